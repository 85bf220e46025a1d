"""Packed targets and drafts: the text of the dense model that they stand for, with any draft or none, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("gguf")

from gguf_files import tiny, write_gguf
from models import noised, prompts

import gsd_kernels as gsd
from gsd_kernels.ops.packed import unpack_rows
from gsd_kernels_hf.packed import modules
from gsd_kernels_hf.packed.modules import packed_in

FILES = {
    "llama": ("llama", 64, ["q4_0", "q8_0"], False),
    "llama-tied": ("llama", 64, ["q4_1", "q5_0", "iq4_nl", "mxfp4"], True),
    "llama-k": ("llama", 256, ["q4_k", "q6_k", "q5_k"], False),
    "qwen2": ("qwen2", 64, ["q5_1", "q8_0"], False),
    "qwen3": ("qwen3", 64, ["q8_0", "bf16", "q4_0"], True),
}


@pytest.fixture(scope="module", params=FILES)
def pair(request, tmp_path_factory):
    """A packed target, the dense bfloat16 model that it stands for, and a packed draft."""
    architecture, hidden, kinds, tied = FILES[request.param]
    folder = tmp_path_factory.mktemp("gguf")
    made = tiny(architecture, hidden, tied=tied, head_dim=128 if architecture == "qwen3" else None)
    path = write_gguf(folder / "target.gguf", made, architecture, kinds)
    dense = AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, dtype=torch.bfloat16).eval()
    draft = gsd.from_gguf(write_gguf(folder / "draft.gguf", noised(made, 0.01), architecture, kinds))
    target = gsd.from_gguf(path)
    for model in (target, dense):
        model.generation_config.eos_token_id = None
    return target, dense, draft


def test_no_whole_matrix_is_unpacked(pair, monkeypatch):
    """Which would need the memory of the dense model."""
    target, inputs = copy.deepcopy(pair[0]), prompts(2, 7, vocab=90)

    def some_rows(matrix, rows=None, **how):
        assert rows is not None, f"all {matrix.outputs} rows were unpacked"
        return unpack_rows(matrix, rows, **how)

    monkeypatch.setattr(modules, "unpack_rows", some_rows)
    out = gsd.generate(target, **inputs, max_new_tokens=12, do_sample=False, draft_sources=("history",))
    assert out.shape[0] == 2
    with pytest.raises(AssertionError, match="rows were unpacked"):
        assert packed_in(target)[0].weight is not None
