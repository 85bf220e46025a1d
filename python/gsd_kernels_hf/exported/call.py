"""transformers' ``custom_generate``: the function that a folder's ``generate.py`` stands for."""

from __future__ import annotations

import logging
import re
import weakref
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from .. import validate
from ..api import by_name, generate, handle_of, patch, theirs, with_defaults
from ..locks import forkable_lock
from ..model import properties
from ..sources.checkpoints import fetch
from .options import FILE, HUB, PLACES, load_options

logger = logging.getLogger("gsd_kernels")

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
        reason = _take_over(inner, folder_code) if _overridden(inner, folder_code) else None
    if reason is not None:
        logger.warning("transformers' own generate serves this model: %s", reason)
        return type(inner).generate(inner, inputs, **theirs(by_name(args, kwargs), reason, None))
    handle = handle_of(inner)
    if handle is not None and not handle.handed_over:
        return inner.generate(inputs, *args, **kwargs)
    place = Path(inner.config.name_or_path)
    options = _loaded(inner, place) if (place / FILE).is_file() else {}
    return generate(inner, inputs, **with_defaults(options, by_name(args, kwargs)))


def _overridden(model: PreTrainedModel, folder_code: str | None) -> bool:
    """Return whether the model's ``generate`` is what transformers made of the folder's when it loaded the model."""
    function = getattr(vars(model).get("generate"), "func", None)
    return folder_code is not None and getattr(function, "__globals__", {}).get("__file__") == folder_code


def _take_over(model: PreTrainedModel, folder_code: str | None) -> str | None:
    """Patch a model with what its folder names; return why transformers has to serve it instead, if it has to."""
    if model not in _lost:
        try:
            _patch(model, folder_code)
        except validate.Unsupported as error:  # as it was loaded; it may be changed
            return error.reason
        except Exception as error:  # whatever is wrong with the files: whoever loads a model wants its text
            logger.debug("custom_generate: %s", model.config.name_or_path, exc_info=True)
            _lost[model] = " ".join(str(error).split()) or type(error).__name__
    return _lost.get(model)


def _patch(model: PreTrainedModel, folder_code: str | None) -> None:
    wanted = (FILE, *(f"{place}/*" for place in sorted(set(PLACES.values()))))
    match = COMMIT.search(folder_code or "")  # transformers' configs do not tell it any more
    commit = getattr(model.config, "_commit_hash", None) if match is None else match[1]
    folder = fetch(model.config.name_or_path, "custom_generate", wanted=wanted, revision=commit)
    options = _loaded(model, folder)
    override = vars(model).pop("generate")
    try:
        patch(model, **options)
    except BaseException:
        vars(model)["generate"] = override
        raise
    vars(model)["generate"].calls = logging.getLogger(CALLS)


def _loaded(model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    if model not in _options:
        _options[model] = load_options(folder, model)
    return _options[model]
