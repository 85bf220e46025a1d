"""Generated tables: the figures of README.md and docs/scale.md, from bench/results.

Rewrites what lies between ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->``; ``--check`` changes nothing and fails
where a file is out of date. Nothing in these blocks is written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .generation import sources_table
from .generation.competitors import ASSISTED, AUTO, GREEDY, PLAIN
from .generation.generate import title
from .lib.intervals import Ratio
from .lib.report import Report, caption, markdown, micros, speedups
from .scale import memory as scale_memory
from .scale import messages as scale_messages

BLOCK = re.compile(r"(<!-- bench:(?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- /bench:(?P=name) -->)", re.DOTALL)
KERNEL_CASES = ("attention", "merge", "sample", "commit")


class MissingResultError(Exception):
    """A block needs a result that is not there; the message names the command that makes it."""


def speed(results: Path) -> str:
    """Every end-to-end run: a table each, and what ``auto`` gains over the best of transformers' assisted settings."""
    paths = [*sorted(results.glob("generate-*.json")), *sorted((results / "gpu").glob("e2e-*.json"))]
    runs = [(path, data) for path in paths if not (data := _read(path))["settings"]["quick"]]
    if not runs:
        raise MissingResultError("`gsd-kernels bench generate`")
    return "\n\n".join(_speed_table(data) for _, data in sorted(runs, key=lambda run: _order(run[1])))


def _order(data: dict[str, Any]) -> tuple[bool, bool, str, str]:
    settings = data["settings"]
    shape = settings["target_shape"]
    return data["environment"]["device_type"] == "cpu", shape == "none", shape, settings["dtype"]


def _speed_table(data: dict[str, Any]) -> str:
    rows = []
    for row in data["summary"]:
        same = f"{row['equal']}/{row['compared']}" if row["compared"] else "–"
        rows.append(
            [
                f"**{row['competitor']}**" if row["competitor"] == AUTO else row["competitor"],
                f"{row['tokens_per_second']:.1f}",
                "–" if row["speedup"] is None else str(Ratio(**row["speedup"])),
                "–" if row["tokens_per_forward"] is None else f"{row['tokens_per_forward']:.2f}",
                same + (f" ({row['within_rounding']} by rounding)" if row["within_rounding"] else ""),
            ]
        )
    prompts = len({run["prompt"] for run in data["runs"]})
    head = f"{title(data['settings'], data['parameters'])}, {prompts} held-out prompts; {_place(data['environment'])}:"
    table = markdown(["", "tokens/s", f"against {GREEDY} (95%)", "tokens/forward", "same tokens"], rows)
    return "\n\n".join(part for part in (head, table, _verdict(data), _missing(data["missing"])) if part)


def _verdict(data: dict[str, Any]) -> str:
    rates = {row["competitor"]: row["tokens_per_second"] for row in data["summary"]}
    assisted = [name for name in ASSISTED if name in rates]
    sentences = []
    if AUTO in rates and assisted:
        best = max(assisted, key=lambda name: rates[name])
        ratio = Ratio(**data["ratios"][f"{AUTO} / {best}"])
        sentences.append(f"`{AUTO}` is {ratio} times the best assisted setting ({best})")
    if AUTO in rates and PLAIN in rates:
        sentences.append(f"{Ratio(**data['ratios'][f'{AUTO} / {PLAIN}'])} times plain decoding by the same code")
    return " and ".join(sentences) + "." if sentences else ""


def _missing(missing: dict[str, str]) -> str:
    return "Missing: " + "; ".join(f"{name} ({reason})" for name, reason in missing.items()) + "." if missing else ""


def tree(results: Path) -> str:
    """Tokens per step of the graph, and how that compares with the tree, by text and rows."""
    path = results / "tree.json"
    if not path.exists():
        raise MissingResultError("`gsd-kernels bench tree-table`")
    data = _read(path)
    target_rows = data["settings"]["grid"]["target_rows"]
    lines: dict[tuple[str, float, int], dict[int, str]] = {}
    for cell in data["cells"]:
        ratio = cell["graph / tree"]
        sure = "*" if ratio["low"] > 1 or ratio["high"] < 1 else ""
        text = f"{cell['tokens_per_step']['graph']:.2f} ({ratio['value']:.2f}{sure})"
        lines.setdefault((cell["text"], cell["temperature"], cell["draft_rows"]), {})[cell["target_rows"]] = text
    rows = [
        [
            f"{text}, {'greedy' if temperature == 0 else f'T = {temperature}'}",
            str(draft_rows),
            *(cells[rows_] for rows_ in target_rows),
        ]
        for (text, temperature, draft_rows), cells in lines.items()
    ]
    total, settings = data["summary"], data["settings"]
    prompts = max(len(names) for names in settings["prompts"].values())
    head = (
        f"Tokens per step of the graph (and its ratio to the tree's; * where the 95% interval excludes 1), by target "
        f"rows; {prompts} prompts of each text, {settings['new_tokens']} new tokens:"
    )
    foot = (
        f"The graph is ahead of the tree in {total['ahead']} of {total['cells']} cells, in {total['surely_ahead']} of "
        f"them beyond doubt; at worst its tokens per step are {total['worst']:.2f} times the tree's, at best "
        f"{total['best']:.2f}. Chain, tree, in-step merging and intervals of every cell: "
        "[bench/results/tree.md](bench/results/tree.md)."
    )
    return "\n\n".join([head, markdown(["text", "draft rows", *map(str, target_rows)], rows), foot])


def sources(results: Path) -> str:
    """Every draft source, alone and together, on three kinds of text."""
    path = results / f"{sources_table.NAME}.json"
    if not path.exists():
        raise MissingResultError("`gsd-kernels bench sources-table`")
    data = _read(path)
    return f"{_place(data['environment'])}. {sources_table.table(data)}"


def kernels(results: Path) -> str:
    """Each op at its largest size, beside the best peer of the same run; the GPU's results where there are any."""
    sections = []
    for folder, pattern in ((results / "gpu", "*.json"), (results, "*.json")):
        reports = [
            Report.read(path) for path in sorted(folder.glob(pattern)) if _read(path).get("case") in KERNEL_CASES
        ]
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
    data = _messages(results)
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


def scale(results: Path) -> str:
    """Memory and messages in short."""
    short, long = scale_memory.TEXTS[1:]
    rows = []
    for found in map(scale_memory.memory, scale_memory.GPUS):
        totals = [found.total(text) / scale_memory.GIB for text in (short, long)]
        rows.append([str(found.gpus), f"{found.target / scale_memory.GIB:.1f}", *(f"{size:.1f}" for size in totals)])
    head = ["GPUs", "target", *(f"all, {length:,} positions × {batch}" for length, batch in (short, long))]
    title_ = f"GiB on each GPU ({scale_memory.TARGET} with {scale_memory.DRAFT}, bfloat16, without activations):"
    parts = [title_, markdown(head, rows)]
    data = _messages(results)
    largest = max(data["settings"]["ranks"])
    ways = {row["way"]: row for row in data["summary"] if row["ranks"] == largest}
    plain, graph = ways[scale_messages.PLAIN], ways["graph"]
    parts.append(
        f"Speculation divides the all-reduces: {plain['all_reduces_per_token']:.1f} a token with plain decoding, "
        f"{graph['all_reduces_per_token']:.1f} with the preset graph ({graph['fewer_all_reduces']:.2f} times fewer; "
        f"demo pair, {largest} ranks, counted). Each carries all the rows that are verified: "
        f"{plain['bytes_per_token'] / 1024:.0f} KiB a token become {graph['bytes_per_token'] / 1024:.0f}."
    )
    return "\n\n".join(parts)


def _messages(results: Path) -> dict[str, Any]:
    path = results / f"{scale_messages.NAME}.json"
    if not path.exists():
        raise MissingResultError("`gsd-kernels bench scale-messages`")
    return _read(path)


def _size(row: Any) -> int:
    return int(row.bytes_moved or 0)


def _place(environment: dict[str, Any]) -> str:
    versions = environment["versions"]
    return f"{caption(environment)}, transformers {versions['transformers']}, commit {environment['commit']}"


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


BLOCKS: dict[str, Callable[[Path], str]] = {
    "speed": speed,
    "tree": tree,
    "sources": sources,
    "kernels": kernels,
    "scale": scale,
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
