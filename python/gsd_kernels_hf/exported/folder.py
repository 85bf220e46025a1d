"""Model folders that decode by themselves: transformers' ``custom_generate``, and what ``gsd_kernels.json`` names.

That file of a folder says what drafts for the model in it. Its ``generate.py`` stands for :func:`custom_generate`.
"""

from __future__ import annotations

import json
import logging
import re
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from gsd_kernels import GraphConfig

from .. import validate
from ..api import by_name, generate, handle_of, patch, theirs, with_defaults
from ..engine.resolved import Options
from ..files import write_json
from ..locks import forkable_lock
from ..model import properties
from ..sources.checkpoints import fetch
from ..sources.corpus import Corpus
from ..sources.load import OWN

logger = logging.getLogger("gsd_kernels")

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
CALLS = "transformers.gsd_kernels"
"""The logger that gets a line a call of a model folder: below transformers', whose ``--log-level info`` shows it."""

COMMIT = re.compile(r"[/\\]([0-9a-f]{40})[/\\]custom_generate[/\\]generate\.py$")
"""In the path of the code of a folder on the Hub."""

_lock = forkable_lock()
_options: weakref.WeakKeyDictionary[PreTrainedModel, dict[str, Any]] = weakref.WeakKeyDictionary()
"""Of a model that was loaded from such a folder."""
_lost: weakref.WeakKeyDictionary[PreTrainedModel, str] = weakref.WeakKeyDictionary()
"""Why a model's folder was not found again, or not understood: it is not asked for at every call."""


def custom_generate_folder() -> str:
    """The folder that ``model.generate(…, custom_generate=FOLDER, trust_remote_code=True)`` takes.

    Its content, a ``custom_generate/generate.py`` with a card, may be put on the Hub as it is.
    """
    return str(HUB)


def custom_generate(
    inputs: Tensor | None = None, *args: Any, model: PreTrainedModel, folder_code: str | None = None, **kwargs: Any
) -> Any:
    """``generate`` as a folder's ``custom_generate/generate.py`` has it; transformers calls it.

    For ``model.generate(…, custom_generate=FOLDER, trust_remote_code=True)`` it is :func:`gsd_kernels.generate`. Of a
    model that ``from_pretrained(FOLDER, trust_remote_code=True)`` loaded, the first call patches it, with what the
    folder's ``gsd_kernels.json`` names: from then on it is as after :func:`gsd_kernels.patch`, and ``unpatch`` gives it
    transformers' own ``generate``. Where the folder is not found by then (moved, named from another working directory,
    loaded with ``cache_dir=`` or a token of the call's), or holds what cannot be read, transformers' own serves the
    model, and a line of the log says why.

    Args:
        inputs: prompt ids int64 [batch, length].
        *args: others of transformers' ``generate``, by position.
        model: the target.
        folder_code: the file of the folder's code as transformers keeps it, below the commit that it is of.
        **kwargs: as in :func:`gsd_kernels.generate`.

    Returns:
        As transformers' ``generate``.

    Raises:
        TypeError, ValueError: something cannot be served; or files of a folder that the call names are damaged.
    """
    inner = properties.unwrap(model)
    with _lock:
        # Whether the model's generate is what transformers made of the folder's when it loaded the model.
        function = getattr(vars(inner).get("generate"), "func", None)
        loaded = folder_code is not None and getattr(function, "__globals__", {}).get("__file__") == folder_code
        reason = _take_over(inner, folder_code) if loaded else None
    if reason is not None:
        logger.warning("transformers' own generate serves this model: %s", reason)
        return type(inner).generate(inner, inputs, **theirs(by_name(args, kwargs), reason, None))
    handle = handle_of(inner)
    if handle is not None and not handle.handed_over:
        return inner.generate(inputs, *args, **kwargs)
    place = Path(inner.config.name_or_path)
    options = load_options(place, inner) if (place / FILE).is_file() else {}
    return generate(inner, inputs, **with_defaults(options, by_name(args, kwargs)))


def _take_over(model: PreTrainedModel, folder_code: str | None) -> str | None:
    """Patch a model with what its folder names; return why transformers has to serve it instead, if it has to."""
    if model in _lost:
        return _lost[model]
    wanted = (FILE, *(f"{place}/*" for place in sorted(set(PLACES.values()))))
    match = COMMIT.search(folder_code or "")  # transformers' configs do not tell it any more
    commit = getattr(model.config, "_commit_hash", None) if match is None else match[1]
    override = vars(model)["generate"]
    try:
        options = load_options(
            fetch(model.config.name_or_path, "custom_generate", wanted=wanted, revision=commit), model
        )
        del vars(model)["generate"]
        patch(model, **options)
        vars(model)["generate"].calls = logging.getLogger(CALLS)
    except validate.Unsupported as error:  # as it was loaded; it may be changed
        return error.reason
    except Exception as error:  # whatever is wrong with the files: whoever loads a model wants its text
        logger.debug("custom_generate: %s", model.config.name_or_path, exc_info=True)
        _lost[model] = " ".join(str(error).split()) or type(error).__name__
    finally:
        vars(model).setdefault("generate", override)
    return _lost.get(model)


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
        if isinstance(shape := values.get("graph_config"), dict):
            values["graph_config"] = GraphConfig(**shape)
        Options(graph_config=values.get("graph_config"))
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
    """Arguments of :func:`gsd_kernels.patch` for the model of ``folder``, its draft model loaded; once a model.

    Raises:
        ValueError: see :func:`read_options`, or a corpus that cannot be opened.
        OSError: a draft model that cannot be loaded.
    """
    if target in _options:
        return _options[target]
    values, code = read_options(folder), {"trust_remote_code": True}  # the target's is trusted: else this would not run
    places = {name: folder / place for name, place in values.items() if name in PLACES and place != OWN}
    arguments: dict[str, Any] = {**values, **places}
    if "assistant_model" in places:
        draft = AutoModelForCausalLM.from_pretrained(places["assistant_model"], dtype=target.dtype, **code)
        arguments["assistant_model"] = draft.to(properties.device_of(target)).eval()
    if (place := places.get("assistant_tokenizer")) is not None:
        arguments["tokenizer"] = AutoTokenizer.from_pretrained(folder, **code)
        arguments["assistant_tokenizer"] = AutoTokenizer.from_pretrained(place, **code)
    if "corpus" in places:
        named = [source for name, source in SOURCES.items() if name in values]
        arguments["draft_sources"] = (*named, "history", Corpus(arguments.pop("corpus")))
    _options[target] = arguments
    return arguments
