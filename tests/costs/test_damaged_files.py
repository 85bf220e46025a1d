"""What is kept on disk is trusted in nothing: whatever a file holds, or is, decoding goes on and the text is right."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from json_damage import leaves, replaced
from models import noised, prompts, tiny

import gsd_kernels as gsd
from gsd_kernels_hf import store
from gsd_kernels_hf.costs import machine
from gsd_kernels_hf.costs import pair as pairs
from gsd_kernels_hf.engine import engine

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just(10**400)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner), max_leaves=6
)
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def pair():
    target = tiny(dtype=torch.float32)
    return target, noised(target)


@pytest.fixture(scope="module")
def plain(pair):
    return pair[0].generate(**prompts(1, 9), **OPTIONS)


def decoded(pair) -> torch.Tensor:
    """A generation as in another process, to its end."""
    pairs._pairs.clear()
    engine._unpatched.clear()
    tokens = gsd.generate(pair[0], **prompts(1, 9), assistant_model=pair[1], **OPTIONS)
    store._flush_all()
    return tokens


@pytest.fixture(scope="module")
def kept(pair, tmp_path_factory) -> tuple[str, bytes]:
    """Name and content of a pair's file."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("sound")
        patch.setenv("GSD_KERNELS_CACHE", str(folder))
        decoded(pair)
        (file,) = folder.glob("pair-*.json")
        return file.name, file.read_bytes()


@pytest.fixture
def place(kept, tmp_path, monkeypatch) -> Path:
    """Where the pair's file is looked for."""
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    machine._known.clear()
    return tmp_path / kept[0]


@st.composite
def damage(draw, whole: bytes) -> bytes:
    """The file with one thing wrong."""
    kind = draw(st.sampled_from(["cut", "bytes", "value", "value", "missing"]))
    if kind == "cut":
        return whole[: draw(st.integers(0, len(whole) - 2))]
    if kind == "bytes":
        return draw(st.binary(max_size=40) | st.just(b"[" * 100_000) | st.just(b"\xff\xfe{}"))
    data = json.loads(whole)
    way = draw(st.sampled_from(leaves(data)[1:]))
    if kind != "missing":
        return json.dumps(replaced(data, way, draw(JSON))).encode()
    inside = data
    for key in way[:-1]:
        inside = inside[key]
    del inside[way[-1]]
    return json.dumps(data).encode()


@pytest.mark.slow
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_file_changes_no_text_and_stops_nothing(data, pair, plain, kept, place, caplog):
    place.write_bytes(data.draw(damage(kept[1])))
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="gsd_kernels"):
        assert torch.equal(decoded(pair), plain)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) <= 1 and all(str(place) in message for message in messages), messages


def section(whole: bytes, begin: str) -> tuple[dict, str]:
    """The file, and the name of its section that begins so."""
    data = json.loads(whole)
    return data, next(name for name in data["sections"] if name.startswith(begin))


@pytest.mark.parametrize(
    ("begin", "way", "value"),
    [
        ("costs", ("target", "covariance", 0, 1), 1e3),
        ("costs", ("other", "covariance", 0, 0), -1.0),
        ("costs", ("steps",), -8),
        ("learned", ("acceptance", "accepted"), {"model": [-10.0, -10.0], "lookup": [-16.0, -16.0]}),
        ("learned", ("acceptance", "hits", "model", 0, 0), 0.0),
        ("costs", ("names", 0), "a" * store.MAX_BYTES),
    ],
)
def test_numbers_that_none_has_are_ignored_with_one_line(begin, way, value, pair, plain, kept, place, caplog):
    data, name = section(kept[1], begin)
    place.write_text(json.dumps(replaced(data, ("sections", name, *way), value)))
    with caplog.at_level(logging.WARNING, logger="gsd_kernels"):
        assert torch.equal(decoded(pair), plain)
    assert len(caplog.records) == 1 and str(place) in caplog.text
    caplog.clear()
    assert torch.equal(decoded(pair), plain) and not caplog.records  # what was written since is whole


@pytest.mark.parametrize("what", ["directory", "full directory", "unreadable", "pipe", "dead link", "link in a ring"])
def test_what_is_no_file_costs_at_most_one_warning(what, pair, plain, kept, place, caplog):
    if "directory" in what:
        place.mkdir()
        if what == "full directory":
            (place / "file").touch()
    elif what == "unreadable":
        place.write_bytes(kept[1])
        place.chmod(0)
        if os.access(place, os.R_OK):
            pytest.skip("this user may read everything")
    elif what == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(place if what == "link in a ring" else place.with_name("nowhere"))
    with caplog.at_level(logging.WARNING, logger="gsd_kernels"):
        assert torch.equal(decoded(pair), plain)
    assert len(caplog.records) <= 1


def test_a_cache_folder_that_is_none_costs_no_text(pair, plain, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "file"))
    machine._known.clear()
    assert torch.equal(decoded(pair), plain)
