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

CARD = """\
# The demo pair

A small Llama and a draft distilled from it, so that speculative decoding can be tried, tested and measured without
downloading anything. They continue Python source; they are not assistants, and what they write is not correct code.
Written by `python -m gsd_kernels_train.recipes.demo_pair`, every number measured by it on the float16 weights as
stored, computed in float32.

| | target | draft |
|---|---|---|
| parameters | {target_parameters:,} | {draft_parameters:,} ({ratio:.1f}× fewer) |
| layers × width (MLP) | {target_size} | {draft_size} |
| query / key-value heads × size | {target_heads} | {draft_heads} |
| held-out loss, nats per token | {target_loss:.3f} | {draft_loss:.3f} |
| held-out bits per byte | **{target_bpb:.3f}** | {draft_bpb:.3f} |
| training | {target_training} | {draft_training} |

Both: Llama architecture, tied embeddings, a byte-level BPE vocabulary of {vocabulary}, {positions} positions
(rotary; trained on up to {trained_length}).

**The draft's greedy agreement with the target**: {agreement:.3f} of all positions of the held-out files;
{continuation:.3f} of the target's own greedy continuations ({continuation_length} tokens after each code prompt of
`prompts.json`), {copy_continuation:.3f} after its copy prompts.

{heads}

## Drafters

`eagle3/` and `dflash/` are drafters of the published kinds for the target, from `gsd-kernels train-drafter`; their
cards say how they were made and what they bring ([EAGLE-3](eagle3/README.md), [DFlash](dflash/README.md)).

## How it was made

- Text: the standard library of Python {python}, {files} files, {megabytes:.1f} MB; {held_out_files} further files held
  out. Digest of all files (SHA-256 over the sorted hashes in `sources.json`): `{digest}`.
  Left out: encodings, pydoc topics, lib2to3, ensurepip, site-packages, files that are not UTF-8, build configuration,
  and two modules that are near copies of others (`wave`, `concurrent.futures.thread`).
- Target: cross-entropy on {tokens_million:.1f} M tokens, library code drawn {library_share:.0%} of the time and test
  suites the rest. Draft: cross-entropy with the target's own distribution (its {label_top} likeliest tokens, the
  others taken together) on {label_tokens:.1f} M tokens of that text and of {generated_tokens} tokens that the target
  wrote itself (half greedily, half at temperature 0.8).
- Muon for the layers' matrices, AdamW for the rest; {target_batch} and {draft_batch} tokens a step; a short warm-up,
  a plateau, then 60% of the run straight down to zero. Matrix products in bfloat16. {threads} CPU threads of a shared
  machine; writing text took the target another {generated_minutes:.0f} min.
- Evaluation: whole files after the begin-of-text token, windows of {context} tokens moved by {stride}, every token
  scored once ({evaluated_tokens:,} tokens, {evaluated_bytes:,} bytes).

To run it again (same files, tokenizer, seeds and batches; it comes close, not to the bit: the schedules follow the
clock in a run by `--minutes` and the steps in a run by `--steps`, and another machine rounds differently):

    python -m gsd_kernels_train.recipes.demo_pair --out pair --steps {target_steps} {draft_steps} {head_steps}

## Held-out files

{held_out}

`prompts.json` holds {code_prompts} prompts cut from them and {copy_prompts} that repeat a function, chosen by the
recipe before any benchmark.

## Licence

The training text, and the excerpts of it in `prompts.json`, are part of Python: Copyright © 2001 onwards Python
Software Foundation; All Rights Reserved; used under the PSF License Version 2 (PSF-2.0), whose text is in
`PYTHON-LICENSE.txt`. The weights and tokenizers are licensed like this package, under Apache-2.0, as far as they are
subject to any rights of its authors.
"""

HEADS_CARD = """\
## Heads

`heads/` lets the target draft for itself: {count} heads of one residual block each ({parameters:,} parameters), which
guess the tokens after the next one from the target's last hidden state. How often each head's first guess is right:

| | {columns} | accepted a step |
|---|{rule}---|
| held-out text | {text} | |
| the target's own greedy text | {own} | {accepted:.2f} |
| before training: text | {text_before} | |
| before training: own text | {own_before} | {accepted_before:.2f} |

`accepted a step`: of one guess per head, as a chain. Measured on {windows} windows of {length} tokens of the held-out
files and {tokens} greedy tokens after the beginnings of {texts} of them. Trained by `gsd-kernels train-heads` on the
library files alone, half of the windows continued by the target itself ({own_tokens:,} tokens), on the target's
distributions: {training_tokens:.1f} M tokens, {steps} steps, {minutes:.0f} min."""


def heads_card(report: dict[str, Any]) -> str:
    """The card's section on the heads, from the report of their training."""
    options, before, after, training = (report[name] for name in ("options", "before", "after", "training"))

    def row(values: list[float]) -> str:
        return " | ".join(f"{value:.3f}" for value in values)

    count = options["heads"]
    return HEADS_CARD.format(
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
    (folder / "README.md").write_text(CARD.format(**values), encoding="utf-8")
