"""Every draft source, alone and together, on three kinds of text: tokens per forward and tokens per second.

Texts, settings and configurations below were fixed before the run. Each cell (a text at a temperature) is one
interleaved run of :mod:`gsd_kernels_bench.generation.generate`. A run that is stopped goes on where it was: finished
cells are kept beside the result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gsd_kernels_hf.files import write_json

from ..lib.environment import environment
from ..lib.intervals import Ratio, paired_ratio
from ..lib.report import SCHEMA, markdown
from . import generate
from .generate import Settings, title

NAME = "sources"
TEXTS = ("copy", "code", "prose")
TEMPERATURES = (0.0, 0.7)
THEIRS = ("hf-greedy", "hf-assisted-5", "hf-assisted-dynamic", "hf-prompt-lookup")
OURS = (
    "plain",
    "chain",
    "tree",
    "merged",
    "history",
    "history-auto",
    "layer-skip",
    "heads",
    "graph",
    "all",
    "heads-auto",
)
LABELS = {
    "hf-greedy": "transformers, plain",
    "hf-assisted-5": "transformers, assisted (5)",
    "hf-assisted-dynamic": "transformers, assisted (dynamic)",
    "hf-prompt-lookup": "transformers, prompt lookup",
    "merged": "graph, draft alone",
    "history": "history alone, rows of prompt lookup",
    "history-auto": "history alone, automatic rows",
    "layer-skip": "layer skipping alone",
    "heads": "heads alone",
    "graph": "graph, draft and history",
    "all": "graph, draft, heads and history",
    "heads-auto": "draft, heads and history, auto",
}
#: What the table is asked: ours against which of theirs, by what.
QUESTIONS = (
    ("history-auto", ("hf-prompt-lookup",), "seconds"),
    ("history", ("hf-prompt-lookup",), "target_forwards"),
    ("graph", ("merged",), "seconds"),
    ("graph", ("merged",), "target_forwards"),
    ("heads-auto", ("hf-assisted-5", "hf-assisted-dynamic", "hf-prompt-lookup"), "seconds"),
)


@dataclass(frozen=True)
class Table:
    """What a table holds.

    Attributes:
        case: its name in the result.
        names: of the rows.
        labels: of rows that are not called by their names.
        questions: see :data:`QUESTIONS`.
        temperatures: of every text.
        counts: whether it has no times.
        gated: whether all texts must be those of plain decoding, but for rounding, and the table says so.
    """

    case: str
    names: tuple[str, ...]
    labels: dict[str, str]
    questions: tuple[tuple[str, tuple[str, ...], str], ...]
    temperatures: tuple[float, ...]
    counts: bool = False
    gated: bool = False


SOURCES = Table(NAME, (*THEIRS, *OURS), LABELS, QUESTIONS, TEMPERATURES)
TIMES = ("seconds", "place", "tokens_per_second", "median_seconds", "speedup")
SAME = ("compared", "equal", "within_rounding")
KEPT = ("prompt", "competitor", "place", "tokens", "seconds", "target_forwards", "mean_rows", "same", "divergence")


def run(settings: Settings, *, texts: Sequence[str], folder: Path, name: str = NAME, spec: Table = SOURCES) -> str:
    """Fill the cells, write ``name``.json and .md to ``folder``, and return the table.

    Raises:
        RuntimeError: a text differs where the table is gated.
    """
    journal = folder / f"{name}.partial.json"
    left_out = ("device", "dtype", "text", "temperature", "seconds")
    head: dict[str, Any] = {key: value for key, value in asdict(settings).items() if key not in left_out}
    head |= {"drafter": None if settings.drafter is None else settings.drafter.name}
    head = json.loads(json.dumps({**head, "dtype": str(settings.dtype).removeprefix("torch.")}))
    result: dict[str, Any] = {"schema": SCHEMA, "case": spec.case, "settings": head, "cells": []}
    if journal.exists() and (earlier := json.loads(journal.read_text(encoding="utf-8")))["settings"] == head:
        result = earlier
    done = {(cell["text"], cell["temperature"]) for cell in result["cells"]}
    for text in texts:
        for temperature in spec.temperatures:
            if (text, temperature) in done:
                continue
            print(f"{name}: {text}, temperature {temperature}", file=sys.stderr, flush=True)
            report = generate.run(replace(settings, text=text, temperature=temperature))
            if spec.gated:
                _check_texts(report)
            result["parameters"], result["configs"] = report.parameters, report.settings["configs"]
            result["cells"].append(
                {
                    "text": text,
                    "temperature": temperature,
                    "environment": report.environment,
                    "prompts": report.prompts,
                    "missing": report.missing,
                    "summary": [_kept(row, list(row), spec) for row in report.summary],
                    "questions": _answers(report.runs, spec),
                    "runs": [_kept(run_, KEPT, spec) for run_ in report.runs],
                }
            )
            write_json(journal, result, indent=None)
    result["environment"] = environment(settings.device)
    written = table(result, spec)
    write_json(folder / f"{name}.json", result, indent=None)
    (folder / f"{name}.md").write_text(written + "\n", encoding="utf-8")
    journal.unlink(missing_ok=True)
    return written


def _check_texts(report: generate.GenerateReport) -> None:
    """Raise unless all texts that were compared are the same, but for rounding."""
    for row in report.summary:
        if row["beyond_rounding"]:
            texts = [run_ for run_ in report.runs if run_["competitor"] == row["competitor"]]
            wrong = ", ".join(run_["prompt"] for run_ in texts if run_["same"] is False)
            raise RuntimeError(f"{row['competitor']}: another text than plain decoding's, beyond rounding, in {wrong}")


def _sameness(cells: Sequence[dict[str, Any]]) -> str:
    """How many texts were compared and are the same."""
    compared, equal, near = (sum(row[k] for c in cells for row in c["summary"]) for k in SAME)
    rounded = f", {near} by rounding" if near else ""
    return f" Texts equal to plain decoding's: {equal} of {compared}{rounded}." if compared else ""


def weights_said(settings: dict[str, Any]) -> str:
    """Which drafters, by the beginning of their files' SHA-256."""
    found = ", ".join(f"{kind} {digest}" for kind, digest in settings.get("drafter_weights", {}).items())
    return f" Drafters, by the SHA-256 of their weights: {found}." if found else ""


def _kept(row: dict[str, Any], keys: Sequence[str], spec: Table) -> dict[str, Any]:
    return {key: row[key] for key in keys if not (spec.counts and key in TIMES)}


def _answers(runs: list[dict[str, Any]], spec: Table) -> list[dict[str, Any]]:
    """Ratios of rates, by time and by forwards, against the fastest of those named."""
    answers = []
    for ours, theirs, cost in spec.questions:
        totals = {
            name: [(run_["tokens"], run_[cost]) for run_ in runs if run_["competitor"] == name]
            for name in (ours, *theirs)
        }
        there = [name for name in theirs if totals[name] and all(c for _, c in totals[name])]
        if not there or not totals[ours]:
            continue
        best = max(there, key=lambda name: sum(t for t, _ in totals[name]) / sum(c for _, c in totals[name]))
        ratio = paired_ratio(totals[ours], totals[best])
        answers.append({"ours": ours, "against": best, "by": cost, "ratio": asdict(ratio)})
    return answers


def table(result: dict[str, Any], spec: Table = SOURCES) -> str:
    """Tokens per second and per forward of every cell, or the latter alone, and the answers, in Markdown."""
    cells = result["cells"]
    heads = [f"{c['text']}, {'greedy' if c['temperature'] == 0 else 'T = ' + str(c['temperature'])}" for c in cells]
    found = [{row["competitor"]: row for row in cell["summary"]} for cell in cells]
    rows = []
    for name in spec.names:
        if not any(name in cell for cell in found):
            continue
        entries = []
        for cell in found:
            row = cell.get(name)
            if spec.counts:
                entries.append("–" if row is None else f"{row['tokens_per_forward']:.2f}")
                continue
            forward = "" if row is None or row["tokens_per_forward"] is None else f" ({row['tokens_per_forward']:.2f})"
            entries.append("–" if row is None else f"{row['tokens_per_second']:.1f}{forward}")
        rows.append([spec.labels.get(name, name), *entries])
    what = title({**result["settings"], "temperature": 0.0}, result["parameters"]).replace(", greedy", "")
    counts = [len(cell["prompts"]) for cell in cells]
    prompts = " to ".join(f"{count}" for count in sorted({min(counts), max(counts)}))
    said = (_sameness(cells) if spec.gated else "") + weights_said(result["settings"])
    counted = (
        "Tokens per target forward, which no load changes"
        if spec.counts
        else "Tokens per second (and per target forward)"
    )
    answers = []
    for ours, theirs, cost in spec.questions:
        entries = []
        for cell in cells:
            asked = (a for a in cell["questions"] if (a["ours"], a["by"]) == (ours, cost) and a["against"] in theirs)
            answer = next(asked, None)
            best = ""
            if answer is not None and len(theirs) > 1:
                best = f" {spec.labels.get(answer['against'], answer['against'].removeprefix('hf-'))}"
            entries.append("–" if answer is None else f"{Ratio(**answer['ratio'])}{best}")
        best_of = "the fastest of transformers' assisted and prompt lookup"
        if not theirs[0].startswith("hf-"):
            best_of = " or ".join(spec.labels.get(name, name) for name in theirs)
        against = spec.labels.get(theirs[0], theirs[0]) if len(theirs) == 1 else best_of
        by = "tokens/s" if cost == "seconds" else "tokens/forward"
        answers.append([f"{spec.labels.get(ours, ours)} against {against}, {by}", *entries])
    return "\n".join(
        [
            f"{counted}; {what}, {prompts} prompts of each text.{said}",
            "",
            markdown(["", *heads], rows),
            "",
            "Ratios with paired bootstrap 95% intervals:",
            "",
            markdown(["", *heads], answers),
        ]
    )
