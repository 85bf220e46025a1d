"""A GGUF file is read whole, or refused by the name of what would be left out: every tensor, every field."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("gguf")

import gguf
import numpy as np
from gguf_files import tiny, write_gguf

from gsd_kernels_hf.packed import dense
from gsd_kernels_hf.packed.entries import Strings
from gsd_kernels_hf.packed.fields import HARMLESS, NEUTRAL, PERMUTED, config_of, empty_model
from gsd_kernels_hf.packed.gguf import from_gguf
from gsd_kernels_hf.packed.header import Header

IDS = torch.tensor([[5, 7, 9, 11, 13, 5, 7]])
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
KNOWN_TENSORS = sorted(gguf.TENSOR_NAMES.values())


def values_of(group: type) -> list[str]:
    """The keys of a group of gguf's, those of the groups inside it too."""
    found = []
    for name, value in vars(group).items():
        if not name.startswith("_"):
            found += values_of(value) if isinstance(value, type) else [value]
    return found


KNOWN_FIELDS = sorted({key.partition(".")[2] for key in values_of(gguf.Keys) if key.startswith("{arch}.")})


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """A copy of the head of an architecture's file, to be changed."""
    made = {}

    def of(architecture: str) -> Header:
        if architecture not in made:
            path = tmp_path_factory.mktemp(architecture) / "model.gguf"
            made[architecture] = Header.read(write_gguf(path, tiny(architecture), architecture, "q8_0"))
        whole = made[architecture]
        return Header(whole.path, dict(whole.fields), dict(whole.tensors))

    return of


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def same(path, model) -> None:
    torch.testing.assert_close(logits(from_gguf(path, dtype=torch.float32)), logits(model), rtol=0, atol=1e-6)


# ---- tensors


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tensor_that_llama_cpp_knows_is_used_or_refused_by_name(heads, architecture):
    own = heads(architecture)
    refused = 0
    for kind in KNOWN_TENSORS:
        for suffix in (".weight", ".bias", ".scale"):
            name = kind.format(bid=1, xid=0) + suffix
            if name in own.tensors or (name == "rope_freqs.weight" and architecture in PERMUTED):
                continue
            head = heads(architecture)
            head.tensors[name] = dataclasses.replace(own.tensors["output_norm.weight"], name=name)
            with pytest.raises(ValueError, match=f"path: .*{name.replace('.', '[.]')} "):
                empty_model(head)
            refused += 1
    assert refused > 500


def another_layer(writer) -> None:
    writer.add_tensor("blk.2.attn_q.weight", np.zeros((64, 64), np.float32))


def a_bias(name: str, size: int = 64):
    return lambda writer: writer.add_tensor(name, np.ones(size, np.float32))


@pytest.mark.parametrize(
    ("also", "named"),
    [
        (another_layer, "blk.2.attn_q.weight"),
        (a_bias("blk.0.attn_q.bias"), "blk.0.attn_q.bias"),
        (a_bias("blk.1.attn_output.bias"), "blk.1.attn_output.bias"),
        (a_bias("blk.1.ffn_up.bias", 128), "blk.1.ffn_up.bias"),
        (a_bias("output.bias", 96), "output.bias"),
        (a_bias("blk.0.attn_q_norm.weight", 16), "blk.0.attn_q_norm.weight"),
        (a_bias("blk.0.ffn_gate_exps.weight"), "blk.0.ffn_gate_exps.weight"),
        (lambda writer: writer.add_expert_count(4), "llama.expert_count is 4"),
    ],
)
def test_a_file_with_more_than_its_model_is_refused(tmp_path, also, named):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama", "f32", also)
    for load in (from_gguf, dense.load_model):
        with pytest.raises(ValueError, match=f"path: {path}: {named}"):
            load(path)


# ---- fields


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_field_that_llama_cpp_knows_is_honoured_or_refused_by_name(heads, architecture):
    plain = config_of(heads(architecture)).to_dict()
    honoured, refused = set(), set()
    for name in [*KNOWN_FIELDS, "rope.scale_linear", "of.tomorrow"]:
        for value in (7, 3, -1, 0.37, False, True, "yarn", [1, 0], Strings(3), float("nan")):
            head = heads(architecture)
            key = f"{architecture}.{name}"
            before = head.fields.get(key)
            head.fields[key] = value
            try:
                found = config_of(head).to_dict()
            except ValueError as error:
                assert str(error).startswith(f"path: {head.path}: ") and architecture in str(error)
                refused.add(name)
                continue
            if found != plain:
                honoured.add(name)
                continue
            expected = NEUTRAL.get(name, ((), ""))[0]
            informs = name in HARMLESS or (name.startswith("rope.scaling.") and name not in NEUTRAL)
            assert informs or value in expected or value == before, (name, value)
    assert {"rope.scale_linear", "rope.scaling.factor", "context_length"} <= honoured
    assert {"of.tomorrow", "attention.scale", "expert_count", "rope.dimension_count", "attention.causal"} <= refused


def linear(writer, key: str = "rope.scaling.factor") -> None:
    writer.add_float32(f"{writer.arch}.{key}", 4.0)


def yarn(writer) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(128)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("also", "scaling"),
    [
        (linear, {"rope_type": "linear", "factor": 4.0}),
        (lambda writer: linear(writer, "rope.scale_linear"), {"rope_type": "linear", "factor": 4.0}),
        (yarn, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}),
    ],
    ids=["linear", "the old key", "yarn"],
)
def test_scaling_of_positions_is_honoured(tmp_path, architecture, also, scaling):
    model = tiny(architecture, rope_parameters={"rope_theta": 10000.0, **scaling})
    path = write_gguf(tmp_path / "m.gguf", model, architecture, "f32", also)
    same(path, model)
    assert not torch.allclose(logits(model), logits(tiny(architecture)), atol=1e-4)


# ---- tokens that end a text


def add_end(name: str, token: int):
    return lambda writer: writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)


@pytest.mark.parametrize("name", ["eot", "eom"])
@pytest.mark.parametrize("load", [from_gguf, dense.load_model])
def test_the_ends_of_a_turn_and_of_a_message_end_a_text(tmp_path, name, load):
    model = tiny("llama")
    call = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    long = model.generate(IDS, **call, eos_token_id=None)[0, IDS.shape[1] :].tolist()
    end = long[4]
    path = write_gguf(tmp_path / "m.gguf", model, "llama", "f32", add_end(name, end))
    found = load(path, torch.float32) if load is dense.load_model else load(path, dtype=torch.float32)
    assert found.generation_config.eos_token_id == found.config.eos_token_id == [2, end]
    text = found.generate(IDS, **call)[0, IDS.shape[1] :].tolist()
    assert text == long[: long.index(end) + 1]


# ---- split models


@pytest.fixture
def parts(tmp_path):
    """A model, and the first of the parts of its file."""
    model = tiny("llama")
    return model, write_gguf(tmp_path / "m.gguf", model, "llama", "f32", of_a_part=9)


def test_all_parts_of_a_split_model_are_loaded(parts):
    model, first = parts
    assert first.name == "m-00001-of-00003.gguf" and len(Header.read(first).fields) > 5
    same(first, model)


# ---- files that transformers unpacks
