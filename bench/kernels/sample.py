"""Picking a token at every row: the target's picks, and the draft's candidates."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gsd_kernels import draft_candidates, sample_rows
from gsd_kernels.ops.sampling import warped_log_probs
from gsd_kernels.ops.sampling.api import DRAFT, LOG_PROBS, SAMPLE

from ..lib.runner import Op, Settings, ready
from ..lib.shapes import SHAPES
from .peers import sampling_peers

NAME = "sample"
BRANCH = 4

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "top_k": 0, "top_p": 1.0},
    "T=0.7": {"temperature": 0.7, "top_k": 0, "top_p": 1.0},
    "T=0.7, top-k 50, top-p 0.9": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
}


def entries(settings: Settings) -> Iterator[Op]:
    """Every vocabulary × rows × way of sampling, and drafting candidates."""
    grid = settings.pick(settings.rows, (1, 16), (1, 8, 16, 64), (1, 8, 32, 64, 128))
    device = settings.device
    seed = torch.tensor(7, dtype=torch.int64, device=device)
    sequence_ids = torch.zeros(1, dtype=torch.int32, device=device)
    seen: set[int] = set()
    for name in settings.shape_names():
        vocabulary = SHAPES[name].vocab_size
        if vocabulary in seen:
            continue
        seen.add(vocabulary)
        for rows in grid:
            gen = torch.Generator().manual_seed(0)
            logits = (3 * torch.randn(1, rows, vocabulary, generator=gen)).to(device, settings.dtype)
            positions = torch.arange(rows, dtype=torch.int32, device=device)[None]
            options = {"seed": seed, "sequence_ids": sequence_ids}
            about = {
                "shape": name,
                "parameters": {"rows": rows, "vocabulary": vocabulary},
                "bytes_moved": logits.nbytes,
            }
            for operation, warpers in MODES.items():
                sample = partial(sample_rows, logits, positions, **options, **warpers)
                yield Op(
                    SAMPLE,
                    lambda backend, sample=sample: sample(backend=backend),
                    peers=sampling_peers(logits[0], *warpers.values()),
                    alike=warpers["temperature"] == 0.0,  # random picks are the tests' matter
                    operation=f"sample_rows {operation}",
                    **about,
                )
            log_probs = partial(warped_log_probs, logits, **MODES["T=0.7, top-k 50, top-p 0.9"])
            yield Op(
                LOG_PROBS,
                lambda backend, log_probs=log_probs: log_probs(backend=backend),
                checked=lambda backend, log_probs=log_probs: log_probs(backend=backend).exp(),  # most are -inf
                tolerance=1e-4,
                operation="warped_log_probs",
                **about,
            )
            draft = partial(draft_candidates, logits, positions, branch=BRANCH, **options)

            def topk(logits: Tensor = logits) -> tuple[Tensor, Tensor]:
                return logits.float().log_softmax(-1).topk(BRANCH)

            yield Op(
                DRAFT,
                lambda backend, draft=draft: draft(backend=backend),
                checked=lambda backend, draft=draft: draft(backend=backend)[1],  # log-probabilities: of ties either
                tolerance=1e-3,
                peers={"torch_topk": ready(topk)},
                alike=False,
                operation=f"draft_candidates, branch {BRANCH}",
                **about,
            )
