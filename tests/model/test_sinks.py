"""Models with attention sinks: texts are transformers' own, and what ignores the sinks is refused."""

from __future__ import annotations

import functools

import models
import pytest
import tiny_configs
import torch
import transformers
from gates import unchanged, unpadded
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import gsd_kernels as gsd
from gsd_kernels_hf.model import probe
from gsd_kernels_hf.model.attention import AttentionKind

NEW = 24  # behind prompts of 11 tokens, windows of 5
CLASSES = {  # each with full layers and such with windows
    "GptOssForCausalLM": {},
    "MiMoV2FlashForCausalLM": {"head_dim": 24},  # values are narrower than keys
    "GraniteSWAForCausalLM": {},
    "GraniteMoeSWAForCausalLM": {},
    "FlintForCausalLM": {"layer_types": ["sliding_attention", "full_attention"]},
}


@functools.lru_cache
def model_of(name: str) -> PreTrainedModel:
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    try:
        model = tiny_configs.build(name, **CLASSES[name])
    except tiny_configs.Unbuildable as error:
        pytest.skip(f"this transformers cannot build it: {error}")
    generator = torch.Generator().manual_seed(2)
    for sinks in sinks_of(model):
        sinks.data.copy_(2 + 2 * torch.randn(sinks.shape, generator=generator, dtype=torch.float64))
    return model


def sinks_of(model: PreTrainedModel) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if name.endswith("sinks")]


def prompts(batch: int) -> dict[str, torch.Tensor]:
    return models.prompts(batch, 11, seed=3, vocab=tiny_configs.VOCAB)


@functools.lru_cache
def plain(name: str, batch: int) -> torch.Tensor:
    """Transformers' own text. Its eager attention makes NaN of padding in float64, so every sequence is alone."""
    model, given = model_of(name), prompts(batch)
    texts = []
    for ids, mask in zip(given["input_ids"], given["attention_mask"].bool(), strict=True):
        alone = model.generate(ids[mask][None], max_new_tokens=NEW, do_sample=False)
        texts.append(torch.cat([ids, alone[0, -NEW:]]))
    return torch.stack(texts)


@pytest.mark.parametrize("name", CLASSES)
def test_sinks_matter_and_are_of_the_layers_that_have_them(name):
    model = model_of(name)
    kinds = probe.served(model).kinds
    with_sinks = [hasattr(layer.self_attn, "sinks") and layer.self_attn.sinks is not None for layer in layers_of(model)]
    assert [kind.sinks is not None for kind in kinds] == with_sinks
    assert any(with_sinks) and tiny_configs.WINDOW in [kind.window for kind in kinds]
    before = [sinks.detach().clone() for sinks in sinks_of(model)]
    try:
        for sinks in sinks_of(model):
            sinks.data.fill_(-1e9)
        text = model.generate(prompts(1)["input_ids"], max_new_tokens=NEW, do_sample=False)
    finally:
        for sinks, value in zip(sinks_of(model), before, strict=True):
            sinks.data.copy_(value)
    assert not torch.equal(text, plain(name, 1))


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    return model.model.layers


def gpt_oss(**fields) -> PreTrainedModel:
    model = tiny_configs.build("GptOssForCausalLM", **fields)
    for sinks in sinks_of(model):
        sinks.data.copy_(torch.tensor([2.0, 0.0, -1.0, 4.0]))
    return model


def exchanged(module, query, key, value, mask, scaling=None, dropout=0.0, s_aux=None, **options):
    """Takes one head's sink for another's."""
    scores = query @ key.repeat_interleave(2, 1).mT * scaling + mask
    columns = s_aux.roll(1).to(scores)[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, columns], -1).softmax(-1)[..., :-1]
    return (weights @ value.repeat_interleave(2, 1)).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize(
    ("own", "says"), [("sdpa", "leave sinks out; .*'eager'"), ("exchanged", "exchanged; .*'sdpa'")]
)
def test_an_attention_that_does_otherwise_with_sinks_is_refused(own, says, monkeypatch):
    """SDPA takes s_aux and drops it; transformers keeps models with sinks from it, a config that was set does not."""
    model = gpt_oss()
    assert gsd.generate(model, unpadded(), draft_sources=("history",), max_new_tokens=2).shape[1] > 2
    for functions, like in ((ALL_ATTENTION_FUNCTIONS, exchanged), (ALL_MASK_ATTENTION_FUNCTIONS, None)):
        if own == "exchanged":
            monkeypatch.setitem(functions._global_mapping, own, like or functions["eager"])
    model.config._attn_implementation = own
    with unchanged(model), pytest.raises(ValueError, match=rf"^model: GptOssForCausalLM.*differ.*{says}"):
        gsd.generate(model, unpadded(), draft_sources=("history",), max_new_tokens=2)


def test_sinks_of_another_size_are_refused():
    model = gpt_oss()
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"GptOssForCausalLM.*s_aux.*4 heads"):
        gsd.generate(model, unpadded(), draft_sources=("history",), max_new_tokens=2)


def test_half_precision_sinks_take_part_in_their_dtype():
    model = gpt_oss().to(torch.bfloat16)
    assert set(probe.served(model).kinds) == {
        AttentionKind(window, sinks=torch.bfloat16) for window in (tiny_configs.WINDOW, None)
    }
    options = {"draft_sources": ("history",), "graph_config": "tree", "max_new_tokens": 12, "do_sample": False}
    assert gsd.generate(model, unpadded(), **options).shape == (1, unpadded().shape[1] + 12)
