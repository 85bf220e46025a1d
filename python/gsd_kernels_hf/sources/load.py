"""The front door of drafters: a folder or hub id → the kind that its config names → a draft source."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel

from ..model.properties import device_of
from . import checkpoints
from .base import DraftSource
from .checkpoints import BadCheckpoint, Checkpoint
from .dflash import DFlash, DFlashDrafts
from .eagle3 import Eagle3, Eagle3Drafts
from .heads import CONFIG_FILE, DraftHeads, Heads

Drafter = Eagle3 | DFlash | DraftHeads
"""What ``drafter=`` takes, beside the place of one."""

KINDS = (Eagle3, DFlash, DraftHeads)
_Kind = TypeVar("_Kind", Eagle3 | DFlash | DraftHeads, DraftHeads)


def load_drafter(where: str | os.PathLike[str], target: PreTrainedModel) -> Drafter:
    """Load the drafter of ``target`` from a folder or hub id, on its device and in its dtype.

    Raises:
        ValueError: no drafter that can be served, or another model's; the message names what and the cure, and no
            weight was read.
    """
    folder = checkpoints.fetch(where)
    if (folder / CONFIG_FILE).is_file():
        return DraftHeads.from_pretrained(folder, target)
    config = checkpoints.read_json(folder / checkpoints.CONFIG)
    kind = kind_of(config, folder)
    makers = {"eagle3": Eagle3.from_checkpoint, "dflash": DFlash.from_checkpoint, "medusa": DraftHeads.from_medusa}
    return makers[kind](Checkpoint.open(folder), target)


_loaded: weakref.WeakKeyDictionary[PreTrainedModel, dict[str, tuple[object, Drafter]]] = weakref.WeakKeyDictionary()
"""Of every target and option the drafter that was loaded last for it, and from which files."""


def loaded_drafter(where: str | os.PathLike[str], target: PreTrainedModel) -> Drafter:
    """As :func:`load_drafter`, once as long as the files, the target's dtype and its device stay the same.

    Raises:
        ValueError: see :func:`load_drafter`.
    """
    return _loaded_once(checkpoints.fetch(where), target, "drafter", load_drafter)


def loaded_heads(where: str | os.PathLike[str], target: PreTrainedModel) -> DraftHeads:
    """As :meth:`DraftHeads.from_pretrained`, once, as :func:`loaded_drafter`.

    Raises:
        ValueError: the folder holds none, or another model's.
    """
    return _loaded_once(checkpoints.fetch(where, "draft_heads"), target, "draft_heads", DraftHeads.from_pretrained)


def _loaded_once(
    folder: Path, target: PreTrainedModel, option: str, load: Callable[[Path, PreTrainedModel], _Kind]
) -> _Kind:
    folder = folder.resolve()
    files = sorted(file for file in folder.iterdir() if file.suffix in (".json", ".safetensors"))
    states = [(file.name, stat.st_size, stat.st_mtime_ns) for file in files for stat in (file.stat(),)]
    key = (folder, states, target.dtype, device_of(target))
    loaded: dict[str, tuple[object, Any]] = _loaded.setdefault(target, {})
    if option not in loaded or loaded[option][0] != key:
        loaded.pop(option, None)  # not two at once
        loaded[option] = key, load(folder, target)
    return loaded[option][1]


def source_of(drafter: Drafter) -> DraftSource:
    """The draft source of a loaded drafter."""
    if isinstance(drafter, DraftHeads):
        return Heads(drafter)
    return DFlashDrafts(drafter) if isinstance(drafter, DFlash) else Eagle3Drafts(drafter)


def kind_of(config: Mapping[str, Any], folder: Path) -> str:
    """The kind of drafter that a ``config.json`` describes.

    Raises:
        ValueError: none that is served.
    """
    named = config.get("speculators_model_type")
    if named is not None:
        if named in ("eagle3", "dflash"):
            return named
        raise BadCheckpoint(f"drafter: {folder} is of speculators' kind {named!r}; served are 'eagle3' and 'dflash'")
    architectures = [str(name) for name in config.get("architectures") or ()]
    if any(name.startswith("DFlash2") for name in architectures):
        raise BadCheckpoint(
            f"drafter: {folder} is a DFlash 2 drafter ({architectures[0]}); DFlash's first kind is served"
        )
    if "dflash_config" in config:  # its auto_map names code, which is not run
        return "dflash"
    if "medusa_num_heads" in config:
        return "medusa"
    if any("Eagle3" in name for name in architectures) or "draft_vocab_size" in config:
        return "eagle3"
    if any(name.endswith(("ForCausalLM", "ForConditionalGeneration")) for name in architectures):
        raise BadCheckpoint(
            f"drafter: {folder} is a language model ({architectures[0]}), not a drafter; load it with transformers and "
            "pass it as assistant_model"
        )
    raise BadCheckpoint(
        f"drafter: {folder} is no EAGLE-3, DFlash or Medusa drafter and no draft heads: its config names the "
        f"architectures {architectures}"
    )
