"""The text: Python's standard library, and which of its files are held out."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

#: Whole files that neither the tokenizer nor the models see before evaluation.
HELD_OUT = tuple(Path(__file__).with_name("held_out.txt").read_text(encoding="utf-8").split())

#: Left out altogether: other people's packages, tables and deliberately undecodable text, and what differs by machine.
EXCLUDED_PARTS = frozenset({"site-packages", "dist-packages", "__pycache__", "ensurepip", "encodings", "pydoc_data",
                            "encoded_modules", "cjkencodings", "lib2to3"})  # fmt: skip
#: Too like sunau.py and process.py to be evaluated on, and not trained on either.
EXCLUDED_FILES = frozenset({"wave.py", "concurrent/futures/thread.py"})
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-", "bad_coding", "badsyntax", "bad_")


class SourceFile(NamedTuple):
    """One source file: its path below the standard library, and its text."""

    name: str
    text: str


def stdlib_sources() -> list[SourceFile]:
    """Return the standard library's readable Python files, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if (
            EXCLUDED_PARTS.intersection(relative.parts)
            or relative.as_posix() in EXCLUDED_FILES
            or any(part.startswith(EXCLUDED_PREFIXES) for part in relative.parts)
        ):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        sources.append(SourceFile(relative.as_posix(), text.replace("\r\n", "\n")))
    return sources


def split_sources(sources: list[SourceFile]) -> tuple[list[SourceFile], list[SourceFile]]:
    """Return (training files, held-out files)."""
    names = set(HELD_OUT)
    held_out = [source for source in sources if source.name in names]
    if missing := names.difference(source.name for source in held_out):
        raise FileNotFoundError(f"held-out modules not in this standard library: {sorted(missing)}")
    return [source for source in sources if source.name not in names], held_out
