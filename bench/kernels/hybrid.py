"""What rows of a hybrid target cost, by window and by depth, by prefix, and what the history makes of it.

The target has the shape of Qwen3.5-0.8B's language model and random weights: the time of a forward does not depend on
them. A prefix is not read: states are of no length, and what attention reads are zeros.

The text of the race repeats itself by construction: behind a token comes the next one of its :data:`PERIOD`, since that
is what the output matrix says of the token's own embedding, and the layers, all of which are computed, add little.
So the first period is new to the history and the rest is not; what the history gains on a text that somebody wanted is
another question, which the race does not answer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import gsd_kernels as gsd
from gsd_kernels.ops.state_rows import BLOCK
from gsd_kernels_hf.model.properties import cache_argument
from gsd_kernels_hf.model.runner import RowModel

from ..lib.environment import environment
from ..lib.report import markdown
from .rows import MOST_ROWS, in_turns, row_inputs

WAYS = {"window": BLOCK, "depth": 0}
IN_WINDOW = BLOCK + BLOCK // 2  # tokens of a window: as many as there are on average, once a state has moved
PROMPT = 64  # of the race
PERIOD = 16  # tokens of the race's text, until it is the same again
QUIET = 0.05  # of the layers' outputs
SHAPE: dict[str, Any] = {
    "vocab_size": 248_320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": False,
}
QUICK = {
    **SHAPE,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


@torch.no_grad()
def repeating_target(dtype: torch.dtype, *, quick: bool = False) -> PreTrainedModel:
    """A model of :data:`SHAPE` whose greedy text repeats itself; ``quick``: a tiny one.

    Raises:
        ValueError: this transformers has no such class.
    """
    try:
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    except ImportError as error:
        raise ValueError("hybrid: needs a transformers that has Qwen3_5ForCausalLM, as 5.24 does") from error
    config = Qwen3_5TextConfig(**(QUICK if quick else SHAPE), eos_token_id=None, pad_token_id=0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = Qwen3_5ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            weight.mul_(QUIET)
    # [periods, PERIOD, D]: the output row of a token is the embedding of the one before it.
    embedding = model.get_input_embeddings().weight.view(-1, PERIOD, config.hidden_size)
    model.lm_head.weight.copy_(embedding.roll(1, 1).flatten(0, 1))
    return model


def behind_a_window(model: PreTrainedModel, block: int, capacity: int) -> RowModel:
    """Rows behind a text that fills a window, where there is one, with :data:`IN_WINDOW` tokens."""
    rows = RowModel(model, capacity, torch.zeros(1, dtype=torch.int32), "auto", block=block)
    stored = torch.zeros(1, dtype=torch.int32)
    count, times = (16, IN_WINDOW // 16) if block else (1, 1)
    for _ in range(times):
        rows.rows(*row_inputs(count, int(stored), branch=1), keep=1)
        rows.cache.commit(torch.arange(count, dtype=torch.int32)[None], torch.full_like(stored, count), stored)
    return rows


def own_step(model: PreTrainedModel, prefix: int) -> Callable[[], object]:
    """transformers' own forward of one token behind a short text, which gets longer."""
    given = {cache_argument(model): DynamicCache(config=model.config)}
    model(input_ids=torch.zeros(1, max(1, min(prefix, 32)), dtype=torch.int64), **given, logits_to_keep=1)
    one = torch.zeros(1, 1, dtype=torch.int64)
    return lambda: model(input_ids=one, **given, use_cache=True)


def by_rows(model: PreTrainedModel, counts: Sequence[int], prefix: int, branch: int, seconds: float) -> list[Any]:
    """Milliseconds of forwards by number of rows, the ways in turns; of one row beside transformers' own."""
    ways = {name: behind_a_window(model, block, prefix + 2 * MOST_ROWS) for name, block in WAYS.items()}
    lines = []
    for count in counts:
        inputs = row_inputs(count, max(prefix, IN_WINDOW), branch=branch)
        calls: dict[str, Callable[[], object]] = {
            name: lambda of=of, inputs=inputs, count=count: of.rows(*inputs, keep=count) for name, of in ways.items()
        }
        if count == 1:
            calls["transformers"] = own_step(model, prefix)
        lines.append({"rows": count, **{name: 1e3 * s for name, s in in_turns(calls, seconds, 0).items()}})
    return lines


def by_prefix(model: PreTrainedModel, prefixes: Sequence[int], counts: Sequence[int], seconds: float) -> list[Any]:
    """Milliseconds of forwards by window, by prefix: of every number of rows, in turns."""
    lines = []
    rows = behind_a_window(model, BLOCK, max(prefixes, default=0) + 2 * MOST_ROWS)
    for prefix in (max(prefix, IN_WINDOW) for prefix in prefixes):
        inputs = {count: row_inputs(count, prefix) for count in counts}
        calls: dict[str, Callable[[], object]] = {
            str(count): lambda given=given, count=count: rows.rows(*given, keep=count)
            for count, given in inputs.items()
        }
        lines.append({"prefix": prefix, **{name: 1e3 * s for name, s in in_turns(calls, seconds, 0).items()}})
    return lines


def race(model: PreTrainedModel, new_tokens: int, repeats: int) -> list[Any]:
    """Greedy texts in turns: transformers, plain decoding, the history alone under ``auto``; medians of the turns."""
    ids = torch.randint(3, model.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
    ours = {**options, "return_dict_in_generate": True}
    steps: dict[str, float] = {}

    def by_us(name: str, **more: Any) -> Tensor:
        out = gsd.generate(model, ids, **ours, **more)
        steps[name] = new_tokens / out.stats.steps
        return out.sequences

    calls: dict[str, Callable[[], Tensor]] = {
        "transformers": lambda: type(model).generate(model, ids, **options),  # type: ignore[arg-type]
        "plain": lambda: by_us("plain", graph_config="plain"),
        "history": lambda: by_us("history", draft_sources=("history",)),
    }
    texts = {name: call() for name, call in calls.items()}  # which warms up
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    return [
        {
            "way": name,
            "seconds": of,
            "tokens_per_second": new_tokens / statistics.median(of),
            "tokens_per_step": steps.get(name, 1.0),
            "same_text": bool(torch.equal(texts[name], texts["transformers"])),
            "distinct_tokens": int(texts[name][0, PROMPT:].unique().numel()),
        }
        for name, of in times.items()
    ]


@torch.no_grad()
def run(
    dtype: torch.dtype,
    *,
    rows: Sequence[int],
    branch: int,
    prefix: int,
    prefixes: Sequence[int],
    seconds: float,
    new_tokens: int,
    repeats: int,
    quick: bool = False,
) -> dict[str, Any]:
    """Measure with torch's present number of threads.

    Args:
        dtype: of weights and cache.
        rows: numbers of rows of a forward.
        branch: children of a node; 1: the rows are a path.
        prefix: cached tokens before them.
        prefixes: at which forwards of the fewest and of 8 rows are timed besides, by window.
        seconds: for every number of rows, and every prefix.
        new_tokens: of the race's texts; 0: no race.
        repeats: of the race.
        quick: a tiny model.

    Raises:
        ValueError: this transformers has no Qwen3.5.
    """
    model = repeating_target(dtype, quick=quick)
    return {
        "schema": 1,
        "case": "hybrid",
        "environment": environment(torch.device("cpu")),
        "parameters": sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel(),
        "dtype": str(dtype).removeprefix("torch."),
        "prefix": max(prefix, IN_WINDOW),
        "branch": branch,
        "rows": by_rows(model, rows, prefix, branch, seconds),
        "prefixes": by_prefix(model, prefixes, sorted({min(rows), 8}), seconds),
        "race": race(model, new_tokens, repeats) if new_tokens else [],
    }


def table(report: dict[str, Any]) -> str:
    """The report in Markdown: milliseconds (multiples of the first line), by prefix, and tokens per second."""
    first = report["rows"][0]
    what = f"{report['parameters'] / 1e6:.3g}M, {report['dtype']}"
    lines = [
        [
            str(line["rows"]),
            *(f"{line[way]:.1f} ({line[way] / first[way]:.2f})" for way in WAYS),
            f"{line['transformers']:.1f}" if "transformers" in line else "",
        ]
        for line in report["rows"]
    ]
    caption = f"{what}, behind {report['prefix']} cached tokens, milliseconds by rows (and times those of one):"
    parts = [caption, markdown(["rows", *(f"by {way}, ms" for way in WAYS), "transformers, ms"], lines)]
    if report["prefixes"]:
        counts = [name for name in report["prefixes"][0] if name != "prefix"]
        lines = [[str(line["prefix"]), *(f"{line[n]:.1f}" for n in counts)] for line in report["prefixes"]]
        parts.append(markdown(["cached tokens", *(f"{n} rows by window, ms" for n in counts)], lines))
    if report["race"]:
        times = {line["way"]: line["seconds"] for line in report["race"]}
        lines = [
            [
                line["way"],
                f"{line['tokens_per_second']:.2f}",
                f"{line['tokens_per_step']:.2f}",
                *(_factor(times[way], line["seconds"]) for way in ("transformers", "plain")),
                "yes" if line["same_text"] else "no",
            ]
            for line in report["race"]
        ]
        head = ["greedy text", "tokens/s", "tokens/step", "× transformers", "× plain", "transformers' text"]
        parts.append(markdown(head, lines))
    return "\n\n".join(parts)


def _factor(theirs: Sequence[float], ours: Sequence[float]) -> str:
    """The median of what turns say, and the least and the most that one of them says."""
    found = [a / b for a, b in zip(theirs, ours, strict=True)]
    return f"{statistics.median(found):.2f} ({min(found):.2f}–{max(found):.2f})"
