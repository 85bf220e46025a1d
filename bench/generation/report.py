"""Results of the runs: rates, intervals against the strongest others, texts compared."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..lib.report import SCHEMA, Columns, table
from .names import HF, HISTORY, LABELS, OURS, PACKED, PACKED_HISTORY, PLAIN, plain_of

RESAMPLES = 10_000  # of prompts, for an interval
MIN_PROMPTS = 6  # prompts that give a ratio an interval
NARROW_BITS = 8.0  # bits a weight; with fewer a model computes something else than it was trained to


@dataclass
class Report:
    """Every decoding of a race, and what follows.

    Attributes:
        settings: of the run. ``ours``: the way whose rate is compared with all others'; ``against``: the way that
            all are compared with.
        parameters: of the target, and of what else there is.
        prompts: by name their kind, length in tokens, and the question that they are a turn of.
        peers: per engine version and bits a weight, per way the chosen setting.
        runs: one decoding each; ``tokens`` are new ones, ``seconds`` those of prompt and text.
        setup_seconds: warm-up and compiling, which no run counts.
        ratios: the rate of ``ours`` over every other's, over the prompts that both decoded.
        strongest: of others: by rate, with eight bits a weight or more, and with fewer.
        seconds: of all rounds.
        others_share: of the machine's processor time meanwhile, what other programs took.
        busy: what is therefore said of the times; ``None`` where they can be trusted.
        stopped: whether it was interrupted; the prompts that everyone had decoded count.
    """

    case: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    parameters: int | dict[str, int]
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
    schema: int = SCHEMA

    def ratio(self, ours: str, theirs: str) -> dict[str, float | None]:
        """Of rates, total tokens over total seconds of the prompts that both decoded; with its 95% interval.

        Prompts are drawn with replacement, the same ones on both sides. Few of them give no interval: what is drawn of
        two or three varies too little.
        """
        found = [_totals([run for run in self.runs if run["way"] == way]) for way in (ours, theirs)]
        both = [prompt for prompt in found[0] if prompt in found[1]]
        a, b = (np.array([totals[prompt] for prompt in both]) for totals in found)  # [prompts, 2]

        def over(chosen: Any) -> Any:
            (tokens, seconds), (their_tokens, their_seconds) = (of[chosen].sum(-2).T for of in (a, b))
            return tokens / seconds / (their_tokens / their_seconds)

        low = high = None
        if len(both) >= MIN_PROMPTS:
            drawn = np.random.default_rng(0).integers(len(both), size=(RESAMPLES, len(both)))
            low, high = np.quantile(over(drawn), (0.025, 0.975)).tolist()
        return {"value": float(over(slice(None))), "low": low, "high": high}

    def bits(self, way: str) -> float:
        """A weight."""
        note = self.peers.get(PACKED if way.startswith(PACKED) else plain_of(way), {})
        return note.get("bits", int(self.settings["dtype"].rpartition("float")[2]))

    def summarise(self, names: Sequence[str]) -> None:
        """Make the summary anew."""
        self.summary = [self._row(name, names) for name in names]
        ours = self.settings["ours"]
        self.ratios = {name: self.ratio(ours, name) for name in names if name != ours} if ours in names else {}
        if ours != HISTORY:  # other engines are beside it alone
            return
        others = [row for row in self.summary if row["way"] not in OURS]
        groups = {
            "wide": [row for row in others if row["bits"] >= NARROW_BITS],
            "narrow": [row for row in others if row["bits"] < NARROW_BITS],
            "transformers": [row for row in others if LABELS[row["way"]].engine == "transformers"],
        }
        self.strongest = {
            group: max(rows, key=lambda row: row["tokens_per_second"])["way"] if rows else None
            for group, rows in groups.items()
        }
        narrow = self.strongest["narrow"]
        if PACKED_HISTORY in names and narrow is not None:
            self.ratios[f"{PACKED_HISTORY} / {narrow}"] = self.ratio(PACKED_HISTORY, narrow)

    def _row(self, name: str, names: Sequence[str]) -> dict[str, Any]:
        runs = [run for run in self.runs if run["way"] == name]
        first = [run for run in runs if run["round"] == 0]
        same, as_plain = ([run[key] for run in first if key in run] for key in ("same", "same_as_plain"))
        parted = [run["divergence"]["within_rounding"] for run in first if run.get("divergence")]
        by_kind = grouped(runs, lambda run: self.prompts[run["prompt"]]["kind"])
        against = self.settings["against"]
        beside = [run["beside_seconds"] for run in runs]
        return {
            "way": name,
            "bits": self.bits(name),
            "speedup": self.ratio(name, against) if against in names else None,
            "beside_seconds": None if None in beside else sum(beside) / sum(run["tokens"] for run in runs),
            **self._figures(runs),
            "rounds": 1 + max(run["round"] for run in runs),
            "texts": len(first),
            "tokens": sum(run["tokens"] for run in first),
            "compared": len(same),
            "same": sum(same),
            "within_rounding": sum(parted),
            "beyond_rounding": len(parted) - sum(parted),
            "compared_with_plain": len(as_plain),
            "same_as_plain": sum(as_plain),
            "by_kind": {kind: {**self._figures(of), "prompts": len(_totals(of))} for kind, of in by_kind.items()},
        }

    def _figures(self, runs: Sequence[dict[str, Any]]) -> dict[str, float | None]:
        """Rates of some runs; the acceptance length is the mean over questions, all turns of one together."""
        questions = grouped(runs, lambda run: self.prompts[run["prompt"]].get("question", run["prompt"]))
        lengths = [_per_step(each) for each in questions.values()]
        tokens, seconds = (sum(of) for of in zip(*_totals(runs).values(), strict=True))
        return {
            "tokens_per_second": tokens / seconds,
            "tokens_per_step": _per_step(runs),
            "acceptance_length": None if None in lengths else statistics.fmean(lengths),
        }


def grouped(runs: Sequence[dict[str, Any]], key: Callable[[dict[str, Any]], str]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run)
    return found


def _totals(runs: Sequence[dict[str, Any]]) -> dict[str, tuple[float, ...]]:
    """Tokens and seconds of one way's runs by prompt, the mean over the rounds."""
    return {
        prompt: tuple(statistics.fmean(run[key] for run in each) for key in ("tokens", "seconds"))
        for prompt, each in grouped(runs, lambda run: run["prompt"]).items()
    }


def _per_step(runs: Sequence[dict[str, Any]]) -> float | None:
    """Tokens a forward of the model; ``None`` where an engine does not count them."""
    if not all(run["steps"] for run in runs):
        return None
    return sum(run["tokens"] + run["ended"] for run in runs) / sum(run["steps"] for run in runs)


def _decimals(number: float | None, scale: float = 1.0) -> str:
    return "–" if number is None else f"{scale * number:.2f}"


def _interval(ratio: dict[str, Any] | None) -> str:
    if ratio is None:
        return "–"
    return f"{ratio['value']:.2f}" + ("" if ratio["low"] is None else f" ({ratio['low']:.2f}–{ratio['high']:.2f})")


RATE: Columns = {"tokens/s": lambda row: f"{row['tokens_per_second']:.1f}"}
STEP: Columns = {"tokens/step": lambda row: _decimals(row["tokens_per_step"])}


def pair_table(data: dict[str, Any]) -> str:
    """A pair's competitors, slowest first."""
    columns: Columns = {
        "": lambda row: row["way"],
        **RATE,
        f"against {data['settings']['against']} (95%)": lambda row: _interval(row["speedup"]),
        **STEP,
        "ms a token beside the models": lambda row: _decimals(row["beside_seconds"], 1e3),
        "same tokens": lambda row: _as_transformers(row) or "–",
    }
    return table(_by_rate(data), columns)


def engines_table(data: dict[str, Any], texts: Columns | None = None) -> str:
    """All engines, slowest first; ``texts``: the column of what their texts are compared with."""
    columns: Columns = {
        "": lambda row: f"**{LABELS[HISTORY]}**" if row["way"] == HISTORY else str(LABELS[row["way"]]),
        "bits a weight": lambda row: f"{row['bits']:.1f}".removesuffix(".0"),
        **RATE,
        **STEP,
        "our history against it (95%)": lambda row: _interval(data["ratios"].get(row["way"])),
    }
    return table(_by_rate(data), columns | ({"texts as transformers'": _texts} if texts is None else texts))


def as_without_drafts(row: dict[str, Any]) -> str:
    if row["way"] != HF and plain_of(row["way"]) == HF:
        return f"{row['same']} of {row['compared']}"
    return f"{row['same_as_plain']} of {row['compared_with_plain']}" if row["compared_with_plain"] else "–"


def _by_rate(data: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(data["summary"], key=lambda row: row["tokens_per_second"])


def _as_transformers(row: dict[str, Any]) -> str:
    """How many texts are equal, and of the others why; empty where none was compared."""
    text = f"{row['same']} of {row['compared']}" if row["compared"] else ""
    for count, why in ((row["within_rounding"], "by rounding"), (row.get("beyond_rounding"), "DIFFER")):
        text += f", {count} {why}" if count else ""
    return text


def _texts(row: dict[str, Any]) -> str:
    text = _as_transformers(row)
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
    strongest, gained = data["strongest"], {way: _interval(ratio) for way, ratio in data["ratios"].items()}
    sentences = [
        (way := strongest.get(group), f"{{}} times {what} ({LABELS.get(way)})") for group, what in said.items()
    ]
    sentences += [
        (f"{PACKED_HISTORY} / {strongest.get('narrow')}", "over the packed weights of the file {} times the same"),
        (HF, "{} times transformers' plain decoding"),
    ]
    return [sentence.format(gained[way]) for way, sentence in sentences if way in gained]


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
    rows = {row["way"]: row for row in data["summary"]}
    chosen = dict.fromkeys([HF, *data["strongest"].values(), *OURS])

    def rate(kind: str, row: dict[str, Any]) -> str:
        of = row["by_kind"].get(kind)
        per_step = "" if not of or of["tokens_per_step"] is None else f" ({of['tokens_per_step']:.1f})"
        return f"{of['tokens_per_second']:.0f}{per_step}" if of else "–"

    columns: Columns = {"": lambda row: str(LABELS[row["way"]]), **{kind: partial(rate, kind) for kind in _kinds(data)}}
    return table([rows[way] for way in chosen if way in rows], columns)


def lengths_table(data: dict[str, Any]) -> str:
    """Tokens a forward by kind as Spec-Bench and SPEED-Bench define their means, of all ways that count forwards."""
    means = {"tokens_per_step": "accepted tokens", "acceptance_length": "acceptance length"}
    rows = [(row, mean) for row in data["summary"] for mean in means if row[mean] is not None]

    def length(kind: str, of: tuple[dict[str, Any], str]) -> str:
        return _decimals(of[0]["by_kind"].get(kind, {}).get(of[1]))

    columns: Columns = {"": lambda of: str(LABELS[of[0]["way"]]), "mean": lambda of: means[of[1]]}
    columns |= {kind: partial(length, kind) for kind in _kinds(data)}
    return table(rows, columns | {"all": lambda of: _decimals(of[0][of[1]])})


def _kinds(data: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(prompt["kind"] for prompt in data["prompts"].values()))


def short(data: dict[str, Any]) -> dict[str, Any]:
    """``data`` with transformers, the fastest of every other engine, also by bits a weight, and ours."""
    fastest = {LABELS[row["way"]].engine: row["way"] for row in _by_rate(data) if row["way"] not in OURS}
    chosen = {HF, PLAIN, HISTORY, PACKED_HISTORY, *data["strongest"].values(), *fastest.values()}
    return {**data, "summary": [row for row in data["summary"] if row["way"] in chosen]}


def what(data: dict[str, Any]) -> str:
    """Say what was decoded, in one sentence without its end."""
    settings, prompts = data["settings"], data["prompts"]
    kinds = _kinds(data)
    own = "" if len(kinds) < 2 else f" ({', '.join(kinds)})"
    return (
        f"{settings['model']}, {data['parameters'] / 1e6:.0f}M, {settings['dtype']}, greedy, {len(prompts)} "
        f"prompts{own}, at most {settings['new_tokens']} new tokens, prompts' time included"
    )
