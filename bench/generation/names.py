"""Names of the ways that a race knows, and how they are shown. Imports no torch: options are checked by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gsd_kernels_cli.values import unknown

HF, HF_LOOKUP, HF_ASSISTED = "transformers", "transformers-lookup", "transformers-assisted"
PLAIN, HISTORY, DRAFT = "gsd-plain", "gsd-history", "gsd-draft"
DRAFTER_ALONE, DRAFTER = "gsd-drafter-alone", "gsd-drafter"
PACKED, PACKED_HISTORY = "gsd-packed", "gsd-packed-history"
UNLEARNED, PACKED_UNLEARNED = "gsd-unlearned", "gsd-packed-unlearned"
WAYS = {
    HF: "plain",
    HF_LOOKUP: "prompt lookup",
    HF_ASSISTED: "assisted",
    PLAIN: "plain",
    HISTORY: "history alone, no draft model",
    UNLEARNED: "history alone, nothing learned before",
    PACKED: "the file itself, plain",
    PACKED_HISTORY: "the file itself, history alone",
    PACKED_UNLEARNED: "the file itself, history alone, nothing learned before",
    DRAFT: "draft model",
    DRAFTER_ALONE: "drafter alone",
    DRAFTER: "drafter and history",
}
"""Ways in this process, and how they are shown: transformers' first, then ours."""
OURS = tuple(WAYS)[3:]
KINDS = ("plain", "lookup", "draft")
OPENVINO_WEIGHTS = ("", "int8", "int4")
OPENVINO_FLOATS = ("int8-floats", "int4-floats")  # their activations rounded to eight bits no more
LLAMA_CPP_WEIGHTS = ("q8_0", "q4_0")  # beside those of the race's dtype and of the file
ENGINES = (
    *("-".join(["openvino", *filter(None, [weights])]) for weights in (*OPENVINO_WEIGHTS, *OPENVINO_FLOATS)),
    *("-".join(["llama-cpp", *filter(None, [weights])]) for weights in ("bf16", "f32", "file", *LLAMA_CPP_WEIGHTS)),
)
"""Of other engines those of plain decoding; ``-lookup`` and ``-draft`` behind them are the other kinds."""
KNOWN = (
    *tuple(WAYS)[:3],
    *(engine if kind == "plain" else f"{engine}-{kind}" for engine in ENGINES for kind in KINDS),
    *OURS,
)
"""All ways there can be; which ones there are depends on the model, the drafts and the engines installed."""


def check_ways(ways: Sequence[str]) -> None:
    """Raise unless all are known.

    Raises:
        ValueError: one is none.
    """
    for way in ways:
        if way not in KNOWN:
            raise ValueError(unknown("--ways", way, KNOWN))


def plain_of(way: str) -> str:
    """Plain decoding by the same engine, whose text a way's drafts should not change."""
    if way in OURS:
        return PLAIN
    return HF if way.startswith(HF) else way.removesuffix("-lookup").removesuffix("-draft")


@dataclass(frozen=True)
class Label:
    """How a way is shown."""

    engine: str
    way: str

    def __str__(self) -> str:
        return f"{self.engine}, {self.way}"


def label(name: str) -> Label:
    """``llama-cpp-q8_0-lookup`` as llama.cpp, q8_0 with n-gram drafts."""
    if name in WAYS:
        return Label("gsd_kernels" if name in OURS else "transformers", WAYS[name])
    engine, key = ("OpenVINO GenAI", "openvino") if name.startswith("openvino") else ("llama.cpp", "llama-cpp")
    rest = [part for part in name.removeprefix(key).split("-") if part]
    kind = rest.pop() if rest and rest[-1] in ("lookup", "draft") else "plain"
    said = {
        "plain": "plain",
        "lookup": "prompt lookup" if key == "openvino" else "n-gram drafts",
        "draft": "draft model",
    }
    weights = [{"file": "the file itself", "floats": "activations unquantised"}.get(part, part) for part in rest]
    return Label(engine, ", ".join([*weights, said[kind]]))
