"""Misspelt names of options, fields and sources: the error names the nearest; nothing is changed."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle

import pytest
from models import prompts, tiny

import gsd_kernels as gsd
from gsd_kernels_hf.engine import resolved
from gsd_kernels_hf.engine.decoder import GraphDecoder
from gsd_kernels_hf.engine.options import Options
from gsd_kernels_hf.validate import options


@pytest.fixture(scope="module")
def target():
    return tiny()


CALLS = {
    "generate": lambda target, **given: gsd.generate(target, **prompts(1, 5), max_new_tokens=2, **given),
    "patch": lambda target, **given: gsd.patch(target, **given),
    "GraphDecoder": lambda target, **given: GraphDecoder(**given),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("graph_confg", "graph_config"),
        ("assistent_model", "assistant_model"),
        ("draft_source", "draft_sources"),
        ("drafters", "drafter"),
        ("refernce_ids", "reference_ids"),
        ("reuse_histroy", "reuse_history"),
    ],
)
def test_an_unknown_option_names_the_nearest(call, name, nearest, target):
    before = dict(vars(target))
    with pytest.raises(TypeError, match=rf"unknown (option|argument) '{name}'; did you mean '{nearest}'\?"):
        CALLS[call](target, **{name: "graph"})
    assert vars(target) == before


def test_arguments_of_transformers_are_named_too_and_the_rest_is_left_to_it(target):
    with pytest.raises(TypeError, match=r"unknown argument 'max_new_token'; did you mean 'max_new_tokens'\?"):
        gsd.generate(target, **prompts(1, 5), max_new_token=2)
    with (
        gsd.patch(target) as handle,
        pytest.raises(TypeError, match=r"unknown argument 'do_sampel'; did you mean 'do_sample'\?"),
    ):
        target.generate(**prompts(1, 5), do_sampel=True)
    assert handle.stats is None
    with pytest.raises(ValueError, match="xyzzy"):
        gsd.generate(target, **prompts(1, 5), xyzzy=1)
    known = {*inspect.signature(target.forward).parameters} - {"self", "kwargs"}
    resolved.check_names(known, target)  # what the model's own code takes is no misspelling


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"graph_config": "auto2"},
            r"unknown name 'auto2'; did you mean 'auto'\? expected one of auto, plain, chain",
        ),
        ({"graph_config": "chian"}, r"did you mean 'chain'\?"),
        ({"graph_config": "forest"}, r"unknown name 'forest'; expected one of auto, plain, chain, tree, graph"),
        ({"graph_config": 5}, r"expected a GraphConfig, a name \(auto, plain, chain, tree, graph\) or None, got int"),
        ({"draft_sources": ("histroy",)}, r"did you mean 'history'\?"),
    ],
)
def test_unknown_values_name_the_nearest(given, says):
    with pytest.raises((TypeError, ValueError), match=says):
        Options(**given)


def test_fields_of_a_shape():
    for make in (
        lambda: gsd.GraphConfig(dept=3),
        lambda: gsd.GraphConfig().replace(dept=3),
        lambda: gsd.GraphConfig.preset("chain", dept=3),
    ):
        with pytest.raises(TypeError, match=r"graph_config: unknown field 'dept'; did you mean 'depth'\?"):
            make()
    with pytest.raises(TypeError, match="depth: expected an int, got 'x'"):
        gsd.GraphConfig.preset("chain", depth="x")
    config = gsd.GraphConfig(3, max_rows=16)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config.replace(depth=3)
    assert list(inspect.signature(gsd.GraphConfig).parameters)[:2] == ["depth", "width"]


def test_lengths_of_drafts_in_transformers_words_are_reported_once(target, caplog, monkeypatch):
    monkeypatch.setattr(options, "_said", set())
    caplog.set_level(logging.WARNING, logger="gsd_kernels")
    ids = prompts(1, 5)
    expected = gsd.generate(target, **ids, max_new_tokens=3)
    assert not caplog.records, "transformers' own default is nobody's wish"
    for _ in range(2):
        again = gsd.generate(target, **ids, max_new_tokens=3, num_assistant_tokens=7)
        assert again.equal(expected)
    (record,) = caplog.records
    assert "num_assistant_tokens=7 of the call has no effect" in record.message and "depth=7" in record.message
    monkeypatch.setattr(target.generation_config, "assistant_confidence_threshold", 0.3, raising=False)
    gsd.generate(target, **ids, max_new_tokens=3)
    assert "assistant_confidence_threshold=0.3 of the model's generation_config" in caplog.records[-1].message


def test_an_unknown_generation_option_is_reported_once_whatever_its_value(target, caplog, monkeypatch):
    monkeypatch.setattr(options, "_said", set())
    caplog.set_level(logging.WARNING, logger="gsd_kernels")
    for value in (1, 1, 2):
        monkeypatch.setattr(target.generation_config, "codebooks", value, raising=False)
        gsd.generate(target, **prompts(1, 5), max_new_tokens=3)
    (record,) = caplog.records
    assert "generation option codebooks=1 is not known to gsd_kernels" in record.message
