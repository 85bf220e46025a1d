"""Text as it is accepted, from a background thread: what a server does.

python examples/stream.py                                        the embedded pair
python examples/stream.py --model DIR_OR_ID --draft DIR_OR_ID    your own

Needs the package: pip install . in this repository's folder.
"""

from __future__ import annotations

from threading import Thread
from typing import Annotated

import typer
from transformers import TextIteratorStreamer

import gsd_kernels
from gsd_kernels_cli.options import Models


def main(
    prompt: Annotated[str, typer.Argument()] = "import json\n\n\ndef load(path):\n",
    model: str | None = None,
    draft: str | None = None,
    max_new_tokens: int = 64,
) -> None:
    """Print a text as it grows."""
    pair = Models(draft).load(model)
    gsd_kernels.patch(pair.target, **pair.speculation)  # from here on its generate speculates
    streamer = TextIteratorStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
    call = dict(**pair.encode([prompt]), streamer=streamer, max_new_tokens=max_new_tokens, do_sample=False)
    worker = Thread(target=pair.target.generate, kwargs=call)
    worker.start()
    print(prompt, end="")
    for text in streamer:
        print(text, end="", flush=True)
    worker.join()
    print()


typer.run(main)
