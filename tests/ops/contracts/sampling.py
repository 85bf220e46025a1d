"""sample_rows and draft_candidates: problems, and equality with the reference but for near ties."""

from __future__ import annotations

from typing import Any

import torch
from ops.contracts.backends import Backend
from torch import Tensor

import gsd_kernels as gsd
from gsd_kernels.ops.sampling.philox import gumbel_noise
from gsd_kernels.ops.sampling.reference import warp
from gsd_kernels.ops.table import OPS

EQUAL_SCORE = 1e-4  # scores this close may be picked either way: logarithms differ in the last bits
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

EACH = {
    "temperature": torch.tensor([0.0, 0.5, 1.0]),
    "top_k": torch.tensor([3, 0, 7]),
    "top_p": torch.tensor([0.9, 0.5, 1.0]),
    "min_p": torch.tensor([0.0, 0.05, 0.01]),
}
SAMPLING: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "greedy": ((2, 3, 1000), {}),
    "greedy-bf16-ties": ((2, 2, 4099), {"dtype": torch.bfloat16, "spread": 1.0}),
    "temperature": ((2, 3, 1003), {"temperature": 0.8}),
    "top-k": ((2, 3, 1003), {"temperature": 0.8, "top_k": 17}),
    "top-k-1": ((2, 3, 63), {"temperature": 2.0, "top_k": 1}),
    "top-p": ((2, 2, 5003), {"temperature": 0.8, "top_p": 0.7}),
    "top-p-0": ((2, 2, 111), {"temperature": 0.8, "top_p": 0.0}),
    "min-p": ((2, 2, 5003), {"temperature": 1.2, "min_p": 0.05}),
    "all": ((2, 2, 9001), {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "dtype": torch.float16}),
    "each": ((3, 2, 4500), EACH),
    "flat-nucleus-streams": ((1, 2, 9001), {"temperature": 1.5, "top_p": 0.95, "spread": 0.5}),
    "top-k-streams": ((1, 1, 9001), {"temperature": 1.0, "top_k": 5000, "top_p": 0.9}),
    "fewer-tokens-than-branch": ((1, 2, 3), {"temperature": 1.0, "branch": 5}),
    "branch-32": ((1, 2, 5000), {"temperature": 1.0, "branch": 32}),
    "vocabulary-256k": ((1, 1, 262144), {"temperature": 1.0, "top_k": 40}),
}
WARPERS = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.0, "top_p": 0.0},
    {
        "temperature": torch.tensor([0.0, 1.0]),
        "top_k": torch.tensor([3, 0]),
        "top_p": torch.tensor([1.0, 0.7]),
        "min_p": torch.tensor([0.0, 0.05]),
    },
]


def sampling_inputs(
    vocab: int, dtype: torch.dtype, seed: int, spread: float = 3.0
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits [2, 5, V], positions, and the keys of the noise."""
    gen = torch.Generator().manual_seed(seed)
    logits = (torch.randn(2, 5, vocab, generator=gen) * spread).to(dtype)
    positions = torch.randint(0, 10**6, (2, 5), generator=gen, dtype=torch.int32)
    noise = {
        "seed": torch.randint(-(2**62), 2**62, (), generator=gen),
        "sequence_ids": torch.tensor([3, 11], dtype=torch.int32),
    }
    return logits, positions, noise


def problem(
    shape: tuple[int, int, int], dtype: torch.dtype = torch.float32, spread: float = 3.0, seed: int = 0
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits of a shape [B, R, V], positions, and keys of which both words are in use."""
    gen = torch.Generator().manual_seed(seed)
    logits = (torch.randn(shape, generator=gen) * spread).to(dtype)
    positions = torch.randint(0, 5000, shape[:2], generator=gen, dtype=torch.int32)
    sequences = torch.arange(shape[0], dtype=torch.int32) + 3
    return logits, positions, {"seed": torch.tensor(-0x123456789ABCDEF), "sequence_ids": sequences}


def check_sampling(
    inputs: tuple[Tensor, Tensor, dict[str, Tensor]], on: Backend, branch: int = 4, **warpers: Any
) -> int:
    """Tokens equal except where scores tie within 1e-4; log-probabilities within 1e-5. Returns the tied differences."""
    logits, positions, keys = inputs
    scores = final_scores(*on.to_reference(inputs), on.to_reference(warpers)).cpu()

    def both(op: Any, **more: int) -> tuple[Any, Any]:
        return tuple(
            op(to(logits), to(positions), **to(keys), **to(warpers), **more, backend=name)
            for to, name in ((on.to, on.name), (on.to_reference, "reference"))
        )

    got, expected = (t.cpu() for t in both(gsd.sample_rows))
    assert got.dtype == expected.dtype == torch.int32
    flips = check_ties(got[..., None], expected[..., None], scores)
    drafted = both(gsd.draft_candidates, branch=branch)
    (tokens, log_probs), (expected, expected_lp) = (tuple(x.cpu() for x in pair) for pair in drafted)
    assert tokens.dtype == torch.int32 and log_probs.dtype == torch.float32
    real = expected_lp > float("-inf")
    assert torch.equal(log_probs > float("-inf"), real) and (log_probs[~real] == float("-inf")).all()
    most = OPS["draft_candidates"].tolerance
    rtol = 0.0 if on.name == "triton" else most
    torch.testing.assert_close(log_probs[real], expected_lp[real], atol=most, rtol=rtol)
    assert (log_probs <= 0).all()
    if logits.shape[-1] < branch and on.name == "cpu":  # elsewhere absent tokens may be any, at −∞
        assert (tokens[..., logits.shape[-1] :] == -1).all()
    ids = [[token for token in row if token >= 0] for row in tokens.masked_fill(~real, -1).flatten(0, 1).tolist()]
    assert all(len(row) == len(set(row)) for row in ids), "a candidate twice"
    return flips + check_ties(tokens.masked_fill(~real, 0), expected.masked_fill(~real, 0), scores)


def final_scores(logits: Tensor, positions: Tensor, keys: dict[str, Tensor], warpers: dict[str, Any]) -> Tensor:
    """What the picks maximise, from the reference: warped logits + noise, or the logits."""
    temperature = torch.as_tensor(warpers.get("temperature", 0.0), device=logits.device).view(-1, 1, 1)
    cuts = [warpers.get(n, off) for n, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))]
    warped = warp(logits.float(), warpers.get("temperature", 0.0), *cuts)
    noise = gumbel_noise(keys["seed"], positions, keys["sequence_ids"][:, None], logits.shape[-1])
    return torch.where(temperature > 0, warped + noise, logits.float())


def check_ties(got: Tensor, expected: Tensor, scores: Tensor) -> int:
    a, b = (scores.gather(-1, t.clamp(min=0).long()) for t in (got, expected))
    assert torch.where(got == expected, 0.0, (a - b).abs()).max() <= EQUAL_SCORE
    return int((got != expected).sum())
