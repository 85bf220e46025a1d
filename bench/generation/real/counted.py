"""Tokens a step of the history alone, with what was learned of the model and without."""

from __future__ import annotations

from typing import Any

import torch
import typer

import gsd_kernels
from gsd_kernels import GraphConfig

from ...lib.environment import environment
from ...lib.report import Columns
from ...lib.report import table as markdown
from ..options import OfSources
from .models import load_real
from .prompts import encoded, read_chats
from .run import cold_cache

NAME = "sources"
DEPTH = 16  # levels at most
NARROW, WIDE = 6, 12  # nodes of a level, up to 16 rows and beyond
Runs = list[dict[str, Any]]


def run(given: OfSources, rows: list[int | str]) -> tuple[str, dict[str, Any]]:
    """The name of the file of results, and what is in it.

    Raises:
        ValueError: packed weights of a model that has none.
    """
    chats, _ = read_chats(given.prompts, given.limit)
    real = load_real(given.model, None, None, getattr(torch, given.dtype))
    if given.packed and real.packed is None:
        raise ValueError("--packed: the model did not come from a GGUF file")
    model = real.packed if given.packed else real.model
    counts = count(model, encoded(chats, real.tokenizer), rows, given.new_tokens)
    own = "bench/generation/real/prompts.json"
    settings = {
        **{"model": real.name, "dtype": given.dtype, "packed": given.packed, "new_tokens": given.new_tokens},
        "prompts": own if given.prompts is None else given.prompts.name,
    }
    about = {"case": NAME, "settings": settings, "environment": environment(torch.device("cpu"))}
    parts = [NAME, given.dtype, *["packed"] * given.packed]
    return "-".join(parts if given.prompts is None else [*parts, given.prompts.stem]), {**about, "counts": counts}


def shape(rows: int) -> GraphConfig:
    """The shape that has as many rows in every step."""
    width, depth = NARROW if rows <= 16 else WIDE, min(DEPTH, rows - 1)
    return GraphConfig(depth=0, branch=4, max_rows=rows, merge_context=2, history_depth=depth, history_width=width)


def count(model: Any, prompts: list[Any], rows: list[int | str], new_tokens: int) -> Runs:
    """Decode every prompt in every way; of each what it took, and whether the text is plain decoding's."""
    plain: dict[str, list[int]] = {}
    found = []
    ways: dict[str, dict[str, Any]] = {"plain": {"graph_config": "plain"}}
    for each in rows:
        options = {"draft_sources": ("history",), "graph_config": shape(each) if isinstance(each, int) else each}
        what = each if isinstance(each, str) else f"{each} rows"
        ways |= {what: options, f"{what}, not learned": {**options, "learned": False}}
    for way, options in ways.items():
        typer.echo(f"{NAME}: {way}", err=True)
        with cold_cache(), gsd_kernels.patch(model, **options, reuse_prefix=False, reuse_history=False) as handle:
            for prompt in prompts:
                ids = prompt.input_ids
                text = model.generate(ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=new_tokens)
                new, stats = text[0, ids.shape[1] :].tolist(), handle.stats
                assert stats is not None
                same = plain.setdefault(prompt.name, new) == new
                about = {"way": way, "prompt": prompt.name, "kind": prompt.kind, "same": same}
                found.append({**about, "tokens": len(new), "steps": stats.steps, "rows": stats.target_rows})
    return found


def table(counts: Runs) -> str:
    """Tokens a step by way and kind of work, and rows a step."""
    ways: dict[str, Runs] = {}
    for run in counts:
        ways.setdefault(run["way"], []).append(run)

    def a_step(what: str, runs: Runs, kind: str | None = None) -> float:
        of = [run for run in runs if kind in (None, run["kind"])]
        return sum(run[what] for run in of) / sum(run["steps"] for run in of)

    columns: Columns = {
        "tokens a step": lambda runs: runs[0]["way"],
        "all": lambda runs: f"{a_step('tokens', runs):.2f}",
        "rows": lambda runs: f"{a_step('rows', runs):.1f}",
        "texts as plain": lambda runs: f"{sum(run['same'] for run in runs)} of {len(runs)}",
    }
    kinds = dict.fromkeys(run["kind"] for run in counts)
    by_kind: Columns = {kind: lambda runs, kind=kind: f"{a_step('tokens', runs, kind):.2f}" for kind in kinds}
    return markdown(ways.values(), columns | by_kind)
