"""The front door of drafters: a folder or hub id → the kind that its config names → a draft source."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import PreTrainedModel

from ..locks import forkable_lock
from ..model.properties import device_of
from ..validate.options import warn_once
from . import checkpoints
from .base import DraftSource
from .checkpoints import Checkpoint, bad
from .dflash import DFlash, DFlashDrafts
from .eagle3 import Eagle3
from .gemma_assistant import CLASS, AssistantDrafts, Gemma4Assistant
from .heads import CONFIG_FILE, DraftHeads, Heads
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
SPECULATORS = {"eagle3": "eagle3", "peagle": "eagle3", "dflash": "dflash", "dflash2": "dflash", "dspark": "dflash"}
"""Kinds by ``speculators_model_type``."""
OWN = "mtp"
"""As a place: the heads in the target's own checkpoint; a folder of this name is ``./mtp``."""

_Kind = TypeVar("_Kind", Drafter, DraftHeads)


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


def loaded_drafter(where: str | os.PathLike[str], target: PreTrainedModel) -> Drafter:
    """Load a drafter once (:func:`load_drafter`) as long as the files, the target's dtype and its device stay the same.

    Files that cannot be loaded any more leave what was loaded from that place, with a warning.

    Raises:
        ValueError: see :func:`load_drafter`.
    """

    def own_files(before: object) -> object:
        place, revision = place_of(target)
        folder = Path(place)
        # What was fetched from the hub stays the same; a folder may be relative to another working directory.
        return stamp(folder) if folder.is_dir() else before or (place, revision)

    if where == OWN:
        return _loaded_once("drafter", OWN, target, own_files, lambda: load_drafter(OWN, target))
    place, files = _named(where, "drafter")
    return _loaded_once("drafter", place, target, files, lambda: load_drafter(where, target))


def loaded_heads(where: str | os.PathLike[str], target: PreTrainedModel) -> DraftHeads:
    """Load heads once, as :meth:`DraftHeads.from_pretrained` and :func:`loaded_drafter` do.

    Raises:
        ValueError: the folder holds none, or another model's.
    """
    place, files = _named(where, "draft_heads")
    load = DraftHeads.from_pretrained
    return _loaded_once("draft_heads", place, target, files, lambda: load(where, target))


def lasting(given: Any) -> Any:
    """Return what an option gave, a folder as it is found from any working directory."""
    if given == OWN or not isinstance(given, (str, os.PathLike)) or not (folder := Path(given).expanduser()).is_dir():
        return given
    return folder.absolute()


def _named(where: str | os.PathLike[str], option: str) -> tuple[str, Callable[[object], object]]:
    """A place's name, and what gives its files as they are now; the hub is asked for an id once."""
    return str(lasting(where)), lambda _: stamp(checkpoints.fetch(where, option))


def stamp(folder: Path) -> tuple[object, ...]:
    """A folder of a checkpoint and its files as they are now, without those that are being written."""
    folder, found = folder.resolve(), []
    for file in sorted(folder.iterdir()):
        if file.suffix in (".json", ".safetensors") and not file.name.startswith("."):
            with suppress(FileNotFoundError):  # moved meanwhile
                stat = file.stat()
                found.append((file.name, stat.st_size, stat.st_mtime_ns))
    return folder, *found


def _loaded_once(
    option: str, place: str, target: PreTrainedModel, files: Callable[[object], object], load: Callable[[], _Kind]
) -> _Kind:
    like = target.dtype, device_of(target)

    def known_and_files() -> tuple[_Loaded | None, object]:
        known = _loaded.get(target, {}).get((option, place))
        if known is not None and known.like != like:
            known = None
        try:
            return known, files(None if known is None else known.files)
        except (ValueError, OSError) as error:
            return known, _still(known, option, error)

    known, now = known_and_files()
    if known is not None and known.files == now:
        return known.drafter  # type: ignore[no-any-return]
    with _lock:  # of two threads the second one waits for what the first one loads
        known, now = known_and_files()
        if known is not None and known.files == now:
            return known.drafter  # type: ignore[no-any-return]
        try:
            drafter = load()
        except (ValueError, OSError) as error:
            _still(known, option, error)
            assert known is not None
            drafter = known.drafter
        kept = _loaded.setdefault(target, {})
        kept.pop((option, place), None)
        kept[option, place] = _Loaded(now, like, drafter)
        for old in [key for key in kept if key[0] == option][:-KEPT_PLACES]:
            kept.pop(old)
        return drafter


def _still(known: _Loaded | None, option: str, error: Exception) -> object:
    """Warn that files went bad, and return those that were loaded; with none that were, the error stands."""
    if known is None:
        raise error
    warn_once((option, str(error)), "%s: what was loaded goes on drafting; now it is: %s", option, error)
    return known.files


def source_of(drafter: Drafter) -> DraftSource:
    """The draft source of a loaded drafter."""
    return next(make for kind, make in SOURCES.items() if isinstance(drafter, kind))(drafter)


def kind_of(config: Mapping[str, Any], folder: Path) -> str:
    """The kind of drafter that a ``config.json`` describes.

    Raises:
        ValueError: none that is served.
    """
    named = config.get("speculators_model_type")
    if named is not None:
        if named in SPECULATORS:
            return SPECULATORS[named]
        raise bad(f"{folder} is of speculators' kind {named!r}; served are {', '.join(map(repr, SPECULATORS))}")
    architectures = [str(name) for name in config.get("architectures") or ()]
    foreign = [name for name in architectures if "DSpark" in name and not name.startswith("Qwen3")]
    if foreign:
        raise bad(f"{folder} is a DSpark drafter of other layers than Qwen3's ({foreign[0]}); not served")
    if "dflash_config" in config or any("DSpark" in name for name in architectures):  # code of auto_map is not run
        return "dflash"
    if "medusa_num_heads" in config:
        return "medusa"
    if CLASS in architectures:
        return "gemma4"
    if any(name.endswith("MTP") for name in architectures):  # as train-drafter writes them
        return "mtp"
    if any("eagle3" in name.lower() or "peagle" in name.lower() for name in architectures) or (
        "draft_vocab_size" in config
    ):
        return "eagle3"
    if any(name.endswith(("ForCausalLM", "ForConditionalGeneration")) for name in architectures):
        raise bad(
            f"{folder} is a language model ({architectures[0]}), not a drafter; load it with transformers and "
            'pass it as assistant_model, or pass drafter="mtp" for the multi-token-prediction heads in the target\'s '
            "own checkpoint"
        )
    raise bad(
        f"{folder} is no drafter of a kind that is served (docs/drafts.md has a table) and no heads: its "
        f"config names the architectures {architectures}"
    )
