"""Training data of the draft: the target's own text, and its distribution at each position of fixed windows."""

from __future__ import annotations

import numpy as np
import torch
from tqdm import tqdm
from transformers import LlamaForCausalLM

from gsd_kernels_train.streams import Streams

#: The draft learns from so many windows (library, tests, the target's own text) of each length, on which the target is
#: asked once: its most likely tokens and their probabilities are kept, so that a step costs no pass of the target.
LABEL_WINDOWS = {512: (3200, 600, 1000), 1024: (560, 90, 250)}
LABEL_TOP = 8
GENERATED_PROMPT, GENERATED_LENGTH, GENERATED_BATCH = 64, 256, 256

Labels = dict[str, np.ndarray]


class LabelledWindows:
    """Windows with the target's most likely tokens at each position; batches are a pure function of their step too."""

    def __init__(self, labels: dict[int, Labels], seed: int, tokens: int) -> None:
        self.labels = labels
        self.seed = seed
        self.tokens = tokens

    def batch(self, step: int, length: int) -> tuple[torch.Tensor, ...]:
        """Return (windows, likely token ids, their probabilities)."""
        labels, rng = self.labels[length], np.random.default_rng([self.seed, step])
        rows = rng.choice(len(labels["windows"]), self.tokens // length, replace=False)
        windows, ids, probabilities = (labels[name][rows] for name in ("windows", "ids", "probabilities"))
        return (
            torch.from_numpy(windows.astype(np.int64)),
            torch.from_numpy(ids.astype(np.int64)),
            torch.from_numpy(probabilities.astype(np.float32)),
        )


@torch.no_grad()
def label_windows(target: LlamaForCausalLM, corpus: list[np.ndarray], length: int, seed: int) -> Labels:
    """Draw windows that do not overlap from (library, tests, generated) and keep the target's likely tokens."""
    target = target.to(torch.bfloat16)
    rng = np.random.default_rng(seed)
    drawn = []
    for stream, count in zip(corpus, LABEL_WINDOWS[length], strict=True):
        starts = length * rng.permutation((len(stream) - 1) // length)[:count]
        drawn += [stream[start : start + length + 1] for start in starts]
    windows = np.stack(drawn)
    ids, probabilities = [], []
    for batch in tqdm(np.array_split(windows, len(windows) * length // 8192), desc=f"target on {length}", unit="batch"):
        logits = target(torch.from_numpy(batch[:, :-1].astype(np.int64)), use_cache=False).logits
        top = logits.topk(LABEL_TOP, dim=-1)
        normaliser = logits.float().logsumexp(-1, keepdim=True)
        ids.append(top.indices.numpy().astype(np.uint16))
        probabilities.append((top.values.float() - normaliser).exp().numpy().astype(np.float16))
    return {"windows": windows, "ids": np.concatenate(ids), "probabilities": np.concatenate(probabilities)}


@torch.no_grad()
def generate_text(model: LlamaForCausalLM, streams: Streams, batches: int, seed: int) -> np.ndarray:
    """Let the target continue training text, half greedily and half at temperature 0.8; return one token stream.

    Greedy rows come in even batches. The prompt stays in front of each continuation.
    """
    model = model.to(torch.bfloat16)
    model.set_attn_implementation("sdpa")
    rows = []
    torch.manual_seed(seed)
    for index in tqdm(range(batches), desc="target's own text", unit="batch"):
        windows = torch.cat([streams.batch(10**6 + 16 * index + k, 512)[0] for k in range(GENERATED_BATCH // 16)])
        sampling = {"do_sample": True, "temperature": 0.8, "top_k": 0} if index % 2 else {"do_sample": False}
        tokens = model.generate(
            windows[:, :GENERATED_PROMPT],
            attention_mask=torch.ones_like(windows[:, :GENERATED_PROMPT]),
            max_length=GENERATED_LENGTH,
            **sampling,
        )
        rows.append(tokens.numpy().astype(np.uint16))
    stream = np.concatenate([row.flatten() for row in rows])
    return stream[stream != model.config.pad_token_id]
