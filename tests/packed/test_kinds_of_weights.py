"""The contract of kinds of weights: with any draft or none the text of what they stand for. A kind is a row."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import tiny as tiny_file
from gguf_files import write_gguf
from models import noised, prompts, tiny
from ops.contracts.backends import needs_cpu
from packed import test_codes, test_pack, test_rounded, test_texts
from quantised import SCHEMES, dense_of, original
from transformers import AutoModelForCausalLM

import gsd_kernels as gsd
from gsd_kernels.ops.packed import PACKERS
from gsd_kernels_hf.costs.pair import describe
from gsd_kernels_hf.costs.prior import weight_bytes
from gsd_kernels_hf.packed.modules import Packed

pytestmark = needs_cpu
SHAPE = gsd.GraphConfig(depth=3, width=3, branch=2, max_rows=16, history_depth=2)
GREEDY = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.8, "seed": 7}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Case:
    """A model, what its text is to be (a dense one's, or its own of plain decoding), and a draft that is often right.

    ``said``: what costs say of its weights, if that is all of them; ``other``: of a dense model, which has more bytes.
    """

    model: Any
    right: Any
    draft: Any
    said: str = ""
    other: Any = None


def of_scheme(name: str) -> Case:
    """A library's weights, which it dequantises; forwarded once, since a library may rewrite its weights then."""
    model = SCHEMES[name](original())
    with torch.no_grad():
        model(**prompts(1, 5, vocab=96))
    dense = dense_of(model, SCHEMES[name], original())
    return Case(model, dense, noised(dense, 0.02), f" of {name.split()[0]}", dense)


def of_codes(name: str, dtype: torch.dtype) -> Case:
    """A library's weights that multiply integers."""
    model = test_codes.SCHEMES[name].make(original(dtype))
    return Case(model, model, noised(original(dtype), 0.02), f" of {name}", original(dtype))


def rounded(dtype: torch.dtype) -> Case:
    model = gsd.keep_packed(test_rounded.made(dtype))
    return Case(model, model, noised(original(dtype), 0.02))


def of_pack(kind: str, tied: bool) -> Case:
    dense = tiny(tie_word_embeddings=tied, **test_pack.SIZES).to(torch.bfloat16)
    packed = gsd.pack(copy.deepcopy(dense), kind)
    draft = noised(dense, 0.01)
    for name, module in packed.named_modules():
        if isinstance(module, Packed):
            dense.get_submodule(name).weight.data.copy_(module.weight)
    return Case(packed, dense, draft, other=dense)


def of_file(name: str, folder: Path) -> Case:
    """A packed target and draft, and the dense bfloat16 model that the target stands for."""
    architecture, hidden, kinds, tied = test_texts.FILES[name]
    made = tiny_file(architecture, hidden, tied=tied, head_dim=128 if architecture == "qwen3" else None)
    path = write_gguf(folder / "target.gguf", made, architecture, kinds)
    dense = AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, dtype=torch.bfloat16).eval()
    draft = gsd.from_gguf(write_gguf(folder / "draft.gguf", noised(made, 0.01), architecture, kinds))
    return Case(gsd.from_gguf(path), dense, draft, other=dense)


ROWS: dict[str, Callable[[Path], Case]] = {
    **{f"file, {name}": functools.partial(of_file, name) for name in test_texts.FILES},
    **{name: lambda _, name=name: of_scheme(name) for name in SCHEMES},
    **{
        f"codes of {name}, {said}": lambda _, name=name, dtype=dtype: of_codes(name, dtype)
        for name in test_codes.SCHEMES
        for said, dtype in DTYPES.items()
    },
    **{f"rounded, {said}": lambda _, dtype=dtype: rounded(dtype) for said, dtype in DTYPES.items()},
    **{f"pack {kind}": lambda _, n=n, kind=kind: of_pack(kind, n % 2 == 0) for n, kind in enumerate(PACKERS)},
}


@pytest.mark.parametrize("name", ROWS)
def test_the_text_is_what_the_weights_say_with_any_draft(name, tmp_path):
    """A batch with padding, greedy and by seed, by the operator: not a bit of a logit depends on what was drafted."""
    case = ROWS[name](tmp_path)
    model, inputs = case.model, prompts(3, 9, vocab=90)
    asked, accepted, tokens = {"return_dict_in_generate": True, "output_logits": True}, 0, set()
    ways = {
        "plain": {"graph_config": "plain"},
        "draft": {"assistant_model": case.draft, "draft_sources": ("model", "history"), "graph_config": SHAPE},
        "itself": {"assistant_model": case.right, "graph_config": "tree"},
        "skip": {"assistant_model": gsd.LayerSkip(model, mlp=[1]), "graph_config": "chain"},
        "heads": {"draft_heads": gsd.DraftHeads.for_model(model, 2), "graph_config": SHAPE},
        "history": {"draft_sources": ("history",), "graph_config": SHAPE},
        "auto": {"assistant_model": case.draft},
    }
    for number, call in enumerate((GREEDY, SAMPLED)):
        expected = gsd.generate(case.right, **inputs, **call, **asked, graph_config="plain")
        assert expected.stats.why_modules is None
        tokens |= set(expected.sequences[:, 9:].flatten().tolist())
        for way in ("plain", "draft", *list(ways)[2 + number :: 2]):
            out = gsd.generate(model, **inputs, **call, **asked, **ways[way])
            assert out.stats.why_modules is None, way
            assert torch.equal(out.sequences, expected.sequences), way
            assert all(map(torch.equal, out.logits, expected.logits)), way
            accepted += sum(out.stats.accepted[2:]) if way == "draft" else 0
    assert accepted > 0 and len(tokens) > 10, "nothing could have failed"
    mine = describe(model, None, "auto")["target"]["packed"]
    assert mine[0].endswith(case.said)
    if case.other is not None:
        assert "packed" not in describe(case.other, None, "auto")["target"] and weight_bytes(model) < weight_bytes(
            case.other
        )
