"""Whole benchmarks of the command line as stages: their results without the files beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from gsd_kernels.attention_config import TABLE
from gsd_kernels_cli import demo
from gsd_kernels_cli.demo import smollm2

from ..lib.shapes import num_parameters
from .work import Work

#: Against CUDA-graphed plain decoding (``plain``); what compiles longer has a stage of its own.
COMPETITORS = (
    "hf-greedy,hf-assisted-3,hf-assisted-5,hf-assisted-dynamic,hf-prompt-lookup,plain,chain,graph,history-auto,auto"
)
STATIC = "hf-static-compile,plain,auto"
THREADS = (1, 2, 4, 8, 16)  # of the CPU's benchmarks
SESSIONS = "plain,graph,graph-new,auto,auto-new"
#: (target, draft, competitors): function and cost apart, the demo pair's function at the cost of these shapes.
PAIRS = {
    "race": ("llama-3-8b", "llama-3.2-1b", SESSIONS),
    "e2e-7b": ("llama-2-7b", "tinyllama-1.1b", COMPETITORS),
    "e2e-8b": ("llama-3-8b", "llama-3.2-1b", COMPETITORS),
    "e2e-70b": ("llama-2-70b", "tinyllama-1.1b", COMPETITORS),
    "static-compile": ("llama-2-7b", "tinyllama-1.1b", STATIC),
}
HEADROOM_FACTOR = 1.05  # of a GPU's memory against a pair's weights
SETUP_SECONDS = 190.0  # seconds of a stage in which models are made and everybody writes a text once
MIN_RACE_SECONDS = 60.0  # seconds of a race


def run(work: Work) -> None:
    """A point for every benchmark; ``report`` is the JSON that it would have written by itself.

    Of a pair that this GPU cannot hold the point ``memory`` says so.
    """
    planned = commands(work.stage.name, work.rehearse, max(MIN_RACE_SECONDS, work.left() - SETUP_SECONDS))
    if work.stage.name in PAIRS and not work.rehearse:
        weights = work.dtype.itemsize * sum(map(num_parameters, PAIRS[work.stage.name][:2]))
        total = torch.cuda.get_device_properties(work.device).total_memory
        if HEADROOM_FACTOR * weights > total:
            lack = f"{weights / 1e9:.0f} GB of weights, the GPU has {total / 1e9:.0f} GB"
            return work.keep("memory", {"missing": lack})
    return work.each({name: (work, name, given) for name, given in planned.items()}, bench)


def commands(stage: str, rehearse: bool, seconds: float) -> dict[str, list[str]]:
    """The arguments of ``gsd-kernels bench`` for a stage, by the name of the result.

    A race begins no prompt that would end after ``seconds``: models are made and warmed up before.
    """
    where = ["--device", "cpu", "--dtype", "float32"] if rehearse else ["--device", "cuda", "--dtype", "bfloat16"]
    if stage == "tune":
        return {"tune": ["tune-attention", *(["--help"] if rehearse else [])]}
    if stage == "cpu":
        tiny = ["--model", str(demo.path() / "target"), "--dtype", "float32"]
        model = tiny if rehearse or smollm2.why_missing() is not None else []
        real = ["real", *model, "--limit", "1", *(["--new-tokens", "4", "--ways", "gsd-plain"] if rehearse else [])]
        short = ["--lengths", "9", "--new-tokens", "2", "--ways", "gsd-history"] if rehearse else ["--rounds", "1"]
        runs = {"real": real, "prompt": ["prompt", *model, *short]}
        return {f"{name} threads={n}": runs[name] for n in THREADS[: 1 if rehearse else None] for name in runs}
    target, draft, competitors = PAIRS[stage]
    if rehearse:
        target = draft = "tiny"
        competitors = {"static-compile": "plain,auto", "race": SESSIONS}.get(stage, "hf-greedy,plain,auto")
    prompts = "1" if rehearse else "3" if stage == "race" else "20"
    size = ["--prompts", prompts, "--new-tokens", "8" if rehearse else "128"]
    models = ["--pair", "tiny" if rehearse else "demo", "--target-shape", target, "--draft-shape", draft]
    return {stage: ["generate", *where, *models, *size, "--competitors", competitors, "--seconds", f"{seconds:.0f}"]}


def bench(work: Work, name: str, arguments: list[str]) -> dict[str, Any]:
    """Run one benchmark in a process that ends with this one's group.

    Of one that the stage's time ended, what it had written counts: a race writes after every prompt.

    Raises:
        RuntimeError: it failed, or had written nothing yet.
    """
    with tempfile.TemporaryDirectory() as folder:
        tunes = arguments[0] == "tune-attention"
        where = [] if tunes else ["--out", folder, "--name", name]
        command = [sys.executable, "-m", "gsd_kernels_hf", "--debug", "bench", *arguments, *where]
        threads = name.partition(" threads=")[2]
        variables = {"OMP_NUM_THREADS": threads} if threads else {}
        seconds, ended = max(work.left(), 1.0), True
        try:
            done = subprocess.run(command, timeout=seconds, env={**os.environ, **variables})
            if done.returncode:
                raise RuntimeError(f"gsd-kernels bench {' '.join(arguments)} ended with {done.returncode}: see the log")
        except subprocess.TimeoutExpired:
            ended = False
        if tunes:  # it rewrites this GPU's entries of the table
            return {"table": json.loads(TABLE.read_text(encoding="utf-8"))}
        report = Path(folder, f"{name}.json")
        if not report.exists():
            raise RuntimeError(f"gsd-kernels bench {arguments[0]} was given {seconds:.0f} s and wrote no result")
        return {"report": json.loads(report.read_text(encoding="utf-8")), "ended": ended}
