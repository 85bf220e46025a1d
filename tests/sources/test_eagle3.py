"""EAGLE-3 drafts: the same text as without, alone and mixed, from every layout and variant."""

from __future__ import annotations

import functools

import pytest
import torch
from models import noised, prompts, tiny
from sources.drafters import eagle3_config, fit_eagle3, generate, random_eagle3, safeailab, save

import gsd_kernels as gsd
from gsd_kernels import Eagle3, GraphConfig

VOCAB = 41
GRAPHS = {
    "chain": GraphConfig.preset("chain", depth=4),
    "tree": GraphConfig(depth=3, width=3, branch=3, max_rows=24, merge_context=-1),
    "graph": GraphConfig(depth=4, width=3, branch=3, max_rows=32, merge_context=0, history_depth=2, history_width=4),
}
VARIANTS = {
    "plain": {},
    "reduced": {"draft_vocab_size": 29},
    "norms": {"norm_before_residual": True, "fc_norm": True, "norm_output": True, "num_key_value_heads": 4},
    "before": {"norm_before_fc": True, "attention_bias": True, "draft_vocab_size": 35},
    "layers": {"num_hidden_layers": 2, "eagle_aux_hidden_state_layer_ids": [1, 3]},
}

FAST = [("reduced", "alone"), ("norms", "history"), ("plain", "all")]  # the rest is marked slow


@functools.cache
def target_of(**config):
    return tiny(num_hidden_layers=3, vocab_size=VOCAB, **config)


@functools.cache
def drafter_of(variant: str) -> Eagle3:
    config = eagle3_config(target_of(), **VARIANTS[variant])
    return fit_eagle3(random_eagle3(config, own_embedding=variant == "before"), target_of())


@functools.cache
def draft_of():
    return noised(target_of(), 0.03).float()


def mixed_with(name: str) -> dict:
    return {
        "alone": {"draft_sources": ("drafter",)},
        "history": {"draft_sources": ("drafter", "history")},
        "all": {"assistant_model": draft_of(), "draft_sources": ("model", "drafter", "history")},
    }[name]


CASES = [
    pytest.param(variant, mixed, marks=() if (variant, mixed) in FAST else pytest.mark.slow)
    for variant in VARIANTS
    for mixed in ("alone", "history", "all")
]


@pytest.mark.parametrize(("variant", "mixed"), CASES)
def test_text_is_the_targets_own(variant, mixed):
    target, drafter = target_of(), drafter_of(variant)
    for sampled in (False, True):
        options = {"do_sample": sampled, **prompts(3, 14, seed=len(variant), vocab=VOCAB)}
        options |= {"seed": 4, "temperature": 0.6, "top_p": 0.95} if sampled else {}
        plain = generate(target, **options).sequences
        accepted = rejected = 0
        for graph in GRAPHS.values() if mixed == "alone" else (GRAPHS["graph"],):
            out = generate(target, **options, drafter=drafter, **mixed_with(mixed), graph_config=graph)
            assert torch.equal(out.sequences, plain)
            assert out.stats.draft_rows > 0
            accepted += sum(out.stats.accepted[2:])
            rejected += sum(n for emitted, n in enumerate(out.stats.accepted) if 0 < emitted <= graph.max_path)
        assert accepted > 0 and rejected > 0, "nothing could have failed"


@pytest.mark.parametrize(
    "processor", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"output_scores": True}], ids=str
)
def test_processors_see_what_they_always_see(processor):
    target, options = target_of(), {"do_sample": False, **prompts(2, 9, vocab=VOCAB), **processor}
    expected = target.generate(**options, max_new_tokens=14, eos_token_id=[2, 5], pad_token_id=0)
    out = generate(target, **options, drafter=drafter_of("reduced"), graph_config=GRAPHS["graph"])
    assert torch.equal(out.sequences, expected if isinstance(expected, torch.Tensor) else expected.sequences)
    assert sum(out.stats.accepted[2:]) > 0


@pytest.mark.parametrize("length", [1, 2, 3, 150])
def test_prompts_of_any_length(length):
    """One token has no feature yet; a long prompt is read in pieces."""
    target, inputs = target_of(), prompts(3, length, vocab=VOCAB)
    options = {"do_sample": False, **inputs}
    plain = generate(target, **options).sequences
    out = generate(target, **options, drafter=drafter_of("plain"), graph_config=GRAPHS["tree"], prefill_chunk_size=40)
    assert torch.equal(out.sequences, plain) and sum(out.stats.accepted[2:]) > 0


def first_candidates(target, drafter, **options):
    """What the drafter proposed in the first step: tokens, log-probabilities."""
    seen = []
    generate(
        target,
        drafter=drafter,
        draft_sources=("drafter",),
        graph_config=GRAPHS["tree"],
        do_sample=False,
        observer=lambda v: seen.append((v.rows.token_ids.clone(), v.rows.scores.clone())),
        **options,
    )
    return seen[0]


def test_drafts_do_not_depend_on_padding_or_chunks():
    """The same prompt alone, behind padding, and read in pieces: the same drafts, to rounding."""
    target, drafter = target_of(), drafter_of("norms")
    ids = prompts(1, 17, vocab=VOCAB)["input_ids"]
    alone = first_candidates(target, drafter, input_ids=ids)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1)
    mask = (torch.arange(22) >= 5).long()[None]
    both = torch.cat([padded, prompts(1, 22, seed=3, vocab=VOCAB)["input_ids"]])
    masks = torch.cat([mask, torch.ones_like(mask)])
    for options in (
        {"input_ids": padded, "attention_mask": mask},
        {"input_ids": both, "attention_mask": masks},
        {"input_ids": ids, "prefill_chunk_size": 3},
    ):
        tokens, scores = first_candidates(target, drafter, **options)
        count = alone[0].shape[1]
        assert torch.equal(tokens[:1, :count], alone[0])
        torch.testing.assert_close(scores[:1, :count], alone[1])


def test_a_chats_next_turn_drafts_as_a_new_call_does():
    """What was reused has its entries in the drafter's cache; plain steps in between are made up for."""
    target, drafter = tiny(num_hidden_layers=3, vocab_size=VOCAB), drafter_of("plain")
    first, more = prompts(1, 12, vocab=VOCAB)["input_ids"], prompts(1, 6, seed=8, vocab=VOCAB)["input_ids"]
    options = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": False, "return_dict_in_generate": True}
    drafts: list = []

    def keep(verified):
        drafts.append((verified.rows.token_ids.clone(), verified.rows.scores.clone()))

    gsd.patch(target, drafter=drafter, draft_sources=("drafter",), graph_config=GRAPHS["tree"], observer=keep)
    try:
        answer = target.generate(first, **options).sequences
        turn = torch.cat([answer, more], 1)
        for reuse in (True, False):
            drafts.clear()
            out = target.generate(turn, reuse_prefix=reuse, **options)
            found = list(drafts)
            if reuse:
                reused, sequences = found, out.sequences
        assert torch.equal(out.sequences, sequences)
        assert len(found) == len(reused)
        for a, b in zip(found, reused, strict=True):
            assert torch.equal(a[0], b[0])
            torch.testing.assert_close(a[1], b[1])
    finally:
        gsd.unpatch(target)


def test_steps_without_the_drafter_are_made_up_for(monkeypatch):
    """Shapes that change from step to step, plain steps among them: later drafts are as if there had been none."""
    from engine.greedy import Switching

    target, drafter = target_of(), drafter_of("plain")
    options = {"do_sample": False, **prompts(2, 14, vocab=VOCAB)}
    plain = generate(target, new=60, **options).sequences
    with Switching(GRAPHS["graph"], seed=3):
        out = generate(target, new=60, **options, drafter=drafter, graph_config="auto")
    assert torch.equal(out.sequences, plain)
    assert out.stats.plain_steps > 0 and out.stats.draft_rows > 0


@pytest.mark.slow
def test_layouts_are_the_same_drafter(tmp_path):
    """SafeAILab's and SpecForge's names, those of speculators, and SGLang's list of layer outputs."""
    target, drafter = target_of(), drafter_of("reduced")
    flat = eagle3_config(target, **VARIANTS["reduced"])
    tensors = safeailab(drafter)
    layers = flat.pop("eagle_aux_hidden_state_layer_ids")
    nested = {name: flat.pop(name) for name in list(flat) if name not in ("architectures", "draft_vocab_size")}
    spec = {"speculators_model_type": "eagle3", "draft_vocab_size": 29, "transformer_layer_config": nested}
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    folders = [
        save(tmp_path / "safeailab", {**flat, **nested, "eagle_aux_hidden_state_layer_ids": layers}, tensors),
        save(tmp_path / "speculators", {**spec, "eagle_aux_hidden_state_layer_ids": layers}, renamed),
    ]
    ids = prompts(1, 12, vocab=VOCAB)["input_ids"]
    want = first_candidates(target, drafter, input_ids=ids)
    for folder in folders:
        for given in (folder, str(folder), Eagle3.from_pretrained(folder, target)):
            tokens, scores = first_candidates(target, given, input_ids=ids)
            assert torch.equal(tokens, want[0]) and torch.equal(scores, want[1])
    sglang = {**flat, **nested, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    loaded = Eagle3.from_pretrained(save(tmp_path / "sglang", sglang, tensors))
    assert loaded.config.layers_of(target) == (1, 2, 3)
    del sglang["eagle_config"]
    loaded = Eagle3.from_pretrained(save(tmp_path / "default", sglang, tensors))
    assert loaded.config.layers_of(tiny(num_hidden_layers=32, hidden_size=8)) == (2, 16, 29)


def test_a_drafter_that_is_cast_between_calls_gets_another_session():
    target, drafter = tiny(num_hidden_layers=3, vocab_size=VOCAB), random_eagle3(eagle3_config(target_of()))
    options = {"max_new_tokens": 8, "eos_token_id": None, "do_sample": False}
    plain = target.generate(prompts(1, 9, vocab=VOCAB)["input_ids"], **options)
    gsd.patch(target, drafter=drafter, graph_config=GRAPHS["tree"])
    try:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            drafter.to(dtype)
            assert torch.equal(target.generate(plain[:, :9], **options), plain)
    finally:
        gsd.unpatch(target)
