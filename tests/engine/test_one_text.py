"""In half precision too a prompt has one text: plain decoding, every shape, every source, any batch."""

from __future__ import annotations

import pytest
import torch
from models import add_noise, noised, prompts, tiny

import gsd_kernels as gsd
from gsd_kernels.backends import unavailable_reason
from gsd_kernels_hf.model.fused import why_not

MISSING = unavailable_reason("cpu", torch.device("cpu"))
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"compiled CPU ops: {MISSING}")

BATCH, LENGTH, TOKENS = 5, 12, 20


def settings(target) -> dict[str, dict]:
    """Every preset and source, alone and together."""
    draft, skip = noised(target, 0.05), gsd.LayerSkip(target, attention=[2], mlp=[1])
    heads = gsd.DraftHeads.for_model(target, 2)
    add_noise(heads.parameters(), 0.05, seed=5)
    model = {"assistant_model": draft}
    everything = {**model, "draft_heads": heads, "draft_sources": ("model", "heads", "history")}
    return {
        **{f"model, {shape}": {**model, "graph_config": shape} for shape in ("chain", "tree", "graph", "auto")},
        "history, graph": {"draft_sources": ("history",), "graph_config": "graph"},
        "history, auto": {"draft_sources": ("history",), "graph_config": "auto"},
        "layer skip": {"assistant_model": skip, "graph_config": "tree"},
        "heads": {"draft_heads": heads, "draft_sources": ("heads",), "graph_config": "tree"},
        "all, graph": {**everything, "graph_config": gsd.GraphConfig(depth=4, history_depth=4, max_rows=33)},
        "all, auto": {**everything, "graph_config": "auto"},
    }


def texts(target, seed: int, *, sampled: bool, **options) -> torch.Tensor:
    """Of a ragged batch of prompts."""
    return gsd.generate(
        target,
        **prompts(BATCH, LENGTH, seed=seed),
        max_new_tokens=TOKENS,
        eos_token_id=None,
        do_sample=sampled,
        seed=seed,
        **({"temperature": 0.8} if sampled else {}),
        **options,
    )


# 2 dtypes × 10 settings × prompts: 100 texts greedy, 100 sampled
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("sampled", "seeds"), [(False, (1,)), (True, (3,))])
def test_a_prompt_has_one_text(dtype, sampled, seeds, tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    target = tiny("qwen3", dtype=torch.float32, num_hidden_layers=3, hidden_size=48, intermediate_size=150).to(dtype)
    assert why_not(target, "auto") is None
    found = settings(target)
    compared, gained = 0, 0.0
    for seed in seeds:
        plain = texts(target, seed, sampled=sampled, graph_config="plain")
        assert len(set(plain[:, LENGTH:].flatten().tolist())) >= 15
        for name, options in found.items():
            out = texts(target, seed, sampled=sampled, return_dict_in_generate=True, **options)
            assert torch.equal(out.sequences, plain), name
            compared += BATCH
            gained = max(gained, out.stats.tokens_per_step)
        lonely = gsd.generate(
            target,
            plain[:1, :LENGTH],
            max_new_tokens=TOKENS,
            eos_token_id=None,
            do_sample=sampled,
            seed=seed,
            **({"temperature": 0.8} if sampled else {}),
        )
        assert torch.equal(lonely, plain[:1])
    assert compared == BATCH * len(found) * len(seeds) and gained > 1.3
