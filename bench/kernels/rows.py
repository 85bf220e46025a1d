"""A target's forward of rows against the time that reading its weights takes, and against its modules.

The floor is what has to be read, weights and the prefix's keys and values, over the bandwidth at which the same
threads, or the GPU, read a tensor as large. Random weights: the time does not depend on them. On a CPU the ways take
turns, and the smallest of many repeats counts, since what other processes do only ever adds; beside processes that are
meant to keep its cores busy the mean does. On a GPU a forward is a CUDA graph, and the median counts.

And the ops of one step beside a forward of one row.
"""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from gsd_kernels import Acceptance, GraphConfig, Rows
from gsd_kernels.backends import unavailable_reason
from gsd_kernels.ops.cuda_common import DTYPES
from gsd_kernels.ops.decoder_rows.weights import stored
from gsd_kernels.ops.packed.api import FLOATS
from gsd_kernels_hf.model.proof import MOST_ROWS, WAYS, row_inputs
from gsd_kernels_hf.model.runner import RowModel
from gsd_kernels_hf.packed.modules import matrix_of, packed_in

from ..lib import report
from ..lib.environment import environment
from ..lib.shapes import shape_named
from ..lib.timing import read_bandwidth, time_call
from .cases import PREFIX, Step, commit_op, random_caches

GRAPH = GraphConfig(depth=6, width=8, branch=4, max_rows=64, merge_context=1)

#: The norm of what two ways' logits differ by, over that of the logits.
MOST_ERROR = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}


def random_model(
    name: str, dtype: torch.dtype, device: torch.device | str = "cpu", layers: int | None = None
) -> PreTrainedModel:
    """A LLaMA of a named shape, made on the device; ``layers``: instead of the shape's."""
    config = copy.deepcopy(shape_named(name))
    config.update({"num_hidden_layers": layers or config.num_hidden_layers, "max_position_embeddings": 8192})
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def in_turns(calls: dict[str, Callable[[], object]], seconds: float, busy: int) -> dict[str, float]:
    """Seconds of each call: the fastest run of it, or beside busy processes the mean.

    They take turns for ``seconds``, at least three times.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    begin, turns = time.perf_counter(), 0
    while turns < 3 or time.perf_counter() - begin < seconds:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
        turns += 1
    return {name: sum(of) / len(of) if busy else min(of) for name, of in times.items()}


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Run so many processes that do nothing but compute, while the block runs."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def bytes_read(rows: RowModel, count: int, prefix: int) -> int:
    """Bytes that a forward of ``count`` rows of one sequence reads: weights, embeddings of its tokens, the prefix.

    Of an embedding that is not the output matrix too, a row a token.
    """
    model = rows.model
    table, head = (matrix_of(of()) for of in (model.get_input_embeddings, model.get_output_embeddings))
    shared = stored(table).data_ptr() == stored(head).data_ptr()
    unread = 0 if shared else table.nbytes - count * (table.nbytes // table.shape[0])
    packed = {module.packed.data_ptr(): module.matrix.nbytes for module in packed_in(model)}
    weights = sum(p.nbytes for p in model.parameters()) + sum(packed.values())
    return weights - unread + rows.cache.nbytes * prefix // rows.cache.capacity


@torch.no_grad()
def measure(
    shape: str,
    model: PreTrainedModel,
    rows: tuple[int, ...],
    prefix: int,
    prompt: int,
    seconds: float,
    busy: int = 0,
    ways: Iterable[str] = WAYS,
) -> dict[str, Any]:
    """Milliseconds of rows and of a prompt by some ways, and their multiples of the floor.

    Args:
        shape, model: the model, and its shape's name.
        rows: numbers of rows of a forward.
        prefix: cached tokens before the rows.
        prompt: tokens of the prompt that is timed.
        seconds: for each number of rows.
        busy: processes beside this one that keep a core busy each.
        ways: of :data:`WAYS`.
    """
    device, on_gpu = model.device, model.device.type == "cuda"
    kv_start = torch.zeros(1, dtype=torch.int32, device=device)
    ids = torch.randint(0, model.config.vocab_size, (1, max(prefix, prompt)), device=device)
    result: dict[str, Any] = {
        "shape": shape,
        "dtype": str(model.dtype).removeprefix("torch."),
        "prefix": prefix,
        "rows": [],
    }
    with neighbours(busy):
        models = {way: WAYS[way](model, max(prefix, prompt) + MOST_ROWS, kv_start, "auto") for way in ways}
        for model_rows in models.values():
            model_rows.prefill(ids[:, :prefix], None, None)
        size = bytes_read(models["operator"], max(rows), prefix)
        source = torch.randn(1 if on_gpu else size // 4)  # equal pages could be one page of the host
        known = {"read": size / read_bandwidth(device)} if on_gpu else {}
        for count in rows:
            inputs = row_inputs(count, prefix, device)
            calls: dict[str, Callable[[], Tensor]] = {
                way: lambda of=of, inputs=inputs, count=count: of.rows(*inputs, keep=count)
                for way, of in models.items()
            }
            check(calls, count, model.dtype)
            if on_gpu:
                best = known | {way: time_call(call, device, seconds=seconds).median for way, call in calls.items()}
            else:
                best = in_turns({"read": source.sum, **calls}, seconds, busy)
            line = {"rows": count, **{f"{way}_ms": 1e3 * value for way, value in best.items()}}
            result["rows"].append(line | {f"{way}_over_floor": best[way] / best["read"] for way in models})
        prompts = {way: lambda of=of: again(of, ids[:, :prompt]) for way, of in models.items()}
        best = in_turns(prompts, 2 * seconds, busy)
        result["prompt"] = {"tokens": prompt, **{f"{way}_ms": 1e3 * value for way, value in best.items()}}
    floor = min(line["read_ms"] for line in result["rows"])
    return {**result, "bytes": size, "bandwidth_gb_s": size / floor / 1e6}


def check(calls: dict[str, Callable[[], Any]], count: int, dtype: torch.dtype) -> None:
    """Nothing that is wrong is timed: the ways' logits agree as far as a dtype lets so many layers.

    Raises:
        RuntimeError: they do not.
    """
    ours, *others = (call().float() for call in calls.values())
    theirs = others[0] if others else ours
    error, most = float((ours - theirs).norm() / theirs.norm()), MOST_ERROR[dtype]
    if not error <= most:
        raise RuntimeError(f"rows: {count} rows differ from the modules' by {error:.2g}, more than {most}")


def again(rows: RowModel, ids: Tensor) -> None:
    """Read a prompt from the beginning, to its end."""
    rows.cache.prompt_length = 0
    rows.prefill(ids, None, None)
    if ids.device.type == "cuda":
        torch.cuda.synchronize(ids.device)


def run(shape: str, dtypes: list[torch.dtype], device: torch.device, **sizes: Any) -> dict[str, Any]:
    """Measure every dtype with torch's present number of threads, or on a GPU.

    Args:
        shape: of the model, as :func:`~gsd_kernels_bench.lib.shapes.shape_named` knows it.
        dtypes: of weights and cache.
        device: of the model.
        **sizes: of :func:`measure`.

    Raises:
        ValueError: no such shape, or a dtype that the operator does not take.
    """
    takes = DTYPES if device.type == "cuda" else FLOATS
    for dtype in dtypes:
        if dtype not in takes:
            names = [str(d).removeprefix("torch.") for d in (*takes, dtype)]
            raise ValueError(f"--dtype: expected {', '.join(names[:-2])} or {names[-2]}, got {names[-1]}")
    return {
        "schema": 1,
        "case": "rows",
        "environment": environment(device),
        "busy": sizes["busy"],
        "results": [measure(shape, random_model(shape, dtype, device), **sizes) for dtype in dtypes],
    }


Line = tuple[dict[str, Any], dict[str, Any]]
"""A result, and one of its lines."""


def table(data: dict[str, Any]) -> str:
    """The report in Markdown: milliseconds, and multiples of the floor."""
    lines = [(result, line) for result in data["results"] for line in (*result["rows"], result["prompt"])]

    def about(of: Line) -> str:
        result, line = of
        what = f"rows {line['rows']}" if "rows" in line else f"prompt of {line['tokens']}"
        return f"{result['shape']}, {result['dtype']}, {what}"

    def by(way: str, of: Line) -> str:
        over = f" ({of[1][f'{way}_over_floor']:.2f})" if "rows" in of[1] else ""
        return f"{of[1][f'{way}_ms']:.2f}{over}"

    ways = {way: partial(by, way) for way in WAYS if f"{way}_ms" in lines[-1][1]}
    floor: report.Columns = {"floor": lambda of: f"{of[1]['read_ms']:.2f}" if "rows" in of[1] else ""}
    return report.table(lines, {"ms (multiples of the floor)": about, **floor, **ways})


def agreeing(rows: Rows) -> Tensor:
    """Picks of the target, int32 [B, R], that accept the deepest path."""
    picks = torch.zeros_like(rows.token_ids)
    at = rows.depths.argmax(1, keepdim=True)  # [B, 1]
    for _ in range(int(rows.depths.max())):
        parents = rows.parent_rows.gather(1, at).clamp(min=0).long()
        pick = torch.where(at > 0, rows.token_ids.gather(1, at), picks.gather(1, parents))
        picks.scatter_(1, parents, pick)
        at = parents
    return picks


@torch.inference_mode()
def step_overhead(shape: str, device: torch.device, dtype: torch.dtype, batch: int) -> dict[str, Any]:
    """Cost of one decode step's graph ops beside the target's forward: merge × depth + flatten + verify + commit.

    The target has one row a forward and a 256-token prefix in its cache: what an ordinary decoding step costs. The
    graph is drafted from random candidates and verified against picks that agree with most of them. Every op is
    compared with its reference before it is timed.

    Raises:
        ValueError: no such shape.
        RuntimeError: an op is wrong.
    """
    step = Step(GRAPH, device, batch)
    step.merge("reference")
    rows = step.flatten("reference")
    step.picks = agreeing(rows)
    accepted = Acceptance(*step.verify(rows, "reference"))
    caches = random_caches(
        shape_named(shape), device, dtype, torch.Generator().manual_seed(0), GRAPH.cache_slots, batch
    )
    ops = {op.op.name: op for op in step.ops()}
    ops["commit"] = commit_op(caches, accepted.accepted_rows, accepted.num_accepted)
    for op in ops.values():
        op.check((op.checked or op.call)("auto"))
    model = random_model(shape, dtype, device)
    forwards = RowModel(model, PREFIX + 1, torch.zeros(1, dtype=torch.int32, device=device), "auto")
    inputs = row_inputs(1, PREFIX, device)
    parts = {name: vars(time_call(partial(op.call, "auto"), device)) for name, op in ops.items()}
    forward = time_call(lambda: forwards.rows(*inputs, keep=1), device)
    whole = sum(part["median"] for part in parts.values())
    return {
        "benchmark": "step_overhead",
        "environment": environment(device),
        "backend": "reference" if unavailable_reason(device.type, device) else device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": shape,
        "batch": batch,
        "rows": GRAPH.max_rows,
        "levels": GRAPH.depth,
        "accepted": accepted.num_accepted.tolist(),
        "parts": parts,
        "graph_ops_seconds": whole,
        "target_forward": vars(forward),
        "fraction": whole / forward.median,
    }
