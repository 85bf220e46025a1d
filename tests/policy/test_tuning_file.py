"""A damaged tuning file is ignored with one warning, whatever is in it: measured anew, and replaced where possible."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import noised, prompts, tiny

import gsd_kernels as gsd
from gsd_kernels_hf.policy import tuning

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner), max_leaves=6
)
SECONDS = st.sampled_from([float("nan"), float("inf"), -float("inf"), -1e-3, "0.1", None, True, [0.1], {}, 10**400])


@pytest.fixture(scope="module")
def pair():
    target = tiny(dtype=torch.float32)
    return target, noised(target)


@pytest.fixture(scope="module")
def sound(pair, tmp_path_factory) -> bytes:
    """A whole file, as it was kept."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("sound")
        patch.setenv("GSD_KERNELS_CACHE", str(folder))
        gsd.tune(*pair)
        (file,) = folder.glob("tune-*.json")
        return file.name.encode() + b"\n" + file.read_bytes()


@pytest.fixture
def place(sound, tmp_path, monkeypatch) -> Path:
    """Where the pair's tuning file is looked for."""
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    return tmp_path / sound.partition(b"\n")[0].decode()


def tuned(pair, sound: bytes, caplog, path: Path) -> tuple[bool, list[str]]:
    """Whether the file was ignored, and what was said of it; measuring is replaced by another result."""
    whole = json.loads(sound.partition(b"\n")[2])
    anew = tuning.StepCosts(
        target={int(k): 2 * v for k, v in whole["target"].items()},
        draft={k: tuple(v) for k, v in whole["draft"].items()},
        overhead=123.0,
        about=whole["about"],
    )
    tuning._known.clear()
    caplog.clear()
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.INFO, logger="gsd_kernels"):
        patch.setattr(tuning, "measure", lambda *a: anew)
        found = gsd.tune(*pair)
    tuning._known.clear()
    assert not list(path.parent.glob("*.tmp"))
    return found == anew, [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_whole_file_is_used(pair, sound, place, caplog):
    place.write_bytes(sound.partition(b"\n")[2])
    assert tuned(pair, sound, caplog, place) == (False, [])


@st.composite
def damage(draw, whole: bytes) -> bytes:
    """The file with one thing wrong."""
    kind = draw(st.sampled_from(["cut", "bytes", "json", "field", "seconds", "missing", "about"]))
    if kind == "cut":
        return whole[: draw(st.integers(0, len(whole) - 2))]
    if kind == "bytes":
        return draw(st.binary(max_size=40) | st.just(b"[" * 100_000) | st.just(b"\xff\xfe{}"))
    if kind == "json":
        return json.dumps(draw(JSON)).encode()
    data = json.loads(whole)
    field = draw(st.sampled_from(["target", "draft", "overhead", "about"]))
    if kind == "missing":
        inner = data[field]
        if field in ("target", "overhead") or draw(st.booleans()):
            del data[field]
        else:
            del inner[draw(st.sampled_from(sorted(inner)))]
    elif kind == "about":
        data["about"][draw(st.sampled_from(sorted(data["about"])))] = "another"
    elif kind == "field":
        data[field] = draw(JSON.filter(lambda value: not isinstance(value, (int, float)) or isinstance(value, bool)))
    else:
        bad = draw(SECONDS)
        if field == "target":
            data[field][draw(st.sampled_from(["1", "8", "128", "0", "-1", "x", "1.5"]))] = bad
        elif field == "draft":
            data[field][draw(st.sampled_from(sorted(data[field])))] = draw(
                st.sampled_from([bad, [bad, 0.1], [0.1, bad], [0.1], [0.1, 0.1, 0.1], "ab"])
            )
        else:
            data["overhead"] = bad
    return json.dumps(data).encode()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_file_is_ignored_with_one_warning_and_replaced(data, pair, sound, place, caplog):
    place.write_bytes(data.draw(damage(sound.partition(b"\n")[2])))
    ignored, said = tuned(pair, sound, caplog, place)
    assert ignored and len(said) == 1 and str(place) in said[0], said
    assert tuned(pair, sound, caplog, place)[1] == [], "the file was not replaced"


@pytest.mark.parametrize("what", ["directory", "full directory", "unreadable", "pipe", "dead link", "link in a ring"])
def test_what_is_no_file_is_ignored_with_one_warning(what, pair, sound, place, caplog):
    if "directory" in what:
        place.mkdir()
        if what == "full directory":
            (place / "file").touch()
    elif what == "unreadable":
        place.write_bytes(sound.partition(b"\n")[2])
        place.chmod(0)
        if os.access(place, os.R_OK):
            pytest.skip("this user may read everything")
    elif what == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(place if what == "link in a ring" else place.with_name("nowhere"))
    ignored, said = tuned(pair, sound, caplog, place)
    assert ignored and len(said) == 1 and str(place) in said[0], said


def test_a_cache_folder_that_is_none_costs_one_warning(pair, sound, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "file"))
    ignored, said = tuned(pair, sound, caplog, tmp_path / "x")
    assert ignored and len(said) == 1, said


def test_a_generation_survives_a_damaged_file(pair, tmp_path, monkeypatch):
    """The whole way: no shape is chosen from costs that are not there."""
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    plain = pair[0].generate(**prompts(1, 9), max_new_tokens=8, do_sample=False)
    options = {**prompts(1, 9), "assistant_model": pair[1], "max_new_tokens": 8, "do_sample": False}
    gsd.generate(pair[0], **options)
    (place,) = tmp_path.glob("tune-*.json")
    whole = json.loads(place.read_text())
    for damaged in ({"draft": {}}, {"target": {"8": 0.1}}, {"target": {"1": 0.0}}):
        place.write_text(json.dumps({**whole, **damaged}))
        tuning._known.clear()
        assert torch.equal(gsd.generate(pair[0], **options), plain)
        assert json.loads(place.read_text()) != {**whole, **damaged}, "the file was not replaced"
