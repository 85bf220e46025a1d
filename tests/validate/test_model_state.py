"""Quantised activations, copies, checkpoints, caches and features of models: exact, or refused by name."""

from __future__ import annotations

import copy
import io
import subprocess
import sys

import models
import pytest
import tiny_configs
import torch
import transformers
from gates import TOKENS, exact, llama, prompt, refused, unpadded
from torch import nn

import gsd_kernels as gsd
from gsd_kernels_hf.model import probe

torch.set_num_threads(1)

# Dynamic quantisation of activations ---------------------------------------------------------------------------------


class Quantised(nn.Linear):
    """int8 activations with one scale for all rows, or one for each."""

    each = False

    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True) if self.each else x.abs().max()
        scale = scale.clamp(min=1e-9) / 127
        return nn.functional.linear((x / scale).round() * scale, self.weight)


class QuantisedByRow(Quantised):
    each = True


def quantise(model, kind) -> None:
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).__class__ = kind


def test_activations_quantised_over_all_rows():
    model = llama()
    quantise(model, Quantised)
    refused(model, "quantised over all rows of a forward.*mlp")
    quantise(model, QuantisedByRow)
    exact(model)


@pytest.mark.filterwarnings("ignore")
def test_dynamic_quantisation_of_torch():
    quantization = pytest.importorskip("torch.ao.quantization")
    if not hasattr(quantization, "quantize_dynamic") or "x86" not in torch.backends.quantized.supported_engines:
        pytest.skip("torch has no dynamic quantisation here")
    model = llama(dtype=torch.float32)
    model.generation_config.eos_token_id = None
    quantised = quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*quantised over all rows"):
        gsd.generate(quantised, **prompt(), draft_sources=("history",), graph_config="tree", **TOKENS)


def test_weights_that_hold_nan_are_not_taken_for_mixing():
    model = llama()
    with torch.no_grad():
        model.lm_head.weight[3, 3] = torch.nan
    assert probe.examine(model).problem is None


# Copies and checkpoints ----------------------------------------------------------------------------------------------

LOADING = """
import sys, torch, transformers
sys.modules["gsd_kernels"] = sys.modules["gsd_kernels_hf"] = None
ids = torch.load(sys.argv[1])
for path in sys.argv[2:]:
    model = torch.load(path, weights_only=False)
    assert model.generate.__func__ is transformers.GenerationMixin.generate
    assert model.config._attn_implementation == "sdpa"
    torch.save(model.generate(ids, max_new_tokens=12, do_sample=False), path + ".out")
"""


@pytest.mark.slow
def test_a_saved_model_is_loaded_where_this_package_is_not(tmp_path):
    """Saved while it is patched, and in the middle of a text."""
    model = llama()
    expected = model.generate(unpadded(), **TOKENS)
    gsd.patch(model, assistant_model=models.noised(model), graph_config="tree")
    ids, *paths = (str(tmp_path / name) for name in ("ids.pt", "patched.pt", "generating.pt"))
    torch.save(unpadded(), ids)
    torch.save(model, paths[0])
    model.generate(unpadded(), **TOKENS, stopping_criteria=[lambda *_: torch.save(model, paths[1]) or False])
    done = subprocess.run([sys.executable, "-c", LOADING, ids, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for path in paths:
        assert torch.equal(torch.load(f"{path}.out"), expected)


def test_copies_made_while_a_model_generates(tmp_path):
    model, copies = llama(), []
    draft = models.noised(model)

    def keep(*_):
        buffer = io.BytesIO()
        torch.save(model, buffer)
        copies[:] = [copy.deepcopy(model), buffer]
        model.save_pretrained(tmp_path)
        return False

    out = gsd.generate(
        model, unpadded(), assistant_model=draft, graph_config="tree", stopping_criteria=[keep], **TOKENS
    )
    copies[1].seek(0)
    assert "gsd" not in (tmp_path / "config.json").read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    for clone in (copies[0], torch.load(copies[1], weights_only=False), loaded):
        assert clone.config._attn_implementation == "sdpa"
        assert torch.equal(clone.generate(unpadded(), **TOKENS), out)


# Caches --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Gemma3nForCausalLM", "Gemma4ForCausalLM", "MllamaForCausalLM"])
def test_layers_without_keys_of_their_own(name):
    """They share those of others, or never run; as target and as draft."""
    model = tiny_configs.build(name)
    exact(model)
    draft = models.noised(model, 0.01)
    target = llama(vocab_size=tiny_configs.VOCAB)
    expected = target.generate(**prompt(), **TOKENS)
    assert torch.equal(gsd.generate(target, **prompt(), assistant_model=draft, graph_config="tree", **TOKENS), expected)


def test_training_mode():
    model = llama().train()
    exact(model)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is in training mode with gradient checkpointing.*eval\(\)"):
        gsd.generate(model, **prompt(), **TOKENS)
    assert model.training and model.is_gradient_checkpointing
    exact(model.eval())


# Features that a patch leaves alone ----------------------------------------------------------------------------------


def test_attention_weights_of_a_patched_model():
    model = llama(dtype=torch.float32)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**prompt(), output_attentions=True).attentions
        gsd.patch(model)
        model.generate(**prompt(), **TOKENS)
        model.config.output_attentions = True
        given = model(**prompt()).attentions
    assert len(given) == 2 and all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


def test_continuous_batching_of_a_patched_model():
    """It asks the config for an attention implementation that it knows."""
    manager = getattr(transformers, "ContinuousBatchingManager", None)
    if not hasattr(manager, "switch_to_cb_friendly_attn"):
        pytest.skip("this transformers has no such check")
    model = llama(dtype=torch.float32)
    gsd.patch(model)
    manager.switch_to_cb_friendly_attn(manager.__new__(manager), model, auto_switch_to_flash=False)
    assert model.config._attn_implementation == "sdpa"
