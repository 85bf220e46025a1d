"""What the corpus table is asked: code completion, an edit, an agent's loop, prose; none of it in the corpus."""

from __future__ import annotations

import re
from typing import Any

from gsd_kernels_cli import demo

from .prose import PASSAGES

TASKS = ("code", "edit", "agent", "prose")
VISITED = 5  # files that an agent's loop comes back to
LINES = 12  # of a file in an edit, or in an agent's context
CHANGED = 3  # lines of an edit
LABELS = {
    "code": "code completion, held-out files",
    "edit": f"edit: a file of {LINES} lines, {CHANGED} of them changed",
    "agent": f"agent's loop over {VISITED} files",
    "prose": "prose",
}


def texts_of(task: str, prompts: int, turns: int) -> list[tuple[str, str]]:
    """Names and texts of a task's prompts, in order.

    ``edit``: a piece of a held-out file, and again with three changed lines, broken off behind the last of them.
    ``agent``: of ``turns``, each shows a number and the beginning of one of a few files, which come again; nothing of
    the last turn is in the prompt, as where a context is cut.
    """
    if task == "prose":
        return list(PASSAGES.items())[:prompts]
    if task == "code":
        return [(p["name"], p["text"]) for p in demo.prompts("code")[:prompts]]
    pieces = _pieces()
    if task == "edit":
        return [(name, _edit(lines)) for name, lines in pieces[:prompts]]
    found = []
    for turn in range(turns):
        name, lines = pieces[turn % VISITED]
        shown = lines[: LINES - 2 * (turn // VISITED % 3)]
        found.append((f"turn {turn + 1}: {name}", "\n".join([f"# step {turn + 1}: read {name}", *shown]) + "\n"))
    return found


def _pieces() -> list[tuple[str, list[str]]]:
    """Consecutive lines of held-out files, one piece a file."""
    found: dict[str, list[str]] = {}
    for source in demo_sources():
        lines = [line for line in source.text.splitlines() if line.strip()]
        middle = next((i for i in range(len(lines) // 3, len(lines)) if lines[i].startswith(("def ", "class "))), None)
        if middle is not None and middle + LINES <= len(lines):
            found[source.name] = lines[middle : middle + LINES]
    return list(found.items())


def demo_sources(*, held_out: bool = True) -> list[Any]:
    """Files of the standard library that the demo pair was not trained on, or all others."""
    from gsd_kernels_train.recipes.stdlib import split_sources, stdlib_sources

    return split_sources(stdlib_sources())[held_out]


def _edit(lines: list[str]) -> str:
    changed = list(lines)
    places = [place for place in range(1, LINES // 2) if re.search(r"[a-z]{4,}", lines[place])][-CHANGED:]
    for place in places:
        changed[place] = re.sub(r"([a-z]{4,})", r"\1_2", changed[place], count=1)
    return "\n".join([*lines, "", "", *changed[: places[-1] + 1]]) + "\n"
