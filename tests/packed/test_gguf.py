"""GGUF files as models: read whole, or refused by what is damaged or would be left out."""

from __future__ import annotations

import dataclasses
import logging
import struct

import gguf
import numpy as np
import pytest
import torch
from gguf_files import tiny, with_field, write_gguf
from models import prompts
from packed import rows
from torch import nn
from transformers import AutoModelForCausalLM

import gsd_kernels as gsd
from gsd_kernels.ops.packed import unpack_rows
from gsd_kernels_hf.packed import dense, modules
from gsd_kernels_hf.packed.entries import Strings
from gsd_kernels_hf.packed.fields import HARMLESS, NEUTRAL, PERMUTED, config_of, empty_model
from gsd_kernels_hf.packed.gguf import from_gguf
from gsd_kernels_hf.packed.header import Header
from gsd_kernels_hf.packed.modules import Packed, PackedEmbedding, PackedLinear, packed_in

# GGUF files as models: what transformers' own loader makes of them, without unpacking; damaged heads are named.


pytest.importorskip("gguf")

IDS = torch.tensor([[5, 7, 9, 11, 13, 5, 7], [1, 1, 40, 41, 42, 43, 44]])
MIXED = ["q4_1", "q8_0", "q5_0", "bf16", "iq4_nl", "q4_0", "q5_1", "f16", "mxfp4", "f32"]
FILES = {
    "llama": ("llama", 64, ["q4_0"], False),
    "llama tied": ("llama", 64, ["q8_0"], True),
    "llama mixed": ("llama", 64, MIXED, False),
    "llama of 256": ("llama", 256, ["q4_k", "q6_k", "q5_k"], False),
    "qwen2 with biases": ("qwen2", 64, ["q5_1", "q4_0"], False),
    "qwen3 with norms": ("qwen3", 64, ["q8_0", "q4_1"], True),
}
files = pytest.mark.parametrize("name", FILES)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Path of a file of :data:`FILES`, each written once."""
    paths = {}

    def of(name):
        if name not in paths:
            architecture, hidden, kinds, tied = FILES[name]
            path = tmp_path_factory.mktemp("gguf") / "model.gguf"
            model = tiny(architecture, hidden, tied=tied, head_dim=128 if architecture == "qwen3" else None)
            paths[name] = write_gguf(path, model, architecture, kinds)
        return paths[name]

    return of


def theirs(path, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@files
def test_weights_and_logits_are_those_of_transformers_loader(made, name, dtype):
    mine, other = from_gguf(made(name), dtype=dtype), theirs(made(name), dtype)
    for place, module in other.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            assert torch.equal(mine.get_submodule(place).weight, module.weight), place
    for place, parameter in mine.named_parameters():
        assert torch.equal(parameter, other.get_parameter(place)), place
    mask = torch.ones_like(IDS)
    mask[1, :2] = 0
    given = {"input_ids": IDS, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    mine, other = mine(**given).logits, other(**given).logits
    close = (1e-5 if dtype == torch.float32 else 0.03) * float(other.abs().max())
    torch.testing.assert_close(mine, other, rtol=0, atol=close)


@files
def test_matrices_stay_packed_in_the_file(made, name):
    model = from_gguf(made(name))
    kinds = {k for k in FILES[name][2] if k not in ("f32", "f16", "bf16")}
    packed = [module for module in model.modules() if isinstance(module, Packed)]
    assert {module.kind.name for module in packed} == kinds
    assert all(isinstance(module, (PackedLinear, PackedEmbedding)) for module in packed)
    assert not any(parameter.dim() == 2 for parameter in model.parameters()) or name == "llama mixed"


def test_frequencies_of_the_file_divide_those_of_the_config(tmp_path):
    import gguf
    import numpy as np

    model = tiny("llama")
    factors = np.linspace(1, 8, 8).astype(np.float32)

    class Writer(gguf.GGUFWriter):
        def write_header_to_file(self, *args):
            self.add_tensor("rope_freqs.weight", factors)
            super().write_header_to_file(*args)

    writer, gguf.GGUFWriter = gguf.GGUFWriter, Writer
    try:
        path = write_gguf(tmp_path / "f.gguf", model, "llama", "q8_0")
    finally:
        gguf.GGUFWriter = writer
    found = from_gguf(path).model.rotary_emb.inv_freq
    assert torch.equal(found, model.model.rotary_emb.inv_freq / torch.from_numpy(factors))


def test_moving_casting_and_saving_behave_or_say_why(made, tmp_path):
    path = made("llama mixed")
    model = from_gguf(path, dtype=torch.float32)
    before = model(IDS).logits
    linear = next(module for module in model.modules() if isinstance(module, PackedLinear))
    assert "bits a weight" in repr(linear)
    assert model.to(torch.float64) is model  # packed weights are cast by nobody
    assert linear.packed.dtype == torch.uint8
    assert torch.equal(from_gguf(path, dtype=torch.float32).to("cpu")(IDS).logits, before)
    with pytest.raises(ValueError, match=f"save_pretrained: the weights of this model stay packed in {path}"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_another_architecture_is_unpacked_by_transformers_and_the_log_says_so(tmp_path, caplog):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), "llama", "q8_0")
    raw = bytearray(path.read_bytes())
    at = raw.index(b"general.architecture") + len("general.architecture") + 12
    assert raw[at : at + 5] == b"llama"
    raw[at : at + 5] = b"gemma"
    path.write_bytes(raw)
    with caplog.at_level(logging.WARNING, "gsd_kernels"), pytest.raises(Exception):  # noqa: B017 (its numbers are missing)
        from_gguf(path)
    assert "transformers unpacks all weights of the architecture gemma" in caplog.text


def test_wrong_arguments_are_named(made, tmp_path):
    with pytest.raises(ValueError, match="is no file"):
        from_gguf(tmp_path / "none.gguf")
    with pytest.raises(ValueError, match="is no file"):
        from_gguf(tmp_path)
    with pytest.raises(TypeError, match=r"dtype: expected torch\.float32"):
        from_gguf(made("llama"), dtype=torch.float64)


@pytest.mark.parametrize("name", ["llama-tied", "llama-k"])
def test_no_whole_matrix_is_unpacked(name, tmp_path, monkeypatch):
    """Which would need the memory of the dense model."""
    target = rows.of_file(name, tmp_path).model

    def some_rows(matrix, rows=None, **how):
        assert rows is not None, f"all {matrix.outputs} rows were unpacked"
        return unpack_rows(matrix, rows, **how)

    monkeypatch.setattr(modules, "unpack_rows", some_rows)
    out = gsd.generate(
        target, **prompts(2, 7, vocab=90), max_new_tokens=12, do_sample=False, draft_sources=("history",)
    )
    assert out.shape[0] == 2
    with pytest.raises(AssertionError, match="rows were unpacked"):
        assert packed_in(target)[0].weight is not None


U32, I32, F32, BOOL, STRING, ARRAY, U64, F64 = 4, 5, 6, 7, 8, 9, 10, 12
WHOLE = "block_count context_length embedding_length feed_forward_length attention.head_count vocab_size".split()
LENGTHS = ("attention.head_count_kv", "rope.dimension_count", "attention.key_length", "attention.value_length")
REAL = ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor", "rope.scale_linear")
TEXT = struct.pack("<Q4s", 4, b"four")
LIST = struct.pack("<IQ2I", U32, 2, 2, 2)
FOREIGN = {  # values that are no number of anything, by name: type and bytes
    "a text": (STRING, TEXT),
    "a list": (ARRAY, LIST),
    "texts": (ARRAY, struct.pack("<IQ", STRING, 1) + TEXT),
    "2^31": (U32, struct.pack("<I", 1 << 31)),
    "2^64 - 1": (U64, struct.pack("<Q", (1 << 64) - 1)),
    "below 0": (I32, struct.pack("<i", -1)),
    "nan": (F32, struct.pack("<f", float("nan"))),
    "infinite": (F64, struct.pack("<d", float("inf"))),
    "0": (U32, struct.pack("<I", 0)),
    "true": (BOOL, b"\1"),
    "a boolean of 2": (BOOL, b"\2"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a file, where its tensors begin, and its path."""
    path = write_gguf(tmp_path_factory.mktemp("whole") / "m.gguf", tiny("llama"), "llama", ["q4_0", "q8_0"])
    return path.read_bytes(), min(tensor.offset for tensor in Header.read(path).tensors.values()), path


def refusal_of(path, raw: bytes) -> str:
    """What a file of these bytes is refused with."""
    path.write_bytes(raw)
    with pytest.raises(ValueError) as caught:
        from_gguf(path)
    with pytest.raises(ValueError) as other:
        dense.load_model(path)
    assert str(caught.value).startswith(f"path: {path}") and str(other.value) == str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("value", FOREIGN)
@pytest.mark.parametrize("name", [*WHOLE, *LENGTHS, *REAL])
def test_a_field_that_is_no_number_is_named_with_its_value(whole, tmp_path, name, value):
    if value == "2^31" and name == "rope.freq_base":
        pytest.skip("frequencies of that base there may be")
    kind, content = FOREIGN[value]
    message = refusal_of(tmp_path / "m.gguf", with_field(whole[2], f"llama.{name}", kind, content))
    assert f"llama.{name} " in message, message


Q, K, TWICE = b"blk.0.attn_q.weight", b"blk.0.attn_k.weight", b"llama.block_c0unt"


def behind(raw: bytes, name: bytes, skipped: int, new: bytes) -> bytes:
    """The file with other bytes behind a name."""
    at = raw.index(name) + len(name) + skipped
    return raw[:at] + new + raw[at + len(new) :]


HEADS = {
    **{f"alignment {n}": ("", ("general.alignment", U32, struct.pack("<I", n))) for n in (0, 1, 3, 24, 1 << 31)},
    "alignment 0.5": ("general.alignment", ("general.alignment", F32, struct.pack("<f", 0.5))),
    "an unknown type": ("77", ("llama.block_count", 77, b"")),
    **{f"offset {n}": (f"{K.decode()} has", (K, 24, struct.pack("<Q", n))) for n in (0, 7, 1 << 63, (1 << 64) - 1)},
    **{
        f"shape {shape}": ("attn_", (Q, 4, struct.pack("<2Q", *shape)))
        for shape in ((0, 64), (64, 0), (1 << 62, 64), (1 << 32, 1 << 32), (33, 64), (64, 65))
    },
    "a field twice": ("llama.block_count", (TWICE, U32, struct.pack("<I", 2))),
    "a tensor twice": ("name", (Q, -len(Q), K)),
}
"""Words of the refusal; a field's key, type and bytes, or a name and what is written behind it."""


@pytest.mark.parametrize("damage", HEADS)
def test_a_head_that_contradicts_the_file_is_refused(whole, tmp_path, damage):
    words, (name, *rest) = HEADS[damage]
    if name == TWICE:
        raw = with_field(whole[2], TWICE.decode(), *rest).replace(TWICE, b"llama.block_count")
    else:
        raw = behind(whole[0], name, *rest) if isinstance(name, bytes) else with_field(whole[2], name, *rest)
    assert words in refusal_of(tmp_path / "m.gguf", raw)


# A GGUF file is read whole, or refused by the name of what would be left out: every tensor, every field.


pytest.importorskip("gguf")

WHOLE_IDS = torch.tensor([[5, 7, 9, 11, 13, 5, 7]])
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
        return model(WHOLE_IDS).logits


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
    long = model.generate(WHOLE_IDS, **call, eos_token_id=None)[0, WHOLE_IDS.shape[1] :].tolist()
    end = long[4]
    path = write_gguf(tmp_path / "m.gguf", model, "llama", "f32", add_end(name, end))
    found = load(path, torch.float32) if load is dense.load_model else load(path, dtype=torch.float32)
    assert found.generation_config.eos_token_id == found.config.eos_token_id == [2, end]
    text = found.generate(WHOLE_IDS, **call)[0, WHOLE_IDS.shape[1] :].tolist()
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
