"""``gsd-kernels bench sources``: tokens a step of the history alone, with what was learned of the model and without."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gsd_kernels_cli import options, values

from ...lib.options import RESULTS, Dtype, Name, Out, listed, quiet, show
from .options import Limit, Model, Prompts

if TYPE_CHECKING:
    from gsd_kernels import GraphConfig

    from .models import Real
    from .prompts import Chat

NAME = "sources"
AUTO = "auto"
ROWS = (8, 16, 64, AUTO)
DEPTH = 16  # levels at most
NARROW, WIDE = 6, 12  # nodes of a level, up to 16 rows and beyond
ALL = "all"


def command(
    place: options.ModelPlace = None,
    model: Model = None,
    prompts: Prompts = None,
    limit: Limit = None,
    packed: Annotated[bool, typer.Option("--packed", help="The weights as they lie in the GGUF file.")] = False,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Of the weights.")] = Dtype.bfloat16,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="At most; a text may end before.")] = 160,
    rows: Annotated[
        list[str] | None,
        typer.Option("--rows", metavar="N,…", help=f"Of every step, or auto. Default: {', '.join(map(str, ROWS))}."),
    ] = None,
    out: Out = RESULTS,
    name: Name = None,
) -> None:
    """Tokens a step of the history alone on everyday work, with what was learned of the model and without.

    Counts, which no other load changes, but for auto, whose rows follow the clock. Every way begins cold.
    """
    model = values.named_once(place, model)
    wanted = [_rows(each) for each in listed(rows) or map(str, ROWS)]
    import torch

    from ...lib.environment import environment
    from ...lib.report import write
    from .models import load_real
    from .prompts import first_of_each_kind, read_chats

    quiet()
    chats, _ = read_chats(prompts)
    if limit is not None:
        chats = first_of_each_kind(chats, limit)
    real = load_real(model, None, None, getattr(torch, dtype.value))
    if packed and real.packed is None:
        raise ValueError("--packed: the model did not come from a GGUF file")
    counts = count(real, chats, wanted, new_tokens, packed=packed)
    settings = {"model": real.name, "dtype": dtype.value, "packed": packed, "new_tokens": new_tokens}
    settings["prompts"] = "bench/generation/real/prompts.json" if prompts is None else Path(prompts).name
    data = {"case": NAME, "settings": settings, "environment": environment(torch.device("cpu")), "counts": counts}
    called = name or "-".join([NAME, dtype.value, *["packed"] * packed, *([] if prompts is None else [prompts.stem])])
    show([write(out, called, data)], table(counts), {})


def _rows(given: str) -> int | str:
    if given == AUTO:
        return AUTO
    if not given.isdecimal() or not 2 <= int(given) <= 128:
        raise ValueError(f"--rows: expected numbers from 2 to 128 or {AUTO}, got {given!r}")
    return int(given)


def shape(rows: int) -> GraphConfig:
    """The shape that has as many rows in every step."""
    from gsd_kernels import GraphConfig

    width, depth = NARROW if rows <= 16 else WIDE, min(DEPTH, rows - 1)
    return GraphConfig(depth=0, branch=4, max_rows=rows, merge_context=2, history_depth=depth, history_width=width)


def count(
    real: Real, chats: list[Chat], rows: list[int | str], new_tokens: int, *, packed: bool = False
) -> list[dict[str, Any]]:
    """Decode every chat in every way; of each what it took, and whether the text is plain decoding's."""
    import gsd_kernels

    from .prompts import encoded
    from .run import cold_cache

    model = real.packed if packed else real.model
    assert model is not None
    prompts, plain, found = encoded(chats, real.tokenizer), {}, []
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


def table(counts: list[dict[str, Any]]) -> str:
    """Tokens a step by way and kind of work, and rows a step."""
    from ...lib.report import markdown

    kinds = list(dict.fromkeys(run["kind"] for run in counts))
    lines = []
    for way in dict.fromkeys(run["way"] for run in counts):
        runs = [run for run in counts if run["way"] == way]
        by_kind = {kind: [run for run in runs if run["kind"] == kind] for kind in kinds}
        steps, rows = (sum(run[name] for run in runs) for name in ("steps", "rows"))
        same = f"{sum(run['same'] for run in runs)} of {len(runs)}"
        cells = [_per_step(of) for of in (runs, *by_kind.values())]
        lines.append([way, cells[0], f"{rows / steps:.1f}", same, *cells[1:]])
    return markdown(["tokens a step", ALL, "rows", "texts as plain", *kinds], lines)


def _per_step(runs: list[dict[str, Any]]) -> str:
    return f"{sum(run['tokens'] for run in runs) / sum(run['steps'] for run in runs):.2f}"
