"""The model card: the recipe in words, with the measured numbers."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np

from gsd_kernels_train import text

from ..stdlib import HELD_OUT, SourceFile, sources_digest
from . import distillation, evaluation, models, stages, tokenizer


def _template(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def heads_card(report: dict[str, Any]) -> str:
    """The card's section on the heads, from the report of their training."""
    heads, size = report["options"]["heads"], models.TARGET_CONFIG["hidden_size"]
    seconds = report["training"]["seconds"] + report["own_text"]["seconds"]
    rows = {
        f"{when}_{what}": " | ".join(f"{value:.3f}" for value in report[when][what])
        for when in ("before", "after")
        for what in ("accuracy", "continuation_accuracy")
    }
    return (
        _template("card_heads.md")
        .removesuffix("\n")
        .format(
            **report,
            **rows,
            text=text,
            parameters=heads * size * (size + 1),
            columns=" | ".join(f"head {k}" for k in range(heads)),
            rule="---|" * heads,
            million=report["training"]["tokens"] / 1e6,
            minutes=seconds / 60,
        )
    )


def trained(record: dict[str, Any]) -> str:
    """A model's training in words."""
    extended = "".join(f", extended at step {step}" for step in record.get("extended_at", []))
    return f"{record['tokens'] / 1e6:.1f} M tokens, {record['steps']} steps, {record['seconds'] / 60:.0f} min{extended}"


def values_of(
    training: list[SourceFile], held_out: list[SourceFile], tokens: dict[str, np.ndarray], records: dict[str, Any]
) -> dict[str, object]:
    """Values of the card on the training: its text, and the records of its stages."""
    windows = distillation.LABEL_WINDOWS.items()
    return {
        "records": records,
        "target_training": trained(records["target"]),
        "draft_training": trained(records["draft"]),
        "trained_length": max(length for _, length in stages.TARGET_CURRICULUM),
        "python": platform.python_version(),
        "files": len(training),
        "megabytes": sum(len(source.text.encode()) for source in training) / 1e6,
        "held_out_files": len(held_out),
        "held_out": ", ".join(f"`{name}`" for name in HELD_OUT),
        "digest": sources_digest(training + held_out),
        "tokens_million": sum(len(stream) for stream in tokens.values()) / 1e6,
        "label_tokens": sum(length * sum(counts) for length, counts in windows) / 1e6,
        "generated_minutes": records["generated"]["seconds"] / 60,
    }


def write_card(folder: Path, **values: object) -> None:
    """Fill in the model card; constants of the recipe it names by their modules."""
    modules = (distillation, evaluation, models, stages, tokenizer)
    values |= {module.__name__.rpartition(".")[2]: module for module in modules}
    (folder / "README.md").write_text(_template("card.md").format(**values), encoding="utf-8")
