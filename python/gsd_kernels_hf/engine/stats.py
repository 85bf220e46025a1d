"""Counts and times of a generation."""

from __future__ import annotations

import html
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..model import replay
from ..sources.mixer import SourceStats


@dataclass(repr=False)
class GenerationStats:
    """Counts and times of one ``generate`` call; ``print(stats)`` shows them as a table.

    Attributes:
        steps: speculative steps, each one target forward.
        plain_steps: those of them that verified one row, with nothing drafted.
        sequences: sequences in the batch.
        new_tokens: tokens emitted, all sequences together, end-of-text tokens included.
        sequence_steps: steps summed over the sequences that were still unfinished in them.
        draft_rows, target_rows: rows that the models computed after the prompt, padding included. (A target on a CPU
            computes no rows beyond the longest graph of the batch; elsewhere shapes are static.)
        drafted_nodes: nodes in all graphs.
        merges: merge edges in all graphs.
        accepted_merges: merge edges on accepted paths.
        accepted: ``accepted[n]`` counts the steps in which a sequence emitted n tokens.
        shapes: steps of each shape, by name; ``"plain"``, ``depth x width x branch x rows`` of a shape with a model's
            levels, ``lookup-`` before it of one without.
        sources: :class:`SourceStats` by name. Accepted tokens of all together are ``new_tokens − sequence_steps``, and
            what a stopping criterion took back: the last token of a step is the target's own.
        plain_seconds: what a plain step would take, as :attr:`gain` needs it; ``None``: not known.
        plain_from: what that was estimated from.
        cache_bytes: all key/value caches.
        seconds: ``prefill``, ``draft`` (with merging and flattening), ``target``, ``other`` and ``total``.
        backend: the backend asked for.
        criterion: what decided which drafted tokens were accepted; ``"exact"`` with greedy decoding and without a
            draft, whatever was asked for.
        lossless: whether the output is the target's own (always, but for criteria documented as lossy).
        left_out: sources that were given and not used, or not to the end: they brought little lately, see
            docs/how-it-works.md, or the text has more tokens than their model has positions.
        why_modules: what kept the target's rows from being one operator, so that its modules computed them; ``None``:
            the operator did.
        why: what made transformers' own ``generate`` serve the call of a patched model, of which nothing else is
            counted here but the seconds; ``None``: this package served it.
    """

    steps: int = 0
    plain_steps: int = 0
    sequences: int = 0
    new_tokens: int = 0
    sequence_steps: int = 0
    draft_rows: int = 0
    target_rows: int = 0
    drafted_nodes: int = 0
    merges: int = 0
    accepted_merges: int = 0
    accepted: list[int] = field(default_factory=list)
    shapes: dict[str, int] = field(default_factory=dict)
    sources: dict[str, SourceStats] = field(default_factory=dict)
    plain_seconds: float | None = None
    plain_from: str | None = None
    cache_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "draft": 0.0, "target": 0.0})
    backend: str = "auto"
    criterion: str = "exact"
    lossless: bool = True
    left_out: list[str] = field(default_factory=list)
    why_modules: str | None = None
    why: str | None = None

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens that a sequence gained from one target forward; 1 is plain decoding."""
        return self.new_tokens / self.sequence_steps if self.sequence_steps else 0.0

    @property
    def gain(self) -> float | None:
        """How many times plain decoding's speed this was, the prompt apart: an estimate.

        Tokens a step times the seconds of a plain step over those of a step. ``None`` where it cannot be known: too few
        plain steps in this call and no costs learned, or transformers served it.
        """
        if self.steps and self.plain_steps == self.steps:
            return 1.0
        spent = self.seconds.get("total", 0.0) - self.seconds["prefill"]
        if self.plain_seconds is None or not self.steps or spent <= 0:
            return None
        return self.tokens_per_step * self.plain_seconds * self.steps / spent

    def as_dict(self) -> dict[str, Any]:
        """All fields, ``tokens_per_step`` and ``gain``, for JSON."""
        return {**asdict(self), "tokens_per_step": self.tokens_per_step, "gain": self.gain}

    def table(self) -> list[tuple[str, str]]:
        """The answers to what a user asks first, as (name, text), line by line."""
        if self.why is not None:
            return [("served by", f"transformers' own generate: {self.why}"), ("seconds", self._times())]
        total = self.seconds.get("total", 0.0)
        speed = f", {self.new_tokens / total:.1f} a second with the prompt" if total else ""
        way = "one operator" if self.why_modules is None else f"its modules ({self.why_modules})"
        lines = [
            ("new tokens", f"{self.new_tokens:,} in {self.sequences:,} sequence{'s' * (self.sequences != 1)}{speed}"),
            ("steps", f"{self.steps:,}, of which {self.plain_steps:,} plain"),
            ("tokens per step", f"{self.tokens_per_step:.2f}; 1 is plain decoding"),
            ("estimated gain", self._gain()),
            ("seconds", self._times()),
            ("steps by shape", ", ".join(f"{name}: {count:,}" for name, count in self.shapes.items())),
            ("rows", f"{self.target_rows:,} of the target by {way}, {self.draft_rows:,} of drafts; padding included"),
            ("merge edges", f"{self.merges:,}, of which {self.accepted_merges:,} on accepted paths"),
            ("caches", f"{self.cache_bytes / 2**20:.1f} MiB"),
        ]
        lines += [(f"source {name}", str(source)) for name, source in self.sources.items()]
        if self.left_out:
            lines.append(("left out", ", ".join(self.left_out)))
        if not self.lossless:
            lines.append(("output", f"not the target's own: criterion {self.criterion}"))
        return lines

    def _gain(self) -> str:
        if self.gain is None:
            return "not known: too few plain steps, and no costs learned"
        if self.plain_seconds is None:
            return f"{self.gain:.2f} times plain decoding: nothing was drafted"
        plain = f"whose step takes {self.plain_seconds * 1e3:.3g} ms by {self.plain_from}"
        return f"{self.gain:.2f} times plain decoding, {plain}"

    def _times(self) -> str:
        parts = ", ".join(f"{name} {value:.3f}" for name, value in self.seconds.items() if name != "total")
        return f"{self.seconds.get('total', 0.0):.3f}: {parts}"

    def __str__(self) -> str:
        rows = self.table()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)

    def __repr__(self) -> str:
        if self.why is not None:
            return "GenerationStats(served by transformers)"
        gain = "" if self.gain is None else f", gain {self.gain:.2f}"
        seconds = f"{self.seconds.get('total', 0.0):.2f} s"
        steps = f"{self.steps} steps, {self.tokens_per_step:.2f} a step"
        return f"GenerationStats({self.new_tokens} tokens in {steps}{gain}, {seconds})"

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        cells = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in self.table())
        return f"<table>{''.join(cells)}</table>"


Part = tuple[str, torch.cuda.Event, torch.cuda.Event]
"""Name of a part, and the events at its borders."""


class Clock:
    """Sum of the seconds of named parts; device time by events on a GPU, so that nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.use_events = device, replay.is_gpu(device)
        self.pending: list[Part] = []  # that were begun, and not counted yet
        self.seconds: dict[str, float] = {}
        self.latest: dict[str, float] = {}  # of the current step, as far as it was read
        self.start = self.step_start = self.heard = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what runs inside as part ``name``."""
        if self.use_events:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            stream = torch.cuda.current_stream(self.device)  # of the target's GPU, which need not be the current one
            begin.record(stream)
            yield
            end.record(stream)
            self.pending.append((name, begin, end))
        else:
            begin_time = time.perf_counter()
            yield
            self._count(name, time.perf_counter() - begin_time)

    def over(self, parts: Sequence[Part], begin: float) -> None:
        """A step that began then is over, but others may have begun since; count the parts that were handed over."""
        for name, start, end in parts:
            self._count(name, start.elapsed_time(end) / 1e3)
        self.step_start, self.heard = max(begin, self.heard), time.perf_counter()

    def read(self) -> None:
        """Count the parts that the device has done; does not wait for others."""
        waiting = []
        for name, begin, end in self.pending:
            if end.query():
                self._count(name, begin.elapsed_time(end) / 1e3)
            else:
                waiting.append((name, begin, end))
        self.pending = waiting

    def _count(self, name: str, seconds: float) -> None:
        self.latest[name] = seconds
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def begin_step(self) -> None:
        """Mark where a step begins."""
        self.latest.clear()
        self.step_start = time.perf_counter()

    def since_step(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self.step_start

    def finish(self) -> dict[str, float]:
        """Seconds of every part, of all else and of all; waits for the device."""
        for _, _, end in self.pending:
            end.synchronize()
        self.read()
        total = time.perf_counter() - self.start
        parts = {name: self.seconds.get(name, 0.0) for name in ("prefill", "draft", "target")}
        return {**parts, "other": max(0.0, total - sum(parts.values())), "total": total}
