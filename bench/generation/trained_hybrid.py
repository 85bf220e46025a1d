"""A small hybrid target and its heads: ``python -m gsd_kernels_bench.generation.trained_hybrid``.

Three of four layers are gated delta nets and every fourth is attention, as in Qwen3.5. Tokenizer, text and held-out
files are the demo pair's, so the pair's draft fits this target too. The model is not shipped: ``hybrid/target`` (in
bfloat16) and ``hybrid/heads`` are what it leaves, ``hybrid/hybrid-trained.json`` has the tokens a forward that history,
heads and the pair's draft bring, and ``hybrid/work`` is where it goes on from.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from gsd_kernels_cli.demo import path as demo_folder
from gsd_kernels_hf import DraftHeads
from gsd_kernels_hf.files import write_json
from gsd_kernels_train.loop import Budget
from gsd_kernels_train.recipes.demo_pair.stages import (
    LIBRARY_SHARE,
    SEED,
    cross_entropy_loss,
    optimise,
    prepare,
    train_pair_heads,
)
from gsd_kernels_train.recipes.demo_pair.tokenizer import MAX_POSITIONS, VOCAB_SIZE
from gsd_kernels_train.streams import Stream, Streams

from . import hybrid_table

SHAPE: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
BATCH = 4096  # tokens a step
CURRICULUM = ((0.8, 256), (1.0, 512))  # (share of the run, sequence length)


def build_hybrid(tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """Return a freshly initialised Qwen3.5 with tied embeddings."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(seed)
    tokens = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_POSITIONS, tie_word_embeddings=True, **tokens, **SHAPE
    )
    model = Qwen3_5ForCausalLM(config)
    model.generation_config = GenerationConfig(**tokens)
    return model


def train_hybrid(out: Path, budget: Budget, head_budget: Budget) -> None:
    """Train the target, and heads for it, where ``out`` does not hold them yet."""
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "tokenizer").exists():
        AutoTokenizer.from_pretrained(demo_folder() / "target").save_pretrained(work / "tokenizer")
    tokenizer, _, _, tokens = prepare(work)
    if not (out / "target").exists():
        text = [(LIBRARY_SHARE, Stream(tokens["library"])), (1 - LIBRARY_SHARE, Stream(tokens["tests"]))]
        model = build_hybrid(tokenizer, SEED)
        loss = cross_entropy_loss(model, compiled=False)
        streams = Streams(text, SEED, BATCH)
        record = optimise("hybrid", model, loss, streams, CURRICULUM, budget, work / "checkpoints")
        write_json(work / "record.json", asdict(record) | {"threads": torch.get_num_threads()})
        model.config.name_or_path = ""
        partial = work / "target"
        model.to(torch.bfloat16).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        shutil.move(partial, out / "target")
    train_pair_heads(out / "target", out / "heads", head_budget)


def count_tokens(out: Path, prompts: int, new_tokens: int) -> None:
    """Write the tokens a forward of what ``out`` holds, in float32."""
    folders = out / "target", demo_folder() / "draft"
    target, draft = (AutoModelForCausalLM.from_pretrained(of, dtype=torch.float32).eval() for of in folders)
    heads = DraftHeads.from_pretrained(out / "heads", target).float()
    record = json.loads((out / "work" / "record.json").read_text())
    about = {name: record[name] for name in ("loss", "steps", "tokens", "seconds")}
    report = hybrid_table.count(
        target,
        draft,
        heads,
        AutoTokenizer.from_pretrained(out / "target"),
        prompts=prompts,
        new_tokens=new_tokens,
        about={"layers": SHAPE["num_hidden_layers"], **about},
    )
    write_json(out / f"{hybrid_table.NAME}.json", report, indent=1)
    print(hybrid_table.table(report))


def main(arguments: list[str] | None = None) -> None:
    """Run the recipe from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m gsd_kernels_bench.generation.trained_hybrid", description=__doc__.split(":")[0] + "."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for target, heads and work in progress")
    parser.add_argument("--minutes", type=float, default=45, help="wall time of the target (default: %(default)s)")
    parser.add_argument("--head-minutes", type=float, default=8, help="the same of the heads (default: %(default)s)")
    parser.add_argument("--steps", type=int, nargs=2, metavar=("TARGET", "HEADS"), help="train by steps instead")
    parser.add_argument("--prompts", type=int, default=7, help="of each text, to count on (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=96, help="of each prompt (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    transformers_logging.set_verbosity_error()
    if options.steps:
        budgets = [Budget(steps=steps) for steps in options.steps]
    else:
        budgets = [Budget(minutes=minutes) for minutes in (options.minutes, options.head_minutes)]
    train_hybrid(options.out, *budgets)
    count_tokens(options.out, options.prompts, options.new_tokens)


if __name__ == "__main__":
    main()
