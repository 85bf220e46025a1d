"""A conversation with streamed answers.

python examples/chat.py                                        the embedded pair (it continues Python, it cannot talk)
python examples/chat.py --model DIR_OR_ID --draft DIR_OR_ID    your own; its chat template is used if it has one

Messages come from the command line, else from the terminal until an empty one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

try:
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

    import gsd_kernels
    from gsd_kernels_cli import demo
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is missing; in this repository's folder: pip install .") from None

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model")
parser.add_argument("--draft")
parser.add_argument("--max-new-tokens", type=int, default=48)
parser.add_argument("messages", nargs="*")
options = parser.parse_args()

if options.model:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    draft = AutoModelForCausalLM.from_pretrained(options.draft, dtype="auto") if options.draft else None
else:
    model, draft, tokenizer = demo.load()


def messages() -> Iterator[str]:
    if options.messages or not sys.stdin.isatty():
        yield from options.messages or ["def add(a, b):", "def subtract(a, b):"]
        return
    while message := input("> "):
        yield message


def prompt(turns: list[dict[str, str]]) -> str:
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return "\n".join(turn["content"] for turn in turns) + "\n"


handle = gsd_kernels.patch(model, assistant_model=draft)
turns: list[dict[str, str]] = []
for message in messages():
    print(">", message)
    turns.append({"role": "user", "content": message})
    text = prompt(turns)
    inputs = tokenizer(
        text, return_tensors="pt", return_token_type_ids=False, add_special_tokens=not tokenizer.chat_template
    )
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    output = model.generate(**inputs, streamer=streamer, max_new_tokens=options.max_new_tokens, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    turns.append({"role": "assistant", "content": answer})
    print(f"[{handle.stats.tokens_per_step:.2f} tokens per step]")
