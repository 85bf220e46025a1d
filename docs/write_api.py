"""Writes docs/api.md from the docstrings of the public names, and the table of docs/serving.md from the server's.

    python docs/write_api.py [--check]

``--check`` changes nothing and fails where a page is out of date.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import gsd_kernels
from gsd_kernels_serve import fields

LINE = 90
PAGE = Path(__file__).with_name("api.md")
SERVING = Path(__file__).with_name("serving.md")
SECTIONS = {
    "Generation": (
        "generate",
        "Options",
        "patch",
        "learn",
        "Patch",
        "HistoryMemory",
        "unpatch",
        "custom_generate_folder",
        "custom_generate",
        "from_gguf",
        "keep_packed",
        "pack",
        "tune",
        "GenerationStats",
        "SourceStats",
        "GraphConfig",
        "Automatic",
        "RowSettings",
        "ShapeSettings",
        "Typical",
        "DraftHeads",
        "Eagle3",
        "DFlash",
        "Mtp",
        "Gemma4Assistant",
        "LayerSkip",
        "Corpus",
        "OnlineLearner",
        "GraphDecoder",
    ),
    "Draft sources": ("DraftSource", "Level", "Proposal", "Verified", "Text", "DecodeState", "Sampler"),
    "One step": ("TokenGraph", "Frontier", "Rows", "Acceptance"),
    "Operations": (
        "merge",
        "flatten",
        "dag_attention",
        "verify",
        "commit_kv",
        "write_kv",
        "sample_rows",
        "draft_candidates",
        "perturb_candidates",
        "mix_candidates",
        "NgramTable",
        "ngram_insert",
        "ngram_lookup",
    ),
    "Backends": ("BACKENDS", "BackendUnavailableError"),
}
TYPES = {
    "Options": "gsd_kernels_hf.engine.options",
    "Patch": "gsd_kernels_hf.api",
    "GenerationStats": "gsd_kernels_hf.engine.stats",
    "SourceStats": "gsd_kernels_hf.engine.stats",
    "HistoryMemory": "gsd_kernels_hf.sources.memory",
    "Text": "gsd_kernels_hf.sources.base",
    "DecodeState": "gsd_kernels_hf.records",
    "Sampler": "gsd_kernels_hf.records",
}
"""Types that public functions take, hand to you or return, and no user makes."""

HEAD = """\
# Public names

All of `gsd_kernels`; anything else is private. *Types* are met in arguments and results, and need not be imported. Made
from the docstrings by `python docs/write_api.py`.
"""


def page() -> str:
    """The whole page.

    Raises:
        ValueError: a public name is in no section, or a section names what is not public.
    """
    listed = [name for names in SECTIONS.values() for name in names]
    if odd := (set(listed) - set(TYPES)) ^ (set(gsd_kernels.__all__) - {"__version__"}):
        raise ValueError(f"SECTIONS and gsd_kernels.__all__ differ: {', '.join(sorted(odd))}")
    parts = [HEAD]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [entry(name, value_of(name)) for name in names]
    return "\n".join(parts)


def value_of(name: str) -> Any:
    """A public name, or one of :data:`TYPES`."""
    return getattr(import_module(TYPES[name]) if name in TYPES else gsd_kernels, name)


def entry(name: str, value: Any) -> str:
    """One name: its signature unless it is a type, its docstring, and the public methods of a class."""
    if not callable(value):
        return f"### `{name}`\n\n`{value!r}`\n"
    made = f"*Type*, of `{TYPES[name]}`.\n" if name in TYPES else code(f"{name}{signature(value)}")
    lines = [f"### `{name}`\n", made, prose(inspect.getdoc(value))]
    for method, member in methods(value) if inspect.isclass(value) else ():
        lines += [
            f"#### `{name}.{method}`\n",
            code(f"{method}{signature(member)}"),
            prose(inspect.getdoc(member) or ""),
        ]
    return "\n".join(lines)


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Documented functions that the class defines itself, in the order of the source."""
    for name, member in vars(cls).items():
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if not name.startswith("_") and inspect.isfunction(function) and function.__doc__:
            yield name, getattr(cls, name) if isinstance(member, classmethod) else function


def signature(value: Any) -> str:
    """The signature as in the source, a parameter a line where it is long; without ``self`` and ``-> None``."""
    try:
        found = inspect.signature(value)
    except ValueError:  # a type that takes what its base takes
        return ""
    parts: list[str] = []
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        if parameter.name != "self":
            parts.append(_parameter(parameter))
    returned = "" if found.return_annotation in (found.empty, None, "None") else f" -> {found.return_annotation}"
    if len(line := f"({', '.join(parts)}){returned}") <= LINE:
        return line
    return "(\n" + "".join(f"    {part},\n" for part in parts) + f"){returned}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"{stars}{parameter.name}{kind}{default}"


def code(text: str) -> str:
    return f"```python\n{text}\n```\n"


def prose(doc: str) -> str:
    """A docstring as Markdown: sections become lists, roles and double backticks become code."""
    doc = re.sub(r":\w+:`~?\.?(?:[\w.]*\.)?([\w]+)`", r"`\1`", doc).replace("``", "`")
    lines: list[str] = []
    inside = False
    for line in doc.splitlines():
        if re.fullmatch(r"(Args|Attributes|Returns|Raises|Yields|Shapes):", line):
            lines.append(f"**{line[:-1]}**\n")
            inside = True
        elif inside and (item := re.fullmatch(r"    ([\w*, .\[\]]+): (.*)", line)):
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif inside and line.startswith("    "):
            lines.append("  " + line.strip() if line.startswith("     ") else line.strip())
        else:
            inside = inside and not line.strip()
            lines.append(line)
    return "\n".join(lines).strip() + "\n"


def serving_page() -> str:
    """docs/serving.md with the table of fields as the server has it."""
    head, _, rest = SERVING.read_text(encoding="utf-8").partition("<!-- fields -->\n")
    _, mark, tail = rest.partition("<!-- /fields -->")
    return f"{head}<!-- fields -->\n{fields.table()}{mark}{tail}"


def main(arguments: list[str] | None = None) -> int:
    """Write or check; 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if the page is out of date")
    check, stale = parser.parse_args(arguments).check, 0
    for path, text in ((PAGE, page()), (SERVING, serving_page())):
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path}: out of date: python docs/write_api.py", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
