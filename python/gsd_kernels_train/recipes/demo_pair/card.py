"""The model card: the recipe in words, with the measured numbers."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np

from gsd_kernels_train.text import HELD_OUT_BLOCKS, PICKED_TEXTS, PICKED_TOKENS

from ..stdlib import HELD_OUT, SourceFile, sources_digest
from .distillation import LABEL_TOP, LABEL_WINDOWS
from .evaluation import CONTINUATION_LENGTH, EVALUATION_CONTEXT, EVALUATION_STRIDE, Evaluation
from .models import DRAFT_CONFIG, TARGET_CONFIG
from .stages import DRAFT_BATCH, LIBRARY_SHARE, TARGET_BATCH, TARGET_CURRICULUM
from .tokenizer import MAX_POSITIONS, VOCAB_SIZE


def _template(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def heads_card(report: dict[str, Any]) -> str:
    """The card's section on the heads, from the report of their training."""
    options, before, after, training = (report[name] for name in ("options", "before", "after", "training"))

    def row(values: list[float]) -> str:
        return " | ".join(f"{value:.3f}" for value in values)

    count = options["heads"]
    return (
        _template("card_heads.md")
        .removesuffix("\n")
        .format(
            count=count,
            parameters=count * TARGET_CONFIG["hidden_size"] * (TARGET_CONFIG["hidden_size"] + 1),
            columns=" | ".join(f"head {k}" for k in range(count)),
            rule="---|" * count,
            text=row(after["accuracy"]),
            own=row(after["continuation_accuracy"]),
            text_before=row(before["accuracy"]),
            own_before=row(before["continuation_accuracy"]),
            accepted=after["accepted"],
            accepted_before=before["accepted"],
            windows=HELD_OUT_BLOCKS,
            length=options["length"],
            texts=PICKED_TEXTS,
            tokens=PICKED_TOKENS,
            own_tokens=report["own_text"]["tokens"],
            training_tokens=training["tokens"] / 1e6,
            steps=training["steps"],
            minutes=(training["seconds"] + report["own_text"]["seconds"]) / 60,
        )
    )


def model_values(target: int, draft: int, records: dict[str, Any]) -> dict[str, object]:
    """Values of the card on the models' shapes and training.

    Args:
        target, draft: numbers of parameters.
        records: of the stages of training.
    """
    values: dict[str, object] = {
        "target_parameters": target,
        "draft_parameters": draft,
        "ratio": target / draft,
        "vocabulary": VOCAB_SIZE,
        "positions": MAX_POSITIONS,
        "trained_length": max(length for _, length in TARGET_CURRICULUM),
        "target_batch": TARGET_BATCH,
        "draft_batch": DRAFT_BATCH,
        "threads": records["target"]["threads"],
    }
    for member, shape in (("target", TARGET_CONFIG), ("draft", DRAFT_CONFIG)):
        record = records[member]
        values |= {
            f"{member}_size": f"{shape['num_hidden_layers']} × {shape['hidden_size']} ({shape['intermediate_size']})",
            f"{member}_heads": f"{shape['num_attention_heads']} / {shape['num_key_value_heads']} × {shape['head_dim']}",
            f"{member}_steps": record["steps"],
            f"{member}_training": f"{record['tokens'] / 1e6:.1f} M tokens, {record['steps']} steps, "
            f"{record['seconds'] / 60:.0f} min"
            + "".join(f", extended at step {step}" for step in record.get("extended_at", [])),
        }
    return values


def measured_values(measured: Evaluation) -> dict[str, object]:
    """Values of the card on the held-out files."""
    return {
        "target_loss": measured.target_loss,
        "draft_loss": measured.draft_loss,
        "target_bpb": measured.target_bits_per_byte,
        "draft_bpb": measured.draft_bits_per_byte,
        "agreement": measured.agreement,
        "continuation_length": CONTINUATION_LENGTH,
        "context": EVALUATION_CONTEXT,
        "stride": EVALUATION_STRIDE,
        "evaluated_tokens": measured.tokens,
        "evaluated_bytes": measured.bytes,
    }


def recipe_values(
    training: list[SourceFile], held_out: list[SourceFile], tokens: dict[str, np.ndarray], records: dict[str, Any]
) -> dict[str, object]:
    """Values of the card on the training text."""
    return {
        "python": platform.python_version(),
        "files": len(training),
        "megabytes": sum(len(source.text.encode()) for source in training) / 1e6,
        "held_out_files": len(held_out),
        "held_out": ", ".join(f"`{name}`" for name in HELD_OUT),
        "digest": sources_digest(training + held_out),
        "tokens_million": sum(len(stream) for stream in tokens.values()) / 1e6,
        "library_share": LIBRARY_SHARE,
        "label_top": LABEL_TOP,
        "label_tokens": sum(length * sum(counts) for length, counts in LABEL_WINDOWS.items()) / 1e6,
        "generated_tokens": f"{records['generated']['tokens']:,}",
        "generated_minutes": records["generated"]["seconds"] / 60,
    }


def write_card(folder: Path, values: dict[str, object]) -> None:
    """Fill in the model card."""
    (folder / "README.md").write_text(_template("card.md").format(**values), encoding="utf-8")
