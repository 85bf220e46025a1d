"""What is asked of a transformers model."""

from __future__ import annotations

import models
import torch
from transformers import DynamicCache, LlamaForCausalLM

import gsd_kernels as gsd
from gsd_kernels_hf.model.properties import cache_argument


class Older(LlamaForCausalLM):
    """Foreign code, written when a cache was called ``past_key_values``."""

    def forward(self, input_ids=None, past_key_values=None, logits_to_keep=0, **kwargs):
        kwargs |= {"logits_to_keep": logits_to_keep}
        return super().forward(input_ids, **{cache_argument(models.tiny()): past_key_values}, **kwargs)


class Newer(LlamaForCausalLM):
    def forward(self, input_ids=None, cache=None, logits_to_keep=0, **kwargs):
        kwargs |= {"logits_to_keep": logits_to_keep}
        return super().forward(input_ids, **{cache_argument(models.tiny()): cache}, **kwargs)


class Anything(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_a_cache_goes_by_the_models_own_name_or_by_transformers():
    target = models.tiny()
    name = cache_argument(target)
    cache = DynamicCache()
    target(torch.tensor([[3, 4]]), **{name: cache}, use_cache=True)
    assert cache.get_seq_length() == 2
    for kind, its in ((Older, "past_key_values"), (Newer, "cache"), (Anything, name)):
        assert cache_argument(kind(target.config)) == its


def test_a_model_of_either_name_is_decoded():
    target = models.tiny()
    draft = models.noised(target)
    prompt = {"input_ids": torch.tensor([[5, 9, 5, 9, 5]]), "max_new_tokens": 12, "eos_token_id": None}
    plain = gsd.generate(target, **prompt)
    for kind in (Older, Newer):
        model = kind(target.config).eval()
        model.load_state_dict(target.state_dict())
        assert torch.equal(gsd.generate(model, **prompt, assistant_model=draft, graph_config="tree"), plain)
