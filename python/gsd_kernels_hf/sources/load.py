"""The front door of drafters: a folder or hub id → the kind that its config names → a draft source."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

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
from .mtp import Mtp, open_heads, place_of
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


KEPT_PLACES = 2  # of a target and an option: a patch's, and that of calls which name another one
_loaded: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[object, ...], tuple[object, Any]]]
_loaded = weakref.WeakKeyDictionary()
"""The files of a drafter and itself; of every target by option, place, dtype and device, the newest last."""
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


def loaded(where: str | os.PathLike[str], target: PreTrainedModel, option: str = "drafter") -> Any:
    """Load what an option names once, as long as its files and the target's dtype and device stay the same.

    Files that cannot be loaded any more leave what was loaded from that place, with a warning. The hub is asked for an
    id once.

    Raises:
        ValueError: see :func:`load_drafter` and :meth:`DraftHeads.from_pretrained`.
    """
    own = option == "drafter" and where == OWN
    key = option, OWN if own else str(lasting(where)), target.dtype, device_of(target)
    with _lock:  # of two threads the second one waits for what the first one loads
        kept = _loaded.setdefault(target, {})
        now, drafter = kept.get(key, (None, None))
        try:
            place = place_of(target) if own else (checkpoints.fetch(where, option), None)
            # What was fetched from the hub stays the same; a folder may be relative to another working directory.
            files, now = now, stamp(Path(place[0])) if Path(place[0]).is_dir() else now or place
            if now != files:
                drafter = (load_drafter if option == "drafter" else DraftHeads.from_pretrained)(where, target)
        except (ValueError, OSError) as error:
            if drafter is None:
                raise
            warn_once((option, str(error)), "%s: what was loaded goes on drafting; now it is: %s", option, error)
        kept.pop(key, None)
        kept[key] = now, drafter
        for old in [key for key in kept if key[0] == option][:-KEPT_PLACES]:
            kept.pop(old)
    return drafter


def source_of(drafter: Drafter) -> DraftSource:
    """The draft source of a loaded drafter."""
    return next(make for kind, make in SOURCES.items() if isinstance(drafter, kind))(drafter)
