"""The race: everyone decodes every prompt in turn, and each text is held against those of plain decoding."""

from __future__ import annotations

import itertools
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gsd_kernels_cli.busy import Others, distrust
from gsd_kernels_cli.comparison import Run, first_divergence
from gsd_kernels_cli.ranks import from_first

from ..lib.report import write
from .competitors import UNDRAFTED, Ways, timed
from .names import ENGINES, OURS, plain_of
from .pairs import Prompt
from .report import Report

FORWARDS = ("prefill", "draft", "target")  # parts of a call's statistics
SLOW_SHARE = 0.6  # of the fastest peer's rate: who is below sits out later rounds


@dataclass(frozen=True)
class Race:
    """Rules of a race, and where its results are written.

    Attributes:
        model: says why a text parts from another one.
        report: kept up with every prompt.
        new_tokens: at most; a text may end before.
        references: by a way's name the ways that its text is held against, each with its field of a run.
        following: the prompt behind an answer's tokens; ``None`` where nothing more is asked.
        ends: tokens that end a text.
        rounds: over all prompts. In the first everyone decodes, later those who matter for the comparison.
        seconds: no further prompt is begun after that; there is always one.
        temperature: 0 is greedy.
        with_stats: whether a run keeps all that our decoding counts.
        folder, name: of the file; without a folder nothing is written.
    """

    model: PreTrainedModel
    report: Report
    new_tokens: int
    references: Callable[[str], dict[str, str]]
    following: Callable[[Prompt, list[int]], Prompt | None] = lambda prompt, answer: None
    ends: tuple[int, ...] = ()
    rounds: int = 1
    seconds: float = math.inf
    temperature: float = 0.0
    with_stats: bool = False
    folder: Path | None = None
    name: str = ""

    def run(self, racing: Ways, prompts: Sequence[Prompt]) -> None:
        """Let everyone decode every prompt, beginning with another one each time; a file is written after each.

        A chat of several turns goes on with the first way's answers, the same for all ways and rounds. Ctrl-C and
        SIGTERM end the race with the prompts that everyone has decoded.

        Raises:
            KeyboardInterrupt: it was ended before the first prompt was decoded.
        """
        begin, others, report = time.perf_counter(), Others(), self.report
        names, answers = [*racing], dict[str, list[int]]()
        try:
            for round_, (number, first) in itertools.product(range(self.rounds), enumerate(prompts)):
                spent = from_first(time.perf_counter() - begin)
                if number and spent * (number + 1) / number > self.seconds:
                    self._say(f"{number} of {len(prompts)} prompts in {spent:.0f} s")
                    return
                if round_ and not number:
                    names = self._still(names)
                turn = (number + round_) % len(names)
                prompt: Prompt | None = first
                while prompt is not None:
                    where = f"round {round_ + 1}/{self.rounds}, prompt {number + 1}/{len(prompts)}"
                    order = {name: racing[name] for name in names[turn:] + names[:turn]}
                    answer = self._turn(order, prompt, number, round_, where)[names[0]]
                    prompt = self.following(prompt, answers.setdefault(prompt.name, answer))
                report.summarise([*racing])
                report.seconds = time.perf_counter() - begin
                report.others_share = others.share()
                report.busy = distrust(report.others_share)
                left = len(prompts) * self.rounds - 1
                if number == round_ == 0 and left:
                    rest = report.seconds * left
                    known = f"about {rest / 60:.0f} minutes" if rest >= 90 else f"about {rest:.0f} s"
                    took = f"the first prompt took {report.seconds:.0f} s, so the other {left} take {known}"
                    self._say(f"{took}; Ctrl-C ends with the table so far")
                if self.folder is not None:
                    write(self.folder, self.name, report)
        except KeyboardInterrupt:
            if not report.runs:
                raise
            report.stopped = True

    def _turn(self, racing: Ways, prompt: Prompt, number: int, round_: int, where: str) -> dict[str, list[int]]:
        """Everyone's text of a prompt. Runs are kept at once: a prompt counts that everyone has decoded."""
        self.report.prompts[prompt.name] = prompt.about()
        texts: dict[str, list[int]] = {}
        runs = []
        seed = number if self.temperature else round_  # engines that remember texts begin a round without them
        for way, decode in racing.items():
            self._say(f"{where}, {way}")
            texts[way], measured = self._measured(way, timed(decode, prompt.input_ids, self.new_tokens, seed))
            runs.append({"prompt": prompt.name, "way": way, "round": round_, **measured})
        for run in runs:  # against plain ones, and why a first difference is there
            way = run["way"]
            for key, reference in self.references(way).items():
                if reference not in texts or reference == way:
                    continue
                run[key] = texts[way] == texts[reference]
                if key == "same" and not run[key] and plain_of(way) not in ENGINES:
                    both = (texts[reference], texts[way])
                    options = {"temperature": self.temperature, "seed": seed}
                    parted = first_divergence(self.model, prompt.input_ids, *both, **options)
                    run["divergence"] = None if parted is None else parted.as_dict()
        self.report.runs += runs
        return texts

    def _measured(self, way: str, decoded: Run) -> tuple[list[int], dict[str, Any]]:
        """The new tokens without the end's, which not every engine gives, and what they took.

        Seconds beside the models are of captures, the host, what comes before and after.
        """
        stats, seconds = decoded.stats, decoded.seconds or 0.0
        if way in UNDRAFTED and stats is not None and stats.target_rows > stats.steps:
            raise RuntimeError(f"{way} drafted: {stats.target_rows} rows in {stats.steps} steps")
        ended = next((place for place, token in enumerate(decoded.tokens) if token in self.ends), None)
        text = decoded.tokens[:ended]
        return text, {
            "tokens": max(1, len(text)),
            "ended": ended is not None,
            "seconds": seconds,
            "steps": decoded.target_forwards,
            "rows_per_step": stats.target_rows / stats.steps if stats is not None and stats.steps else None,
            "beside_seconds": stats and seconds - sum(stats.seconds.get(part, 0.0) for part in FORWARDS),
            **({"stats": stats and stats.as_dict()} if self.with_stats else {}),
        }

    def _still(self, racing: list[str]) -> list[str]:
        """Ours, and whoever is not far behind the fastest of the others."""
        rates = {row["way"]: row["tokens_per_second"] for row in self.report.summary}
        fastest = max((rate for way, rate in rates.items() if way not in OURS), default=0.0)
        return [way for way in racing if way in OURS or rates[way] >= SLOW_SHARE * fastest]

    def _say(self, what: str) -> None:
        print(f"{self.report.case}: {what}", file=sys.stderr, flush=True)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM, as ``timeout`` sends it, ends the block as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
