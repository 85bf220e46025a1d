"""Size of the house by room, in kB of code: comments, docstrings, blank lines and indentation are not counted.

A denser line gains nothing, therefore, and an explanation costs nothing. ``python tests/sizes.py`` prints the rooms.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
C_LIKE = (".h", ".cpp", ".cu", ".cuh", ".hpp")

BUDGET = {
    "bench": 3,
    "bench/generation": 78.2,
    "bench/gpu": 52.7,
    "bench/kernels": 24.3,
    "bench/lib": 13.3,
    "csrc/algorithms": 146.4,
    "csrc/cpu": 172.9,
    "csrc/cuda": 64,
    "csrc/torch_ops": 32.7,
    "docs": 6.6,  # 6 before commands, classes and fields were built as well
    "examples": 20.2,
    "gsd_kernels": 19.8,
    "gsd_kernels/ops": 178,
    "python/gsd_kernels_hub": 10.4,  # what is laid out for the Hub
    "python/gsd_kernels_cli": 97.3,
    "python/gsd_kernels_hf": 43.8,
    "python/gsd_kernels_hf/acceptance": 20.6,
    "python/gsd_kernels_hf/costs": 9.6,
    "python/gsd_kernels_hf/engine": 62.9,
    "python/gsd_kernels_hf/exported": 6.3,
    "python/gsd_kernels_hf/model": 131,
    "python/gsd_kernels_hf/packed": 48.4,
    "python/gsd_kernels_hf/policy": 16.1,
    "python/gsd_kernels_hf/sources": 143.9,
    "python/gsd_kernels_hf/validate": 16.7,
    "python/gsd_kernels_serve": 87.1,
    "python/gsd_kernels_sglang": 17.7,
    "python/gsd_kernels_train": 81.2,
    "python/gsd_kernels_train/recipes": 2.9,
    "tests": 900,
    ".": 8.6,  # 8 before setup.py asked an nvcc for its version and architectures
}
"""kB of code that a room may have: a ceiling, which only falls.

A room has its folder's files, but for those of rooms inside it.
A commit that adds takes as much from the room. A new room takes its ceiling from those of others.
"""


def before() -> dict[str, float]:
    """:data:`BUDGET` where this branch left main, on main that of the commit before; without a history, as it is."""
    for main in ("origin/main", "main"):
        try:
            left, head = _git("merge-base", "HEAD", main), _git("rev-parse", "HEAD")
            text = _git("show", f"{'HEAD^1' if left == head else left}:tests/sizes.py")
        except (subprocess.CalledProcessError, FileNotFoundError):
            continue
        return budget_of(text)
    return BUDGET


def _git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True, stderr=subprocess.DEVNULL).strip()


def budget_of(text: str) -> dict[str, float]:
    """:data:`BUDGET` of another version of this file."""
    assigned = (node for node in ast.parse(text).body if isinstance(node, ast.Assign))
    return next(ast.literal_eval(node.value) for node in assigned if node.targets[0].id == "BUDGET")


def risen(now: dict[str, float], then: dict[str, float]) -> list[str]:
    """Say which ceilings are higher than before, and new ones that no other room fell for."""
    said = [f"{room}: {then[room]} kB, now {kb}" for room, kb in now.items() if kb > then.get(room, kb)]
    new = {room: kb for room, kb in now.items() if room not in then}
    freed = sum(kb - now.get(room, 0) for room, kb in then.items())
    if new and sum(new.values()) > freed:
        said.append(f"{', '.join(new)}: {sum(new.values())} kB are new, and other rooms fell by {freed}")
    return said


def python_code(text: str) -> int:
    """Bytes of code in a Python file."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
    }
    return sum(
        len(token.string.strip())
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type != tokenize.COMMENT and not (token.type == tokenize.STRING and token.start in docstrings)
    )


def c_code(text: str) -> int:
    """Bytes of code in a C++ or CUDA file."""
    return len(re.sub(r"\s+", "", re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)))


def room_of(file: str) -> str:
    """The innermost room of :data:`BUDGET` that a file lies in; ``.`` for all others."""
    return max((room for room in BUDGET if file.startswith(f"{room}/")), key=len, default=".")


def rooms() -> dict[str, float]:
    """kB of code by room, of the files that git knows or would take."""
    listed = subprocess.check_output(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    )
    found = dict.fromkeys(BUDGET, 0.0)
    for name in sorted(set(listed.splitlines())):
        path = ROOT / name
        if path.suffix not in (".py", *C_LIKE) or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        code = (python_code if path.suffix == ".py" else c_code)(text)
        found[room_of(name)] = found.get(room_of(name), 0.0) + code / 1000
    return found


def main() -> None:
    """Print every room with its budget, then the sums."""
    found = rooms()
    for room, size in sorted(found.items(), key=lambda item: -item[1]):
        print(f"{room:36s} {size:8.1f} of {BUDGET.get(room, 0):6.0f} kB")
    sums = {
        "all without tests": [room for room in found if room != "tests"],
        "the core": [room for room in found if room.startswith(("gsd_kernels", "csrc", "python/gsd_kernels_hf"))],
    }
    for name, members in sums.items():
        size, budget = sum(found[room] for room in members), sum(BUDGET[room] for room in members)
        print(f"{name:36s} {size:8.1f} of {budget:6.0f} kB")


if __name__ == "__main__":
    main()
