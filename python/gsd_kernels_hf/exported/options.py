"""``gsd_kernels.json`` of a model folder: what drafts for the model in it, and how it is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from gsd_kernels import GraphConfig

from ..engine.options import Options
from ..files import write_json
from ..model import properties
from ..sources.corpus import Corpus
from ..sources.load import OWN

HUB = Path(__file__).parent / "hub"
"""``custom_generate/`` and its card, as they may lie on the Hub."""
FILE = "gsd_kernels.json"
FORMAT, VERSION = "gsd_kernels model folder", 1
SOURCES = {"assistant_model": "model", "drafter": "drafter", "draft_heads": "heads"}
"""Options that name a folder, and what ``draft_sources`` calls them."""
PLACES = {
    "assistant_model": "draft",
    "assistant_tokenizer": "draft",
    "drafter": "drafter",
    "draft_heads": "heads",
    "corpus": "corpus",
}
"""Options that are folders beside the file, and what these are called."""


def write_options(folder: Path, options: Mapping[str, Any]) -> None:
    """Write the file; ``options`` are names of folders in ``folder``, and ``graph_config``."""
    given = {
        name: asdict(value) if isinstance(value, GraphConfig) else value
        for name, value in options.items()
        if value is not None
    }
    write_json(folder / FILE, {"format": FORMAT, "version": VERSION, **given})


def read_options(folder: Path) -> dict[str, Any]:
    """The file's options; none where there is no file.

    Raises:
        ValueError: it is damaged, of a newer version, or names what lies outside the folder or is not there.
    """
    file = folder / FILE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        form, version = values.pop("format"), values.pop("version")
        Options(graph_config=shape_in(values))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{FILE}: {file} is damaged ({error}); export the folder anew") from error
    if form != FORMAT or type(version) is not int:
        raise ValueError(f"{FILE}: {file} is none of gsd_kernels; export the folder anew")
    strange = sorted(values.keys() - {*PLACES, "graph_config"})
    if version > VERSION or strange:
        what = f"version {version}" if version > VERSION else f"the option {strange[0]!r}"
        raise ValueError(f"{FILE}: {file} has {what}, unknown to this version of gsd_kernels; update the package")
    for name, place in PLACES.items():
        own = (name, values.get(name)) == ("drafter", OWN)
        if name in values and not own and (values[name] != place or not (folder / place).is_dir()):
            raise ValueError(f"{FILE}: {name}: expected {place!r}, a folder in {folder}, got {values[name]!r}")
    return values


def load_options(folder: Path, target: PreTrainedModel) -> dict[str, Any]:
    """Arguments of :func:`gsd_kernels.patch` for the model of ``folder``, its draft model loaded.

    Raises:
        ValueError: see :func:`read_options`, or a corpus that cannot be opened.
        OSError: a draft model that cannot be loaded.
    """
    values = read_options(folder)
    arguments: dict[str, Any] = {}
    for name in ("drafter", "draft_heads"):
        if name in values:
            arguments[name] = OWN if values[name] == OWN else folder / values[name]
    if "assistant_model" in values:
        draft = AutoModelForCausalLM.from_pretrained(
            folder / values["assistant_model"], dtype=target.dtype, trust_remote_code=True
        )  # whose code came with the target's, which is trusted: else this would not run
        arguments["assistant_model"] = draft.to(properties.device_of(target)).eval()
    if "assistant_tokenizer" in values:
        arguments["tokenizer"] = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        draft_tokenizer = AutoTokenizer.from_pretrained(folder / values["assistant_tokenizer"], trust_remote_code=True)
        arguments["assistant_tokenizer"] = draft_tokenizer
    if "corpus" in values:
        named = [source for name, source in SOURCES.items() if name in values]
        arguments["draft_sources"] = (*named, "history", Corpus(folder / values["corpus"]))
    shape = shape_in(values)
    return arguments if shape is None else {**arguments, "graph_config": shape}


def shape_in(values: Mapping[str, Any]) -> GraphConfig | str | None:
    """The ``graph_config`` of a file's options."""
    shape = values.get("graph_config")
    return GraphConfig(**shape) if isinstance(shape, dict) else shape
