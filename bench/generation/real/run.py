"""One interleaved run of everyday work, in this process and those of other engines, with a cache folder of its own."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from gsd_kernels_cli.busy import Others, distrust
from gsd_kernels_cli.comparison import first_divergence

from ...lib.environment import environment
from ..competitors import Competitor, warmed_up
from ..pairs import Pair, Prompt
from ..peers.race import Peers
from .models import Real, bits_of, load_real
from .names import HF, OURS, PACKED, PLAIN, check_ways, label, plain_of
from .prompts import Chat, encoded, first_of_each_kind, read_chats
from .report import RealReport
from .ways import engines_for, names_of, own_ways

NAME = "real"
WARM_UP_TOKENS = 8
TEMPLATE_TOKENS = 32  # that a chat template may write round an answer
SLOW_SHARE = 0.6  # of the fastest peer's rate: who is below sits out later rounds


@dataclass(frozen=True)
class Settings:
    """One run.

    Attributes:
        model, draft, drafter: as on the command line; ``None``: SmolLM2, nothing.
        dtype: of our weights and transformers', and of the arithmetic of engines that have the choice.
        new_tokens: at most; a text may end before.
        rounds: over all prompts. In the first everyone decodes, later those who matter for the comparison.
        ways: by default all that there are.
        prompts: a file of one's own.
        llama_cpp: folder of llama.cpp's binaries.
        limit: the first so many prompts of every kind.
    """

    model: str | None = None
    draft: str | None = None
    drafter: str | None = None
    dtype: torch.dtype = torch.bfloat16
    new_tokens: int = 160
    rounds: int = 1
    ways: Sequence[str] = ()
    prompts: Path | None = None
    llama_cpp: Path | None = None
    limit: int | None = None


def name_of(settings: Settings) -> str:
    """Of the file of results: README's table is made of the whole run of this benchmark's own model and prompts."""
    given = (settings.model, settings.draft, settings.drafter, settings.prompts)
    own = [re.sub(r"[^\w.]+", "-", Path(part).name or str(part)).lower() for part in given if part is not None]
    part = ["part"] if settings.ways else []
    quick = [] if settings.limit is None else ["quick" if settings.limit == 1 else f"first-{settings.limit}"]
    return "-".join([NAME, str(settings.dtype).removeprefix("torch."), *own, *part, *quick])


def run(settings: Settings, *, folder: Path | None = None, name: str = NAME) -> RealReport:
    """Race the ways; after every prompt the results so far are written to ``folder``.

    Ctrl-C and SIGTERM end the race with the prompts that everyone has decoded.

    Raises:
        KeyboardInterrupt: it was ended before the first prompt was decoded.
        ValueError: a way that there is not, or prompts or models that cannot be read.
    """
    check_ways(settings.ways)
    with _terminable():
        return _run(settings, folder, name)


def _run(settings: Settings, folder: Path | None, name: str) -> RealReport:
    chats, tuning = read_chats(settings.prompts)
    if settings.limit is not None:
        chats = first_of_each_kind(chats, settings.limit)
    _say("loading the model")
    real = load_real(settings.model, settings.draft, settings.drafter, settings.dtype)
    engines = engines_for(real, settings.llama_cpp)
    names = _named(settings.ways, names_of(real, engines))
    prompts, others = encoded(chats, real.tokenizer), encoded(tuning, real.tokenizer)
    longest = [_to_the_end(real, chat, settings.new_tokens) for chat in chats if chat.turns]
    pair = Pair(real.name, real.model, real.shared_draft, [*prompts, *longest])
    report = RealReport(
        settings={
            "model": real.name,
            "dtype": str(settings.dtype).removeprefix("torch."),
            "draft": settings.draft,
            "drafter": settings.drafter,
            "prompts": "own" if settings.prompts else "bench/generation/real/prompts.json",
            "new_tokens": settings.new_tokens,
            "rounds": settings.rounds,
            "ways": names,
        },
        environment=environment(torch.device("cpu")),
        parameters=real.model.num_parameters(),
        prompts={prompt.name: _about(prompt, chat) for prompt, chat in zip(prompts, chats, strict=True)},
    )
    with (
        cold_cache(),
        Peers(pair, names, others, new_tokens=settings.new_tokens, engines=engines, ends=real.ends) as peers,
    ):
        report.peers = peers.notes
        if real.packed is not None:
            report.peers |= {PACKED: {"bits": bits_of(real.packed)}}
        ways = {way.name: way for way in (*own_ways(real, names), *peers.competitors)}
        sorted_ways = [ways[name] for name in names if name in ways]
        racing = warmed_up(sorted_ways, others[0].input_ids, lambda way: WARM_UP_TOKENS, report)
        try:
            _rounds(settings, real, chats, racing, report, folder, name)
        except KeyboardInterrupt:
            if not report.runs:
                raise
            report.stopped = True
    return report


def _about(prompt: Prompt, chat: Chat) -> dict[str, Any]:
    return {"kind": prompt.kind, "tokens": prompt.input_ids.shape[1], "question": chat.question or chat.name}


def _to_the_end(real: Real, chat: Chat, new_tokens: int) -> Prompt:
    """A prompt as long as a chat's last turn can be, for engines that ask for the length before."""
    said = [*chat.messages, *({"role": "user", "content": turn} for turn in chat.turns)]
    (prompt,) = encoded([Chat(chat.name, chat.kind, said)], real.tokenizer)
    room = len(chat.turns) * (new_tokens + TEMPLATE_TOKENS)
    return Prompt(prompt.name, prompt.kind, torch.nn.functional.pad(prompt.input_ids, (0, room)))


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM, as ``timeout`` sends it, ends the block as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _named(wanted: Sequence[str], known: Sequence[str]) -> list[str]:
    for way in wanted:
        if way not in known:
            raise ValueError(f"--ways: {way!r} cannot take part with this model and these engines: {', '.join(known)}")
    return [way for way in known if not wanted or way in wanted]


@contextmanager
def cold_cache() -> Iterator[None]:
    """Nothing that was learned before helps: a folder of the run's own in place of the user's cache."""
    before = os.environ.get("GSD_KERNELS_CACHE")
    # What costs have been learned is written behind a race, also behind one that is stopped while the folder goes.
    with tempfile.TemporaryDirectory(prefix="gsd-kernels-cold-", ignore_cleanup_errors=True) as cold:
        os.environ["GSD_KERNELS_CACHE"] = cold
        try:
            yield
        finally:
            if before is None:
                del os.environ["GSD_KERNELS_CACHE"]
            else:
                os.environ["GSD_KERNELS_CACHE"] = before


def _rounds(
    settings: Settings,
    real: Real,
    chats: Sequence[Chat],
    racing: list[Competitor],
    report: RealReport,
    folder: Path | None,
    name: str,
) -> None:
    """Every prompt's ways decode one after the other, beginning with another one each time.

    A chat of several turns goes on with the first way's answers, the same for all ways and rounds.
    """
    begin, others = time.perf_counter(), Others()
    answers: dict[str, str] = {}
    for round_ in range(settings.rounds):
        if round_:
            racing = _still(racing, report)
        for number, first in enumerate(chats):
            turn = (number + round_) % len(racing)
            chat: Chat | None = first
            while chat is not None:
                (prompt,) = encoded([chat], real.tokenizer)
                report.prompts[prompt.name] = _about(prompt, chat)
                texts: dict[str, list[int]] = {}
                runs: list[dict[str, Any]] = []
                for way in racing[turn:] + racing[:turn]:
                    _say(f"round {round_ + 1}/{settings.rounds}, prompt {number + 1}/{len(chats)}, {way.name}")
                    texts[way.name], measured = _decode(real, way, prompt, settings.new_tokens, round_)
                    runs.append({"prompt": prompt.name, "way": way.name, "round": round_, **measured})
                for run_ in runs:
                    run_.update(_compared(real.model, prompt, texts, run_["way"]))
                report.runs += runs  # at once: a prompt counts that everyone has decoded
                answer = real.tokenizer.decode(texts[racing[0].name], skip_special_tokens=True)
                chat = chat.answered(answers.setdefault(chat.name, answer))
            report.summarise([way.name for way in racing] if not round_ else None)
            report.seconds = time.perf_counter() - begin
            report.others_share = others.share()
            report.busy = distrust(report.others_share)
            left = len(chats) * settings.rounds - 1
            if number == round_ == 0 and left:
                _say(_estimate(report.seconds, left))
            if folder is not None:
                report.write(folder, name)


def _estimate(seconds: float, left: int) -> str:
    """How long the rest takes, by the first prompt."""
    rest = f"about {seconds * left / 60:.0f} minutes" if seconds * left >= 90 else f"about {seconds * left:.0f} s"
    return f"the first prompt took {seconds:.0f} s, so the other {left} take {rest}; Ctrl-C ends with the table so far"


def _still(racing: list[Competitor], report: RealReport) -> list[Competitor]:
    """Ours, and whoever is not far behind the fastest of the others."""
    rates = {row["way"]: row["tokens_per_second"] for row in report.summary}
    fastest = max((rate for way, rate in rates.items() if way not in OURS), default=0.0)
    return [way for way in racing if way.name in OURS or rates[way.name] >= SLOW_SHARE * fastest]


def _decode(
    real: Real, way: Competitor, prompt: Prompt, new_tokens: int, round_: int
) -> tuple[list[int], dict[str, Any]]:
    """The new tokens without the end's, which not every engine gives, and what they took."""
    tokens, seconds, decoded = way.timed(prompt.input_ids, new_tokens, round_)
    ended = next((place for place, token in enumerate(tokens) if token in real.ends), None)
    stats = decoded.stats
    if way.name in (PLAIN, PACKED) and stats is not None and stats.target_rows > stats.steps:
        raise RuntimeError(f"{way.name} drafted: {stats.target_rows} rows in {stats.steps} steps")
    text = tokens[:ended]
    return text, {
        "tokens": max(1, len(text)),
        "ended": ended is not None,
        "seconds": seconds,
        "steps": decoded.target_forwards,
        "rows_per_step": stats.target_rows / stats.steps if stats is not None and stats.steps else None,
    }


def _compared(model: PreTrainedModel, prompt: Prompt, texts: dict[str, list[int]], way: str) -> dict[str, Any]:
    """Compare the text with transformers' and with its engine's plain one, and say why a first difference is there."""
    result: dict[str, Any] = {}
    mine = texts[way]
    for key, reference in (("same", HF), ("same_as_plain", plain_of(way))):
        if reference in texts and reference != way:
            result[key] = mine == texts[reference]
    if result.get("same") is False and label(way).engine in ("gsd_kernels", "transformers"):
        divergence = first_divergence(model, prompt.input_ids, texts[HF], mine)
        result["within_rounding"] = divergence is not None and divergence.within_rounding
    return result


def _say(what: str) -> None:
    print(f"{NAME}: {what}", file=sys.stderr, flush=True)
