"""A GGUF file is read whole, or refused by the name of what would be left out: every tensor, every field."""

from __future__ import annotations

import dataclasses
import logging

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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tensor_is_needed_and_has_one_shape(heads, architecture):
    for name, tensor in heads(architecture).tensors.items():
        without, other = heads(architecture), heads(architecture)
        del without.tensors[name]
        other.tensors[name] = dataclasses.replace(tensor, shape=(*tensor.shape[:-1], tensor.shape[-1] + 1))
        for head in (without, other):
            if head is without and name == "output.weight":  # the embedding then
                assert empty_model(head).config.tie_word_embeddings
                continue
            with pytest.raises(ValueError, match=f"path: .*{name.replace('.', '[.]')} "):
                empty_model(head)


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


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_biases_of_all_layers_are_used(tmp_path, architecture, config):
    model = tiny(architecture, **config)
    path = write_gguf(tmp_path / "m.gguf", model, architecture, "f32")
    same(path, model)
    torch.testing.assert_close(logits(dense.load_model(path)), logits(model), rtol=0, atol=1e-6)


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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "name",
    [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_a_field_that_is_missing_is_named(heads, architecture, name):
    head = heads(architecture)
    del head.fields[f"{architecture}.{name}"]
    with pytest.raises(ValueError, match=f"path: {head.path}: {architecture}.{name} is missing; expected "):
        config_of(head)


def test_what_a_head_leaves_out_is_what_llama_cpp_takes(heads):
    head = heads("qwen2")  # whose config would say 32 heads of keys
    del (
        head.fields["qwen2.attention.head_count_kv"],
        head.fields["qwen2.rope.freq_base"],
        head.fields["qwen2.vocab_size"],
    )
    found = config_of(head)
    assert (found.num_key_value_heads, found.vocab_size) == (4, 96)
    assert found.rope_parameters["rope_theta"] == 10000.0


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


def test_a_window_of_attention_is_honoured_where_the_model_has_one(heads):
    for window, expected in ((7, 7), (0, None)):
        head = heads("mistral")
        head.fields["mistral.attention.sliding_window"] = window
        assert config_of(head).sliding_window == expected
    head = heads("llama")
    head.fields["llama.attention.sliding_window"] = 512  # its context
    config_of(head)
    head.fields["llama.attention.sliding_window"] = 511
    with pytest.raises(ValueError, match=r"llama\.attention\.sliding_window is 511; expected 0, or at least"):
        config_of(head)


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


def test_all_ends_are_kept_once_each_and_in_order(heads):
    head = heads("llama")
    head.fields |= {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    assert config_of(head).eos_token_id == [2, 7]
    head.fields["tokenizer.ggml.eot_token_id"] = 2
    assert config_of(head).eos_token_id == 2


@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom"])
@pytest.mark.parametrize("value", [96, -1, "2", 2.0, True])
def test_a_token_that_is_none_is_refused(heads, name, value):
    head = heads("llama")
    head.fields[f"tokenizer.ggml.{name}_token_id"] = value
    with pytest.raises(
        ValueError, match=rf"tokenizer\.ggml\.{name}_token_id is {value!r}; expected a token from 0 to 95"
    ):
        config_of(head)


def test_padding_outside_the_vocabulary_is_passed_over_as_by_llama_cpp(heads, caplog):
    head = heads("llama")
    head.fields["tokenizer.ggml.padding_token_id"] = 32000
    with caplog.at_level(logging.WARNING, "gsd_kernels"):
        assert config_of(head).pad_token_id is None
    assert "tokenizer.ggml.padding_token_id is 32000" in caplog.text and len(caplog.records) == 1


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


def test_a_part_without_the_others_says_so(parts, tmp_path):
    _, first = parts
    second = tmp_path / "m-00002-of-00003.gguf"
    with pytest.raises(ValueError, match=f"path: {second} is part 2 of 3 .*; give the first, {first}"):
        from_gguf(second)
    with pytest.raises(ValueError, match=f"path: {second} is part 2 of 3 .*; give the first, {first}"):
        dense.load_tokenizer(second)
    with pytest.raises(ValueError, match=r"part 1 of 3 .*transformers reads one file; merge the parts"):
        dense.load_model(first)
    alone = tmp_path / "model.gguf"
    alone.write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match=f"path: {alone} is part 1 of 3 of a split model .* does not tell where"):
        from_gguf(alone)
    third = tmp_path / "m-00003-of-00003.gguf"
    other = third.read_bytes()
    third.unlink()
    with pytest.raises(ValueError, match=f"path: {first} is part 1 of 3 .*, and part 3 is not beside it: {third.name}"):
        from_gguf(first)
    third.write_bytes(second.read_bytes())
    with pytest.raises(ValueError, match=rf"path: {third}: split\.no is 1; expected 2"):
        from_gguf(first)
    third.write_bytes(other[:-10])
    with pytest.raises(ValueError, match=f"path: {third} is damaged, cut short"):
        from_gguf(first)


# ---- files that transformers unpacks


def phi3(path, model, also=lambda writer: None):
    def more(writer):
        writer.add_pad_token_id(0)
        also(writer)

    return write_gguf(path, model, "phi3", "f32", more)


@pytest.mark.slow
def test_what_transformers_leaves_out_or_makes_up_is_refused(tmp_path):
    model = tiny("phi3")
    same(phi3(tmp_path / "m.gguf", model, add_end("eot", 9)), model)
    assert from_gguf(tmp_path / "m.gguf").generation_config.eos_token_id == [2, 9]
    path = tmp_path / "refused.gguf"
    for also, error in (
        (
            a_bias("rope_factors_long.weight", 8),
            f"path: {path} has rope_factors_long.weight, which transformers' loader",
        ),
        (
            a_bias("blk.0.attn_output.bias"),
            f"path: {path} has blk.0.attn_output.bias, which transformers' loader passes",
        ),
        (linear, f"path: {path}: phi3.rope.scaling.factor is 4.0; expected 1"),
        (lambda writer: writer.add_causal_attention(False), f"path: {path}: phi3.attention.causal is False"),
    ):
        with pytest.raises(ValueError, match=error):
            from_gguf(phi3(path, model, also))
    raw = (tmp_path / "m.gguf").read_bytes()
    path.write_bytes(raw.replace(b"blk.1.ffn_down.weight", b"blk.1.ffn_d0wn.weight"))
    with pytest.raises(ValueError, match=f"path: {path} has nothing for model.layers.1.mlp.down_proj.weight"):
        from_gguf(path)
