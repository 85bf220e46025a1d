"""Picking a token at every row: the target's picks, and the draft's candidates."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gsd_kernels import draft_candidates, sample_rows
from gsd_kernels.ops.sampling.api import DRAFT_CANDIDATES, SAMPLE_ROWS

from ..lib.runner import Contestant, Entry, Settings
from ..lib.shapes import SHAPES
from .peers import sampling_peers

NAME, X = "sample", "rows"
BRANCH = 4

#: operation → temperature, top_k, top_p
MODES = {"greedy": (0.0, 0, 1.0), "T=0.7": (0.7, 0, 1.0), "T=0.7, top-k 50, top-p 0.9": (0.7, 50, 0.9)}


def entries(settings: Settings) -> Iterator[Entry]:
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
            for operation, (temperature, top_k, top_p) in MODES.items():

                def sample(
                    backend: str,
                    logits: Tensor = logits,
                    positions: Tensor = positions,
                    warpers: tuple[float, int, float] = (temperature, top_k, top_p),
                ) -> Tensor:
                    return sample_rows(
                        logits,
                        positions,
                        seed=seed,
                        sequence_ids=sequence_ids,
                        temperature=warpers[0],
                        top_k=warpers[1],
                        top_p=warpers[2],
                        backend=backend,
                    )

                ours = settings.ours(SAMPLE_ROWS, sample)
                best = logits[0].argmax(-1)
                yield Entry(
                    shape=name,
                    parameters={"rows": rows, "vocabulary": vocabulary},
                    operation=f"sample_rows {operation}",
                    bytes_moved=logits.nbytes,
                    contestants=[*ours, *sampling_peers(settings, logits[0], temperature, top_k, top_p)],
                    # Random picks have no right answer here; their distribution is a matter for the tests.
                    error=(lambda picked, best=best: float((picked.flatten() != best).sum()))
                    if temperature == 0.0
                    else None,
                )

            def candidates(backend: str, logits: Tensor = logits, positions: Tensor = positions) -> tuple[Tensor, ...]:
                return draft_candidates(
                    logits, positions, branch=BRANCH, seed=seed, sequence_ids=sequence_ids, backend=backend
                )

            ours = settings.ours(DRAFT_CANDIDATES, candidates)
            peers = []
            if settings.wants_peer("torch_topk"):
                peers.append(
                    Contestant(
                        "torch_topk", lambda scores=logits: scores.float().log_softmax(-1).topk(BRANCH), peer=True
                    )
                )
            yield Entry(
                shape=name,
                parameters={"rows": rows, "vocabulary": vocabulary},
                operation=f"draft_candidates, branch {BRANCH}",
                bytes_moved=logits.nbytes,
                contestants=[*ours, *peers],
            )
