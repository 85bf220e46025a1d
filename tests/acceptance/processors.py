"""Logits processors of all kinds that a copy for every sequence would break, each with what it was shown."""

from __future__ import annotations

import threading

import torch
from transformers import LogitsProcessor

SHIFT = 3.0


class Recorded(LogitsProcessor):
    """Keeps what it was shown: the very tensors, and copies of that moment."""

    def __init__(self):
        self.kept, self.seen = [], []

    def __call__(self, input_ids, scores):
        self.kept.append((input_ids, scores))
        self.seen.append((input_ids.clone(), scores.clone()))
        return self.process(input_ids, scores)

    def process(self, input_ids, scores):
        return scores


class Guidance(Recorded):
    """Classifier-free guidance by hand: every sequence is pushed away from the one before it."""

    def process(self, input_ids, scores):
        return scores + 0.6 * (scores - scores.roll(1, 0))


class Mean(Recorded):
    """All sequences say the same, and the scores behind finished ones count too."""

    def process(self, input_ids, scores):
        return scores.mean(0, keepdim=True).expand_as(scores)


class Apart(Recorded):
    """No sequence says what another one said last."""

    def process(self, input_ids, scores):
        scores = scores.clone()
        scores[:, input_ids[:, -1]] -= SHIFT
        return scores


class Native(Recorded):
    """Holds what cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def process(self, input_ids, scores):
        with self.lock:
            scores = scores.clone()
            scores[:, 5 * len(self.seen) % scores.shape[1]] += SHIFT
        return scores


class Drawn(Recorded):
    """Its own random numbers, one lot a call."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(4)

    def process(self, input_ids, scores):
        return scores + torch.randn(scores.shape, generator=self.generator)


class InPlace(Recorded):
    def process(self, input_ids, scores):
        self.kept[-1] = (input_ids, input_ids)  # its scores do change
        scores[:, input_ids.shape[1] % scores.shape[1]] += SHIFT
        return scores


class ByLength(Recorded):
    """Forces a token at every third length."""

    def process(self, input_ids, scores):
        if input_ids.shape[1] % 3:
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[torch.arange(len(scores)), (input_ids.shape[1] + torch.arange(len(scores))) % scores.shape[1]] = 0.0
        return forced


class Doubled(Recorded):
    def process(self, input_ids, scores):
        return scores.double() * 1.5 + torch.arange(len(scores))[:, None]


class Near(Recorded):
    """In float64 the best token is ahead of two others by less than float32 tells apart."""

    def process(self, input_ids, scores):
        scores = scores.double()
        tokens = (input_ids[:, -1:] * 7 + torch.tensor([1, 2, 3])) % scores.shape[1]
        ahead = scores.amax(-1, keepdim=True) + 9 + 1e-9 * torch.arange(3)
        return scores.scatter(1, tokens.sort(-1).values, ahead)


def closure():
    """A plain function that counts in its closure."""
    calls, seen = [0], []

    def biased(input_ids, scores):
        calls[0] += 1
        seen.append((input_ids.clone(), scores.clone()))
        scores = scores.clone()
        scores[calls[0] % len(scores), 7 * calls[0] % scores.shape[1]] += 2 * SHIFT
        return scores

    biased.seen = seen
    return biased


KINDS = {
    "guidance": Guidance,
    "mean": Mean,
    "apart": Apart,
    "native": Native,
    "drawn": Drawn,
    "in place": InPlace,
    "by length": ByLength,
    "doubled": Doubled,
    "near": Near,
    "closure": closure,
}
