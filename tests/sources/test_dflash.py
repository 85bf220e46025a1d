"""DFlash drafts: the same text as without, as a chain and as a lattice, alone and mixed with the history."""

from __future__ import annotations

import functools

import torch
from models import prompts, tiny
from sources.drafters import dflash_config, fit_dflash, generate, random_dflash, save

from gsd_kernels import DFlash, GraphConfig

VOCAB = 41
GRAPHS = {
    "chain": GraphConfig.preset("chain", depth=4),
    "tree": GraphConfig(depth=3, width=3, branch=3, max_rows=24, merge_context=-1),
    "lattice": GraphConfig(depth=6, width=4, branch=3, max_rows=32, merge_context=0, history_depth=1, history_width=4),
}
VARIANTS = {
    "shared": {},
    "reduced": {"draft_vocab_size": 31, "block_size": 4},
    "window": {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
        "inner": {"sample_from_anchor": True},
    },
}


@functools.cache
def target_of():
    return tiny(num_hidden_layers=3, vocab_size=VOCAB)


@functools.cache
def drafter_of(variant: str) -> DFlash:
    module = random_dflash(dflash_config(target_of(), **VARIANTS[variant]), own=variant == "reduced")
    return fit_dflash(module, target_of())


def graphs_of(target, **options):
    """The first step's graph and rows."""
    seen = []
    generate(
        target,
        draft_sources=("drafter",),
        do_sample=False,
        observer=lambda v: seen.append((v.graph.token_ids.clone(), v.graph.depths.clone(), v.rows.scores.clone())),
        **options,
    )
    return seen[0]


def test_candidates_by_depth_are_one_lattice():
    """Each depth has the same ``branch`` tokens below every path; merged, they are one node each."""
    inputs = {"input_ids": prompts(1, 12, vocab=VOCAB)["input_ids"], "drafter": drafter_of("shared")}
    lattice = GraphConfig(depth=4, width=3, branch=3, max_rows=64, merge_context=0, max_path=4)
    tokens, depths, _ = graphs_of(target_of(), graph_config=lattice, **inputs)
    by_depth = [set(tokens[0][depths[0] == depth].tolist()) for depth in (1, 2, 3)]
    assert all(len(found) == 3 for found in by_depth)
    tree = graphs_of(target_of(), graph_config=lattice.replace(merge_context=-1, max_path=4), **inputs)
    for depth in (2, 3):
        assert set(tree[0][0][tree[1][0] == depth].tolist()) <= by_depth[depth - 1]


def test_layouts_are_the_same_drafter(tmp_path):
    target, drafter = target_of(), drafter_of("shared")
    flat = dflash_config(target)
    inner = flat["dflash_config"]
    theirs = {
        "speculators_model_type": "dflash",
        "block_size": flat["block_size"],
        "mask_token_id": inner["mask_token_id"],
        "aux_hidden_state_layer_ids": [i + 1 for i in inner["target_layer_ids"]],
        "transformer_layer_config": {name: flat[name] for name in flat if name not in ("dflash_config", "auto_map")},
    }
    newer = {**flat, "dflash_config": {**inner, "block_size": flat["block_size"]}}
    del newer["block_size"]
    inputs = {"input_ids": prompts(1, 12, vocab=VOCAB)["input_ids"], "graph_config": GRAPHS["tree"]}
    want = graphs_of(target, drafter=drafter, **inputs)
    for name, config in (("z-lab", flat), ("newer", newer), ("speculators", theirs)):
        folder = save(tmp_path / name, config, drafter.state_dict())
        for found, expected in zip(graphs_of(target, drafter=folder, **inputs), want, strict=True):
            assert torch.equal(found, expected)
