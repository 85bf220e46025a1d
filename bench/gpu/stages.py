"""Builds, tests, tunes and measures on one GPU, in stages that can be resumed.

    python bench/gpu/stages.py [--out DIR] [--only STAGE]... [--budget SECONDS] [--again] [--list]
    python bench/gpu/stages.py --rehearse                  the same on a CPU with tiny shapes

Every stage is a process of its own that ends within its limit (at most 8.5 minutes) and leaves ``STAGE.stage.json``
(commands, seconds, the end of their output) beside its results. Stages that are done are skipped, so the same command
goes on after an interruption; ``--budget`` begins none that could not finish in time. Nothing is imported but
typer and the standard library: the first stage installs the package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

import typer

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "gpu"
LIMIT = 510  # seconds a stage may take
TAIL = 6000  # characters of output that are kept


@dataclass(frozen=True)
class Stage:
    """Commands that are run one after the other, until one fails or ``limit`` seconds are over."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    limit: int = LIMIT


def python(*arguments: str) -> tuple[str, ...]:
    return sys.executable, *arguments


def bench(*arguments: str) -> tuple[str, ...]:
    return python("-m", "gsd_kernels_hf", "--debug", "bench", *arguments)


def several(option: str, values: tuple[object, ...]) -> list[str]:
    return [word for value in values for word in (option, str(value))]


def stages(out: Path, rehearse: bool) -> list[Stage]:
    """All stages in order. A rehearsal has the same ones, with shapes and grids that a CPU gets through."""
    shapes = ("tiny",) if rehearse else ("llama-2-7b", "llama-3-8b", "llama-2-70b")
    rows = (1, 8) if rehearse else (1, 8, 16, 32, 64, 128)
    prefixes = (64,) if rehearse else (1024, 4096, 8192, 32768)
    device = ["--device", "cpu"] if rehearse else ["--device", "cuda"]
    dtype = ["--dtype", "float32"] if rehearse else ["--dtype", "bfloat16"]
    common = [*device, *dtype, "--out", str(out), "--seconds", "0.01" if rehearse else "0.2"]
    whole = [*device, *dtype, "--out", str(out), "--pair", "tiny" if rehearse else "demo"]
    small = "tiny" if rehearse else "tinyllama-1.1b"

    found = [
        Stage("build", () if rehearse else (install(),)),
        Stage(
            "doctor",
            (python("-m", "gsd_kernels_hf", "doctor", *([] if rehearse else ["--kernels", "--arch", "90"])),),
        ),
        Stage("tests", (python("-m", "pytest", "-q", "--co" if rehearse else "--maxfail=20", *gpu_tests()),)),
        # Rewrites this GPU's entries of gsd_kernels/attention_configs.json; the step costs are tuned in each e2e stage.
        Stage("tune", (bench("tune-attention", *(["--help"] if rehearse else [])),)),
    ]
    for shape in shapes:
        grid = [*several("--shape", (shape,)), *several("--rows", rows), *several("--prefix", prefixes)]
        name = f"attention-{shape}"
        found.append(Stage(name, (bench("attention", *common, *grid, "--peer", "sdpa_mask", "--name", name),)))
    every = several("--shape", shapes)
    found.append(
        Stage(
            "kernels",
            (
                bench("merge", *device, *common[4:], *several("--rows", (16,) if rehearse else ()), "--name", "merge"),
                bench("sample", *common, *every, *several("--rows", rows[:2] if rehearse else ()), "--name", "sample"),
                bench("commit", *common, *every, *several("--rows", rows[:1] if rehearse else ()), "--name", "commit"),
            ),
        )
    )
    found += [
        # Function and cost apart: 7B behind a TinyLlama-shaped draft, 8B behind a 1B one, 70B behind TinyLlama's.
        whole_run("e2e-7b", "tiny" if rehearse else "llama-2-7b", small, whole, rehearse),
        whole_run(
            "e2e-8b", "tiny" if rehearse else "llama-3-8b", "tiny" if rehearse else "llama-3.2-1b", whole, rehearse
        ),
        whole_run("e2e-70b", "tiny" if rehearse else "llama-2-70b", small, whole, rehearse),
    ]
    peer_grid = [
        *several("--shape", shapes[:1]),
        *several("--rows", rows[-1:] if rehearse else (16, 64)),
        *several("--prefix", prefixes if rehearse else (4096,)),
    ]
    found += [
        Stage(f"peers-{peer}", (bench("attention", *common, *peer_grid, "--peer", peer, "--name", f"peers-{peer}"),))
        for peer in ("flex_attention", "flash_attn", "flashinfer")
    ]
    found.append(
        whole_run(
            "peers-static-compile",
            "tiny" if rehearse else "llama-2-7b",
            small,
            whole,
            rehearse,
            competitors="hf-static-compile,plain,auto",
        )
    )
    return found


#: Against CUDA-graphed plain decoding (``plain``); what compiles longer has a stage of its own.
COMPETITORS = "hf-greedy,hf-assisted-3,hf-assisted-5,hf-assisted-8,hf-assisted-dynamic,plain,chain,tree,graph,auto"


def whole_run(
    name: str, target: str, draft: str, common: list[str], rehearse: bool, competitors: str = COMPETITORS
) -> Stage:
    """One end-to-end race; it begins no prompt that would end after the limit."""
    size = ["--prompts", "1", "--new-tokens", "8"] if rehearse else ["--prompts", "20", "--new-tokens", "128"]
    shapes = ["--target-shape", target, "--draft-shape", draft]
    if rehearse:
        competitors = ",".join([*competitors.split(",")[:2], "auto"])
    return Stage(
        name,
        (bench("generate", *common, *shapes, *size, "--competitors", competitors, "--seconds", "300", "--name", name),),
    )


def install() -> tuple[str, ...]:
    """The package with its CUDA ops, without a network: torch and the other requirements are there already."""
    return python("-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "-e", str(ROOT))


def gpu_tests() -> list[str]:
    # The project's options need plugins that a GPU machine may lack.
    return ["-m", "gpu", "-p", "no:cacheprovider", "-o", "addopts=--strict-markers"]


def run(stage: Stage, out: Path, rehearse: bool) -> bool:
    """Run a stage and keep its record; whether every command succeeded."""
    begin = time.monotonic()
    environment = {**os.environ, **({} if rehearse else {"GSD_BUILD_CUDA": "1"})}
    records = []
    for command in stage.commands:
        left = stage.limit - (time.monotonic() - begin)
        print(f"{stage.name}: {' '.join(command)}", file=sys.stderr, flush=True)
        log = out / f"{stage.name}.log"
        with log.open("ab") as output:
            code = call(command, environment, output, left)
        records.append({"command": command[1:], "exit_code": code, "seconds": time.monotonic() - begin})
        if code != 0:
            break
    ok = all(record["exit_code"] == 0 for record in records)
    tail = ""
    if stage.commands:
        tail = (out / f"{stage.name}.log").read_text(encoding="utf-8", errors="replace")[-TAIL:]
    record = {"stage": stage.name, "ok": ok, "seconds": time.monotonic() - begin, "commands": records, "output": tail}
    mark(out, stage).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{stage.name}: {'done' if ok else 'FAILED'} in {record['seconds']:.0f} s", file=sys.stderr, flush=True)
    if not ok:
        print(tail[-2000:], file=sys.stderr, flush=True)
    return ok


def call(command: tuple[str, ...], environment: dict[str, str], output: IO[bytes], seconds: float) -> int:
    """The command's exit code; 124 where it ran out of time."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=max(seconds, 1.0)
        )
    except subprocess.TimeoutExpired:
        return 124
    return done.returncode


def mark(out: Path, stage: Stage) -> Path:
    return out / f"{stage.name}.stage.json"


def is_done(out: Path, stage: Stage) -> bool:
    try:
        return bool(json.loads(mark(out, stage).read_text(encoding="utf-8"))["ok"])
    except (OSError, ValueError, KeyError):
        return False


def command(
    out: Annotated[Path | None, typer.Option("--out", help="Folder for results; default: bench/results/gpu.")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", metavar="STAGE", help="This stage; repeatable.")] = None,
    budget: Annotated[float, typer.Option("--budget", metavar="SECONDS", help="For this call.")] = float("inf"),
    again: Annotated[bool, typer.Option("--again", help="Also stages that are done.")] = False,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="On the CPU with tiny shapes, the build left out.")
    ] = False,
    list_stages: Annotated[bool, typer.Option("--list", help="Name the stages and leave.")] = False,
) -> None:
    """Build, test, tune and measure on one GPU, in stages that can be interrupted and resumed."""
    folder = (out or (RESULTS.with_name("gpu-rehearsal") if rehearse else RESULTS)).resolve()
    planned = stages(folder, rehearse)
    if unknown := sorted(set(only or ()) - {stage.name for stage in planned}):
        names = ", ".join(stage.name for stage in planned)
        raise typer.BadParameter(f"--only: no stage {unknown[0]!r}; stages: {names}")
    planned = [stage for stage in planned if not only or stage.name in only]
    folder.mkdir(parents=True, exist_ok=True)
    if list_stages:
        for stage in planned:
            print(f"{stage.name}{'  done' if is_done(folder, stage) else ''}")
    elif failed := run_all(planned, folder, rehearse=rehearse, again=again, budget=budget):
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        raise typer.Exit(1)


def run_all(planned: list[Stage], out: Path, *, rehearse: bool, again: bool, budget: float) -> list[str]:
    """Run the stages that are not done yet and fit into ``budget`` seconds; the names of those that failed."""
    begin, failed = time.monotonic(), []
    for stage in planned:
        if is_done(out, stage) and not again:
            print(f"{stage.name}: done before", file=sys.stderr)
            continue
        if time.monotonic() - begin + stage.limit > budget:
            print(f"{stage.name}: left for the next call", file=sys.stderr)
            break
        if not run(stage, out, rehearse):
            failed.append(stage.name)
            if stage.name == "build":
                break
    return failed


if __name__ == "__main__":
    typer.run(command)
