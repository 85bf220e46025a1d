"""The ops of the history's table: remembering, looking up, noise of what was found, two sources as one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gsd_kernels import NgramTable, mix_candidates, ngram_insert, ngram_lookup, perturb_candidates
from gsd_kernels.config import MAX_CONTEXT
from gsd_kernels.ops.ngram.api import INSERT, LOOKUP, MIX, PERTURB

from ..lib.runner import Entry, Op, Settings

NAME, X = "ngram", "rows"
BRANCH = 4
TOKENS = 200  # that contexts are made of, and what follows them


def entries(settings: Settings) -> Iterator[Entry]:
    """Every number of contexts; ``--rows`` names them."""
    for count in settings.pick(settings.rows, (8,), (8, 64), (8, 64)):
        for op in ops(count, settings.device):
            yield settings.entry(
                op, shape="history table", parameters={"rows": count}, operation=op.name, bytes_moved=0
            )


def ops(count: int, device: torch.device) -> Iterator[Op]:
    """Each op on the same contexts, of which the table has them all."""
    gen = torch.Generator().manual_seed(0)

    def candidates() -> tuple[Tensor, Tensor]:
        found = torch.randn(1, count, TOKENS, generator=gen).log_softmax(-1).topk(BRANCH)
        return found.indices.to(device, torch.int32), found.values.to(device)

    contexts = torch.randint(0, TOKENS, (1, count, MAX_CONTEXT), generator=gen, dtype=torch.int32).to(device)
    tokens, log_probs = candidates()
    others, other_log_probs = candidates()
    valid = torch.ones(1, count, dtype=torch.bool, device=device)
    table = NgramTable.empty(1, BRANCH, device)

    def insert(backend: str, into: NgramTable = table) -> tuple[Tensor, ...]:
        ngram_insert(into, contexts, tokens, log_probs, valid, backend=backend)
        return into.keys, into.tokens, into.log_probs

    yield Op(
        "ngram_insert",
        INSERT.implementations,
        insert,
        checked=lambda backend: insert(backend, NgramTable.empty(1, BRANCH, device)),
    )
    insert("reference")
    yield Op("ngram_lookup", LOOKUP.implementations, lambda backend: ngram_lookup(table, contexts, backend=backend))
    noise = {
        "positions": torch.arange(count, dtype=torch.int32, device=device)[None],
        "seed": torch.tensor(7, dtype=torch.int64, device=device),
        "sequence_ids": torch.zeros(1, dtype=torch.int32, device=device),
    }
    yield Op(
        "perturb_candidates",
        PERTURB.implementations,
        lambda backend: perturb_candidates(tokens, log_probs, **noise, backend=backend),
        tolerance=1e-4,
    )
    weight = torch.full((1, count), 0.4, device=device)
    yield Op(
        "mix_candidates",
        MIX.implementations,
        lambda backend: mix_candidates(tokens, log_probs, others, other_log_probs, weight, backend=backend),
        tolerance=1e-4,
    )
