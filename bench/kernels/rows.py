"""A target's forward of rows against the time that reading its weights takes, and against its modules.

The floor is the bytes of the weights and of the prefix's keys and values over the bandwidth at which the same threads
read a tensor as large. Random weights: the time does not depend on them. The ways take turns; the smallest of many
repeats counts, since what other processes do only ever adds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from gsd_kernels import cpu_levels
from gsd_kernels.graph import pack_bits
from gsd_kernels.ops.decoder_rows.api import FLOATS
from gsd_kernels_hf.model.fused import FusedRows
from gsd_kernels_hf.model.runner import RowModel

from ..lib.environment import environment
from ..lib.report import markdown
from ..lib.shapes import shape_named

WAYS = {"operator": FusedRows, "modules": RowModel}
BRANCH = 4  # children of a node of the tree
MOST_ROWS = 128


def random_model(name: str, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """A LLaMA of a named shape, made on the device."""
    shape = shape_named(name)
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tie_word_embeddings,
        max_position_embeddings=8192,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def smallest(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Seconds of the fastest run of each call; they take turns for ``seconds``, at least three times."""
    best = dict.fromkeys(calls, float("inf"))
    begin, turns = time.perf_counter(), 0
    while turns < 3 or time.perf_counter() - begin < seconds:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
        turns += 1
    return best


def row_inputs(rows: int, prefix: int) -> tuple[torch.Tensor, ...]:
    """A tree of ``rows`` nodes, each with up to BRANCH children."""
    sees, depths = torch.eye(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.int32)
    for row in range(1, rows):
        parent = (row - 1) // BRANCH
        sees[row] |= sees[parent]
        depths[row] = depths[parent] + 1
    kv_len = torch.tensor([prefix], dtype=torch.int32)
    return torch.arange(rows)[None] % 7, kv_len, torch.arange(rows), pack_bits(sees)[None], depths[None], depths[None]


def measure(
    shape: str, dtype: torch.dtype, rows: tuple[int, ...], prefix: int, prompt: int, seconds: float
) -> dict[str, Any]:
    """Milliseconds of rows and of a prompt, and what they are multiples of."""
    model = random_model(shape, dtype)
    weights = sum(p.nbytes for p in model.parameters())
    kv_start = torch.zeros(1, dtype=torch.int32)
    ids = torch.randint(0, model.config.vocab_size, (1, max(prefix, prompt)))
    result: dict[str, Any] = {"shape": shape, "dtype": str(dtype).removeprefix("torch."), "prefix": prefix, "rows": []}
    with torch.no_grad():
        models = {name: way(model, max(prefix, prompt) + MOST_ROWS, kv_start, "auto") for name, way in WAYS.items()}
        for model_rows in models.values():
            model_rows.prefill(ids[:, :prefix], None, None)
        size = weights + models["operator"].cache.nbytes * prefix // (max(prefix, prompt) + MOST_ROWS)
        source = torch.ones(size // 4)
        for count in rows:
            inputs = row_inputs(count, prefix)
            calls: dict[str, Callable[[], object]] = {
                name: lambda of=of, inputs=inputs, count=count: of.rows(*inputs, keep=count)
                for name, of in models.items()
            }
            best = smallest({"read": source.sum, **calls}, seconds)
            line = {"rows": count, **{f"{name}_ms": 1e3 * value for name, value in best.items()}}
            line |= {f"{name}_over_floor": best[name] / best["read"] for name in WAYS}
            result["rows"].append(line)
        prompts = {name: lambda of=of: again(of, ids[:, :prompt]) for name, of in models.items()}
        best = smallest(prompts, 2 * seconds)
        result["prompt"] = {"tokens": prompt, **{f"{name}_ms": 1e3 * value for name, value in best.items()}}
    fastest = min(line["read_ms"] for line in result["rows"])
    return {**result, "bytes": size, "bandwidth_gb_s": size / fastest / 1e6}


def again(rows: RowModel, ids: torch.Tensor) -> None:
    """Read a prompt from the beginning."""
    rows.cache.prompt_length = 0
    rows.prefill(ids, None, None)


def run(
    shape: str, dtypes: list[torch.dtype], rows: tuple[int, ...], prefix: int, prompt: int, seconds: float
) -> dict[str, Any]:
    """Measure every dtype with torch's present number of threads.

    Args:
        shape: of the model, as :func:`~gsd_kernels_bench.lib.shapes.shape_named` knows it.
        dtypes: of weights and cache.
        rows: numbers of rows of a forward.
        prefix: cached tokens before the rows.
        prompt: tokens of the prompt that is timed.
        seconds: for each number of rows.

    Raises:
        ValueError: no such shape, or a dtype that the operator does not take.
    """
    for dtype in dtypes:
        if dtype not in FLOATS:
            raise ValueError(f"--dtype: expected float32, bfloat16 or float16, got {str(dtype).removeprefix('torch.')}")
    return {
        "schema": 1,
        "case": "rows",
        "environment": environment(torch.device("cpu")),
        "level": cpu_levels.active(),
        "results": [measure(shape, dtype, rows, prefix, prompt, seconds) for dtype in dtypes],
    }


def table(report: dict[str, Any]) -> str:
    """The report in Markdown: milliseconds, and multiples of the floor."""
    lines = []
    for result in report["results"]:
        what = f"{result['shape']}, {result['dtype']}"
        for line in result["rows"]:
            times = [f"{line[f'{name}_ms']:.2f} ({line[f'{name}_over_floor']:.2f})" for name in WAYS]
            lines.append([f"{what}, rows {line['rows']}", f"{line['read_ms']:.2f}", *times])
        prompt = result["prompt"]
        times = [f"{prompt[f'{name}_ms']:.2f}" for name in WAYS]
        lines.append([f"{what}, prompt of {prompt['tokens']}", "", *times])
    return markdown(["ms (multiples of the floor)", "floor", *WAYS], lines)
