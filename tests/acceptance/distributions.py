"""Exact probabilities by transformers' warpers, and a chi-square test that is held against moved mass."""

from __future__ import annotations

import numpy as np
import torch
import transformers
from transformers.generation import logits_process

P_VALUE = 1e-3


def transformers_warpers(options: dict[str, float]) -> transformers.LogitsProcessorList:
    made = transformers.LogitsProcessorList()
    if options.get("temperature", 1.0) != 1.0:
        made.append(logits_process.TemperatureLogitsWarper(options["temperature"]))
    if "top_k" in options:
        made.append(logits_process.TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        made.append(logits_process.TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        made.append(logits_process.MinPLogitsWarper(options["min_p"]))
    return made


def exact_probabilities(logits: torch.Tensor, options: dict[str, float]) -> torch.Tensor:
    """[..., V] float64, by transformers' own warpers."""
    flat = logits.reshape(-1, logits.shape[-1]).double()
    return transformers_warpers(options)(torch.zeros(len(flat), 1, dtype=torch.long), flat).softmax(-1).view_as(logits)


def fit(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value of a chi-square test; cells that expect fewer than 5 draws are taken together."""
    from scipy import stats  # here: GPU tests beside those that draw run where it is missing

    assert counts[probabilities == 0].sum() == 0, "a token of probability 0 was drawn"
    expected = probabilities * counts.sum()
    small = expected < 5
    observed = [*counts[~small], counts[small].sum()]
    wanted = [*expected[~small], expected[small].sum()]
    if wanted[-1] < 1e-9:
        observed, wanted = observed[:-1], wanted[:-1]
    return float(stats.chisquare(observed, np.array(wanted) * sum(observed) / sum(wanted)).pvalue)


def moved(probabilities: np.ndarray, mass: float = 0.02) -> list[np.ndarray]:
    """``mass`` moved between two tokens of p ≥ 0.05, every way."""
    likely = np.flatnonzero(probabilities >= 0.05)
    out = []
    for a in likely:
        for b in likely:
            if a != b:
                shifted = probabilities.copy()
                shifted[a] -= mass
                shifted[b] += mass
                out.append(shifted)
    return out
