"""Builds the reference pages, which are not committed, from what they describe.

    python docs/build.py [--out docs/reference]

``api.md`` comes from the docstrings of the public names, ``commands.md`` from the commands' options, ``server.md`` from
the server's table of fields, ``models.md`` from ``model_classes.json``, which the sweeps of tests/ write.
"""

from __future__ import annotations

import html
import inspect
import json
import re
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.cli import get_docs_for_click

import gsd_kernels
from gsd_kernels_cli.app import app
from gsd_kernels_serve import fields

LINE = 90
CLASSES = Path(__file__).with_name("model_classes.json")
OUT = Path(__file__).with_name("reference")
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
        "GenerationStats",
        "SourceStats",
        "GraphConfig",
        "Automatic",
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
    "Draft sources": ("DraftSource", "Level", "Proposal", "Prefilled", "Verified", "Text", "DecodeState", "Sampler"),
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
    "Options": "gsd_kernels_hf.engine.resolved",
    "Patch": "gsd_kernels_hf.api",
    "GenerationStats": "gsd_kernels_hf.engine.stats",
    "SourceStats": "gsd_kernels_hf.sources.mixer",
    "HistoryMemory": "gsd_kernels_hf.sources.memory",
    "Text": "gsd_kernels_hf.sources.base",
    "DecodeState": "gsd_kernels_hf.records",
    "Sampler": "gsd_kernels_hf.records",
}
"""Types that public functions take, hand to you or return, and no user makes."""

HEAD = """\
# Public names

All of `gsd_kernels`; anything else is private. *Types* are met in arguments and results, and need not be imported. Made
from the docstrings.
"""


def api() -> str:
    """The page of public names.

    Raises:
        ValueError: a public name is in no section, or a section names what is not public.
    """
    listed = [name for names in SECTIONS.values() for name in names]
    if odd := (set(listed) - set(TYPES)) ^ (set(gsd_kernels.__all__) - {"__version__"}):
        raise ValueError(f"SECTIONS and gsd_kernels.__all__ differ: {', '.join(sorted(odd))}")
    parts = [HEAD]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += map(entry, names)
    return "\n".join(parts)


def entry(name: str) -> str:
    """A public name or one of :data:`TYPES`: its signature unless it is a type, its docstring, a class's methods."""
    value = getattr(import_module(TYPES[name]) if name in TYPES else gsd_kernels, name)
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
    """Documented functions that the class or its base, if that is ours, defines, in the order of the sources."""
    for name in {**vars(cls), **vars(cls.__base__)}:
        member = getattr(cls, name)
        function = inspect.isfunction(member) or inspect.ismethod(member)
        if not name.startswith("_") and function and member.__doc__ and member.__module__.startswith("gsd_"):
            yield name, member


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
            stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
            kind = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
            default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
            parts.append(f"{stars}{parameter.name}{kind}{default}")
    returned = "" if found.return_annotation in (found.empty, None, "None") else f" -> {found.return_annotation}"
    if len(line := f"({', '.join(parts)}){returned}") <= LINE:
        return line
    return "(\n" + "".join(f"    {part},\n" for part in parts) + f"){returned}"


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


SERVER = """\
# Fields of the server

\\* marks fields that are not OpenAI's. "Accepted" are values with which a refused field asks for nothing. Where no size
is said, a field has at most 1,000 characters. "Deep" counts lists and objects in each other, "values" what is in them.

"""


def server() -> str:
    """The page of the server's fields."""
    return SERVER + fields.table()


def commands() -> str:
    """The page of the commands' options, as typer writes it."""
    root = typer.main.get_command(app)
    return html.unescape(get_docs_for_click(obj=root, ctx=typer.Context(root), name="gsd-kernels"))


MODELS = """\
# Model classes

With transformers {version} and a tiny random model of each class.

- **served** ({served}): greedy text in float64 is token for token transformers' own, beyond any sliding window, for one
  prompt and for three left-padded ones; sampled text is the same with a draft and without.
- **refused** ({refused}): a `ValueError` names the class and says why, before anything is changed.
- **no tiny model** ({unknown}): the sweep cannot make a small config of it, so nothing is known. Such a model is
  examined like any other when it is used.

"""
IMAGES = """
## Classes that read images or sounds

Served ({served}): behind an image or a sound, greedy text in float64 is token for token transformers' own, for one
prompt and for two left-padded ones, and another image gives another text. Others ({refused}) are left to transformers,
as several prompts of unlike lengths may be where one is served.

"""


def models() -> str:
    """The page of model classes, by what the sweeps found."""
    found = json.loads(CLASSES.read_text(encoding="utf-8"))
    parts: list[str] = []
    for head, cells in ((MODELS, found["text"]), (IMAGES, found["images"])):
        counts = Counter(cell.partition(":")[0] for cell in cells.values())
        about = {"served": counts["served"], "refused": counts["refused"], "unknown": counts["no tiny model"]}
        parts += [head.format(version=found["transformers"], **about), "| class | |\n|---|---|\n"]
        parts += [f"| `{name}` | {cell} |\n" for name, cell in cells.items()]
    return "".join(parts)


PAGES = {"api": api, "commands": commands, "models": models, "server": server}


def main(out: Annotated[Path, typer.Option(help="the folder to write to")] = OUT) -> None:
    """Write all pages."""
    out.mkdir(parents=True, exist_ok=True)
    for name, build in PAGES.items():
        (out / f"{name}.md").write_text(build(), encoding="utf-8")
        print(out / f"{name}.md")


if __name__ == "__main__":
    typer.run(main)
