"""A draft model of another tokenizer that shares few tokens with the target's: its paths are read as text."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, takewhile

from transformers import PreTrainedModel

from gsd_kernels import GraphConfig, Rows, flatten
from gsd_kernels.config import MAX_ROWS

from .. import validate
from ..model import properties
from ..model.recurrent.mixers import mixers_of
from ..model.spelling import Speller
from ..model.vocabulary import Translation
from .base import Level, OwnSource, Proposal, Text
from .mixer import Mixer
from .own_text import END_ROWS, Reader
from .trie import Places, Trie, after_nodes, proposal_of


@dataclass(frozen=True)
class DraftedPath:
    """A path of a draft's rows, from the root to a leaf or to a special token.

    Attributes:
        sequence: whose.
        rows: of its ordinary tokens.
        ends: bytes of the path's text up to the end of each.
        text: of them.
        mark: a special token behind them, its row and its id in the draft's vocabulary; ``None`` for none.
    """

    sequence: int
    rows: list[int]
    ends: list[int]
    text: bytes
    mark: tuple[int, int] | None


class Retokenised(OwnSource):
    """A draft model that drafts in its own tokens: a graph of its own, over a text and a cache of its own.

    SLEM of arXiv 2502.05202, for a graph: the text of each of the best paths is cut by the target's tokenizer, together
    with the last tokens of the text, and paths of one text meet. The probability of a token is that of the draft's
    tokens that spell it, summed over the ways that it is spelled. The last token of a path may merge with what would
    follow: nothing is proposed behind it. All of this is done on the host, once a step.

    Args:
        model: the draft, which is not changed.
        translation: between its tokenizer and the target's.
        name: in statistics, and of its weight among the sources.
    """

    name = "model"
    other_tokens = on_host = reads_prompt = True

    def __init__(self, model: PreTrainedModel, translation: Translation, *, name: str = "model") -> None:
        self.model, self.translation, self.name = model, translation, name
        self.forwards, self.most_tokens = (model,), properties.positions(model)
        self.speller = Speller(translation.tokenizer, translation.target)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {type(self.model).__name__}, read as text>"

    def check(self, target: PreTrainedModel) -> None:
        """Refuse models that lack tokens of their tokenizers, and a draft that cannot go back in its text.

        Raises:
            ValueError: it keeps a recurrent state, or tokens are lacking.
        """
        if recurrent := mixers_of(self.model):
            raise validate.Unsupported(
                f"assistant_model: {type(self.model).__name__} keeps a recurrent state ({recurrent[0][0]}), which does "
                "not go back to where the draft's tokens change as the text grows; give a draft that has most of the "
                "target's tokens"
            )
        self.translation.check(target, self.model)

    def attach(self, text: Text) -> None:
        super().attach(text)
        self.drafts.restart(text, {})

    def start(self, text: Text) -> None:
        """Make the draft's text and its graph."""
        self.own, vocabulary = Reader(self.model, self.translation, text), properties.vocabulary(self.model)
        self.drafts = Mixer([self.own], self.own.state, self.sampler.backend, vocab_size=vocabulary)

    def prepare(self, config: GraphConfig) -> None:
        """Cache the prompt and what other shapes' steps emitted."""
        if config.depth > 0:
            self._catch_up(config)

    def _catch_up(self, config: GraphConfig) -> GraphConfig:
        """Let the draft's text and cache be the target's text; the shape of the draft's graph."""
        shape = own_shape(config)
        self.own.catch_up()
        if self.fits(shape.depth):
            self.own.reserve(int(self.own.state.out_len.max()), shape.cache_slots)
            self.drafts.prepare(shape)
        return shape

    def fits(self, depth: int = 1) -> bool:
        """Return whether the draft has positions for ``depth`` tokens behind its text, which are not the target's."""
        state = self.own.state
        return self.most_tokens is None or int(state.out_len.max()) + depth <= self.most_tokens

    @property
    def max_length(self) -> int | None:  # type: ignore[override]
        """The draft's positions; once there is a text of its own that counts: ``None``, or 0 where it is full."""
        return (None if self.fits() else 0) if hasattr(self, "own") else self.most_tokens

    def propose(self, level: Level) -> Proposal | None:
        """Propose what follows each frontier node in the re-tokenised paths; ``None`` beyond ``depth`` levels."""
        if level.number >= level.config.depth:
            return None
        if level.number == 0:
            self.places: Places = [{0: trie} for trie in self.look_ahead(level.config)]
        return proposal_of(
            after_nodes(self.places, level), level, self.sampler, rows=0 if level.number else self.forwarded
        )

    def look_ahead(self, config: GraphConfig) -> list[Trie]:
        """Draft, and read the best paths as the target's tokens: what may follow, by sequence."""
        shape, self.forwarded = self._catch_up(config), 0
        if not self.fits(shape.depth):
            return [Trie() for _ in self.own.ids]
        rows = flatten(self.drafts.draft(shape), shape.max_rows, int(shape.max_path or 0), backend=self.sampler.backend)
        self.forwarded = self.drafts.drafted_rows
        tries, paths = [Trie() for _ in self.own.ids], self.paths(rows)
        probs = [dict(enumerate(of_rows)) for of_rows in rows.scores.exp().tolist()]
        jobs = [(self.own.before(p.sequence), p.text[len(self.own.begun[p.sequence]) :]) for p in paths]
        for path, spelled in zip(paths, self.speller.spell(jobs), strict=True):
            begun = len(self.own.begun[path.sequence])  # bytes that the target has emitted already
            places = [path.rows[bisect_left(path.ends, begun + end)] for end in spelled.ends]
            ahead = list(zip(spelled.tokens, places, strict=True))
            if path.mark is not None and begun + spelled.covered == len(path.text):
                row, token = path.mark
                mark = self.translation.target.counterpart(token, self.translation.draft)
                ahead += [] if mark is None else [(mark, row)]
            tries[path.sequence].add(ahead, probs[path.sequence])
        return tries

    def paths(self, rows: Rows) -> list[DraftedPath]:
        """The paths to all leaves, of texts that are not done, that go on from what the target has emitted."""
        spelled, paths = self.translation.draft.spelled, []
        columns = (rows.token_ids, rows.parent_rows, rows.num_rows[:, None], self.state.done[:, None])
        for sequence, (tokens, parents, (count,), (done,)) in enumerate(
            zip(*(c.tolist() for c in columns), strict=True)
        ):
            inner = {0, *parents[:count]}
            for leaf in range(count) if not done else ():
                if leaf in inner:
                    continue
                path = [leaf]
                while parents[path[0]] > 0:
                    path.insert(0, parents[path[0]])
                pieces = list(takewhile(lambda piece: piece is not None, (spelled.get(tokens[row]) for row in path)))
                text, ends, marks = b"".join(pieces), list(accumulate(map(len, pieces))), path[len(pieces) :]
                if text.startswith(self.own.begun[sequence]):
                    mark = (marks[0], tokens[marks[0]]) if marks else None
                    paths.append(DraftedPath(sequence, path[: len(pieces)], ends, text, mark))
        return paths


def own_shape(config: GraphConfig) -> GraphConfig:
    """Shape of the draft's own graph in a step of another: its levels, no other source's, and rows to read the text."""
    return config.replace(history_depth=0, max_rows=min(MAX_ROWS, config.max_rows + 2 * END_ROWS))
