"""GraphConfig: ranges, types, presets; masks of bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import gsd_kernels as gsd
from gsd_kernels.graph import pack_bits, unpack_bits


def test_bits_round_trip():
    for n in (1, 31, 32, 33, 100):
        mask = torch.rand(3, 5, n) < 0.5
        assert torch.equal(unpack_bits(pack_bits(mask), n), mask)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"depth": 0}, "depth"),
        ({"width": 65}, "width"),
        ({"branch": 0}, "branch"),
        ({"max_rows": 1}, "max_rows"),
        ({"max_rows": 129}, "max_rows"),
        ({"max_path": 32}, "max_path"),
        ({"merge_context": 9}, "merge_context"),
        ({"sibling_ratio": 1.5}, "sibling_ratio"),
        ({"min_prob": -0.1}, "min_prob"),
        ({"depth": 60, "width": 32}, "nodes"),
    ],
)
def test_config_out_of_range_names_the_field(change, match):
    with pytest.raises(ValueError, match=match):
        gsd.GraphConfig(**change)


def test_config_types_presets_and_freezing():
    with pytest.raises(TypeError, match="depth"):
        gsd.GraphConfig(depth=2.0)
    with pytest.raises(TypeError, match="nonsense"):
        gsd.GraphConfig.preset("tree", nonsense=1)
    with pytest.raises(ValueError, match="chain, tree, graph"):
        gsd.GraphConfig.preset("forest")
    chain = gsd.GraphConfig.preset("chain", depth=7)
    assert (chain.width, chain.branch, chain.max_rows, chain.merge_context) == (1, 1, 8, -1)
    assert gsd.GraphConfig.preset("tree").merge_context == -1
    with pytest.raises(dataclasses.FrozenInstanceError):
        chain.depth = 3
    with pytest.raises(TypeError, match="history_depth"):
        gsd.GraphConfig.preset("chain", history_depth=1.5)
    assert chain.replace(max_rows=4).max_path == 3


@pytest.mark.parametrize("depths", [(0, 4), (3, 4), (64, 64)])
def test_a_chain_has_rows_for_the_historys_levels(depths):
    """But no more than a step may have."""
    depth, levels = depths
    chain = gsd.GraphConfig.preset("chain", depth=depth, history_depth=levels)
    assert chain.max_rows == min(depth + levels + 1, 128) and chain.max_path == chain.max_rows - 1
