"""A conversation with streamed answers.

python examples/chat.py                                        the embedded pair (it continues Python, it cannot talk)
python examples/chat.py --model DIR_OR_ID --draft DIR_OR_ID    your own; its chat template is used if it has one

Messages come from the command line, else from the terminal until an empty one. Needs the package: pip install . in this
repository's folder.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated

import typer
from transformers import TextStreamer

import gsd_kernels
from gsd_kernels_cli.options import Models


def main(
    messages: Annotated[list[str] | None, typer.Argument()] = None,
    model: str | None = None,
    draft: str | None = None,
    max_new_tokens: int = 48,
) -> None:
    """Answer messages; every turn is read from where the last one ended."""
    pair = Models(draft).load(model)
    handle = gsd_kernels.patch(pair.target, **pair.speculation)
    typed = iter(partial(input, "> "), "") if sys.stdin.isatty() else ["def add(a, b):", "def subtract(a, b):"]
    turns: list[dict[str, str]] = []
    for message in messages or typed:
        print(">", message)
        turns.append({"role": "user", "content": message})
        inputs = pair.chat(turns)
        streamer = TextStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
        output = pair.target.generate(**inputs, streamer=streamer, max_new_tokens=max_new_tokens, do_sample=False)
        answer = pair.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        turns.append({"role": "assistant", "content": answer})
        print(f"[{handle.stats.tokens_per_step:.2f} tokens per step]")


typer.run(main)
