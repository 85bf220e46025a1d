"""What objects say of themselves is a line with what a user asks, and no weights."""

from __future__ import annotations

import models
import pytest

import gsd_kernels as gsd
from gsd_kernels_hf.sources.draft_model import DraftModel
from gsd_kernels_hf.sources.heads import Heads
from gsd_kernels_hf.sources.history import History
from gsd_kernels_hf.sources.memory import HistoryMemory


class Mine(gsd.DraftSource):
    name = "mine"


@pytest.fixture(scope="module")
def target():
    return models.tiny()


@pytest.mark.parametrize(
    "config",
    [
        gsd.GraphConfig(),
        gsd.GraphConfig.preset("chain", depth=3),
        gsd.GraphConfig(depth=0, history_depth=10, max_path=7, sibling_ratio=0.1),
        gsd.GraphConfig(max_path=9),
    ],
)
def test_a_shape_says_its_size_and_what_is_unusual_and_makes_itself_anew(config):
    assert eval(repr(config), {"GraphConfig": gsd.GraphConfig}) == config
    assert repr(config).startswith("GraphConfig(depth=") and len(repr(config)) < 120


def test_a_usual_shape_is_short():
    assert repr(gsd.GraphConfig()) == "GraphConfig(depth=5, width=4, branch=3, max_rows=32)"


def test_sources(target):
    heads = gsd.DraftHeads.for_model(target, 2)
    assert repr(Mine()) == "<Mine 'mine'>"
    assert repr(History()) == "<History 'history'>"
    assert repr(DraftModel(target)) == "<DraftModel 'model': LlamaForCausalLM>"
    assert repr(heads) == "<DraftHeads: hidden_size=32, num_heads=2, num_layers=1, made for llama>"
    assert repr(Heads(heads)) == "<Heads 'heads'>"
    assert repr(HistoryMemory(1000)) == "<HistoryMemory: 0 contexts of a vocabulary of 1,000 tokens>"
    assert repr(gsd.LayerSkip(target, mlp=[1])).startswith("LayerSkip(attention=[], mlp=[1], cost=0.")


def test_options(target):
    assert repr(gsd.GraphDecoder()) == "<GraphDecoder: auto, sources history, criterion exact>"
    assert repr(gsd.GraphDecoder(None, "plain")) == "<GraphDecoder: plain, sources none, criterion exact>"
    shown = repr(gsd.GraphDecoder(target, "tree", draft_sources=("model", "history"), criterion="typical"))
    assert shown.startswith("<GraphDecoder: GraphConfig(depth=5") and "sources model, history" in shown
    assert "\n" not in shown and "Typical(epsilon=" in shown
