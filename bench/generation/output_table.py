"""Drafters by place in the output: tokens a target forward in windows of the text that is written.

Texts go on past the end that the model gives them. What a small model writes then soon repeats itself, which a history
drafts well: beside the counts stands how much of each window was written before, and how many texts had ended. A
forward counts for the window in which its first token lies.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from gsd_kernels_cli.comparison import first_divergence
from gsd_kernels_cli.demo import smollm2
from gsd_kernels_hf.files import write_json
from gsd_kernels_hf.records import Verified

from ..lib.environment import environment
from ..lib.intervals import paired_ratio
from ..lib.report import SCHEMA, markdown
from . import chat_pair
from .competitors import competitors
from .drafters_table import TABLE
from .generate import Settings
from .long_table import rope_said, stretched
from .pairs import Pair, Prompt, load_pair
from .sources_table import weights_said

NAME = "output"
GRAM = 8  # tokens in a row that make a repeat
FEWEST = 6  # prompts for an interval
NAMES = ("history-16", "merged", "graph", "eagle3", "eagle3-history", "dflash-lattice", "dflash-history")
CHAT_NAMES = ("history-16", "eagle3", "eagle3-history")
BOTH = {"graph": ("history-16", "merged"), "eagle3-history": ("history-16", "eagle3")}
BOTH |= {"dflash-history": ("history-16", "dflash-lattice")}


def pair_of(settings: Settings, texts: Sequence[str]) -> tuple[Pair, list[int]]:
    """The target with its drafters, endless, its prompts, and the tokens that end a text.

    Raises:
        ValueError: an unknown text.
    """
    options: dict[str, Any] = {"device": settings.device, "dtype": settings.dtype, "texts": texts}
    if settings.pair != chat_pair.NAME:
        pair = load_pair(settings.pair, **options, prompts=settings.prompts, fresh=True)
        longest = max(prompt.input_ids.shape[1] for prompt in pair.prompts)
        return stretched(pair, longest + settings.new_tokens), []
    pair = chat_pair.chat_pair(**options, prompts=settings.prompts)
    config = pair.target.generation_config
    ends, config.eos_token_id = config.eos_token_id, None
    return pair, [ends] if isinstance(ends, int) else list(ends or ())


def begins_of(new_tokens: int, window: int) -> list[int]:
    """Where the windows of a text begin; a rest that fills none belongs to the last one."""
    return [window * place for place in range(max(1, new_tokens // window))]


def windows_of(steps: Sequence[int], begins: Sequence[int]) -> tuple[list[int], list[int]]:
    """Tokens and forwards by window, of the tokens that each forward gave."""
    tokens, forwards = [0] * len(begins), [0] * len(begins)
    place = at = 0
    for gained in steps:
        while at + 1 < len(begins) and begins[at + 1] <= place:
            at += 1
        tokens[at] += gained
        forwards[at] += 1
        place += gained
    return tokens, forwards


def repeats(text: Sequence[int], begins: Sequence[int]) -> list[float]:
    """By window, the share of tokens that end a row of :data:`GRAM` tokens which is earlier in the text."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for end in range(1, len(text) + 1):
        row = tuple(text[max(0, end - GRAM) : end])
        found.append(row in seen)
        seen.add(row)
    parts = [found[begin:end] for begin, end in zip(begins, [*begins[1:], len(found)], strict=True)]
    return [sum(part) / len(part) for part in parts]


def decoded(
    pair: Pair, prompt: Prompt, settings: Settings, temperature: float, begins: Sequence[int], ends: Sequence[int]
) -> dict[str, Any]:
    """One text by all ways: its repeats, where it ended, tokens and forwards of each way by window.

    Raises:
        RuntimeError: two ways wrote different texts, beyond rounding.
    """
    steps: list[int] = []

    def observe(verified: Verified) -> None:
        steps.append(int(verified.accepted.num_accepted[0]))

    found: dict[str, Any] = {"prompt": prompt.name, "text": prompt.kind, "temperature": temperature, "ways": {}}
    first: Tensor | None = None
    for way in competitors(pair, settings.competitors, temperature=temperature, observer=observe):
        if way.decode is None:
            continue
        steps.clear()
        new = way.decode(prompt.input_ids, settings.new_tokens, 0).sequences[0, prompt.input_ids.shape[1] :]
        first = new if first is None else first
        plain, other = first.tolist(), new.tolist()
        gap = first_divergence(pair.target, prompt.input_ids, plain, other, temperature=temperature)
        if gap is not None and not gap.within_rounding:
            raise RuntimeError(f"{way.name}: another text than the other ways', beyond rounding, in {prompt.name}")
        tokens, forwards = windows_of(steps, begins)
        found["ways"][way.name] = {"tokens": tokens, "forwards": forwards, "same": gap is None}
    assert first is not None
    text = first.tolist()
    found["repeats"] = repeats(text, begins)
    found["ended"] = next((place for place, token in enumerate(text) if token in ends), None)
    return found


def run(
    settings: Settings,
    texts: Sequence[str],
    *,
    window: int,
    temperatures: Sequence[float],
    folder: Path,
    name: str,
) -> str:
    """Decode every prompt by every way, write ``name``.json and .md to ``folder``, and return the table.

    What is decoded is kept beside the result until all is: a run that is stopped goes on where it was.

    Raises:
        RuntimeError: two ways wrote different texts.
        ValueError: an unknown text.
    """
    journal = folder / f"{name}.partial.json"
    head = {
        "pair": settings.pair,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "texts": list(texts),
        "prompts": settings.prompts,
        "new_tokens": settings.new_tokens,
        "window": window,
        "temperatures": list(temperatures),
        "competitors": list(settings.competitors),
        "drafter_weights": dict(settings.drafter_weights),
    }
    result: dict[str, Any] = {"schema": SCHEMA, "case": f"drafters-{NAME}", "settings": head, "runs": []}
    if journal.exists() and (earlier := json.loads(journal.read_text(encoding="utf-8")))["settings"] == head:
        result = earlier
    done = {(run_["prompt"], run_["temperature"]) for run_ in result["runs"]}
    (pair, ends), begins = pair_of(settings, texts), begins_of(settings.new_tokens, window)
    for temperature in temperatures:
        for prompt in pair.prompts:
            if (prompt.name, temperature) in done:
                continue
            print(f"{name}: {prompt.name}, temperature {temperature}", file=sys.stderr, flush=True)
            result["runs"].append(decoded(pair, prompt, settings, temperature, begins, ends))
            write_json(journal, result, indent=None)
    rope = None if settings.pair == chat_pair.NAME else pair.target.config.rope_parameters
    result |= {"rope": rope, "environment": environment(settings.device)}
    written = table(result)
    write_json(folder / f"{name}.json", result, indent=None)
    (folder / f"{name}.md").write_text(written + "\n", encoding="utf-8")
    journal.unlink(missing_ok=True)
    return written


def table(result: dict[str, Any]) -> str:
    """Tokens a forward by window, with and without the history, repeats and ends, in Markdown."""
    settings = result["settings"]
    new_tokens, chats = settings["new_tokens"], settings["pair"] == chat_pair.NAME
    begins = begins_of(new_tokens, settings["window"])
    heads = [f"{begin:,}–{end:,}" for begin, end in zip(begins, [*begins[1:], new_tokens], strict=True)]
    rows = []
    for temperature in settings["temperatures"]:
        runs = [run_ for run_ in result["runs"] if run_["temperature"] == temperature]
        rows += _rows(runs, "greedy" if temperature == 0 else f"T = {temperature}", settings["competitors"], begins)
    ways = [way for run_ in result["runs"] for way in run_["ways"].values()]
    names = ", ".join(dict.fromkeys(run_["prompt"] for run_ in result["runs"]))
    what = f"{smollm2.NAME if chats else 'demo pair'}, {settings['dtype']}"
    turned = "" if result["rope"] is None else f"; rotary settings of all models: {rope_said(result['rope'])}"
    head = (
        f"Tokens a target forward by place in the output, which no load changes; {what}, {new_tokens:,} new tokens "
        f"after each of {names}{turned}. Texts go on past their end. Texts equal to the first way's: "
        f"{sum(way['same'] for way in ways)} of {len(ways)}.{weights_said(settings)}"
    )
    return "\n\n".join([head, markdown(["output tokens", *heads], rows)])


def _rows(runs: Sequence[dict[str, Any]], how: str, names: Sequence[str], begins: Sequence[int]) -> list[list[str]]:
    """The rows of one temperature."""

    def totals(name: str, at: int) -> list[tuple[float, float]]:
        return [(run_["ways"][name]["tokens"][at], run_["ways"][name]["forwards"][at]) for run_ in runs]

    def rate(name: str, at: int) -> float:
        tokens, forwards = (sum(part) for part in zip(*totals(name, at), strict=True))
        return tokens / max(1, forwards)

    places, rows = range(len(begins)), []
    there = [name for name in names if name in runs[0]["ways"]]
    for name in there:
        rows.append([f"{TABLE.labels[name]}, {how}", *(f"{rate(name, at):.2f}" for at in places)])
    for name, alone in BOTH.items():
        if name in there and all(one in there for one in alone):
            ratios = []
            for at in places:
                best = max(alone, key=lambda one, at=at: rate(one, at))
                ratios.append(str(paired_ratio(totals(name, at), totals(best, at), fewest=FEWEST)))
            rows.append([f"{TABLE.labels[name]} against the better of the two alone, {how}", *ratios])
    said = [sum(run_["repeats"][at] for run_ in runs) / len(runs) for at in places]
    rows.append([f"written before in rows of {GRAM} tokens, {how}", *(f"{x:.0%}" for x in said)])
    if any(run_["ended"] is not None for run_ in runs):
        over = [sum(run_["ended"] is not None and run_["ended"] < begin for run_ in runs) for begin in begins]
        rows.append([f"texts past their end where it begins, {how}", *(f"{n} of {len(runs)}" for n in over)])
    return rows
