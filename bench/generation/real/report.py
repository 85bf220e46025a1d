"""Results of the runs: rates, intervals against the strongest others, texts compared."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gsd_kernels_hf.files import write_json

from ...lib.intervals import Ratio, paired_ratio
from ...lib.report import SCHEMA, markdown
from .names import HF, HISTORY, OURS, PACKED_HISTORY, PLAIN, label, plain_of

MIN_PROMPTS = 6  # prompts that give a ratio an interval
NARROW_BITS = 8.0  # bits a weight; with fewer a model computes something else than it was trained to


@dataclass
class RealReport:
    """Every decoding of the run, and what follows.

    Attributes:
        prompts: by name their kind, length in tokens, and the question that they are a turn of.
        peers: per engine version and bits a weight, per way the chosen setting.
        runs: one decoding each; ``tokens`` are new ones, ``seconds`` those of prompt and text.
        ratios: our history's rate over every other's, over the prompts that both decoded.
        strongest: of others: by rate, with eight bits a weight or more, and with fewer.
        seconds: of all rounds.
        others_share: of the machine's processor time meanwhile, what other programs took.
        busy: what is therefore said of the times; ``None`` where they can be trusted.
        stopped: whether it was interrupted; the prompts that everyone had decoded count.
    """

    settings: dict[str, Any]
    environment: dict[str, Any]
    parameters: int
    prompts: dict[str, dict[str, Any]]
    peers: dict[str, Any] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    setup_seconds: dict[str, float] = field(default_factory=dict)
    summary: list[dict[str, Any]] = field(default_factory=list)
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)
    strongest: dict[str, str | None] = field(default_factory=dict)
    seconds: float = 0.0
    others_share: float | None = None
    busy: str | None = None
    stopped: bool = False
    case: str = "real"
    schema: int = SCHEMA

    def write(self, folder: Path, name: str) -> list[Path]:
        """Write ``name``.json; the files written."""
        folder.mkdir(parents=True, exist_ok=True)
        return [write_json(folder / f"{name}.json", asdict(self))]

    def totals(self, way: str, kind: str | None = None) -> dict[str, tuple[float, float]]:
        """Tokens and seconds of a way by prompt, the mean over its rounds."""
        pairs: dict[str, list[tuple[float, float]]] = {}
        for run in self.runs:
            if run["way"] == way and kind in (None, self.prompts[run["prompt"]]["kind"]):
                pairs.setdefault(run["prompt"], []).append((run["tokens"], run["seconds"]))
        return {
            prompt: (statistics.fmean(t for t, _ in each), statistics.fmean(s for _, s in each))
            for prompt, each in pairs.items()
        }

    def ratio(self, ours: str, theirs: str) -> Ratio:
        """Of rates, over the prompts that both decoded."""
        a, b = self.totals(ours), self.totals(theirs)
        both = [prompt for prompt in a if prompt in b]
        return paired_ratio([a[prompt] for prompt in both], [b[prompt] for prompt in both], fewest=MIN_PROMPTS)

    def bits(self, way: str) -> float:
        """A weight."""
        names = sorted((name for name in self.peers if way == name or way.startswith(f"{name}-")), key=len)
        own = {"float32": 32, "bfloat16": 16, "float16": 16, "float64": 64}[self.settings["dtype"]]
        known = [self.peers[name]["bits"] for name in names if "bits" in self.peers[name]]
        return known[-1] if known else own

    def summarise(self, names: Sequence[str] | None = None) -> None:
        """Make the summary anew of ``names``; by default of those that are in it."""
        names = [row["way"] for row in self.summary] if names is None else names
        kinds = list(dict.fromkeys(prompt["kind"] for prompt in self.prompts.values()))
        self.summary = [self._row(name, kinds) for name in names]
        self.ratios = {}
        if HISTORY in names:
            self.ratios = {name: asdict(self.ratio(HISTORY, name)) for name in names if name != HISTORY}
        others = [row for row in self.summary if row["way"] not in OURS]
        groups = {
            "wide": [row for row in others if row["bits"] >= NARROW_BITS],
            "narrow": [row for row in others if row["bits"] < NARROW_BITS],
            "transformers": [row for row in others if label(row["way"]).engine == "transformers"],
        }
        self.strongest = {
            group: max(rows, key=lambda row: row["tokens_per_second"])["way"] if rows else None
            for group, rows in groups.items()
        }
        narrow = self.strongest["narrow"]
        if PACKED_HISTORY in names and narrow is not None:
            self.ratios[f"{PACKED_HISTORY} / {narrow}"] = asdict(self.ratio(PACKED_HISTORY, narrow))

    def _row(self, name: str, kinds: Sequence[str]) -> dict[str, Any]:
        runs = [run for run in self.runs if run["way"] == name]
        first = [run for run in runs if run["round"] == 0]
        compared = [run for run in first if "same" in run]
        plain = [run for run in first if "same_as_plain" in run]
        by_kind = {kind: self.totals(name, kind) for kind in kinds}
        return {
            "way": name,
            "bits": self.bits(name),
            "tokens_per_second": _rate(self.totals(name)),
            "tokens_per_step": _per_step(runs),
            "acceptance_length": self._acceptance_length(runs),
            "rounds": 1 + max(run["round"] for run in runs),
            "texts": len(first),
            "tokens": sum(run["tokens"] for run in first),
            "compared": len(compared),
            "same": sum(run["same"] for run in compared),
            "within_rounding": sum(run.get("within_rounding", False) for run in compared),
            "compared_with_plain": len(plain),
            "same_as_plain": sum(run["same_as_plain"] for run in plain),
            "by_kind": {
                kind: {
                    "tokens_per_second": _rate(totals),
                    "tokens_per_step": _per_step(of := [r for r in runs if self.prompts[r["prompt"]]["kind"] == kind]),
                    "acceptance_length": self._acceptance_length(of),
                    "prompts": len(totals),
                }
                for kind, totals in by_kind.items()
                if totals
            },
        }

    def _acceptance_length(self, runs: Sequence[dict[str, Any]]) -> float | None:
        """Tokens a forward by question, all turns of it together, and the mean of these."""
        questions: dict[str, list[dict[str, Any]]] = {}
        for run in runs:
            questions.setdefault(self.prompts[run["prompt"]].get("question", run["prompt"]), []).append(run)
        lengths = [_per_step(each) for each in questions.values()]
        return None if not lengths or None in lengths else statistics.fmean(length for length in lengths if length)


def _rate(totals: dict[str, tuple[float, float]]) -> float:
    return sum(tokens for tokens, _ in totals.values()) / sum(seconds for _, seconds in totals.values())


def _per_step(runs: Sequence[dict[str, Any]]) -> float | None:
    """Tokens a forward of the model; ``None`` where an engine does not count them."""
    if not runs or not all(run["steps"] for run in runs):
        return None
    return sum(run["tokens"] + run["ended"] for run in runs) / sum(run["steps"] for run in runs)


def table(data: dict[str, Any], *, by_drafts: bool = False) -> str:
    """The summary in Markdown, slowest first; with ``by_drafts`` texts are held against undrafted ones alone."""
    rows = []
    for row in _by_rate(data):
        ratio, name = data["ratios"].get(row["way"]), str(label(row["way"]))
        rows.append(
            [
                f"**{name}**" if row["way"] == HISTORY else name,
                f"{row['bits']:.1f}".removesuffix(".0"),
                f"{row['tokens_per_second']:.1f}",
                "–" if row["tokens_per_step"] is None else f"{row['tokens_per_step']:.2f}",
                "–" if ratio is None else str(Ratio(**ratio)),
                _as_without_drafts(row) if by_drafts else _texts(row),
            ]
        )
    compared = "texts as without drafts" if by_drafts else "texts as transformers'"
    return markdown(["", "bits a weight", "tokens/s", "tokens/step", "our history against it (95%)", compared], rows)


def _as_without_drafts(row: dict[str, Any]) -> str:
    if row["way"] != HF and plain_of(row["way"]) == HF:
        return f"{row['same']} of {row['compared']}"
    return f"{row['same_as_plain']} of {row['compared_with_plain']}" if row["compared_with_plain"] else "–"


def _by_rate(data: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(data["summary"], key=lambda row: row["tokens_per_second"])


def _texts(row: dict[str, Any]) -> str:
    text = ""
    if row["compared"]:
        text = f"{row['same']} of {row['compared']}"
        if row["within_rounding"]:
            text += f", {row['within_rounding']} by rounding"
    if row["compared_with_plain"] and plain_of(row["way"]) != HF:
        whose = "our" if row["way"] in OURS else "its"
        text += f"{'; ' * bool(text)}as {whose} plain {row['same_as_plain']} of {row['compared_with_plain']}"
    return text or "–"


def verdicts(data: dict[str, Any]) -> list[str]:
    """Say what our history gains against the strongest others, one sentence each."""
    said = {
        "wide": "the fastest other with 8 bits a weight or more",
        "narrow": "the fastest other with fewer",
        "transformers": "transformers' fastest",
    }
    sentences = []
    for group, what in said.items():
        way = data["strongest"].get(group)
        if way is not None and way in data["ratios"]:
            sentences.append(f"{Ratio(**data['ratios'][way])} times {what} ({label(way)})")
    packed = f"{PACKED_HISTORY} / {data['strongest'].get('narrow')}"
    if packed in data["ratios"]:
        sentences.append(f"over the packed weights of the file {Ratio(**data['ratios'][packed])} times the same")
    if HF in data["ratios"]:
        sentences.append(f"{Ratio(**data['ratios'][HF])} times transformers' plain decoding")
    return sentences


def remarks(data: dict[str, Any]) -> list[str]:
    """Say what to know before the figures are read."""
    sentences = [data["busy"]] if data["busy"] else []
    decoded, asked = len({run["prompt"] for run in data["runs"]}), len(data["prompts"])
    if data["stopped"]:
        sentences.append(f"Stopped after {decoded} of {asked} prompts.")
    if decoded < MIN_PROMPTS:
        sentences.append(f"No intervals: {decoded} prompts are too few; from {MIN_PROMPTS} on there are.")
    return sentences


def gains(data: dict[str, Any]) -> str | None:
    """The first verdict as a sentence with the history's rate; ``None`` where the history did not take part."""
    if not (first := verdicts(data)[:1]):
        return None
    rate = next(row["tokens_per_second"] for row in data["summary"] if row["way"] == HISTORY)
    return f"In {data['settings']['dtype']} the history alone gives {rate:.0f} tokens/s: {'; '.join(first)}."


def exactness(data: dict[str, Any]) -> str:
    """Say how many texts of the history are transformers' own."""
    row = next(row for row in data["summary"] if row["way"] == HISTORY)
    same = f"{row['same']} of {row['compared']} texts with drafts are transformers' own"
    return f"In {data['settings']['dtype']} {same}, at {row['tokens_per_second']:.0f} tokens/s."


def kinds_table(data: dict[str, Any]) -> str:
    """Tokens a second by kind of work: ours and the strongest others."""
    chosen = [HF, *dict.fromkeys(way for way in data["strongest"].values() if way), *OURS]
    rows = {row["way"]: row for row in data["summary"]}
    chosen = [way for way in dict.fromkeys(chosen) if way in rows]
    kinds = list(dict.fromkeys(prompt["kind"] for prompt in data["prompts"].values()))
    lines = []
    for way in chosen:
        by_kind = rows[way]["by_kind"]
        cells = []
        for kind in kinds:
            rate = by_kind.get(kind)
            per_step = "" if not rate or rate["tokens_per_step"] is None else f" ({rate['tokens_per_step']:.1f})"
            cells.append("–" if not rate else f"{rate['tokens_per_second']:.0f}{per_step}")
        lines.append([str(label(way)), *cells])
    return markdown(["", *kinds], lines)


def lengths_table(data: dict[str, Any]) -> str:
    """Tokens a forward by kind as Spec-Bench and SPEED-Bench define their means, of all ways that count forwards."""
    kinds = list(dict.fromkeys(prompt["kind"] for prompt in data["prompts"].values()))
    lines = []
    for row in data["summary"]:
        for measure, said in (("tokens_per_step", "accepted tokens"), ("acceptance_length", "acceptance length")):
            values = [row["by_kind"].get(kind, {}).get(measure) for kind in kinds]
            if row[measure] is not None:
                cells = ["–" if value is None else f"{value:.2f}" for value in [*values, row[measure]]]
                lines.append([str(label(row["way"])), said, *cells])
    return markdown(["", "mean", *kinds, "all"], lines)


def short(data: dict[str, Any]) -> dict[str, Any]:
    """``data`` with transformers, the fastest of every other engine, also by bits a weight, and ours."""
    fastest = {label(row["way"]).engine: row["way"] for row in _by_rate(data) if row["way"] not in OURS}
    chosen = {HF, PLAIN, HISTORY, PACKED_HISTORY, *data["strongest"].values(), *fastest.values()}
    return {**data, "summary": [row for row in data["summary"] if row["way"] in chosen]}


def what(data: dict[str, Any]) -> str:
    """Say what was decoded, in one sentence without its end."""
    settings, prompts = data["settings"], data["prompts"]
    kinds = list(dict.fromkeys(prompt["kind"] for prompt in prompts.values()))
    own = "" if len(kinds) < 2 else f" ({', '.join(kinds)})"
    return (
        f"{settings['model']}, {data['parameters'] / 1e6:.0f}M, {settings['dtype']}, greedy, {len(prompts)} "
        f"prompts{own}, at most {settings['new_tokens']} new tokens, prompts' time included"
    )
