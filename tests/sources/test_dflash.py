"""DFlash drafts: the same text as without, as a chain and as a lattice, alone and mixed with the history."""

from __future__ import annotations

import functools

import pytest
import torch
from models import noised, prompts, tiny
from sources.drafters import dflash_config, fit_dflash, generate, random_dflash, save

import gsd_kernels as gsd
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
CASES = [
    pytest.param(variant, mixed, marks=() if (variant, mixed) != ("window", "all") else pytest.mark.slow)
    for variant, mixed in (("shared", "alone"), ("reduced", "history"), ("window", "alone"), ("window", "all"))
]


@functools.cache
def target_of():
    return tiny(num_hidden_layers=3, vocab_size=VOCAB)


@functools.cache
def drafter_of(variant: str) -> DFlash:
    module = random_dflash(dflash_config(target_of(), **VARIANTS[variant]), own=variant == "reduced")
    return fit_dflash(module, target_of())


@pytest.mark.parametrize(("variant", "mixed"), CASES)
def test_text_is_the_targets_own(variant, mixed):
    target, drafter = target_of(), drafter_of(variant)
    sources = {
        "alone": {"draft_sources": ("drafter",)},
        "history": {"draft_sources": ("drafter", "history")},
        "all": {"assistant_model": noised(target, 0.03), "draft_sources": ("model", "drafter", "history")},
    }[mixed]
    accepted = rejected = 0
    for sampled in (False, True):
        options = {"do_sample": sampled, **prompts(3, 14, seed=len(variant), vocab=VOCAB)}
        options |= {"seed": 4, "temperature": 0.6, "top_p": 0.95} if sampled else {}
        plain = generate(target, **options).sequences
        for graph in GRAPHS.values() if mixed == "alone" else (GRAPHS["lattice"],):
            out = generate(target, **options, drafter=drafter, **sources, graph_config=graph)
            assert torch.equal(out.sequences, plain)
            assert out.stats.draft_rows > 0
            accepted += sum(out.stats.accepted[2:])
            rejected += sum(n for emitted, n in enumerate(out.stats.accepted) if 0 < emitted <= graph.max_path)
    assert accepted > 0 and rejected > 0, "nothing could have failed"


@pytest.mark.parametrize("processor", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}], ids=str)
def test_processors_see_what_they_always_see(processor):
    target, options = target_of(), {"do_sample": False, **prompts(2, 9, vocab=VOCAB), **processor}
    expected = target.generate(**options, max_new_tokens=14, eos_token_id=[2, 5], pad_token_id=0)
    out = generate(target, **options, drafter=drafter_of("shared"), graph_config=GRAPHS["lattice"])
    assert torch.equal(out.sequences, expected)
    assert sum(out.stats.accepted[2:]) > 0


@pytest.mark.parametrize("length", [1, 2, 150])
def test_prompts_of_any_length(length):
    target, options = target_of(), {"do_sample": False, **prompts(3, length, vocab=VOCAB)}
    plain = generate(target, **options).sequences
    out = generate(target, **options, drafter=drafter_of("shared"), graph_config=GRAPHS["tree"], prefill_chunk_size=40)
    assert torch.equal(out.sequences, plain) and sum(out.stats.accepted[2:]) > 0


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


def test_drafts_do_not_depend_on_padding_or_chunks():
    target, drafter = target_of(), drafter_of("window")
    ids = prompts(1, 17, vocab=VOCAB)["input_ids"]
    options = {"drafter": drafter, "graph_config": GRAPHS["tree"]}
    alone = graphs_of(target, input_ids=ids, **options)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1)
    mask = (torch.arange(22) >= 5).long()[None]
    for changed in ({"input_ids": padded, "attention_mask": mask}, {"input_ids": ids, "prefill_chunk_size": 3}):
        found = graphs_of(target, **changed, **options)
        assert torch.equal(found[0], alone[0])
        torch.testing.assert_close(found[2], alone[2])


def test_a_chats_next_turn_drafts_as_a_new_call_does():
    target, drafter = tiny(num_hidden_layers=3, vocab_size=VOCAB), drafter_of("shared")
    first, more = prompts(1, 12, vocab=VOCAB)["input_ids"], prompts(1, 6, seed=8, vocab=VOCAB)["input_ids"]
    options = {"max_new_tokens": 20, "eos_token_id": None, "do_sample": False, "return_dict_in_generate": True}
    drafts: list = []

    def keep(verified):
        drafts.append((verified.rows.token_ids.clone(), verified.rows.scores.clone()))

    gsd.patch(target, drafter=drafter, draft_sources=("drafter",), graph_config=GRAPHS["tree"], observer=keep)
    try:
        turn = torch.cat([target.generate(first, **options).sequences, more], 1)
        found = []
        for reuse in (True, False):
            drafts.clear()
            target.generate(turn, reuse_prefix=reuse, **options)
            found.append(list(drafts))
        for a, b in zip(*found, strict=True):
            assert torch.equal(a[0], b[0])
            torch.testing.assert_close(a[1], b[1])
    finally:
        gsd.unpatch(target)


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
