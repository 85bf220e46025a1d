"""Names of the ways that a race knows, and how they are shown. Imports no torch: options are checked by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gsd_kernels_cli.values import unknown


class Label(NamedTuple):
    """How a way is shown."""

    engine: str
    weights: str
    way: str

    def __str__(self) -> str:
        return ", ".join(filter(None, self))


HF, HF_LOOKUP, HF_ASSISTED = "transformers", "transformers-lookup", "transformers-assisted"
PLAIN, HISTORY, DRAFT = "gsd-plain", "gsd-history", "gsd-draft"
DRAFTER_ALONE, DRAFTER = "gsd-drafter-alone", "gsd-drafter"
PACKED, PACKED_HISTORY = "gsd-packed", "gsd-packed-history"
UNLEARNED, PACKED_UNLEARNED = "gsd-unlearned", "gsd-packed-unlearned"
OURS = {
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
"""Our ways, and how they are shown."""
THEIRS = {HF: "plain", HF_LOOKUP: "prompt lookup", HF_ASSISTED: "assisted"}
OPENVINO, LLAMA_CPP = "OpenVINO GenAI", "llama.cpp"
OPENVINO_WEIGHTS = ("", "int8", "int4")
LLAMA_CPP_WEIGHTS = ("q8_0", "q4_0")  # beside those of the race's dtype and of the file
#: Name of other engines' plain decoding → engine, and how its weights are shown.
ENGINES = {
    "openvino": (OPENVINO, ""),
    "openvino-int8": (OPENVINO, "int8"),
    "openvino-int4": (OPENVINO, "int4"),
    # Their activations are rounded to eight bits no more.
    "openvino-int8-floats": (OPENVINO, "int8, activations unquantised"),
    "openvino-int4-floats": (OPENVINO, "int4, activations unquantised"),
    **{f"llama-cpp-{kind}": (LLAMA_CPP, kind) for kind in ("bf16", "f32", *LLAMA_CPP_WEIGHTS)},
    "llama-cpp-file": (LLAMA_CPP, "the file itself"),
}
#: Engine → what stands behind its names for other ways, and how they are shown.
KINDS = {
    OPENVINO: {"": "plain", "-lookup": "prompt lookup", "-draft": "draft model"},
    LLAMA_CPP: {"": "plain", "-lookup": "n-gram drafts", "-draft": "draft model"},
}
LABELS = {
    **{name: Label("transformers", "", way) for name, way in THEIRS.items()},
    **{name + kind: Label(*of, way) for name, of in ENGINES.items() for kind, way in KINDS[of[0]].items()},
    **{name: Label("gsd_kernels", "", way) for name, way in OURS.items()},
}
"""All ways there can be; which ones there are depends on the model, the drafts and the engines installed."""


def check_ways(ways: Sequence[str]) -> None:
    """Raise unless all are known.

    Raises:
        ValueError: one is none.
    """
    for way in ways:
        if way not in LABELS:
            raise ValueError(unknown("--ways", way, LABELS))


def plain_of(way: str) -> str:
    """Plain decoding by the same engine, whose text a way's drafts should not change."""
    if way in OURS:
        return PLAIN
    return HF if way.startswith(HF) else way.removesuffix("-lookup").removesuffix("-draft")
