"""Evaluation of both models on the held-out files: loss, bits per byte, agreement."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from ..stdlib import SourceFile

EVALUATION_CONTEXT, EVALUATION_STRIDE = 1024, 512
CONTINUATION_LENGTH = 128


@dataclass(frozen=True)
class Evaluation:
    """Losses and agreement of both models on the held-out files."""

    files: int
    tokens: int
    bytes: int
    target_loss: float
    target_bits_per_byte: float
    draft_loss: float
    draft_bits_per_byte: float
    agreement: float


def negative_log_likelihood(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Return the sum over ``tokens`` [n] of -log p, in nats, from the logits [n, vocabulary] that predict them."""
    return F.cross_entropy(logits.double(), tokens, reduction="sum").item()


@torch.no_grad()
def evaluate(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, held_out: list[SourceFile]
) -> Evaluation:
    """Score whole files: every token once, after at least ``EVALUATION_STRIDE`` others where the file has them.

    The agreement is the share of positions where both models' most likely tokens are the same.
    """
    count = size = agreed = 0
    target_nats = draft_nats = 0.0
    for source in tqdm(held_out, desc="held-out files", unit="file"):
        tokens = torch.tensor(tokenizer(source.text)["input_ids"], dtype=torch.int64, device="cpu")
        size += len(source.text.encode())
        scored = 1
        while scored < len(tokens):
            start = 0 if scored == 1 else scored - EVALUATION_STRIDE
            window = tokens[start : start + EVALUATION_CONTEXT + 1]
            skip = scored - start - 1
            wanted = window[skip + 1 :]
            ours, theirs = (model(window[None, :-1], use_cache=False).logits[0, skip:] for model in (target, draft))
            target_nats += negative_log_likelihood(ours, wanted)
            draft_nats += negative_log_likelihood(theirs, wanted)
            agreed += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            count += len(wanted)
            scored = start + len(window)
    return Evaluation(
        files=len(held_out),
        tokens=count,
        bytes=size,
        target_loss=target_nats / count,
        target_bits_per_byte=target_nats / math.log(2) / size,
        draft_loss=draft_nats / count,
        draft_bits_per_byte=draft_nats / math.log(2) / size,
        agreement=agreed / count,
    )


@torch.no_grad()
def continuation_agreement(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> float:
    """Return the share of the target's own greedy tokens, after each text, that the draft would also have picked."""
    agreed = count = 0
    for text in tqdm(texts, desc="continuations", unit="prompt"):
        prompt = tokenizer(text, return_tensors="pt")
        length = prompt["input_ids"].shape[1]
        tokens = target.generate(**prompt, max_new_tokens=CONTINUATION_LENGTH, do_sample=False)
        picked = draft(tokens[:, :-1]).logits[0, length - 1 :].argmax(-1)
        agreed += int((picked == tokens[0, length:]).sum())
        count += len(picked)
    return agreed / count
