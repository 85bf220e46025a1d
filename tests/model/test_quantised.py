"""Targets with quantised weights: the text of the same model by itself. Needs the extra ``[quantised]``.

Exact are schemes that read every row of activations by itself. ``llm_int8_threshold`` above 0 (bitsandbytes' default)
and dynamic activation quantisation per tensor choose outliers or scales over all rows of a forward, rejected ones
included.
"""

from __future__ import annotations

import pytest
import torch
from models import noised, prompts
from quantised import by_bitsandbytes, original

import gsd_kernels as gsd
from gsd_kernels import GraphConfig

SHAPE = GraphConfig(depth=3, width=3, branch=3, max_rows=20, history_depth=2, history_width=3)
GREEDY = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": False}
FLOAT32 = torch.float32


def torchao(model):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())  # its output matrix, too
    return model


def bitsandbytes(**how):
    return lambda model: by_bitsandbytes(model, **how)


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": FLOAT32}
SCHEMES = {
    "bitsandbytes": (bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0), "Int8Params"),
    "bitsandbytes nf4": (bitsandbytes(**NF4), "Params4bit"),
    "torchao": (torchao, "Int8Tensor"),
}


@pytest.fixture(scope="module", params=SCHEMES)
def quantised(request):
    package = request.param.partition(" ")[0]
    pytest.importorskip(package, reason=f"needs {package}: pip install -e '.[quantised]'")
    pytest.importorskip("accelerate", reason="needs accelerate: pip install -e '.[quantised]'")
    make, weight = SCHEMES[request.param]
    model = make(original(FLOAT32))
    assert type(model.model.layers[0].self_attn.q_proj.weight).__name__ == weight, "nothing is quantised"
    return model


def inputs_of(batch: int, seed: int = 0):
    return prompts(batch, 12, seed=seed, vocab=96)


@torch.no_grad()
def logits(model):
    return model(**inputs_of(2)).logits


def test_a_quantised_draft(quantised):
    target, call = original(FLOAT32), {**inputs_of(2), **GREEDY}
    options = {"assistant_model": quantised, "graph_config": SHAPE, "return_dict_in_generate": True}
    out = gsd.generate(target, **call, **options)
    assert torch.equal(out.sequences, target.generate(**call)) and out.stats.tokens_per_step > 1.5


def test_activations_that_are_quantised_row_by_row_under_auto():
    """A last bit of an activation may become a whole level of int8, so texts are the same at their beginning only."""
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao: pip install -e '.[quantised]'")
    target = original(FLOAT32)
    quantization.quantize_(target, quantization.Int8DynamicActivationInt8WeightConfig())
    inputs = inputs_of(1)
    expected = target.generate(**inputs, **GREEDY)
    for sources in ({"draft_sources": ("history",)}, {"assistant_model": noised(original(FLOAT32), 0.02)}):
        out = gsd.generate(target, **inputs, **GREEDY, **sources)
        assert out.shape == expected.shape and torch.equal(out[:, :14], expected[:, :14])


def test_int8_that_takes_outliers_from_all_rows_may_draft():
    """A target that does so is refused, as tests/packed/test_codes.py asks."""
    pytest.importorskip("bitsandbytes")
    draft, call = by_bitsandbytes(original(FLOAT32), load_in_8bit=True), {**inputs_of(1), **GREEDY}
    expected = original(FLOAT32).generate(**call)
    assert torch.equal(gsd.generate(original(FLOAT32), **call, assistant_model=draft, graph_config="chain"), expected)
