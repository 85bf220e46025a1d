"""Names of the ways that a race knows, and how they are shown. Imports no torch: options are checked by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gsd_kernels_cli.values import unknown


@dataclass(frozen=True)
class Label:
    """How a way is shown."""

    engine: str
    way: str

    def __str__(self) -> str:
        return f"{self.engine}, {self.way}"


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
OPENVINO_WEIGHTS = ("", "int8", "int4")
LLAMA_CPP_WEIGHTS = ("q8_0", "q4_0")  # beside those of the race's dtype and of the file
#: Name of other engines' plain decoding → engine, and how its weights are shown.
ENGINES = {
    **{"-".join(["openvino", *filter(None, [kind])]): Label("OpenVINO GenAI", kind) for kind in OPENVINO_WEIGHTS},
    # Their activations are rounded to eight bits no more.
    **{
        f"openvino-{kind}-floats": Label("OpenVINO GenAI", f"{kind}, activations unquantised")
        for kind in ("int8", "int4")
    },
    **{f"llama-cpp-{kind}": Label("llama.cpp", kind) for kind in ("bf16", "f32", *LLAMA_CPP_WEIGHTS)},
    "llama-cpp-file": Label("llama.cpp", "the file itself"),
}
#: Engine → what stands behind its names for other ways, and how they are shown.
KINDS = {
    "OpenVINO GenAI": {"": "plain", "-lookup": "prompt lookup", "-draft": "draft model"},
    "llama.cpp": {"": "plain", "-lookup": "n-gram drafts", "-draft": "draft model"},
}
LABELS = {
    **{name: Label("transformers", way) for name, way in THEIRS.items()},
    **{
        name + kind: Label(of.engine, ", ".join(filter(None, [of.way, shown])))
        for name, of in ENGINES.items()
        for kind, shown in KINDS[of.engine].items()
    },
    **{name: Label("gsd_kernels", way) for name, way in OURS.items()},
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
