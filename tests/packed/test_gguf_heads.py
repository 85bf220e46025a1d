"""Damaged GGUF heads: one ValueError that names the file, the field and its value, before anything is made of it."""

from __future__ import annotations

import struct

import pytest

pytest.importorskip("gguf")

from gguf_files import tiny, with_field, write_gguf

from gsd_kernels_hf.packed import dense
from gsd_kernels_hf.packed.gguf import from_gguf
from gsd_kernels_hf.packed.header import Header

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
