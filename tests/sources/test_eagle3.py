"""EAGLE-3 drafts: the same text as without, alone and mixed, from every layout and variant."""

from __future__ import annotations

import functools

import pytest
import torch
from models import prompts, tiny
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


@functools.cache
def target_of(**config):
    return tiny(num_hidden_layers=3, vocab_size=VOCAB, **config)


@functools.cache
def drafter_of(variant: str) -> Eagle3:
    config = eagle3_config(target_of(), **VARIANTS[variant])
    return fit_eagle3(random_eagle3(config, own_embedding=variant == "before"), target_of())


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
    assert loaded.layers_of(target) == (1, 2, 3)
    del sglang["eagle_config"]
    loaded = Eagle3.from_pretrained(save(tmp_path / "default", sglang, tensors))
    assert loaded.layers_of(tiny(num_hidden_layers=32, hidden_size=8)) == (2, 16, 29)


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
