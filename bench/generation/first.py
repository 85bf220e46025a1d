"""A first text of a pair that nobody ran beside the same text of one that did, on this machine.

    python -m bench.generation.first [FOLDER [DRAFT_FOLDER]]

Default: SmolLM2 in bfloat16, the history alone. Each prompt has a cache folder of its own; the model is loaded and
proved before. Seconds are those of a text's steps, without its prompt.
"""

from __future__ import annotations

import os
import sys
import tempfile

import numpy as np

import gsd_kernels
from gsd_kernels_cli.demo import smollm2
from gsd_kernels_cli.pair import load_pair
from gsd_kernels_hf.costs import pair as pairs
from gsd_kernels_hf.engine import engine

from .real.prompts import read_chats

PROMPTS, TOKENS, WARMING_TOKENS = 12, 64, 96


def main(folder: str | None = None, draft: str | None = None) -> None:
    """Print tokens a second of each first text and of the warmed one, then of all."""
    loaded = load_pair(folder or str(smollm2.folder()), draft, dtype="bfloat16")
    chats = [chat.messages for chat in read_chats()[0][:PROMPTS]]

    def text(number: int, tokens: int, shape: str = "auto") -> tuple[int, float]:
        ids = loaded.tokenizer.apply_chat_template(
            chats[number], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        options = {"do_sample": False, "reuse_history": False, "return_dict_in_generate": True}
        stats = gsd_kernels.generate(
            loaded.target, **ids, assistant_model=loaded.draft, graph_config=shape, max_new_tokens=tokens, **options
        ).stats
        return stats.new_tokens, stats.seconds["total"] - stats.seconds["prefill"]

    taken = np.zeros((2, 2))  # of first texts and of warmed ones: tokens, seconds
    for number in range(len(chats)):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as os.environ["GSD_KERNELS_CACHE"]:
            pairs._pairs.clear()
            engine._unpatched.clear()
            text(number - 1, 4, "plain")
            first = text(number, TOKENS)
            for other in (1, 2, 3):
                text(number - other, WARMING_TOKENS)
            taken += first, text(number, TOKENS)
        rates = taken[:, 0] / taken[:, 1]
        ratio = f"{rates[0]:.1f} first, {rates[1]:.1f} warmed tokens/s, {rates[0] / rates[1]:.3f}"
        print(f"{number + 1} of {len(chats)} prompts: {ratio}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
