"""``python -m gsd_kernels_train.recipes.chat_drafter --out made``: the whole recipe."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers.utils import logging as transformers_logging

from gsd_kernels_cli.demo import smollm2
from gsd_kernels_hf.files import write_file
from gsd_kernels_hf.sources.checkpoints import CONFIG, WEIGHTS, read_json
from gsd_kernels_train.drafter import write_checkpoint
from gsd_kernels_train.drafters import DrafterOptions, train_drafter
from gsd_kernels_train.job import TrainingOptions
from gsd_kernels_train.loop import Interval

from . import __doc__ as description
from .answers import write_chats

PROMPTS, SEED, HELD_OUT = 9600, 2026, 48
DRAFTER = DrafterOptions(
    "eagle3", intermediate_size=1024, draft_vocabulary=6144, target_head=True, depth=3, hidden_layers=(10, 20, 29)
)


def main(arguments: list[str] | None = None) -> None:
    """Run the recipe from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m gsd_kernels_train.recipes.chat_drafter", description=description.split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the drafter, and of work in progress")
    parser.add_argument("--batches", type=int, default=29, help="of 64 prompts (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="of training (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    transformers_logging.set_verbosity_error()
    work = options.out / "work"
    (work / "answers").mkdir(parents=True, exist_ok=True)
    model, tokenizer = smollm2.load(torch.bfloat16)
    files = write_chats(model, tokenizer, work / "answers", PROMPTS, SEED, batches=options.batches)
    chats = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    random.Random(SEED).shuffle(chats)
    parts = {"held-out": chats[:HELD_OUT], "chats": chats[HELD_OUT:]}
    for name, lines in parts.items():
        text = "".join(f"{line}\n" for line in lines)
        write_file(work / f"{name}.jsonl", lambda file, text=text: file.write_text(text, encoding="utf-8"))
    train_drafter(DRAFTER, training(work, options.steps))
    write_shipped(work / "trained", options.out / "drafter")


def training(work: Path, steps: int) -> TrainingOptions:
    """How it was trained."""
    return TrainingOptions(
        target=str(smollm2.folder()),
        text=[],
        chats=[work / "chats.jsonl"],
        held_out_text=[],
        held_out_chats=[work / "held-out.jsonl"],
        out=work / "trained",
        steps=steps,
        minutes=None,
        batch=2,
        length=384,
        micro_batch=None,
        lr=4e-3,
        warmup=0.02,
        decay=0.6,
        weight_decay=0.05,
        sequence_level=0.0,
        token_level=1.0,
        own_sequences=None,
        seed=7,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        checkpoint_every=Interval(seconds=60),
    )


def write_shipped(trained: Path, folder: Path) -> None:
    """Write a trained drafter as it is shipped: in bfloat16, without what only other engines read."""
    tensors = load_file(trained / WEIGHTS)
    tensors.pop("t2d", None)
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder, read_json(trained / CONFIG), tensors, torch.bfloat16)


if __name__ == "__main__":
    main()
