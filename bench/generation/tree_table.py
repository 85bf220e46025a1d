"""Graph against tree against chain: tokens per step at equal draft rows and equal target rows.

The grid, texts and configurations below were fixed before the run. Tokens per step depend on the models and the shape
of a step alone, not on the machine or the target's size, so the un-inflated pair is used. A run that is stopped goes on
where it was: every finished decoding is kept beside the result.

Three ways of spending the same rows on the same draft: ``tree`` is the best dynamic token tree; ``merged`` joins
recurring sequences inside a step; ``graph`` joins them across steps too, through the history of the target. ``chain``
drafts one token a level, with as many draft rows where its depth allows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gsd_kernels import GraphConfig, generate
from gsd_kernels_hf import Verified
from gsd_kernels_hf.files import write_json, write_text

from ..lib.environment import environment
from ..lib.intervals import Ratio, paired_ratio
from ..lib.report import SCHEMA, markdown
from .pairs import Pair, Prompt, left_padded, load_pair

NAME = "tree"
VARIANTS = ("chain", "tree", "merged", "graph")
BRANCH, MERGE_CONTEXT, REUSE_DEPTH, REUSE_WIDTH = 4, 2, 4, 8

#: draft rows (nodes that the draft model expands: the root, then width nodes a level) → depth, width
DRAFTS = {9: (5, 2), 16: (6, 3), 33: (5, 8), 64: (8, 9)}


@dataclass(frozen=True)
class Grid:
    """The cells: every text × temperature × draft rows × target rows."""

    draft_rows: tuple[int, ...] = tuple(DRAFTS)
    target_rows: tuple[int, ...] = (8, 16, 32, 64, 128)
    texts: tuple[str, ...] = ("code", "copy", "table")
    temperatures: tuple[float, ...] = (0.0, 0.7)


QUICK = Grid(draft_rows=(9, 16), target_rows=(8, 16), texts=("code", "copy"))


@dataclass(frozen=True)
class Cell:
    """One cell of the grid."""

    text: str
    temperature: float
    draft_rows: int
    target_rows: int

    def config(self, variant: str) -> GraphConfig:
        """Configuration of a variant for the cell's rows."""
        depth, width = DRAFTS[self.draft_rows]
        if variant == "chain":
            longest = min(self.draft_rows, self.target_rows - 1)
            return GraphConfig.preset("chain", depth=longest)
        # One bound on the path for all, so that padding of the draft's first level is the same too.
        path = min(2 * depth + REUSE_DEPTH, self.target_rows - 1)
        tree = GraphConfig(
            depth=depth, width=width, branch=BRANCH, max_rows=self.target_rows, max_path=path, merge_context=-1
        )
        if variant == "tree":
            return tree
        merged = tree.replace(merge_context=MERGE_CONTEXT, max_path=path)
        if variant == "merged":
            return merged
        return merged.replace(history_depth=REUSE_DEPTH, history_width=REUSE_WIDTH, max_path=path)

    def key(self, variant: str) -> str:
        """Identity of a decoding."""
        return json.dumps([self.text, self.temperature, asdict(self.config(variant))])


def cells(grid: Grid) -> Iterator[Cell]:
    for text in grid.texts:
        for temperature in grid.temperatures:
            for draft_rows in grid.draft_rows:
                for target_rows in grid.target_rows:
                    yield Cell(text, temperature, draft_rows, target_rows)


def decode(
    pair: Pair, prompts: list[Prompt], temperature: float, config: GraphConfig, new_tokens: int
) -> dict[str, Any]:
    """All texts of a kind as one batch: tokens and steps of each, and what the steps were made of.

    Tokens per step of a sequence do not depend on the others; a batch only takes less time.
    """
    ids, mask = left_padded(prompts)
    runs: list[dict[str, Any]] = [
        {"prompt": prompt.name, "tokens": 0, "steps": 0, "used_target_rows": 0, "nodes": 0, "merges": 0, "accepted": []}
        for prompt in prompts
    ]

    def observe(record: Verified) -> None:
        assert record.graph is not None
        counts = (record.accepted.num_accepted, record.rows.num_rows, record.graph.num_nodes, record.graph.num_merges)
        for run_, (tokens, rows, nodes, merges) in zip(runs, torch.stack(counts, 1).tolist(), strict=True):
            if tokens == 0:  # finished: the row stays in the batch and costs nothing that is counted
                continue
            run_["tokens"] += tokens
            run_["steps"] += 1
            run_["used_target_rows"] += rows  # rows that hold a token, not padding
            run_["nodes"] += nodes
            run_["merges"] += merges
            run_["accepted"] += [0] * (tokens + 1 - len(run_["accepted"]))
            run_["accepted"][tokens] += 1  # steps that gained so many tokens

    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    output = generate(
        pair.target,
        ids,
        attention_mask=mask,
        assistant_model=pair.draft,
        graph_config=config,
        max_new_tokens=new_tokens,
        seed=0,
        observer=observe,
        return_dict_in_generate=True,
        **sampling,
    )
    return {"config": asdict(config), "accepted_merges": output.stats.accepted_merges, "runs": runs}


def run(grid: Grid, *, pair: str, prompts: int, new_tokens: int, folder: Path, name: str | None = None) -> str:
    """Fill the grid, write ``name``.json and .md to ``folder``, and return the table."""
    name = name or (NAME if grid != QUICK else f"{NAME}-quick")
    device = torch.device("cpu")
    models = load_pair(pair, device=device, dtype=torch.float32, texts=grid.texts, prompts=prompts)
    settings = {
        "pair": pair,
        "new_tokens": new_tokens,
        "prompts": {text: [p.name for p in models.prompts if p.kind == text] for text in grid.texts},
        "grid": {key: list(value) for key, value in asdict(grid).items()},
        "variants": {v: asdict(Cell("code", 0.0, 16, 32).config(v)) for v in VARIANTS},  # one of them, as an example
        "drafts": {str(rows): shape for rows, shape in DRAFTS.items()},
    }
    journal = folder / f"{name}.partial.jsonl"
    done = _resume(journal, settings)
    todo = list(cells(grid))
    for number, cell in enumerate(todo):
        for variant in VARIANTS:
            key = cell.key(variant)
            if key in done:  # from an earlier call, or a chain that another cell has too
                continue
            where = f"{cell.text}, T = {cell.temperature}, {cell.draft_rows} and {cell.target_rows} rows, {variant}"
            print(f"{name}: cell {number + 1}/{len(todo)}: {where}", file=sys.stderr, flush=True)
            texts = [prompt for prompt in models.prompts if prompt.kind == cell.text]
            done[key] = decode(models, texts, cell.temperature, cell.config(variant), new_tokens)
            _keep(journal, {"key": key, "decoded": done[key]})
    result = {
        "schema": SCHEMA,
        "case": NAME,
        "environment": environment(device),
        "settings": settings,
        "cells": [_cell_result(cell, {v: done[cell.key(v)] for v in VARIANTS}) for cell in todo],
    }
    result["summary"] = summary(result["cells"])
    text = table(result)
    write_json(folder / f"{name}.json", result, indent=None)
    (folder / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    journal.unlink()
    return text


def _resume(journal: Path, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Decodings of an earlier run with the same settings; starts a journal where there is none."""
    head = json.dumps(settings)
    if journal.exists():
        lines = journal.read_text(encoding="utf-8").splitlines()
        if lines and lines[0] == head:
            return {record["key"]: record["decoded"] for record in map(json.loads, lines[1:])}
    journal.parent.mkdir(parents=True, exist_ok=True)
    journal.write_text(head + "\n", encoding="utf-8")
    return {}


def _keep(journal: Path, record: dict[str, Any]) -> None:
    """Append a record, whole or not at all."""
    write_text(journal, journal.read_text(encoding="utf-8") + json.dumps(record) + "\n")


def _cell_result(cell: Cell, decoded: dict[str, dict[str, Any]]) -> dict[str, Any]:
    totals = {variant: [(r["tokens"], r["steps"]) for r in decoded[variant]["runs"]] for variant in VARIANTS}
    return {
        **asdict(cell),
        "tokens_per_step": {v: sum(t for t, _ in totals[v]) / sum(s for _, s in totals[v]) for v in VARIANTS},
        "per_step": {v: _per_step(decoded[v]) for v in VARIANTS},
        "graph / tree": asdict(paired_ratio(totals["graph"], totals["tree"])),
        "merged / tree": asdict(paired_ratio(totals["merged"], totals["tree"])),
        "tree / chain": asdict(paired_ratio(totals["tree"], totals["chain"])),
        "decoded": decoded,
    }


def _per_step(decoded: dict[str, Any]) -> dict[str, float]:
    """Rows and nodes of a mean step. Computed rows include padding: shapes are static."""
    config = GraphConfig(**decoded["config"])
    runs = decoded["runs"]
    steps = sum(run_["steps"] for run_ in runs)
    means = {key: sum(run_[key] for run_ in runs) / steps for key in ("used_target_rows", "nodes", "merges")}
    return {
        "expanded_nodes": 1 + config.draft_slots,
        "computed_draft_rows": config.draft_rows,
        "computed_target_rows": config.max_rows,
        **means,
        "accepted_merges": decoded["accepted_merges"] / steps,
    }


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of the cells where the graph is ahead and behind."""
    ratios = [cell["graph / tree"] for cell in results]
    return {
        "cells": len(ratios),
        "ahead": sum(r["value"] > 1.0 for r in ratios),
        "surely_ahead": sum(r["low"] > 1.0 for r in ratios),
        "behind": sum(r["value"] < 1.0 for r in ratios),
        "behind_by_more_than_2_percent": sum(r["value"] < 0.98 for r in ratios),
        "worst": min(r["value"] for r in ratios),
        "best": max(r["value"] for r in ratios),
    }


def table(result: dict[str, Any]) -> str:
    """Tokens per step of every cell in Markdown, with what the cells add up to."""
    rows = []
    for cell in result["cells"]:
        text = "greedy" if cell["temperature"] == 0 else f"T = {cell['temperature']}"
        numbers = cell["tokens_per_step"]
        rows.append(
            [
                f"{cell['text']}, {text}",
                str(cell["draft_rows"]),
                str(cell["target_rows"]),
                *(f"{numbers[v]:.2f}" for v in VARIANTS),
                str(Ratio(**cell["graph / tree"])),
            ]
        )
    total = result["summary"]
    lines = [
        markdown(["text", "draft rows", "target rows", *VARIANTS, "graph / tree (95%)"], rows),
        "",
        f"The graph is ahead of the tree in {total['ahead']} of {total['cells']} cells (in {total['surely_ahead']} the "
        f"whole interval is above 1) and behind by more than 2% in {total['behind_by_more_than_2_percent']}; its "
        f"tokens per step are {total['worst']:.2f}–{total['best']:.2f} times the tree's.",
    ]
    return "\n".join(lines)
