"""The kinds of weights, a row each: with any draft or none the text is that of what they stand for."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf_files import tiny as tiny_file
from gguf_files import write_gguf
from models import noised, prompts, tiny
from packed import test_libraries
from quantised import SCHEMES, dense_of, original
from transformers import AutoModelForCausalLM

import gsd_kernels as gsd
from gsd_kernels.ops.packed import PACKERS
from gsd_kernels_hf.packed.modules import Packed

FILES = {
    "llama": ("llama", 64, ["q4_0", "q8_0"], False),
    "llama-tied": ("llama", 64, ["q4_1", "q5_0", "iq4_nl", "mxfp4"], True),
    "llama-k": ("llama", 256, ["q4_k", "q6_k", "q5_k"], False),
    "qwen2": ("qwen2", 64, ["q5_1", "q8_0"], False),
    "qwen3": ("qwen3", 64, ["q8_0", "bf16", "q4_0"], True),
}
"""Architecture, width, kinds of weights, whether the output matrix is the embedding."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Case:
    """A model, the one whose text it has (a dense one's, or its own), and a draft that is often right."""

    model: Any
    right: Any
    draft: Any


def of_scheme(name: str) -> Case:
    """A library's weights, which it dequantises; forwarded once, since a library may rewrite its weights then."""
    model = SCHEMES[name](original())
    with torch.no_grad():
        model(**prompts(1, 5, vocab=96))
    dense = dense_of(model, SCHEMES[name], original())
    return Case(model, dense, noised(dense, 0.02))


def of_codes(name: str, dtype: torch.dtype) -> Case:
    """A library's weights that multiply integers."""
    model = test_libraries.INTEGERS[name][0](original(dtype))
    return Case(model, model, noised(original(dtype), 0.02))


def rounded(dtype: torch.dtype) -> Case:
    model = gsd.keep_packed(test_libraries.rounded(dtype))
    return Case(model, model, noised(original(dtype), 0.02))


def of_pack(kind: str, tied: bool) -> Case:
    dense = tiny(tie_word_embeddings=tied, **test_libraries.SIZES).to(torch.bfloat16)
    packed = gsd.pack(copy.deepcopy(dense), kind)
    draft = noised(dense, 0.01)
    for name, module in packed.named_modules():
        if isinstance(module, Packed):
            dense.get_submodule(name).weight.data.copy_(module.weight)
    return Case(packed, dense, draft)


def of_file(name: str, folder: Path) -> Case:
    """A packed target and draft, and the dense bfloat16 model that the target stands for."""
    architecture, hidden, kinds, tied = FILES[name]
    made = tiny_file(architecture, hidden, tied=tied, head_dim=128 if architecture == "qwen3" else None)
    path = write_gguf(folder / "target.gguf", made, architecture, kinds)
    dense = AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, dtype=torch.bfloat16).eval()
    draft = gsd.from_gguf(write_gguf(folder / "draft.gguf", noised(made, 0.01), architecture, kinds))
    return Case(gsd.from_gguf(path), dense, draft)


ROWS: dict[str, Callable[[Path], Case]] = {
    **{f"file, {name}": functools.partial(of_file, name) for name in FILES},
    **{name: lambda _, name=name: of_scheme(name) for name in SCHEMES},
    **{
        f"codes of {name}, {said}": lambda _, name=name, dtype=dtype: of_codes(name, dtype)
        for name in test_libraries.INTEGERS
        for said, dtype in DTYPES.items()
    },
    **{f"rounded, {said}": lambda _, dtype=dtype: rounded(dtype) for said, dtype in DTYPES.items()},
    **{f"pack {kind}": lambda _, n=n, kind=kind: of_pack(kind, n % 2 == 0) for n, kind in enumerate(PACKERS)},
}
