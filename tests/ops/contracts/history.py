"""Texts that were read, graphs that go on from them, and weights, for the ops of the history."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

import gsd_kernels as gsd
from gsd_kernels.ops.history import WEIGHTS, Recollection, history_append


@dataclass(frozen=True)
class Known:
    """A history that has read random texts of few tokens, so that matches are long and sources agree and differ."""

    batch: int = 2
    vocab: int = 4
    text: int = 60  # tokens read
    branch: int = 3
    remembered: int = 8  # continuations of an entry
    learned: bool = False
    runners: int = 8  # that are there
    emitted: int = 3
    weights: str = "random"
    sizes: dict[str, int] = field(default_factory=dict)

    def build(self, backend: str = "reference") -> tuple[Recollection, Tensor]:
        """The history, and its text int32 [B, T], which ends with the root."""
        gen = torch.Generator().manual_seed(self.vocab + self.text)
        table = filled(self.batch, self.remembered, self.vocab, self.text, gen, self.sizes)
        learned = filled(1, 4, self.vocab, 30, gen, {"max_context": 3}) if self.learned else None
        weights = torch.randn(WEIGHTS, generator=gen, dtype=torch.float64)
        if self.weights == "none":
            weights = torch.zeros(WEIGHTS, dtype=torch.float64)
        known = Recollection.empty(table, weights, learned, room=16, hashes=8)
        known.reserve(self.text + 9)
        text = torch.randint(0, self.vocab, (self.batch, self.text + 9), generator=gen).int()
        text[:, 7::11] = -1
        if self.text:
            text[:, -9:] = text[:, 8:17]  # what was said before, and more follows there
        counts = torch.full((self.batch,), text.shape[1], dtype=torch.int32)
        history_append(known, text, counts, backend=backend)
        known.runners[:, : self.runners] = torch.arange(self.runners, dtype=torch.int32) % self.vocab
        known.runner_log_probs.copy_(torch.linspace(-0.3, -5.0, known.runners.shape[1]))
        known.emitted.fill_(self.emitted)
        return known, text

    def graph(self, text: Tensor, levels: int = 3) -> gsd.TokenGraph:
        """A graph whose first children are what the text says after its end."""
        config = gsd.GraphConfig(depth=levels, width=4, branch=self.branch, max_rows=24, merge_context=2)
        graph = gsd.TokenGraph.empty(self.batch, config, "cpu")
        graph.reset(text[:, -1].contiguous(), tail_of(text))
        frontier, gen = graph.root_frontier(), torch.Generator().manual_seed(levels)
        for level in range(levels):
            shape = (*frontier.shape, self.branch)
            tokens = torch.randint(0, self.vocab, shape, generator=gen).int()
            chances = torch.rand(shape, generator=gen).log()
            rest = {"level": level, "width": 4, "merge_context": 2, "backend": "reference"}
            frontier = gsd.merge(graph, frontier, tokens, chances, **rest).node_ids
        return graph


KNOWN = {
    "usual": Known(),
    "with what was learned": Known(learned=True, vocab=6),
    "one sequence": Known(batch=1, branch=2, emitted=0),
    "few remembered": Known(branch=1, remembered=1, vocab=3),
    "more than candidates": Known(branch=12, remembered=12, vocab=5),
    "nothing read": Known(text=0, runners=0),
    "runners alone": Known(text=0, vocab=40),
    "long repeats": Known(vocab=2, text=200),
    "short contexts": Known(sizes={"max_context": 2}),
    "ties": Known(weights="none", vocab=9),
    "many sequences": Known(batch=19, vocab=7),
}


def filled(
    batch: int, branch: int, vocab: int, entries: int, gen: torch.Generator, sizes: dict[str, int]
) -> gsd.NgramTable:
    """A table of random continuations, of which some are absent, some the same twice."""
    table = gsd.NgramTable.empty(batch, branch, "cpu", **{"capacity": 256, "max_context": 4, "ways": 8} | sizes)
    contexts = torch.randint(0, vocab, (batch, entries, 5), generator=gen).int()
    following = torch.randint(0, vocab, (batch, entries, branch), generator=gen).int()
    absent = torch.rand(following.shape, generator=gen).cumsum(-1) > 2.0  # the last of a row
    log_probs = (torch.rand(following.shape, generator=gen) / branch).sort(-1, descending=True)[0].log()
    following = torch.where(absent, -1, following)
    if entries:
        known = torch.ones(batch, entries, dtype=torch.bool)
        gsd.ngram_insert(table, contexts, following, log_probs, known, backend="reference")
    return table


def tail_of(text: Tensor) -> Tensor:
    """The tokens before the last one, nearest first, int32 [B, 8]."""
    return pad(text[:, -9:-1].flip(-1), (0, 8), value=-1)[:, :8].contiguous()


def noise(batch: int) -> dict[str, Tensor]:
    sequences = torch.arange(batch, dtype=torch.int32)
    return {"first_pick": sequences + 7, "seed": torch.tensor(-3), "sequence_ids": sequences + 2}


def close_candidates(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], atol: float) -> None:
    """Equal but for rounding: of candidates as likely as each other any order."""
    (tokens, log_probs), (other_tokens, others) = got[:2], expected[:2]
    assert torch.equal(tokens < 0, other_tokens < 0) and torch.equal(log_probs == -torch.inf, tokens < 0)
    torch.testing.assert_close(log_probs, others, atol=atol, rtol=0)
    for at in (tokens != other_tokens).nonzero().tolist():
        chances = others[tuple(at[:-1])]
        near = (chances - chances[at[-1]]).abs() <= 2 * atol
        assert near.sum() > 1 or at[-1] == chances.shape[0] - 1


def on_device(known: Recollection, device: str) -> Recollection:
    """The same in storage of its own."""

    def moved(part: Tensor | gsd.NgramTable | None) -> Tensor | gsd.NgramTable | None:
        if isinstance(part, gsd.NgramTable):
            return gsd.NgramTable(*map(moved, (part.keys, part.tokens, part.log_probs)), part.max_context, part.ways)
        return None if part is None else part.to(device, copy=True)

    return Recollection(**{one.name: moved(getattr(known, one.name)) for one in fields(known)})


def changed(case: Known, **changes: object) -> Known:
    return replace(case, **changes)
