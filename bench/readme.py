"""Generated tables: the figures of README.md, docs/benchmarks.md and docs/served.md, from bench/results.

Rewrites what lies between ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->``; ``--check`` changes nothing and fails
where a file is out of date. Nothing in these blocks is written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .generation.competitors import AUTO, GREEDY, PLAIN
from .generation.real import report as real_report
from .gpu import table as gpu_table
from .lib.intervals import Ratio
from .lib.report import Report, caption, markdown, micros, speedups
from .scale import memory as scale_memory
from .scale import messages as scale_messages

BLOCK = re.compile(r"(<!-- bench:(?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- /bench:(?P=name) -->)", re.DOTALL)
ENGINES = ("openvino", "llama-cpp")
KERNEL_CASES = ("attention", "merge", "sample", "commit")


class MissingResultError(Exception):
    """A block needs a result that is not there; the message names the command that makes it."""


def real(results: Path) -> str:
    """Everyday work on a real model: ours, transformers, and the fastest other engines, by bits a weight."""
    runs = _real_runs(results)
    head = f"{real_report.what(runs[0])}; {_machine(runs[0]['environment'])}, {runs[0]['environment']['date']}:"
    gains = filter(None, map(real_report.gains, runs))
    return "\n\n".join([head, real_report.table(real_report.short(runs[0])), *gains])


def real_all(results: Path, *kinds: str) -> str:
    """The same runs, or those of such names, with every way, and by kind of work."""
    sections = []
    for data in _real_runs(results, *kinds):
        sections += [
            f"{real_report.what(data)}; {_place(data['environment'])}:",
            real_report.table(data),
            "Tokens a second by kind of work, and tokens a step where they are counted:",
            real_report.kinds_table(data),
            _missing(data["missing"]),
        ]
    return "\n\n".join(section for section in sections if section)


def _real_runs(results: Path, *kinds: str) -> list[dict[str, Any]]:
    """The runs of ``bench real`` on its own model and prompts, bfloat16 first."""
    paths = (results / f"real-{kind}.json" for kind in kinds or ("bfloat16", "float32"))
    if not (runs := [_read(path) for path in paths if path.exists()]):
        raise MissingResultError("`gsd-kernels bench real`")
    return runs


def equal(results: Path) -> str:
    """Texts with drafts that are those without, by engine, arithmetic and drafts, of all these runs."""
    runs = _real_runs(results, "bfloat16", "float32", "bfloat16-file")
    return real_report.equal_table(runs)


def headline(results: Path) -> str:
    """``auto`` beside the fastest of transformers' ways and of other engines in the same run, one line a run."""
    rows, machines, setups = [], {}, []
    runs = [data for data in _end_to_end(results) if AUTO in data["setup_seconds"]]
    for data in runs:
        settings, environment = data["settings"], data["environment"]
        rates = {row["competitor"]: row["tokens_per_second"] for row in data["summary"]}
        theirs = [name for name in rates if name.startswith("hf-")]
        engines = [name for name in rates if name.startswith(ENGINES)]
        sizes = f"{_millions(data['parameters']['target'])} with {_millions(data['parameters']['draft'])}"
        instructions = environment.get("instructions")
        rows.append(
            [
                f"{settings['pair']} pair, {sizes}, {settings['dtype']}{f', {instructions}' if instructions else ''}",
                f"{rates[GREEDY]:.1f}",
                *(_fastest(rates, names) for names in (theirs, engines)),
                f"{rates[PLAIN]:.1f}" if PLAIN in rates else "–",
                f"{rates[AUTO]:.1f}",
                str(Ratio(**data["ratios"][f"{AUTO} / {max([*theirs, *engines], key=rates.__getitem__)}"])),
            ]
        )
        setups.append(data["setup_seconds"][AUTO])
        machines[f"{_machine(environment)}, {environment['date']}"] = None
    if not rows:
        raise MissingResultError("`gsd-kernels bench generate`")
    head = [
        *("target and draft", "transformers, plain", "transformers' fastest", "other engines' fastest"),
        *("this, plain", "this, `auto`", "`auto` / the fastest other (95%)"),
    ]
    foot = (
        f"Tokens per second, greedy; {'; '.join(machines)}. Each way was warmed up first, which took `auto` "
        f"{min(setups):.1f}–{max(setups):.1f} s and is not counted."
    )
    if not any(data["environment"]["device_type"] == "cuda" for data in runs):
        foot += " **No whole race has been run on a GPU yet**; forwards and captured steps: docs/benchmarks.md."
    return f"{markdown(head, rows)}\n\n{foot}"


def _fastest(rates: dict[str, float], names: Sequence[str]) -> str:
    """The fastest of ``names`` and its tokens per second."""
    if not names:
        return "–"
    best = max(names, key=lambda name: rates[name])
    return f"{rates[best]:.1f} ({best.removeprefix('hf-')})"


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:.0f}M" if parameters >= 1e6 else f"{parameters / 1e6:.1f}M"


def _end_to_end(results: Path) -> list[dict[str, Any]]:
    """The runs of ``bench generate``, but for quick ones."""
    found = [*map(_read, sorted(results.glob("generate-*.json"))), *_of_stages(results / "gpu")]
    runs = (data for data in found if data.get("case") == "generate" and not data["settings"]["quick"])
    return sorted(runs, key=_order)


def _of_stages(folder: Path) -> list[dict[str, Any]]:
    """The benchmarks' own results in the records of the GPU's stages, rehearsals left out."""
    stages = [data for data in map(_read, sorted(folder.glob("*.json"))) if not data.get("rehearsal")]
    points = [point for data in stages for point in data.get("points", {}).values()]
    return [point["report"] for point in points if "report" in point]


def _order(data: dict[str, Any]) -> tuple[bool, bool, str, str]:
    settings = data["settings"]
    shape = settings["target_shape"]
    return data["environment"]["device_type"] == "cpu", shape == "none", shape, settings["dtype"]


def _missing(missing: dict[str, str]) -> str:
    return "Missing: " + "; ".join(f"{name} ({reason})" for name, reason in missing.items()) + "." if missing else ""


def rows(results: Path) -> str:
    """Forwards of rows as one operator and by modules, beside the time that reading the weights takes."""
    tables = [_rows_table(_read(path)) for path in sorted(results.glob("rows*.json"), key=lambda path: path.stem)]
    if not tables:
        raise MissingResultError("`gsd-kernels bench rows --json bench/results/rows.json`")
    return "\n\n".join(tables)


def gpu(results: Path) -> str:
    """Forwards of rows on GPUs as one operator and by modules, and captured steps, from the stages' files."""
    folders = [results / "gpu", *sorted(path for path in (results / "gpu").glob("*") if path.is_dir())]
    tables = [gpu_table.table(folder, _place) for folder in folders if (folder / "rows.json").exists()]
    if not tables:
        raise MissingResultError("`python bench/gpu/stages.py --only rows --only pair`")
    return "\n\n".join(tables)


def _rows_table(data: dict[str, Any]) -> str:
    lines = []
    for result in data["results"]:
        name = f"{result['shape']}, {result['dtype']}"
        for way in ("operator", "modules"):
            entries = [f"{line[f'{way}_ms']:.1f} ({line[f'{way}_over_floor']:.2f})" for line in result["rows"]]
            lines.append([f"{name}, {way}", *entries, f"{result['prompt'][f'{way}_ms']:.0f}"])
        lines.append([f"{name}, reading", *(f"{line['read_ms']:.1f}" for line in result["rows"]), "–"])
    first = data["results"][0]
    head = ["", *(str(line["rows"]) for line in first["rows"]), f"a prompt of {first['prompt']['tokens']}"]
    what = "Milliseconds by rows (and times those of reading weights and cache)"
    if busy := data.get("busy"):
        beside = f"Beside {busy} process{'es' * (busy > 1)} that computed without end, on average"
        what = f"{beside}: {what[0].lower()}{what[1:]}"
    return f"{_place(data['environment'])}. {what}:\n\n{markdown(head, lines)}"


def kernels(results: Path) -> str:
    """Each op at its largest size, beside the best peer of the same run; the GPU's results where there are any."""
    sections = []
    for found in (_of_stages(results / "gpu"), map(_read, sorted(results.glob("*.json")))):
        reports = [Report.of(data) for data in found if data.get("case") in KERNEL_CASES]
        reports = [report for report in reports if not report.quick]
        if reports:
            sections.append(_kernel_table(reports))
    if not sections:
        raise MissingResultError("`gsd-kernels bench attention`, `merge`, `sample`, `commit`")
    return "\n\n".join(sections)


def _kernel_table(reports: list[Report]) -> str:
    rows = []
    for report in reports:
        peers = {ours.key: peer for ours, peer in speedups(report)}
        best: dict[tuple[str, str], Any] = {}
        for row in report.measured():
            place = (row.operation, row.shape)
            if row.peer or row.contestant == "reference":
                continue
            if place not in best or _size(row) > _size(best[place]):
                best[place] = row
        for row in best.values():
            peer = peers.get(row.key)
            where = ", ".join([row.shape, *(f"{key} {value}" for key, value in row.parameters.items())])
            rows.append(
                [
                    f"{row.operation}: {where}",
                    report.dtype,
                    f"{micros(row.median)} ({row.contestant})",
                    f"{row.bandwidth_fraction:.2f}",
                    "–" if peer is None else f"{micros(peer.median or 0)} ({peer.contestant})",
                ]
            )
    bandwidth = ", ".join(f"{report.copy_bandwidth / 1e9:.0f}" for report in reports)
    head = f"{_place(reports[0].environment)}; copy bandwidth {bandwidth} GB/s:"
    return f"{head}\n\n" + markdown(["", "dtype", "median", "of copy bandwidth", "best peer"], rows)


def messages(results: Path) -> str:
    """Messages between ranks for a token, plain decoding beside speculation."""
    data = _result(results, scale_messages.NAME, "scale-messages")
    settings, target = data["settings"], data["target"]
    names = settings["prompts"]
    head = (
        f"{len(names)} held-out prompts ({names[0]} … {names[-1]}) of the demo pair, whose target holds each key/value "
        f"head twice so that four ranks can share it ({target['num_hidden_layers']} layers, hidden size "
        f"{target['hidden_size']}, vocabulary {target['vocab_size']}); {settings['dtype']}, greedy, "
        f"{settings['new_tokens']} new tokens, gloo; {_place(data['environment'])}:"
    )
    return f"{head}\n\n{scale_messages.table(data)}"


def memory(results: Path) -> str:
    """Memory that one GPU holds of a large target and its draft; from the shapes, so no result is needed."""
    return (
        f"GiB on each GPU; {scale_memory.TARGET} with {scale_memory.DRAFT}, bfloat16, preset graph; caches are both "
        f"models', for positions × batch:\n\n{scale_memory.table()}"
    )


def _result(results: Path, name: str, command: str) -> dict[str, Any]:
    """A result.

    Raises:
        MissingResultError: it is not there; ``bench command`` makes it.
    """
    path = results / f"{name}.json"
    if not path.exists():
        raise MissingResultError(f"`gsd-kernels bench {command}`")
    return _read(path)


def _size(row: Any) -> int:
    return int(row.bytes_moved or 0)


def _machine(environment: dict[str, Any]) -> str:
    return f"{caption(environment)}, transformers {environment['versions']['transformers']}"


def _place(environment: dict[str, Any]) -> str:
    return f"{_machine(environment)}, commit {environment['commit']}"


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


BLOCKS: dict[str, Callable[[Path], str]] = {
    "real": real,
    "real-all": real_all,
    "real-file": lambda results: real_all(results, "bfloat16-file"),
    "equal": equal,
    "headline": headline,
    "rows": rows,
    "gpu": gpu,
    "kernels": kernels,
    "scale-messages": messages,
    "scale-memory": memory,
}


def rewritten(text: str, results: Path) -> str:
    """``text`` with every block made anew; a block whose result is missing names the command that makes it.

    Raises:
        ValueError: an unknown block, or a marker without its counterpart.
    """

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in BLOCKS:
            raise ValueError(f"bench:{name}: unknown block; there are {', '.join(BLOCKS)}")
        try:
            body = BLOCKS[name](results)
        except MissingResultError as error:
            body = f"Not measured yet: {error}."
        return f"{match[1]}{body}\n{match[4]}"

    if len(re.findall(r"<!-- /?bench:", text)) != 2 * len(BLOCK.findall(text)):
        raise ValueError("a bench marker has no counterpart")
    return BLOCK.sub(block, text)


def rewrite(file: Path, results: Path, *, check: bool) -> bool:
    """Rewrite a file's blocks, or only check them; whether all is well."""
    before = file.read_text(encoding="utf-8")
    try:
        after = rewritten(before, results)
    except ValueError as error:
        print(f"{file}: {error}", file=sys.stderr)
        return False
    if check:
        if after != before:
            print(f"{file}: out of date: gsd-kernels bench readme", file=sys.stderr)
        return after == before
    file.write_text(after, encoding="utf-8")
    return True
