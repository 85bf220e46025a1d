"""``python -m gsd_kernels_train.recipes.demo_pair --out pair``: the whole recipe."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from gsd_kernels_train.loop import Budget

from . import __doc__ as description
from .assembly import assemble
from .stages import train_pair, train_pair_heads

#: Share of ``--minutes`` that the target gets.
TARGET_SHARE = 0.74


def main(arguments: list[str] | None = None) -> None:
    """Run the recipe from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m gsd_kernels_train.recipes.demo_pair", description=description.split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the pair, and for work in progress")
    parser.add_argument("--minutes", type=float, default=43, help="wall time for both models (default: %(default)s)")
    parser.add_argument("--head-minutes", type=float, default=15, help="the same for the heads (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, nargs=3, metavar=("TARGET", "DRAFT", "HEADS"), help="train by steps instead"
    )
    parser.add_argument("--batches", type=int, default=8, help="batches of text from the target (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--no-compile", action="store_true", help="where torch.compile has no C++ compiler")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    transformers_logging.set_verbosity_error()
    if options.steps:
        target_budget, draft_budget, head_budget = (Budget(steps=steps) for steps in options.steps)
    else:
        head_budget = Budget(minutes=options.head_minutes)
        target_budget = Budget(minutes=TARGET_SHARE * options.minutes)
        draft_budget = Budget(minutes=(1 - TARGET_SHARE) * options.minutes)
    work = options.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    train_pair(work, target_budget, draft_budget, options.batches, compiled=not options.no_compile)
    train_pair_heads(work / "target", work / "heads", head_budget)
    assemble(work, options.out / "demo_pair")


if __name__ == "__main__":
    main()
