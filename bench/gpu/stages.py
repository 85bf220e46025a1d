"""Builds, tests and measures on one GPU, in stages in order of worth, for a machine at hand for minutes.

    python bench/gpu/stages.py [--out DIR] [--former DIR] [--only STAGE]... [--budget SECONDS] [--again] [--list]
    python bench/gpu/stages.py --rehearse                  the same on a CPU with tiny shapes

Every stage is a process that ends within its limit (at most 8 minutes). It leaves a file, STAGE.json (device,
versions, every measured point, what is left), written after every point; what all of them print is in stages.log. What
is measured is not measured again: the same command goes on where the last one ended, also on another machine that is
given the files of earlier calls (``--former``). A call begins no stage for which its seconds (``--budget``) or files
(``--files``) do not suffice.

The limits of the stages up to ``proof`` fit together in ten minutes on a bare machine, the build counted, and those of
the next three, built anew, in the next ten. What each result decides:

========= ==============================================================================================
group     wgmma serves or not: with other bits its kernels go (rows_group*, warpgroup_machine.h)
right     the operator serves or not; a wrong replay alone: GSD_KERNELS_ROWS_OVERLAP=0 becomes the default
clusters  fewer than 32 of 4 or 16 of 8: sums through L2 are what this card takes, else the cluster stays
inside    of each matrix wgmma or mma.sync: the slower one of a shape goes
ahead     kAheadMegabytes; where 0 is as fast, asking ahead goes
proof     what users of this GPU get; a kind that fails here is the next thing to mend
rows      the wanted milliseconds, 8B: 4.2, 4.7, 5.4, 7.8 (H200) or 5.8, 6.1, 6.5, 8.0 (H100) at 16 … 256 rows
duel      which form of an op goes: its verdict names it
pair      captures: a shape's nodes and seconds; two texts of the operator are a fault, and nothing ships
race      auto below 1.0 × the best fixed graph: its policy is wrong on GPUs
cpu       how many threads the default takes; where more are slower, a limit
packed    packed matrices serve without GSD_KERNELS_FUSED_ROWS=cuda, or their kernels go
tune      attention_configs.json
========= ==============================================================================================

Only the standard library is imported here, and nothing need be installed: the stages import the packages of this
checkout. What they need beside it is looked for first.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = re.compile(r"(?:(?<=-[IL])|(?<=\\[nt])|(?<![\w.:/]))/(?:[\w.+@-]+/)+(?=[\w.+-])")  # of absolute paths in JSON
RESULTS = ROOT / "bench" / "results" / "gpu"
LONGEST = 480  # seconds that a stage may take
GRACE = 20  # seconds of them for ending: a stage begins nothing new after the rest
FILES = 8  # that a call leaves, at most; the log is one
WORKER = "gsd_kernels_bench.gpu.work"  # the module that does a stage's work
LOG = "stages.log"
MOST_LOG = 4 << 20  # bytes of it that are kept
TAIL = 4000  # characters of a stage's part in its record

MODELS = ("torch", "triton", "transformers", "numpy")
COMMAND_LINE = (*MODELS, "typer", "rich")
TESTING = (*MODELS, "pytest", "hypothesis")


@dataclass(frozen=True)
class Stage:
    """One measurement that is run in a process of its own.

    Attributes:
        name: also of its files.
        work: the module of this folder, and its function, that do the work.
        what: in a few words.
        limit: seconds after which it is killed.
        least: seconds with which it is worth beginning. A stage that goes on where it ended needs fewer than ``limit``.
        needs: modules without which it does not begin.
        with_ops: whether it uses the compiled CUDA ops, which are built first where they are missing.
    """

    name: str
    work: str
    what: str
    limit: int = LONGEST
    least: int = LONGEST
    needs: tuple[str, ...] = MODELS
    with_ops: bool = True


#: In order of worth: what decides whether anything else means something comes first.
STAGES = (
    Stage("build", "build:run", "the CUDA ops for this GPU, doctor", 115, 60, ("torch",)),
    Stage("group", "right:run", "products by wgmma and by mma.sync: the same bits or not", 45, 25),
    Stage("right", "right:run", "the verdict on the operator of rows: error, bits, launches that begin early", 80, 45),
    Stage("clusters", "clusters:run", "how many clusters of blocks this card holds at a time", 20, 10, with_ops=False),
    Stage("inside", "inside:inside", "its time by kernel and by matrix; path attention by rows and prefix", 50, 30),
    Stage("ahead", "inside:ahead", "its time by megabytes of weights that are asked for ahead", 40, 25),
    Stage("proof", "right:prove", "the proof of every kind, as a GPU makes it at its first use", 120, 30),
    Stage(
        "rows", "inside:rows", "its time by rows, early, in turn and by groups, beside the modules; a prompt's", 100, 40
    ),
    Stage("duel", "duel:duel", "Triton and CUDA C++ forms of each op and of a captured step: which goes", 150, 60),
    Stage(
        "pair", "pair:run", "8B + 1B, operator and modules: captured steps, nodes, memory, a replay by kernel", 100, 60
    ),
    Stage("race", "races:run", "8B behind a 1B: plain, graph and auto, sessions kept and not", 260, 120, COMMAND_LINE),
    Stage(
        "cpu", "races:run", "bench real and prompt on the CPU by 1 to 16 threads", 480, 60, COMMAND_LINE, with_ops=False
    ),
    Stage("tests", "gpu_tests:run", "each kernel once, captured steps, then more", 480, 60, TESTING),
    Stage("sanitize", "gpu_tests:sanitize", "the operator's tests under compute-sanitizer", 480, 120, TESTING),
    Stage("packed", "packed:run", "packed matrices in the operator of rows: bits, then time", 150, 60),
    Stage("attention", "duel:attention", "tree attention beside its peers, cold L2", 480, 60),
    Stage("e2e-8b", "races:run", "8B behind a 1B, beside transformers' modes", 480, 240, COMMAND_LINE),
    Stage("e2e-7b", "races:run", "7B behind a 1.1B", 480, 240, COMMAND_LINE),
    Stage("e2e-70b", "races:run", "70B behind a 1.1B, on a GPU that holds it", 480, 240, COMMAND_LINE),
    Stage("tune", "races:run", "launch configurations of the Triton attention", needs=COMMAND_LINE),
    Stage("static-compile", "races:run", "transformers' compiled static cache", needs=COMMAND_LINE),
)


def stage_named(name: str) -> Stage:
    """Raises:
    ValueError: no such stage.
    """
    found = {stage.name: stage for stage in STAGES}
    if name not in found:
        raise ValueError(f"--only: no stage {name!r}; stages: {', '.join(found)}")
    return found[name]


@dataclass(frozen=True)
class Call:
    """Where results go and come from, and what this call may spend."""

    out: Path
    former: Path
    rehearse: bool = False
    again: bool = False
    budget: float = float("inf")
    files: int = FILES

    def record(self, stage: Stage) -> dict[str, Any]:
        """The record of a stage: of this call's folder, else of earlier calls'; empty if nothing is known."""
        for folder in (self.out, self.former):
            try:
                found = json.loads((folder / f"{stage.name}.json").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if isinstance(found, dict) and found.get("rehearsal") == self.rehearse:
                return found
        return {}

    def is_done(self, stage: Stage) -> bool:
        return bool(self.record(stage).get("ok"))


def run_all(stages: Sequence[Stage], call: Call) -> list[str]:
    """Run the stages that are not done, while seconds and files suffice; the names of those that failed.

    A stage whose ops are not there yet has the stage ``build`` before it.
    """
    begin, files, failed = time.monotonic(), 1, []  # the log is a file
    call.out.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        left = call.budget - (time.monotonic() - begin)
        if call.is_done(stage) and not call.again:
            say(f"{stage.name}: done before")
            continue
        needs = stage.with_ops and stage.name != "build" and not call.rehearse
        due = [stage_named("build"), stage] if needs and not built() and missing(stage) is None else [stage]
        if (files := files + len(due)) > call.files:
            say(f"{stage.name}: left for the next call: more than {call.files} files")
            break
        if left < (least := sum(each.least for each in due)):
            say(f"{stage.name}: left for the next call: {left:.0f} s are left, it needs {least}")
            break
        for each in due:  # also where the build fails: Triton's kernels need none of it
            if run(each, call, call.budget - (time.monotonic() - begin)).get("failed"):
                failed.append(each.name)
    return failed


def run(stage: Stage, call: Call, seconds: float) -> dict[str, Any]:
    """Run one stage, for its limit or the ``seconds`` that are left; its record, which is written in any case.

    The record's ``ok``: all points are measured. ``failed``: something went wrong (running out of time is no failure of
    a stage that has measured a point).
    """
    begin, seconds = time.monotonic(), min(stage.limit, seconds)
    say(f"{stage.name}: {stage.what}")
    log, code, problem = call.out / LOG, 0, missing(stage)
    with log.open("ab") as output, search_path() as environment:
        start = output.tell()
        if problem is None:
            given = [stage.name, json.dumps(vars(call), default=str), str(max(1.0, seconds - GRACE))]
            code = execute([sys.executable, "-m", WORKER, *given], environment, output, seconds)
    printed = log.read_bytes()
    log.write_bytes(printed[-MOST_LOG:])
    record = call.record(stage)
    if "exit_code" in record:  # an earlier call's: the stage did not begin to write its own
        record = {}
    record |= {"rehearsal": call.rehearse, "stage": stage.name, "exit_code": code}
    record["wall_seconds"] = round(time.monotonic() - begin, 1)
    if problem is not None:
        record["error"] = problem
    timed_out = code == 124 and bool(record.get("points"))
    record["ok"] = bool(record.get("complete")) and code == 0
    record["failed"] = not record["ok"] and not timed_out and not (code == 0 and record.get("waiting"))
    record["output"] = printed[start:].decode("utf-8", errors="replace")[-TAIL:]
    write(call.out / f"{stage.name}.json", record)
    state = "done" if record["ok"] else problem or ("FAILED" if record["failed"] else "goes on in the next call")
    say(f"{stage.name}: {state} after {record['wall_seconds']:.0f} s")
    if record["failed"]:
        say(record["output"][-2000:])
    return record


def missing(stage: Stage) -> str | None:
    """Say what the stage needs and is not installed; ``None`` where all is."""
    absent = [name for name in stage.needs if importlib.util.find_spec(name) is None]
    return f"the stage {stage.name} needs {', '.join(absent)}: not installed for {sys.executable}" if absent else None


@contextlib.contextmanager
def search_path() -> Iterator[dict[str, str]]:
    """An environment in which Python finds this checkout's packages, installed or not, and no earlier measurements."""
    with tempfile.TemporaryDirectory(prefix="gsd-stages-") as folder:
        Path(folder, "gsd_kernels_bench").symlink_to(ROOT / "bench", target_is_directory=True)
        places = [str(ROOT), folder, str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
        yield {
            "GSD_KERNELS_CACHE": os.path.join(folder, "cache"),  # what is learned starts cold, as on a new machine
            "PYTHONUNBUFFERED": "1",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, places)),
        }


def execute(command: Sequence[str], environment: dict[str, str], output: IO[bytes], seconds: float) -> int:
    """The command's exit code; 124 where it ran out of time and was killed with all that it had started."""
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            return process.wait(timeout=max(seconds, 1.0))
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return 124
            raise


def built() -> bool:
    """Return whether the compiled CUDA ops lie in the checkout."""
    return any((ROOT / "gsd_kernels").glob("_cuda*.so"))


def write(file: Path, record: dict[str, Any]) -> None:
    """Replace a record whole: a call may be killed at any time.

    Files are named without their folders: it is read elsewhere, where those of this machine say nothing.
    """
    partial = file.with_suffix(".partial")
    partial.write_text(FOLDERS.sub("", json.dumps(record, indent=1)) + "\n", encoding="utf-8")
    partial.replace(file)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what a command line asks for; the exit status."""
    parser = argparse.ArgumentParser(description="Build, test and measure on one GPU, in stages in order of worth.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for results; default: bench/results/gpu")
    parser.add_argument("--former", type=Path, metavar="DIR", help="results of earlier calls; default: --out")
    parser.add_argument("--only", action="append", metavar="STAGE", help="this stage; repeatable")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="for this call")
    parser.add_argument("--files", type=int, default=FILES, metavar="N", help=f"left by this call; default {FILES}")
    parser.add_argument("--again", action="store_true", help="also what is done")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU with tiny shapes")
    parser.add_argument("--list", action="store_true", help="name the stages and leave")
    given = parser.parse_args(arguments)
    try:
        chosen = [stage_named(name) for name in given.only or ()]
    except ValueError as error:
        parser.error(str(error))
    stages = [stage for stage in STAGES if not chosen or stage in chosen]
    folder = (given.out or (RESULTS.with_name("gpu-rehearsal") if given.rehearse else RESULTS)).resolve()
    call = Call(folder, (given.former or folder).resolve(), given.rehearse, given.again, given.budget, given.files)
    if given.list:
        for stage in stages:
            waits = "" if call.is_done(stage) else f"at most {stage.limit} s"
            print(f"{stage.name:15} {waits or 'done':14} {stage.what}")
        return 0
    failed = run_all(stages, call)
    if failed:
        say(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
