"""The duel of an op's Triton and CUDA C++ forms: each small op, tree attention, and whole captured steps with either.

What goes is what the verdict names: two forms of one op are two places for a fault. A Triton form stays only where CUDA
C++ takes much longer, since it is compiled at its first use; CUDA's tree attention stays only where it is faster.

The stage ``attention`` times tree attention alone, beside other people's kernels.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from gsd_kernels.backends import FIRST, compiled_first, unavailable_reason
from gsd_kernels_hf.model.fused import SWITCH

from ..generation.configs import fixed_configs
from ..kernels.cases import CASES
from ..lib.runner import Settings
from ..lib.runner import run as run_case
from . import pair
from .graphs import compilations, summary
from .right import passed
from .work import Work, points, switched

FORMS = ("triton", "cuda")
SHAPE = "llama-3-8b"
ROWS = {"merge": (16, 64), "sample": (16, 64), "commit": (8,)}
ATTENTION = (("llama-3-8b", 1024), ("llama-3-8b", 4096), ("llama-3.2-1b", 1024))
ATTENTION_ROWS = (16, 64)
ATTENDS = "dag_attention"
BESIDE = {"shape": ("llama-3-8b", "llama-2-70b"), "prefix": (1024, 4096, 32768), "rows": (16, 32, 64)}  # peers
SMALL = {"shape": ("tiny",), "prefix": (64,), "rows": (8,)}
WORTH = 1.3  # times as long CUDA C++ may take, before Triton's form is worth its compilation
STEPS = dict(zip(FORMS, FIRST, strict=True))  # what GSD_KERNELS_CUDA_FIRST says


def forms(work: Work) -> tuple[str, str]:
    """The backends that are compared."""
    if not work.rehearse:
        return FORMS
    own = "cpu" if unavailable_reason("cpu", work.device) is None else "reference"
    work.skip(f"backends triton and cuda, FlashInfer: reference and {own} take their places")
    return "reference", own


def attention(work: Work) -> None:
    """Points ``SHAPE prefix=PREFIX rows=ROWS`` of tree attention beside its peers."""
    backends = forms(work)
    cases = points("{shape} prefix={prefix} rows={rows}", **(SMALL if work.rehearse else BESIDE))
    work.each(cases, lambda *of: compared(work, "attention", *of, backends, peers=None))


def duel(work: Work) -> None:
    """Points ``OP rows=R``, ``dag_attention SHAPE PREFIX ROWS``, ``step FORM``, and ``verdict``."""
    backends = forms(work)
    shape, at = ("tiny", 1) if work.rehearse else (SHAPE, None)
    cases = {f"{op} rows={n}": (op, shape, 0, n) for op, rows in ROWS.items() for n in rows[:at]}
    sizes, rows = ((("tiny", 64),), (8,)) if work.rehearse else (ATTENTION, ATTENTION_ROWS)
    named = points(ATTENDS + " {size[0]} prefix={size[1]} rows={rows}", size=sizes, rows=rows)
    cases |= {name: ("attention", *size, count) for name, (size, count) in named.items()}
    work.each(cases, lambda *of: compared(work, *of, backends))
    steps(work)
    if all(map(work.is_done, cases)):
        rows = [row for name in cases for row in work.points[name]["rows"]]
        work.each({"verdict": (rows, backends)}, verdict)


def compared(
    work: Work,
    case: str,
    shape: str,
    prefix: int,
    rows: int,
    backends: Sequence[str],
    peers: Sequence[str] | None = (),
) -> dict[str, Any]:
    """The rows of a case's report at one point, its contestants' results compared first; and what was compiled.

    Raises:
        RuntimeError: ours is wrong, or cannot run.
    """
    grid = {"shapes": (shape,), "rows": (rows,), "prefixes": (prefix,), "backends": [*dict.fromkeys(backends)]}
    seconds = 0.02 if work.rehearse else 0.15
    settings = Settings(work.device, work.dtype, **grid, peers=peers, quick=work.rehearse, seconds=seconds)
    with compilations() as compiled:
        found = run_case(case, CASES[case], settings).rows
    for row in found:
        if row.median is None and not row.peer:
            raise RuntimeError(f"{row.contestant} cannot run: {row.missing}")
        print(f"  {row.operation}, {row.contestant}: {1e6 * (row.median or math.nan):.1f} µs", flush=True)
    return {"rows": [vars(row) for row in found], "compilations": summary(compiled)}


def steps(work: Work) -> None:
    """A captured graph step of the pair by either form: seconds of the first call and of a replay, and its kernels."""
    cases = {f"step {form}": (first,) for form, first in STEPS.items()}
    models = lru_cache(lambda: pair.models(work))
    way = "cuda" if passed(work, *pair.shapes(work)) else "0"
    config = fixed_configs(work.device)["graph"]

    def measure(first: str) -> dict[str, Any]:
        with switched({"GSD_KERNELS_CUDA_FIRST": first, SWITCH: way}):
            compiled_first.cache_clear()
            try:
                found = pair.twice(work, *models(), config)
            finally:
                compiled_first.cache_clear()
        texts = [found["text"], *(work.points[name]["text"] for name in cases if work.is_done(name))]
        if any(text != texts[0] for text in texts):
            raise RuntimeError(f"the forms wrote two texts: {texts}")
        return found

    work.each(cases, measure)


def verdict(rows: Sequence[dict[str, Any]], backends: Sequence[str]) -> dict[str, Any]:
    """The seconds of every op's forms, and which of them goes; of several sizes the geometric mean counts."""
    found: dict[str, dict[str, Any]] = {}
    for op in dict.fromkeys(row["operation"] for row in rows):
        triton, cuda = (
            [row["median"] for row in rows if (row["operation"], row["contestant"]) == (op, backend)]
            for backend in backends
        )
        ratio = statistics.geometric_mean(b / a for a, b in zip(triton, cuda, strict=True))
        goes = "triton" if ratio <= WORTH else "cuda"
        if op == ATTENDS:  # Triton's serves heads and dtypes that CUDA's does not
            goes = "neither" if ratio < 1.0 else "cuda"
        print(f"  {op}: CUDA C++ takes {ratio:.2f} times as long; goes: {goes}", flush=True)
        found[op] = {"triton": triton, "cuda": cuda, "cuda_over_triton": ratio, "goes": goes}
    return {"ops": found, "worth": WORTH}
