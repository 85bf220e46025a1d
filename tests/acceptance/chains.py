"""A target and its noisy draft, decoded under a criterion; rows and samplers made by hand."""

from __future__ import annotations

import functools

import models
import torch

import gsd_kernels as gsd
from gsd_kernels_hf.acceptance.sampling import SamplingPlan
from gsd_kernels_hf.records import Sampler

VOCAB = 16
DRAWS = 6_000
CHAIN = gsd.GraphConfig.preset("chain", depth=3)
SAMPLING = [
    {"temperature": 1.0, "top_k": 0},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
]


@functools.lru_cache
def pair(noise: float = 0.05):
    """A target without end-of-text token, and itself with noise."""
    target = models.endless(vocab_size=VOCAB, dtype=torch.float32)
    return target, models.noised(target, noise)


def generate(target, draft, criterion, prompt, **options):
    arguments = {"graph_config": CHAIN, "do_sample": True, "seed": 0, "max_new_tokens": 12, "top_k": 0}
    arguments |= {"return_dict_in_generate": True, "pad_token_id": 0, **prompt, **options}
    return gsd.generate(target, assistant_model=draft, criterion=criterion, **arguments)


def chain_rows(tokens: torch.Tensor) -> gsd.Rows:
    """The rows of a drafted chain; tokens int32 [B, depth]."""
    batch, depth = tokens.shape
    rows = torch.arange(depth + 1, dtype=torch.int32)
    return gsd.Rows(
        token_ids=torch.nn.functional.pad(tokens, (1, 0)),
        parent_rows=(rows - 1).expand(batch, -1),
        depths=rows.expand(batch, -1),
        ancestor_mask=((2 << rows) - 1).to(torch.int32).expand(batch, -1)[..., None],
        node_ids=rows.expand(batch, -1),
        scores=torch.zeros(batch, depth + 1),
        num_rows=torch.full((batch,), depth + 1, dtype=torch.int32),
    )


def sampler(seed: int, sequences: torch.Tensor, **warpers: float) -> Sampler:
    plan = SamplingPlan(**{"temperature": 1.0, **warpers})
    return Sampler(torch.tensor(seed), sequences, plan.warper_arguments, "reference")
