"""GGUF files as models: what transformers' own loader makes of them, without unpacking them."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

pytest.importorskip("gguf")

from gguf_files import tiny, write_gguf

from gsd_kernels_hf.packed.gguf import from_gguf
from gsd_kernels_hf.packed.modules import Packed, PackedEmbedding, PackedLinear

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


WIDTH, QUERIES = "llama.embedding_length", "blk.0.attn_q.weight"


def test_wrong_arguments_are_named(made, tmp_path):
    with pytest.raises(ValueError, match="is no file"):
        from_gguf(tmp_path / "none.gguf")
    with pytest.raises(ValueError, match="is no file"):
        from_gguf(tmp_path)
    with pytest.raises(TypeError, match=r"dtype: expected torch\.float32"):
        from_gguf(made("llama"), dtype=torch.float64)
