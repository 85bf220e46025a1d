"""Targets with quantised weights: the text of the same model by itself. Needs the extra ``[quantised]``.

Exact are schemes that read every row of activations by itself. ``llm_int8_threshold`` above 0 (bitsandbytes' default)
and dynamic activation quantisation per tensor choose outliers or scales over all rows of a forward, rejected ones
included.
"""

from __future__ import annotations

import logging

import pytest
import torch
import transformers
from models import noised, prompts, tiny

import gsd_kernels as gsd
from gsd_kernels import GraphConfig

NEW = 24
SHAPE = GraphConfig(depth=3, width=3, branch=3, max_rows=20, history_depth=2, history_width=3)
GREEDY = {"max_new_tokens": NEW, "eos_token_id": None, "do_sample": False}


def original():
    return tiny(dtype=torch.float32, hidden_size=64, intermediate_size=128, num_attention_heads=4)


def from_pretrained(folder, **how):
    model = original()
    model.save_pretrained(folder)
    how = transformers.BitsAndBytesConfig(**how)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=how, device_map="cpu", dtype=torch.float32
    )


def bitsandbytes_int8(folder):
    return from_pretrained(folder, load_in_8bit=True, llm_int8_threshold=0.0)


def bitsandbytes_nf4(folder):
    return from_pretrained(folder, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


def torchao_int8_weight_only(folder):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = original()
    quantize_(model, Int8WeightOnlyConfig())
    return model


SCHEMES = {
    "bitsandbytes": (bitsandbytes_int8, "Int8Params"),
    "bitsandbytes nf4": (bitsandbytes_nf4, "Params4bit"),
    "torchao": (torchao_int8_weight_only, "Int8Tensor"),
}


@pytest.fixture(scope="module", params=SCHEMES)
def quantised(request, tmp_path_factory):
    package = request.param.partition(" ")[0]
    pytest.importorskip(package, reason=f"needs {package}: pip install -e '.[quantised]'")
    pytest.importorskip("accelerate", reason="needs accelerate: pip install -e '.[quantised]'")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # every product says that it casts to float16
    make, weight = SCHEMES[request.param]
    model = make(tmp_path_factory.mktemp("model"))
    assert type(model.model.layers[0].self_attn.q_proj.weight).__name__ == weight, "nothing is quantised"
    return model


def differs(model) -> bool:
    ids = prompts(2, 12)["input_ids"]
    with torch.no_grad():
        return not torch.equal(model(ids).logits, original()(ids).logits)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_quantised_target_says_what_it_says_alone(quantised, batch):
    assert differs(quantised)
    inputs = prompts(batch, 12, seed=batch)
    expected = quantised.generate(**inputs, **GREEDY)
    out = gsd.generate(
        quantised,
        **inputs,
        **GREEDY,
        assistant_model=noised(original(), 0.02),
        draft_sources=("model", "history"),
        graph_config=SHAPE,
        return_dict_in_generate=True,
    )
    assert torch.equal(out.sequences, expected)
    assert sum(out.stats.accepted[2:]) > 0 and out.stats.tokens_per_step < 1 + SHAPE.max_path
    assert len(set(expected[:, 12:].flatten().tolist())) > 8


def test_a_seed_gives_the_same_text_with_any_draft(quantised):
    sampled = {**prompts(2, 12), **GREEDY, "do_sample": True, "temperature": 0.6, "top_p": 0.95, "seed": 5}
    expected = gsd.generate(quantised, **sampled)
    for sources in ({"assistant_model": noised(original(), 0.02)}, {"draft_sources": ("history",)}):
        assert torch.equal(gsd.generate(quantised, **sampled, **sources, graph_config=SHAPE), expected)


def test_a_quantised_draft(quantised):
    target = original()
    expected = target.generate(**prompts(2, 12), **GREEDY)
    out = gsd.generate(
        target,
        **prompts(2, 12),
        **GREEDY,
        assistant_model=quantised,
        graph_config=SHAPE,
        return_dict_in_generate=True,
    )
    assert torch.equal(out.sequences, expected) and out.stats.tokens_per_step > 1.5


def test_patch_and_unpatch_leave_quantised_weights_alone(quantised):
    inputs = prompts(2, 12)
    with torch.no_grad():
        before = quantised(**inputs).logits
    expected = quantised.generate(**inputs, **GREEDY)
    handle = gsd.patch(quantised, assistant_model=noised(original(), 0.02), graph_config=SHAPE)
    try:
        assert torch.equal(quantised.generate(**inputs, **GREEDY), expected) and handle.stats.tokens_per_step > 1
    finally:
        gsd.unpatch(quantised)
    with torch.no_grad():
        assert torch.equal(quantised(**inputs).logits, before)


def test_activations_that_are_quantised_row_by_row_under_auto():
    """A last bit of an activation may become a whole level of int8, so texts are the same at their beginning only."""
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao: pip install -e '.[quantised]'")
    target = original()
    quantization.quantize_(target, quantization.Int8DynamicActivationInt8WeightConfig())
    inputs = prompts(1, 12)
    expected = target.generate(**inputs, **GREEDY)
    for sources in ({"draft_sources": ("history",)}, {"assistant_model": noised(original(), 0.02)}):
        out = gsd.generate(target, **inputs, **GREEDY, **sources)
        assert out.shape == expected.shape and torch.equal(out[:, :14], expected[:, :14])


def test_a_target_whose_int8_takes_outliers_from_all_rows_is_refused(tmp_path):
    pytest.importorskip("bitsandbytes")
    target = from_pretrained(tmp_path, load_in_8bit=True)  # bitsandbytes' default
    with pytest.raises(ValueError, match=r"^model: int8 of bitsandbytes with llm_int8_threshold=6\.0.*=0\.0\)"):
        gsd.generate(target, **prompts(1, 9), max_new_tokens=4, draft_sources=("history",))
    plain = original().generate(**prompts(1, 9), max_new_tokens=8, do_sample=False)
    options = {"max_new_tokens": 8, "do_sample": False, "graph_config": "chain"}
    assert torch.equal(gsd.generate(original(), **prompts(1, 9), assistant_model=target, **options), plain), (
        "a draft may"
    )
