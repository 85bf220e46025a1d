"""The front door of drafters: a folder or hub id → the kind that its config names → a draft source."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..locks import forkable_lock
from ..model.properties import device_of
from ..validate.options import warn_once
from . import checkpoints
from .base import DraftSource
from .checkpoints import Checkpoint
from .dflash import DFlash, DFlashDrafts
from .eagle3 import Eagle3
from .gemma_assistant import AssistantDrafts, Gemma4Assistant
from .heads import CONFIG_FILE, DraftHeads, Heads
from .layouts import kind_of
from .mtp import Mtp
from .mtp_files import open_heads, place_of
from .recursion import Parallel, Recursive

Drafter = Eagle3 | DFlash | DraftHeads | Mtp | Gemma4Assistant
"""What ``drafter=`` takes, beside the place of one."""

SOURCES: dict[type[Any], Callable[[Any], DraftSource]] = {
    Eagle3: lambda drafter: (Recursive if drafter.config.mask_shape is None else Parallel)(drafter),
    DFlash: DFlashDrafts,
    DraftHeads: lambda heads: Heads(heads, "drafter"),
    Mtp: Recursive,
    Gemma4Assistant: AssistantDrafts,
}
"""The draft source of a loaded drafter, by its class."""
KINDS = tuple(SOURCES)
OWN = "mtp"
"""As a place: the heads in the target's own checkpoint; a folder of this name is ``./mtp``."""


def load_drafter(where: str | os.PathLike[str], target: PreTrainedModel) -> Drafter:
    """Load the drafter of ``target`` from a folder or hub id, or from its own checkpoint (``"mtp"``).

    It is on the target's device, in its dtype.

    Raises:
        ValueError: no drafter that can be served, or another model's; the message names what and the cure, and no
            weight was read.
    """
    if where == OWN:
        place, revision = place_of(target)
        return Mtp.from_checkpoint(*open_heads(place, target, revision), target)
    folder = checkpoints.fetch(where)
    if (folder / CONFIG_FILE).is_file():
        return DraftHeads.from_pretrained(folder, target, option="drafter")
    config = checkpoints.read_json(folder / checkpoints.CONFIG)
    kind = kind_of(config, folder)
    if kind == "medusa":
        return DraftHeads.from_medusa(Checkpoint.open(folder), target)
    makers: dict[str, Any] = {"eagle3": Eagle3, "dflash": DFlash, "gemma4": Gemma4Assistant, "mtp": Mtp}
    drafter: Drafter = makers[kind].from_pretrained(folder, target)
    return drafter


class _Loaded(NamedTuple):
    """A drafter, the files that it was loaded from, and the target's dtype and device."""

    files: object
    like: tuple[torch.dtype, torch.device]
    drafter: Any


KEPT_PLACES = 2  # of a target and an option: a patch's, and that of calls which name another one
_loaded: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[str, str], _Loaded]] = weakref.WeakKeyDictionary()
"""Of every target by option and place, the newest last."""
_lock = forkable_lock()


def lasting(given: Any) -> Any:
    """Return what an option gave, a folder as it is found from any working directory."""
    if given == OWN or not isinstance(given, (str, os.PathLike)) or not (folder := Path(given).expanduser()).is_dir():
        return given
    return folder.absolute()


def stamp(folder: Path) -> tuple[object, ...]:
    """A folder of a checkpoint and its files as they are now, without those that are being written."""
    folder, found = folder.resolve(), []
    for file in sorted(folder.iterdir()):
        if file.suffix in (".json", ".safetensors") and not file.name.startswith("."):
            with suppress(FileNotFoundError):  # moved meanwhile
                stat = file.stat()
                found.append((file.name, stat.st_size, stat.st_mtime_ns))
    return folder, *found


def loaded(option: str, where: str | os.PathLike[str], target: PreTrainedModel) -> Any:
    """Load what an option names once, as long as its files and the target's dtype and device stay the same.

    Files that cannot be loaded any more leave what was loaded from that place, with a warning. The hub is asked for an
    id once.

    Raises:
        ValueError: see :func:`load_drafter` and :meth:`DraftHeads.from_pretrained`.
    """
    own = option == "drafter" and where == OWN
    place = OWN if own else str(lasting(where))

    def files(before: object) -> object:
        if not own:
            return stamp(checkpoints.fetch(where, option))
        at, revision = place_of(target)
        # What was fetched from the hub stays the same; a folder may be relative to another working directory.
        return stamp(Path(at)) if Path(at).is_dir() else before or (at, revision)

    load = load_drafter if option == "drafter" else DraftHeads.from_pretrained
    like = target.dtype, device_of(target)
    with _lock:  # of two threads the second one waits for what the first one loads
        kept = _loaded.setdefault(target, {})
        known = kept.get((option, place))
        if known is not None and known.like != like:
            known = None
        now = None if known is None else known.files
        try:
            now = files(now)
            drafter = load(where, target) if known is None or known.files != now else known.drafter
        except (ValueError, OSError) as error:
            if known is None:
                raise
            warn_once((option, str(error)), "%s: what was loaded goes on drafting; now it is: %s", option, error)
            drafter = known.drafter
        kept.pop((option, place), None)
        kept[option, place] = _Loaded(now, like, drafter)
        for old in [key for key in kept if key[0] == option][:-KEPT_PLACES]:
            kept.pop(old)
    return drafter


def loaded_drafter(where: str | os.PathLike[str], target: PreTrainedModel) -> Drafter:
    """:func:`loaded` of ``drafter``."""
    drafter: Drafter = loaded("drafter", where, target)
    return drafter


def loaded_heads(where: str | os.PathLike[str], target: PreTrainedModel) -> DraftHeads:
    """:func:`loaded` of ``draft_heads``."""
    heads: DraftHeads = loaded("draft_heads", where, target)
    return heads


def source_of(drafter: Drafter) -> DraftSource:
    """The draft source of a loaded drafter."""
    return next(make for kind, make in SOURCES.items() if isinstance(drafter, kind))(drafter)
