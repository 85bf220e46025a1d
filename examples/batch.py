"""A left-padded batch whose sequences accept different lengths; sampled, and the same again without a draft.

python examples/batch.py                                        the embedded pair
python examples/batch.py --model DIR_OR_ID --draft DIR_OR_ID    your own

Needs the package: pip install . in this repository's folder.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer

import gsd_kernels
from gsd_kernels_cli.options import Models

PROMPTS = ["def main():", "class Queue:\n    def put(self, item):", "import os"]


def main(
    prompts: Annotated[list[str] | None, typer.Argument()] = None,
    model: str | None = None,
    draft: str | None = None,
    max_new_tokens: int = 32,
) -> None:
    """Sample a batch twice, with drafts and without."""
    pair = Models(draft).load(model)
    call = {**pair.encode(prompts or PROMPTS), **pair.padding, "max_new_tokens": max_new_tokens}
    call |= {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "seed": 0}
    out = gsd_kernels.generate(pair.target, **call, **pair.speculation, return_dict_in_generate=True)
    for text in pair.tokenizer.batch_decode(out.sequences, skip_special_tokens=True):
        print(text, end="\n\n---\n\n")
    plain = gsd_kernels.generate(pair.target, **call, graph_config="plain")  # the same seed: the same text
    print("the same tokens without a draft:", torch.equal(out.sequences, plain))
    print(f"{out.stats.tokens_per_step:.2f} tokens per step, {out.stats.steps} target forwards")


typer.run(main)
