"""GGUF files as models: what transformers' own loader makes of them, packed; or refused by what would be left out."""

from __future__ import annotations

import logging
import struct

import gguf
import numpy as np
import pytest
import torch
from gguf_files import tiny, write_gguf
from models import prompts
from packed import rows
from torch import nn
from transformers import AutoModelForCausalLM

import gsd_kernels as gsd
from gsd_kernels.ops.packed import unpack_rows
from gsd_kernels_hf.packed import modules
from gsd_kernels_hf.packed.fields import HARMLESS, NEUTRAL, PERMUTED, config_of, empty_model
from gsd_kernels_hf.packed.gguf import from_gguf, load_model
from gsd_kernels_hf.packed.header import Header
from gsd_kernels_hf.packed.modules import Packed, PackedLinear

IDS = torch.tensor([[5, 7, 9, 11, 13, 5, 7], [1, 1, 40, 41, 42, 43, 44]])
FLOATS = {"f32", "f16", "bf16"}
MIXED = ["q4_1", "q8_0", "q5_0", "bf16", "iq4_nl", "q4_0", "q5_1", "f16", "mxfp4", "f32"]
FILES = rows.FILES | {"mixed": ("llama", 64, MIXED, False)}


def written(folder, name):
    architecture, hidden, kinds, tied = FILES[name]
    model = tiny(architecture, hidden, tied=tied, head_dim=128 if architecture == "qwen3" else None)
    return write_gguf(folder / "model.gguf", model, architecture, kinds)


@pytest.mark.parametrize("name", FILES)
def test_weights_and_logits_are_those_of_transformers_loader(name, tmp_path):
    path = written(tmp_path, name)
    mine = from_gguf(path, dtype=torch.float32)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    assert {m.kind.name for m in mine.modules() if isinstance(m, Packed)} == set(FILES[name][2]) - FLOATS
    for place, module in other.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            assert torch.equal(mine.get_submodule(place).weight, module.weight), place
    for place, parameter in mine.named_parameters():
        assert torch.equal(parameter, other.get_parameter(place)), place
    mask = torch.ones_like(IDS)
    mask[1, :2] = 0
    given = {"input_ids": IDS, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    torch.testing.assert_close(mine(**given).logits, other(**given).logits, rtol=1e-4, atol=1e-4)


def test_frequencies_of_the_file_divide_those_of_the_config(tmp_path):
    model, factors = tiny("llama"), np.linspace(1, 8, 8).astype(np.float32)
    also = lambda writer: writer.add_tensor("rope_freqs.weight", factors)  # noqa: E731
    found = from_gguf(write_gguf(tmp_path / "f.gguf", model, "llama", "q8_0", also)).model.rotary_emb.inv_freq
    assert torch.equal(found, model.model.rotary_emb.inv_freq / torch.from_numpy(factors))


def test_casting_and_saving_behave_or_say_why(tmp_path):
    path = written(tmp_path, "mixed")
    model = from_gguf(path, dtype=torch.float32)
    linear = next(module for module in model.modules() if isinstance(module, PackedLinear))
    assert "bits a weight" in repr(linear)
    assert model.to(torch.float64) is model and linear.packed.dtype == torch.uint8, "packed weights are cast by nobody"
    with pytest.raises(ValueError, match=f"save_pretrained: the weights of this model stay packed in {path}"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(TypeError, match=r"dtype: expected torch\.float32"):
        from_gguf(path, dtype=torch.float64)
    with pytest.raises(ValueError, match="is no file"):
        from_gguf(tmp_path)


def test_no_whole_matrix_is_unpacked(tmp_path, monkeypatch):
    """Which would need the memory of the dense model."""
    target = rows.of_file("llama-tied", tmp_path).model

    def some_rows(matrix, rows=None, **how):
        assert rows is not None, f"all {matrix.outputs} rows were unpacked"
        return unpack_rows(matrix, rows, **how)

    monkeypatch.setattr(modules, "unpack_rows", some_rows)
    gsd.generate(target, **prompts(2, 7, vocab=90), max_new_tokens=12, do_sample=False, draft_sources=("history",))


# Heads that contradict their file.


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file's path."""
    return write_gguf(tmp_path_factory.mktemp("whole") / "m.gguf", tiny("llama"), "llama", ["q4_0", "q8_0"])


Q, K, FIELD, TWICE = b"blk.0.attn_q.weight", b"blk.0.attn_k.weight", b"llama.block_count", "llama.block_c0unt"


def behind(raw: bytes, name: bytes, skipped: int, new: bytes) -> bytes:
    """The file with other bytes behind a name."""
    at = raw.index(name) + len(name) + skipped
    return raw[:at] + new + raw[at + len(new) :]


HEADS = {
    **{f"alignment {n}": ("", ("general.alignment", n)) for n in (0, 3, 1 << 31)},
    "an unknown type": ("77", (FIELD, 0, struct.pack("<I", 77))),
    **{f"offset {n}": (f"{K.decode()} has", (K, 24, struct.pack("<Q", n))) for n in (7, 1 << 63)},
    **{
        f"shape {shape}": ("attn_", (Q, 4, struct.pack("<2Q", *shape)))
        for shape in ((0, 64), (1 << 32, 1 << 32), (33, 64), (64, 65))
    },
    "a field twice": (FIELD.decode(), (TWICE, 2)),
    "a count in words": ("split.count is 'two'", ("split.count", "two")),
    "a part that is not there": ("part 2 is not beside it", ("split.count", 2)),
    "an end that is no token": ("tokenizer.ggml.eot_token_id is 999", ("tokenizer.ggml.eot_token_id", 999)),
    "a tensor of another name": ("(attn_q|q_proj)", (Q, -len(Q), b"blk.0.attn_w.weight")),
    "frequencies by nought": (
        "rope_freqs.weight is .*factors above 0",
        (lambda writer: writer.add_tensor("rope_freqs.weight", np.zeros(8, np.float32)),),
    ),
    "a tensor twice": ("name", (Q, -len(Q), K)),
    "heads of no whole width": ("no llama model has such", (b"attention.head_count", 4, struct.pack("<I", 6))),
    "no architecture": ("general.architecture is missing", (b"general.arch", -12, b"general.arcs")),
}
"""Words of the refusal; what is added, a field and its value, or a name and what is written behind it."""


def add(name, *value):
    if callable(name):
        return name
    return lambda writer: (writer.add_string if isinstance(*value, str) else writer.add_uint32)(name, *value)


@pytest.mark.parametrize("damage", HEADS)
def test_a_head_that_contradicts_the_file_is_refused(whole, tmp_path, damage):
    words, (name, *rest) = HEADS[damage]
    path = tmp_path / "m.gguf"
    if isinstance(name, bytes):
        path.write_bytes(behind(whole.read_bytes(), name, *rest))
    else:
        write_gguf(path, tiny("llama"), "llama", "q8_0", add(name, *rest))
        path.write_bytes(path.read_bytes().replace(TWICE.encode(), FIELD))
    for load in (from_gguf, load_model):
        with pytest.raises(ValueError, match=f"^path: {path}.*{words}"):
            load(path)


# Every tensor and every field is used, or refused by name.


ARCHITECTURES = ("llama", "qwen3")


def values_of(group: type) -> list[str]:
    """The keys of a group of gguf's, those of the groups inside it too."""
    found = []
    for name, value in vars(group).items():
        if not name.startswith("_"):
            found += values_of(value) if isinstance(value, type) else [value]
    return found


KNOWN_FIELDS = sorted({key.partition(".")[2] for key in values_of(gguf.Keys) if key.startswith("{arch}.")})


@pytest.fixture(scope="module", params=ARCHITECTURES)
def head(tmp_path_factory, request):
    """The head of an architecture's file, and its copies, to be changed."""
    path = tmp_path_factory.mktemp(request.param) / "model.gguf"
    whole = Header.read(write_gguf(path, tiny(request.param), request.param, "q8_0"))
    return request.param, lambda: Header(whole.path, dict(whole.fields), dict(whole.tensors))


def test_every_tensor_that_llama_cpp_knows_is_used_or_refused_by_name(head):
    architecture, copied = head
    own, refused = copied(), 0
    for kind in sorted(gguf.TENSOR_NAMES.values()):
        suffix = (".weight", ".bias", ".scale")[refused % 3]
        name = kind.format(bid=1 + refused % 2, xid=0) + suffix  # the model has two blocks
        if name in own.tensors or (name == "rope_freqs.weight" and architecture in PERMUTED):
            continue
        more = copied()
        more.tensors[name] = own.tensors["output_norm.weight"]
        with pytest.raises(ValueError, match=f"path: .*{name.replace('.', '[.]')} "):
            empty_model(more)
        refused += 1
    assert refused > 200


def test_every_field_that_llama_cpp_knows_is_honoured_or_refused_by_name(head):
    architecture, copied = head
    plain = config_of(copied()).to_dict()
    honoured, refused = set(), set()
    for name in [*KNOWN_FIELDS, "rope.scale_linear", "of.tomorrow"]:
        for value in (7, 3, -1, 0.37, False, True, "yarn", [1, 0], range(3), float("nan")):
            other, key = copied(), f"{architecture}.{name}"
            before = other.fields.get(key)
            other.fields[key] = value
            try:
                found = config_of(other).to_dict()
            except ValueError as error:
                assert str(error).startswith(f"path: {other.path}: ") and (
                    architecture if type(value) is int else key
                ) in str(error)
                refused.add(name)
                continue
            if found != plain:
                honoured.add(name)
                continue
            informs = name in HARMLESS or (name.startswith("rope.scaling.") and name not in NEUTRAL)
            assert informs or NEUTRAL[name].fits(value) or value == before, (name, value)
    assert {"rope.scale_linear", "rope.scaling.factor", "context_length"} <= honoured
    assert {"of.tomorrow", "attention.scale", "expert_count", "rope.dimension_count", "attention.causal"} <= refused


def yarn(writer) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(128)


LINEAR = {"rope_type": "linear", "factor": 4.0}
WHOLE_FILES = {  # what is added, how positions are scaled, tensors of a part, the model's config
    "linear": (lambda writer: writer.add_float32("llama.rope.scaling.factor", 4.0), LINEAR, 0),
    "the old key": (lambda writer: writer.add_float32("llama.rope.scale_linear", 4.0), LINEAR, 0),
    "yarn": (yarn, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 0),
    "in parts": (lambda writer: None, {}, 9),
    "biases": (lambda writer: None, {}, 0, {"attention_bias": True}),
    "a padding that is no token": (lambda w: w.add_uint32("tokenizer.ggml.padding_token_id", 999), {}, 0),
}


@pytest.mark.parametrize("name", WHOLE_FILES)
def test_scaling_of_positions_and_all_parts_are_read(tmp_path, name):
    also, scaling, parts, *config = WHOLE_FILES[name]
    rope = {"rope_theta": 10000.0, "rope_type": "default", **scaling}
    model = tiny("llama", rope_parameters=rope, **(config[0] if config else {}))
    for key, value in model.named_parameters():
        if key.endswith("bias"):
            nn.init.normal_(value)
    path = write_gguf(tmp_path / "m.gguf", model, "llama", "f32", also, of_a_part=parts)
    mine, other = from_gguf(path, dtype=torch.float32)(IDS).logits, model(IDS).logits
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    assert torch.equal(load_model(path)(IDS).logits, mine)
    assert not scaling or not torch.allclose(other, tiny("llama")(IDS).logits, atol=1e-4)
    for later in tmp_path.glob("m-00002-*"):
        with pytest.raises(ValueError, match=r"split\.no is 1; expected 0.*give the first"):
            from_gguf(later)


@pytest.mark.parametrize("load", [from_gguf, load_model])
def test_the_ends_of_a_turn_and_of_a_message_end_a_text(tmp_path, load):
    model, ids = tiny("llama"), IDS[:1]
    call = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    long = model.generate(ids, **call, eos_token_id=None)[0, ids.shape[1] :].tolist()
    for name, end in (("eot", long[4]), ("eom", long[3])):
        also = lambda w, name=name, end=end: w.add_uint32(f"tokenizer.ggml.{name}_token_id", end)  # noqa: E731
        found = load(write_gguf(tmp_path / f"{name}.gguf", model, "llama", "f32", also), dtype=torch.float32)
        assert found.generation_config.eos_token_id == found.config.eos_token_id == [2, end]
        text = found.generate(ids, **call)[0, ids.shape[1] :].tolist()
        assert text == long[: long.index(end) + 1]


@pytest.mark.parametrize(
    ("architecture", "norms", "words"),
    [
        ("gemma2", "", "transformers cannot read this gemma2 file: "),
        ("stablelm", "", "has nothing for .* of the stablelm model"),
        ("stablelm", "", "is part 1 of .* and transformers reads one file"),
        ("stablelm", "blk.0.attn blk.0.ffn blk.1.attn blk.1.ffn output no", "no_norm.bias, which .* passes over"),
    ],
)
def test_another_architecture_is_unpacked_by_transformers_and_the_log_says_so(
    architecture, norms, words, tmp_path, caplog
):
    also = lambda w: [w.add_tensor(f"{name}_norm.bias", np.zeros(64, np.float32)) for name in norms.split()]  # noqa: E731
    path = write_gguf(tmp_path / "m.gguf", tiny("llama"), architecture, "q8_0", also, of_a_part=9 * ("part" in words))
    with caplog.at_level(logging.WARNING, "gsd_kernels"), pytest.raises(ValueError, match=f"path: {path}.*{words}"):
        from_gguf(path)
    assert f"transformers unpacks all weights of the architecture {architecture}" in caplog.text
