"""Hybrid targets: layers with a recurrent state write transformers' own text, with any draft or none."""

from __future__ import annotations

import functools

import pytest
import tiny_configs
import torch
from tiny_configs import build_hybrid, hybrid_inputs

import gsd_kernels as gsd
from gsd_kernels_hf import validate
from gsd_kernels_hf.model.recurrent import mixers
from gsd_kernels_hf.model.recurrent.step_limit import limit_of
from gsd_kernels_hf.model.recurrent.tree import RowTree

pytestmark = pytest.mark.skipif(not mixers.READABLE, reason=f"states are read from transformers {mixers.FIRST} on")

target_of = functools.lru_cache(build_hybrid)


def test_turns_go_on_from_the_state_where_the_text_ends():
    target = target_of("falcon-h1")
    first = hybrid_inputs(1)["input_ids"]
    shape = gsd.GraphConfig(depth=0, history_depth=4)
    with gsd.patch(target, draft_sources=("history",), graph_config=shape) as handle:
        text = target.generate(first, max_new_tokens=45, do_sample=False)
        more = torch.tensor([[7, 9, 11]])
        asked = torch.cat([text, more], 1), text, torch.cat([text[:, :25], more], 1)
        found = [target.generate(ids, max_new_tokens=20, do_sample=False) for ids in asked]
        reused = [session.target.reused for session in handle.engines.idle.sessions]
    assert reused == [0], "the last prompt left the text in the middle"
    for ids, answer in zip(asked, found, strict=True):
        assert torch.equal(answer, target.generate(ids, max_new_tokens=20, do_sample=False))


def test_rows_that_are_not_what_the_model_computes_are_refused(monkeypatch):
    target = build_hybrid("qwen3.5")
    right = RowTree.of

    def wrong(*args, **options):
        tree = right(*args, **options)
        return RowTree(tree.parents - (tree.parents > 2).long(), tree.depths)

    monkeypatch.setattr(RowTree, "of", wrong)
    with pytest.raises(validate.Unsupported, match=r"Qwen3_5ForCausalLM.*linear_attn"):
        gsd.generate(target, hybrid_inputs(1)["input_ids"], max_new_tokens=4)


def test_paths_longer_than_a_block_are_refused_by_name():
    shape = gsd.GraphConfig(depth=0, history_depth=40, max_rows=64, max_path=40)
    with pytest.raises(ValueError, match=r"graph_config: max_path=40.*Qwen3_5ForCausalLM.*max_path=32"):
        gsd.generate(target_of("qwen3.5"), hybrid_inputs(1)["input_ids"], max_new_tokens=4, graph_config=shape)


# Prompts behind padding of any length, in pieces of one token, with limits on steps.


LAYERS = {"Zaya": 2, "NemotronH": 4, "Zamba2": 4}  # the fewest that have a recurrent layer and attention
LIMITED = ("Zamba2", "NemotronH")  # of which transformers limits steps in prompts alone
PADS = (0, 1, 2, 6)  # of the sequences of a batch
LENGTHS = (7, 8)  # of their prompts: the last one has one word, or two


@functools.cache
def limited(name: str):
    """A tiny model; where there is a limit on steps, one that many of them reach."""
    more = {"time_step_min": 0.3} if name in LIMITED else {}
    model = tiny_configs.build(f"{name}ForCausalLM", LAYERS[name], **more)
    for _, module in mixers.mixers_of(model):
        assert (limit_of(module) is None) == (name not in LIMITED)
        if name in LIMITED:
            with torch.no_grad():
                module.dt_bias.copy_(torch.linspace(-4.0, 0.0, module.dt_bias.numel()))
    return model


@functools.cache
def padded(length: int) -> dict[str, torch.Tensor]:
    """A prompt behind each of :data:`PADS`."""
    ids = torch.randint(6, tiny_configs.VOCAB - 4, (len(PADS), length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    for row, pads in enumerate(PADS):
        ids[row, :pads], mask[row, :pads] = 5, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("backend", "chunk"), [("reference", None), ("reference", 1), ("auto", 3)])
def test_limits_on_steps_are_those_of_transformers(name, backend, chunk):
    """By window and by depth; the first row is the prompt's last token, and no piece of it a generated one."""
    for length in LENGTHS:
        call = {**padded(length), "max_new_tokens": 6, "do_sample": False}
        options = {"draft_sources": ("history",), "graph_config": "tree", "prefill_chunk_size": chunk}
        out = gsd.generate(limited(name), **call, **options, backend=backend)
        assert torch.equal(out, limited(name).generate(**call))
