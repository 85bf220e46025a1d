"""The stages of training; each is skipped where the work folder holds its result, and resumes where it stopped."""

from __future__ import annotations

import json
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from gsd_kernels_train.heads import train_heads
from gsd_kernels_train.job import TrainingOptions
from gsd_kernels_train.loop import Budget, Checkpoints, Interval, Record, build_optimizers, train
from gsd_kernels_train.streams import Stream, Streams

from ..stdlib import SourceFile, split_sources, stdlib_sources
from .distillation import LABEL_WINDOWS, LabelledWindows, generate_text, label_windows
from .models import DRAFT_CONFIG, TARGET_CONFIG, build_model, load_member, save_pair_member
from .tokenizer import encode_files, train_tokenizer

SEED = 2407
TARGET_BATCH, DRAFT_BATCH = 8192, 4096  # tokens a step
#: (share of the run, sequence length): short sequences first, because attention costs most on a CPU.
TARGET_CURRICULUM = ((0.62, 256), (0.92, 512), (1.0, 1024))
DRAFT_CURRICULUM = ((0.69, 512), (1.0, 1024))
#: Share of each batch that comes from library code; the rest is from its test suites.
LIBRARY_SHARE = 0.6
HEADS, HEAD_BATCH, HEAD_LENGTH, HEAD_RATE, HEAD_SEQUENCES = 4, 8, 256, 1e-2, 320

LossFunction = Callable[..., torch.Tensor]


def prepare(work: Path) -> tuple[PreTrainedTokenizerFast, list[SourceFile], list[SourceFile], dict[str, np.ndarray]]:
    """Read the sources, train the tokenizer and encode the training text (kept in ``work``)."""
    training, held_out = split_sources(stdlib_sources())
    tokenizer_folder, encoded = work / "tokenizer", work / "tokens.npz"
    if not tokenizer_folder.exists():
        train_tokenizer([source.text for source in training]).save_pretrained(tokenizer_folder)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    if not encoded.exists():
        np.savez(
            encoded,
            library=encode_files(tokenizer, [source for source in training if not source.is_test]),
            tests=encode_files(tokenizer, [source for source in training if source.is_test]),
        )
    return tokenizer, training, held_out, dict(np.load(encoded))


def train_pair(work: Path, target_budget: Budget, draft_budget: Budget, batches: int, compiled: bool) -> None:
    """Run the training stages that ``work`` does not hold yet: target, the target's own text, draft."""
    tokenizer, _, _, tokens = prepare(work)
    shares = {"library": LIBRARY_SHARE, "tests": 1 - LIBRARY_SHARE}
    text = [(share, Stream(tokens[name])) for name, share in shares.items()]
    records_file = work / "records.json"
    records = json.loads(records_file.read_text()) if records_file.exists() else {}

    def note(stage: str, what: dict[str, float]) -> None:
        records[stage] = what
        records_file.write_text(json.dumps(records, indent=1))

    if not (work / "target").exists():
        model = build_model(TARGET_CONFIG, tokenizer, SEED)
        if compiled:
            model.set_attn_implementation("eager")
        loss = cross_entropy_loss(model, compiled)
        streams = Streams(text, SEED, TARGET_BATCH)
        record = optimise("target", model, loss, streams, TARGET_CURRICULUM, target_budget, work / "target-checkpoints")
        note("target", asdict(record) | {"threads": torch.get_num_threads()})
        save_pair_member(model, tokenizer, work / "target")

    generated_file = work / "generated.npy"
    if not generated_file.exists():
        model = load_member(work / "target")
        began = time.monotonic()
        generated = generate_text(model, Streams(text, SEED + 1, TARGET_BATCH), batches, SEED)
        np.save(generated_file, generated)
        note("generated", {"tokens": len(generated), "seconds": time.monotonic() - began})

    corpus = [tokens["library"], tokens["tests"], np.load(generated_file)]
    for length in LABEL_WINDOWS:
        if not (file := work / f"labels-{length}.npz").exists():
            np.savez(file, **label_windows(load_member(work / "target"), corpus, length, SEED))

    if not (work / "draft").exists():
        model = build_model(DRAFT_CONFIG, tokenizer, SEED)
        if compiled:
            model.set_attn_implementation("eager")
        loss = distillation_loss(model, compiled)
        labels = {length: dict(np.load(work / f"labels-{length}.npz")) for length in LABEL_WINDOWS}
        windows = LabelledWindows(labels, SEED, DRAFT_BATCH)
        record = optimise("draft", model, loss, windows, DRAFT_CURRICULUM, draft_budget, work / "draft-checkpoints")
        note("draft", asdict(record) | {"threads": torch.get_num_threads()})
        save_pair_member(model, tokenizer, work / "draft")


def train_pair_heads(target: Path, out: Path, budget: Budget) -> dict[str, Any]:
    """Train heads for the target in one folder into another, on the library files; the report of the training.

    It goes on from where it stopped, and is not repeated.
    """
    root = Path(sysconfig.get_path("stdlib"))
    training, held_out = split_sources(stdlib_sources())
    options = TrainingOptions(
        target=str(target),
        text=[root / source.name for source in training if not source.is_test],
        held_out_text=[root / source.name for source in held_out],
        out=out,
        steps=budget.steps,
        minutes=budget.minutes,
        batch=HEAD_BATCH,
        length=HEAD_LENGTH,
        lr=HEAD_RATE,
        weight_decay=0.0,
        own_sequences=HEAD_SEQUENCES,
        seed=SEED,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        checkpoint_every=Interval(seconds=60),
    )
    return train_heads(HEADS, 1, options)


def optimise(
    name: str,
    model: LlamaForCausalLM,
    loss_function: LossFunction,
    streams: Streams | LabelledWindows,
    curriculum: tuple[tuple[float, int], ...],
    budget: Budget,
    checkpoints: Path,
) -> Record:
    """Train until the budget is used; continue from ``checkpoints`` if there are any."""

    def losses(step: int, progress: float) -> list[torch.Tensor]:
        length = next(length for end, length in curriculum if progress < end)
        return [loss_function(*streams.batch(step, length))]

    return train(
        name,
        model,
        losses,
        build_optimizers(model, matrix_lr=4e-3, lr=3e-3),
        budget,
        Checkpoints(checkpoints),
        tokens_per_step=streams.tokens,
    )


def autocast() -> torch.autocast:
    """Matrix products in bfloat16, everything that sums in float32."""
    return torch.autocast("cpu", torch.bfloat16)


def cross_entropy_loss(model: LlamaForCausalLM, compiled: bool) -> LossFunction:
    """Return the ordinary next-token loss."""

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        with autocast():
            logits = model(tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return torch.compile(loss, dynamic=False) if compiled else loss


def distillation_loss(model: LlamaForCausalLM, compiled: bool) -> LossFunction:
    """Return the cross-entropy with the target's distribution, its unlikely tokens taken together as one."""

    def loss(tokens: torch.Tensor, ids: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        with autocast():
            logits = model(tokens[:, :-1], use_cache=False).logits
        likely = F.log_softmax(logits.float(), dim=-1).gather(-1, ids)
        rest = torch.log1p(-likely.exp().sum(-1).clamp(max=1 - 1e-4))
        return -((probabilities * likely).sum(-1) + (1 - probabilities.sum(-1)).clamp(min=0) * rest).mean()

    return torch.compile(loss, dynamic=False) if compiled else loss
