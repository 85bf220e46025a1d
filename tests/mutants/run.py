"""Plants the faults of table.py one by one in a copy of the tree, and runs the tests that have to notice.

    python tests/mutants/run.py [--ref COMMIT] [--only TEXT] [--seconds S] [--report FILE]

A fault in C++ is compiled in the copy: all of it once a run, and for every fault what includes its file.

By hand: ``make mutants``. Ends with 1 where a mutant survived, could not be planted,
or its tests had no end. A mutant that was not reached
within ``--seconds`` is "not run", which is no verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 300  # seconds of one selection
COMPILED = (".h", ".cpp")
FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
FAILED, NO_TESTS = 1, (4, 5)  # pytest's exit codes


def copy_of(ref: str, folder: Path) -> None:
    """Write the tree of a commit to a folder, with compiled operators that fit to it."""
    archive = subprocess.run(["git", "archive", ref], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    for compiled in (ROOT / "gsd_kernels").glob("*.so"):
        shutil.copy(compiled, folder / "gsd_kernels")
    (folder / ".paths").mkdir()
    (folder / ".paths/gsd_kernels_bench").symlink_to("../bench")


def pytest(folder: Path, *arguments: str, limit: float) -> subprocess.CompletedProcess[str]:
    """Run pytest in the copy."""
    paths = [str(folder / part) for part in ("", "python", ".paths")]
    own = {"PYTHONPATH": os.pathsep.join(paths), "GSD_KERNELS_CACHE": str(folder / ".cache")}
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | own, capture_output=True, text=True, timeout=limit)


def run_tests(folder: Path, selection: list[str]) -> tuple[int | None, str]:
    """pytest's exit code, None where time was over, and the first test that failed or the last line."""
    try:
        done = pytest(folder, "-x", *selection, limit=LIMIT)
    except subprocess.TimeoutExpired:
        return None, f"no end within {LIMIT} s"
    named = FAILURE.search(done.stdout)
    return done.returncode, named.group(1) if named else (done.stdout or done.stderr).strip()[-120:]


def compiled(folder: Path) -> bool:
    """Compile the CPU operators, what has changed of them; return whether they compile."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    environment = os.environ | {"GSD_KERNELS_BUILD_CUDA": "0", "GSD_KERNELS_BUILD_CPU": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True).returncode == 0


@contextmanager
def operators_kept(folder: Path) -> Iterator[None]:
    """Leave the objects and the library behind as those of the code without a fault, which is compiled but once."""
    build, package, kept = folder / "build", folder / "gsd_kernels", folder / ".kept"
    if not kept.exists():
        if not compiled(folder):
            raise SystemExit("the operators do not compile without a fault")
        shutil.copytree(build, kept / "build")
        shutil.copy2(package / "_cpu.abi3.so", kept)
    try:
        yield
    finally:  # with their times, by which ninja knows that they are not old
        shutil.rmtree(build)
        shutil.copytree(kept / "build", build)
        shutil.copy2(kept / "_cpu.abi3.so", package)


@contextmanager
def planted(file: Path, mutant: Mutant) -> Iterator[None]:
    """Write the fault into the file, and take it out again."""
    text, times = file.read_text(), file.stat()
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        file.write_text(text)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def verdict(folder: Path, mutant: Mutant) -> tuple[str, str]:
    """What became of a mutant, and by which test or why."""
    file = folder / mutant.file
    text = file.read_text() if file.exists() else ""
    if text.count(mutant.old) != 1:
        return "not applied", f"{text.count(mutant.old)} places have the old text"
    in_cpp = file.suffix in COMPILED
    with operators_kept(folder) if in_cpp else nullcontext(), planted(file, mutant):
        if in_cpp and not compiled(folder):
            return "not applied", "it does not compile"
        code, by = run_tests(folder, mutant.tests.split())
    if code in NO_TESTS:
        return "not applied", f"no such tests: {by}"
    if code == 0:
        return "survived", by
    if code is None:  # a hang, or a busy machine: whoever runs it decides
        return "timed out", by
    return ("killed", by) if code == FAILED else ("not applied", f"pytest ended with {code}: {by}")


def control(folder: Path, rows: list[dict]) -> None:
    """A test that fails without the fault as well has killed nothing: run all that killed, on the code as it is."""
    killers = sorted({row["by"] for row in rows if row["verdict"] == "killed" and "::" in row["by"]})
    if not killers:
        return
    done = pytest(folder, *killers, limit=LIMIT * len(killers))
    failing = set(FAILURE.findall(done.stdout))
    for row in rows:
        if row["verdict"] == "killed" and (row["by"] in failing or done.returncode not in (0, FAILED)):
            row.update(verdict="not applied", by=f"fails without the fault too: {row['by']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ref", default="HEAD", help="commit whose code and tests are run")
    parser.add_argument("--only", default="", help="part of a mutant's file or sentence")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no mutant after that")
    parser.add_argument("--report", type=Path, help="JSON file")
    options = parser.parse_args()
    begun, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as name:
        copy_of(options.ref, Path(name))
        for mutant in MUTANTS:
            if options.only not in mutant.file + mutant.breaks:
                continue
            start = time.monotonic()
            late = start - begun > options.seconds
            what, by = ("not run", "") if late else verdict(Path(name), mutant)
            seconds = round(time.monotonic() - start, 1)
            rows.append({"breaks": mutant.breaks, "file": mutant.file, "verdict": what, "by": by, "seconds": seconds})
            print(f"{what:12} {seconds:6.1f} s  {mutant.breaks}  [{by}]", flush=True)
        control(Path(name), rows)
    if options.report:
        options.report.write_text(json.dumps({"ref": options.ref, "mutants": rows}, indent=1) + "\n")
    return any(row["verdict"] in ("survived", "not applied", "timed out") for row in rows)


if __name__ == "__main__":
    sys.exit(main())
