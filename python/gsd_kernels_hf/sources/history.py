"""History: a draft source without a forward, from the text and what the target picked and nearly picked before."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gsd_kernels import GraphConfig, NgramTable, ngram_insert
from gsd_kernels.backends import unavailable_reason
from gsd_kernels.config import MAX_CONTEXT
from gsd_kernels.ops.history import Recollection, Seen, history_append, history_recall
from gsd_kernels.ops.history.records import REMEMBERED
from gsd_kernels.ops.learn import Asked
from gsd_kernels.ops.ngram import ngram_recall, ngram_remember
from gsd_kernels.ops.recall_levels import recall_levels

from ..model import replay
from ..model.properties import device_of
from ..records import Verified
from .base import Level, OwnSource, Proposal, Text
from .memory import prior

PROMPT_PROBABILITY = 0.6  # of a continuation that was read in the prompt


class History(OwnSource):
    """The target's most likely tokens after every context that it was given, and what the text itself goes on with.

    Filled from the prompt and from every verified row, accepted or not. Looked up for every expanded node: at the
    levels of a draft model, with whose candidates it is mixed, and at ``history_depth`` levels beyond.

    All that is remembered of a node is weighed by one mixture, see
    :func:`~gsd_kernels.ops.history.history_recall`. Where no compiled ops are it is the table alone and of a node the
    longest context that it knows. :meth:`check` decides that, and nothing else does. Texts are the same either way.
    """

    name = "history"
    # Priors by the length of the matched context: 0, 1, 2, … tokens; of a mixture behind them by a match of the text
    # itself, and by what is known from elsewhere.
    shares = (0.0, 0.3, 0.5, 0.7, 0.85, 0.9, 0.15)
    reliability = (0.0, 0.5, 0.7, 0.85, 0.95, 0.95, 0.5)
    mixes, compiled_ahead, remembers = False, True, True
    known: Recollection | None = None  # made with a session's first text
    began: NgramTable | None = None  # of what earlier calls left, what the table holds
    era: object = None  # of that memory

    def check(self, target: PreTrainedModel) -> None:
        """Decide whether it is a mixture, see above; no target is refused."""
        self.mixes = mixes_on(device_of(target))
        if self.mixes:
            self.reliability = None  # chances of a mixture are calibrated

    def attach(self, text: Text) -> None:
        super().attach(text)
        self.unread = True  # the text so far is read when it is first needed
        if (memory := text.memory) is not None:
            memory.serve(text.target.vocab_size)
        era = None if memory is None else memory.era
        if era is None or not text.continues or era is not self.era:  # another history than what this table knows
            self.era = era
            self.table.clear()
            self.began = None if memory is None else memory.restore(self.table)
        reference = text.reference_ids
        self.before = 0 if reference is None else 1 + reference.shape[-1]
        if (known := self.known) is not None:  # captured steps read and write where they did, if there is room enough
            known.clear()
            learned = text.learned
            table = None if learned is None else learned.table
            moved, known.learned = table is not known.learned, table
            known.weights.copy_(prior() if learned is None else learned.weights)
            if self._reserve(known) or moved:
                self.text.recapture()
        if reference is not None:
            texts = reference.to(self.state.tokens.device).long().reshape(-1, reference.shape[-1])
            # Several sequences of one prompt have the prompt's.
            texts = texts.repeat_interleave(len(self.state.tokens) // len(texts), 0)  # [B, L]
            lengths = torch.full_like(self.state.kv_start, texts.shape[1])
            self.read(texts, torch.zeros_like(self.state.kv_start), lengths)
        if replay.is_gpu(self.state.tokens.device):
            self._read_text()  # a captured step that drafts nothing appends to it, or never does

    def start(self, text: Text) -> None:
        """Make the storage of a session."""
        batch, device = self.state.tokens.shape[0], self.state.tokens.device
        branch = max(text.branch, REMEMBERED) if self.mixes else text.branch
        self.table = NgramTable.empty(batch, branch, device)
        self.at_once = self.mixes and self.sampler.backend in ("auto", "cpu", "cuda")
        if self.mixes:
            weights = prior().to(device)
            self.known = Recollection.empty(self.table, weights, room=1 + self.state.tokens.shape[1])

    def grow(self) -> None:
        """Make room for the text that the session has room for."""
        if self.known is not None:
            self._reserve(self.known)

    def _reserve(self, known: Recollection) -> bool:
        old = known.text, known.previous
        moved = known.reserve(self.before + 1 + self.state.tokens.shape[1])
        for part in old if moved else ():
            replay.hold(part)
        return moved

    def prepare(self, config: GraphConfig) -> None:
        """Read the text so far."""
        self._read_text()

    def _read_text(self) -> None:
        if self.unread:
            lengths = self.state.out_len
            self.read(self.state.tokens[:, : int(lengths.max())], self.state.kv_start, lengths)
            self.unread = False

    def end(self) -> None:
        """Leave what is known now to later calls."""
        memory = self.text.memory
        if memory is not None and memory.era is self.era:  # else it was cleared, or loaded, during the call
            self._read_text()
            self.began = memory.add(self.table, self.began)

    def read(self, tokens: Tensor, kv_start: Tensor, lengths: Tensor) -> None:
        """Remember the continuations in a text that was not verified here.

        Args:
            tokens: int64 [B, P], left-padded.
            kv_start: int32 [B], padding.
            lengths: int32 [B], padding included.
        """
        place = torch.arange(tokens.shape[1], device=tokens.device)
        inside = (place >= kv_start[:, None]) & (place < lengths[:, None])
        real = torch.where(inside, tokens, -1).to(torch.int32)
        if self.known is not None:
            apart = torch.full_like(lengths, -1)[:, None]  # no match goes on from one text to the next
            history_append(self.known, torch.cat([apart, real], 1), lengths + 1, backend=self.sampler.backend)
            self.known.emitted.fill_(1)
        if tokens.shape[1] < 2:
            return
        padded = torch.nn.functional.pad(real, (MAX_CONTEXT - 1, 0), value=-1)
        contexts = padded.unfold(1, MAX_CONTEXT, 1)[:, :-1].flip(-1)  # [B, P − 1, C], nearest first
        following = torch.nn.functional.pad(real[:, 1:, None], (0, self.table.tokens.shape[2] - 1), value=-1)
        log_probs = torch.full_like(following, math.log(PROMPT_PROBABILITY), dtype=torch.float32)
        known = (contexts[..., 0] >= 0) & (following[..., 0] >= 0)
        ngram_insert(self.table, contexts.contiguous(), following, log_probs, known, backend=self.sampler.backend)

    def observe(self, verified: Verified) -> None:
        """Remember the target's best tokens at every verified row, and what was emitted."""
        known, rows, backend, seen = self.known, verified.rows, self.sampler.backend, None
        if verified.graph is not None:
            best = self.sampler.candidates(verified.logits, rows.depths, self.table.tokens.shape[2], noise=False)
            if known is None:
                ngram_remember(self.table, rows, verified.tail, *best, backend=backend)
                return
            seen = Seen(rows, verified.tail, verified.accepted.accepted_rows, *best)
        if known is not None and not self.unread:
            history_append(known, verified.tokens, verified.accepted.num_accepted, seen, backend=backend)

    def warm(self, level: Level, verified: Verified) -> Proposal:
        """Look up what the root is followed by, and remember no row."""
        self.observe(verified)
        return self.propose(level)

    def propose(self, level: Level) -> Proposal:
        """Continuations of each frontier node; what they were found by is the index."""
        recall, known = (ngram_recall, self.table) if self.known is None else (history_recall, self.known)
        noise, backend = self._noise(level), self.sampler.backend
        return Proposal(*recall(known, level.graph, level.frontier.node_ids, **noise, backend=backend))

    def propose_rest(self, level: Level) -> Asked:
        """Look up level after level in one call."""
        assert self.known is not None, "at_once is for a mixture"
        found = recall_levels(
            self.known,
            level.graph,
            level.frontier.node_ids,
            level.config,
            level.number,
            **self._noise(level),
            backend=self.sampler.backend,
        )
        return Asked(found.node_ids, found.tokens, found.log_probs, found.matched)

    def _noise(self, level: Level) -> dict[str, Tensor]:
        sampler = self.sampler
        if sampler.greedy:
            return {}
        return {"first_pick": level.first_pick, "seed": sampler.seed, "sequence_ids": sampler.sequence_ids}


def mixes_on(device: torch.device) -> bool:
    """Return whether the history is a mixture there: the compiled ops of the device's type make one."""
    return unavailable_reason(device.type, device) is None
