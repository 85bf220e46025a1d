"""What drafts from a hybrid target itself: skipped layers, heads, and drafters that read its hidden states."""

from __future__ import annotations

import functools

import pytest
import torch
from hybrids import CHAIN, FAMILIES, build, inputs_of

import gsd_kernels as gsd
from gsd_kernels.graph import pack_bits
from gsd_kernels_hf.model.hidden import LAST
from gsd_kernels_hf.model.runner import RowModel

GREEDY = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
target_of = functools.lru_cache(build)


def generate(target, **options):
    return gsd.generate(target, **inputs_of(3), return_dict_in_generate=True, **{**GREEDY, **options})


@pytest.mark.parametrize(
    ("family", "outputs", "backend"),
    [
        ("qwen3.5", "out_proj", "auto"),
        ("qwen3.5", "out_proj", "reference"),
        ("kimi", "o_proj", "auto"),
        ("zaya", "o_proj", "auto"),
    ],
)
def test_skipped_blocks_that_do_nothing_are_not_missed(family, outputs, backend):
    """Rows of the levels follow the root and each other in the target's states, which stay as they were."""
    target = build(family)
    layer = target.model.layers[0]
    mixer = layer.linear_attn if family == "qwen3.5" else layer.self_attn
    with torch.no_grad():
        getattr(mixer, outputs).weight.zero_()
    skip = gsd.LayerSkip(target, attention=[0])
    assert 0 < skip.cost < 1
    out = generate(target, assistant_model=skip, graph_config=CHAIN, backend=backend)
    assert torch.equal(out.sequences, type(target).generate(target, **inputs_of(3), **GREEDY))
    assert sum(out.stats.accepted[: CHAIN.depth]) == 0, out.stats.accepted


@pytest.mark.parametrize("family", ["lfm2", "nemotron-h"])
def test_layers_of_other_blocks_are_refused_by_name(family):
    with pytest.raises(ValueError, match=f"model: the blocks of {FAMILIES[family][0]} are not self_attn and mlp"):
        gsd.LayerSkip(target_of(family), mlp=[1])


@pytest.mark.parametrize("how", ["given", "searched"])
def test_an_mlp_that_returns_more_than_hidden_states_is_refused_by_name(how):
    """Zaya's hands its router's states to the next layer's."""
    target = target_of("zaya")
    with pytest.raises(ValueError, match=r"mlp: the blocks of ZayaForCausalLM \(ZayaSparseMoeBlock\).*skipped"):
        if how == "given":
            gsd.LayerSkip(target, mlp=[0])
        else:
            gsd.LayerSkip.search(target, inputs_of(3)["input_ids"][:1], seconds=None)


@pytest.mark.parametrize(("family", "block"), [("qwen3.5", 4), ("qwen3.5", 0), ("lfm2", 4), ("nemotron-h", 4)])
@torch.no_grad()
def test_hidden_states_of_rows_are_the_models_own(family, block):
    """Of a prompt in pieces and of two paths of rows, between any two layers."""
    target, ids = target_of(family), inputs_of(3)["input_ids"][:1]
    layers = (0, 1, 2, target.config.num_hidden_layers, LAST)
    rows = RowModel(target, 32, torch.zeros(1, dtype=torch.int32), "auto", hidden_layers=layers, block=block)
    read: dict[int, list[torch.Tensor]] = {}
    rows.restart(ids[:, :5])
    rows.read(ids[:, :5], None, 2, lambda hidden, _: [read.setdefault(i, []).append(h) for i, h in hidden.items()])
    sees = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
    depths = torch.tensor([[0, 1, 1, 2]], dtype=torch.int32)
    tokens = torch.tensor([[ids[0, 5], ids[0, 6], 9, ids[0, 7]]])
    rows.rows(tokens, torch.tensor([5], dtype=torch.int32), 0, pack_bits(sees)[None], depths, depths, keep=4)
    for path, places in (([0, 1, 3], ids[:, 5:8]), ([0, 2], tokens[:, [0, 2]])):
        right = target(torch.cat([ids[:, :5], places], 1), output_hidden_states=True).hidden_states
        for layer in layers[:-1]:
            assert torch.allclose(torch.cat(read[layer], 1), right[layer][:, :5], atol=2e-3), layer
            assert torch.allclose(rows.hidden[layer][:, path], right[layer][:, 5:], atol=2e-3), layer
        assert torch.allclose(rows.hidden[LAST][:, path], right[-1][:, 5:], atol=2e-3)
