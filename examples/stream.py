"""Text as it is accepted, from a background thread: what a server does.

python examples/stream.py                                        the embedded pair
python examples/stream.py --model DIR_OR_ID --draft DIR_OR_ID    your own
"""

from __future__ import annotations

import argparse
from threading import Thread

try:
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

    import gsd_kernels
    from gsd_kernels_cli import demo
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is missing; in this repository's folder: pip install .") from None

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model")
parser.add_argument("--draft")
parser.add_argument("--max-new-tokens", type=int, default=64)
parser.add_argument("prompt", nargs="?", default="import json\n\n\ndef load(path):\n")
options = parser.parse_args()

if options.model:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    draft = AutoModelForCausalLM.from_pretrained(options.draft, dtype="auto") if options.draft else None
else:
    model, draft, tokenizer = demo.load()

handle = gsd_kernels.patch(model, assistant_model=draft)  # from here on model.generate speculates
inputs = tokenizer(options.prompt, return_tensors="pt", return_token_type_ids=False)
streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
arguments = dict(**inputs, streamer=streamer, max_new_tokens=options.max_new_tokens, do_sample=False)
worker = Thread(target=model.generate, kwargs=arguments)
worker.start()
print(options.prompt, end="")
for text in streamer:
    print(text, end="", flush=True)
worker.join()
print()
