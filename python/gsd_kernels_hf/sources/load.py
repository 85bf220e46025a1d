"""The front door of drafters: a folder or hub id → the kind that its config names → a draft source."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args

from transformers import PreTrainedModel

from ..locks import forkable_lock
from ..model.properties import device_of
from ..validate import warn_once
from .base import DraftSource
from .checkpoints import CONFIG, bad, fetch, read_json
from .dflash import DFlash
from .feature_drafter import Eagle3, Mtp, place_of
from .features import DFlashDrafts, Parallel, Recursive
from .heads import CONFIG_FILE, AssistantDrafts, DraftHeads, Gemma4Assistant, Heads
from .layouts import GEMMA4

Drafter = Eagle3 | DFlash | DraftHeads | Mtp | Gemma4Assistant
"""What ``drafter=`` takes, beside the place of one."""

DRAFTERS: tuple[type[Any], ...] = get_args(Drafter)


class Kind(NamedTuple):
    """A kind of drafter, and what shows it in a ``config.json``.

    Attributes:
        drafter: its class.
        source: makes the draft source of one.
        shown: regular expression found in one of the ``architectures``, or all of one of the config's keys; code of
            ``auto_map`` is not run.
        speculators: values of ``speculators_model_type``, which alone counts where it is there.
    """

    drafter: type[Any]
    source: Callable[[Any], DraftSource]
    shown: str
    speculators: tuple[str, ...] = ()


KINDS = (
    Kind(DFlash, DFlashDrafts, "DSpark|^dflash_config$", ("dflash", "dflash2", "dspark")),
    Kind(DraftHeads, lambda heads: Heads(heads, "drafter"), "^medusa_num_heads$"),
    Kind(Gemma4Assistant, AssistantDrafts, GEMMA4),
    Kind(Mtp, Recursive, "MTP$"),  # as train-drafter writes them
    Kind(
        Eagle3,
        lambda drafter: (Recursive if drafter.mask_hidden is None else Parallel)(drafter),
        "(?i:eagle3|peagle)|^draft_vocab_size$",
        ("eagle3", "peagle"),
    ),
)
"""The first that a config is of counts."""
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
        return Mtp.from_pretrained(place, target, revision=revision)
    folder = fetch(where)
    if (folder / CONFIG_FILE).is_file():
        return DraftHeads.from_pretrained(folder, target, option="drafter")
    config = read_json(folder / CONFIG)
    kind = kind_of(config, folder).drafter
    drafter: Drafter = (kind.from_medusa if kind is DraftHeads else kind.from_pretrained)(folder, target)
    return drafter


def kind_of(config: Mapping[str, Any], folder: Path) -> Kind:
    """The kind of drafter that a ``config.json`` describes.

    Raises:
        ValueError: none that is served.
    """
    named, architectures = config.get("speculators_model_type"), [str(n) for n in config.get("architectures") or ()]
    foreign = [name for name in architectures if "DSpark" in name and not name.startswith("Qwen3")]
    if foreign and named is None:
        raise bad(f"{folder} is a DSpark drafter of other layers than Qwen3's ({foreign[0]}); not served")
    for kind in KINDS:
        shown = any(re.search(kind.shown, n) for n in architectures) or any(re.fullmatch(kind.shown, n) for n in config)
        if shown if named is None else named in kind.speculators:
            return kind
    if named is not None:
        served = ", ".join(repr(name) for kind in reversed(KINDS) for name in kind.speculators)
        raise bad(f"{folder} is of speculators' kind {named!r}; served are {served}")
    model = any(name.endswith(("ForCausalLM", "ForConditionalGeneration")) for name in architectures)
    raise bad(
        f"{folder} is a language model ({architectures[0]}), not a drafter; load it with transformers and pass it as "
        'assistant_model, or pass drafter="mtp" for the multi-token-prediction heads in the target\'s own checkpoint'
        if model
        else f"{folder} is no drafter of a kind that is served (docs/drafts.md has a table) and no heads: its config "
        f"names the architectures {architectures}"
    )


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
    for file in sorted([*folder.glob("[!.]*.json"), *folder.glob("[!.]*.safetensors")]):
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
    key = option, str(lasting(where)), target.dtype, device_of(target)
    with _lock:  # of two threads the second one waits for what the first one loads
        kept = _loaded.setdefault(target, {})
        now, drafter = kept.get(key, (None, None))
        try:
            place = place_of(target) if own else (fetch(where, option),)
            # What was fetched from the hub stays the same; a folder may be relative to another working directory.
            files, now = now, stamp(Path(place[0])) if Path(place[0]).is_dir() else now or place
            if now != files:
                drafter = (load_drafter if option == "drafter" else DraftHeads.from_pretrained)(where, target)
        except (ValueError, OSError) as error:
            if drafter is None:
                raise
            warn_once("%s: what was loaded goes on drafting; now it is: %s", option, str(error))
        kept.pop(key, None)
        kept[key] = now, drafter
        for old in [key for key in kept if key[0] == option][:-KEPT_PLACES]:
            kept.pop(old)
    return drafter


def source_of(drafter: Drafter) -> DraftSource:
    """The draft source of a loaded drafter."""
    return next(kind.source for kind in KINDS if isinstance(drafter, kind.drafter))(drafter)
