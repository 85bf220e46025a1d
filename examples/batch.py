"""A left-padded batch whose sequences accept different lengths; sampled, and the same again without a draft.

python examples/batch.py                                        the embedded pair
python examples/batch.py --model DIR_OR_ID --draft DIR_OR_ID    your own
"""

from __future__ import annotations

import argparse

try:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import gsd_kernels
    from gsd_kernels_cli import demo
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is missing; in this repository's folder: pip install .") from None

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model")
parser.add_argument("--draft")
parser.add_argument("--max-new-tokens", type=int, default=32)
parser.add_argument(
    "prompts", nargs="*", default=["def main():", "class Queue:\n    def put(self, item):", "import os"]
)
options = parser.parse_args()

if options.model:
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    draft = AutoModelForCausalLM.from_pretrained(options.draft, dtype="auto") if options.draft else None
else:
    model, draft, tokenizer = demo.load()
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token

inputs = tokenizer(options.prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "seed": 0, "max_new_tokens": options.max_new_tokens}
sampling["pad_token_id"] = tokenizer.pad_token_id
out = gsd_kernels.generate(model, **inputs, **sampling, assistant_model=draft, return_dict_in_generate=True)
for text in tokenizer.batch_decode(out.sequences, skip_special_tokens=True):
    print(text, end="\n\n---\n\n")

plain = gsd_kernels.generate(model, **inputs, **sampling, graph_config="plain")  # the same seed: the same text
print("the same tokens without a draft:", torch.equal(out.sequences, plain))
print(f"{out.stats.tokens_per_step:.2f} tokens per step, {out.stats.steps} target forwards")
