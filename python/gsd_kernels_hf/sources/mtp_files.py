"""A target's own checkpoint, opened for the heads in it: of its many files only those that hold them."""

from __future__ import annotations

import logging
import os

from transformers import PreTrainedModel

from ..model.hidden import decoder_of
from . import checkpoints, layouts
from .checkpoints import CONFIG, INDEX, WEIGHTS, BadCheckpoint, Checkpoint, bad, fetch
from .layouts import HeadLayout

logger = logging.getLogger("gsd_kernels")


def place_of(target: PreTrainedModel) -> tuple[str, str | None]:
    """Where a target was loaded from: folder or hub id, and the hub's commit.

    Raises:
        BadCheckpoint: it was made here.
    """
    where = target.config.name_or_path
    if not where:
        raise BadCheckpoint(
            'drafter="mtp": the target names no checkpoint (its config.name_or_path is empty), where its '
            "multi-token-prediction heads would be; load it with from_pretrained, or pass "
            "Mtp.from_pretrained(folder, model)"
        )
    return where, getattr(target.config, "_commit_hash", None)


def open_heads(
    where: str | os.PathLike[str], target: PreTrainedModel, revision: str | None = None
) -> tuple[Checkpoint, HeadLayout]:
    """The first head in a checkpoint of ``target``, its tensors by their names here.

    Raises:
        BadCheckpoint: no checkpoint, none with heads, or quantised ones; no weight was read.
    """
    folder = fetch(where, wanted=("*.json",), revision=revision)
    found = Checkpoint(folder, checkpoints.read_json(folder / CONFIG))
    if not (folder / INDEX).is_file():
        fetch(where, wanted=(WEIGHTS,), revision=revision)
    index, names = listed(found)
    layers = len(decoder_of(target)[0])
    heads = layouts.find_heads(names, layers)
    if heads is None:
        others = [name for name in names if "mtp" in name.lower() or "nextn" in name.lower()]
        strange = f"; it has {others[0]}, of a layout that is not served" if others else ""
        raise bad(f"{where} has no multi-token-prediction heads; looked for were {layouts.looked_for(layers)}{strange}")
    layout, prefix = heads
    own = {name: layout.own_name(name.removeprefix(prefix)) for name in names if name.startswith(prefix)}
    own = {name: ours for name, ours in own.items() if ours is not None}
    quantised = next((name for name in own if name.endswith(layouts.QUANTISED)), None)
    if quantised is not None:
        raise bad(
            f"the multi-token-prediction heads in {where} are quantised ({quantised}); served are floating "
            "point and FP8 in blocks (weight_scale_inv)"
        )
    if index is not None:
        files = sorted({index[name] for name in own})
        fetch(where, wanted=files, revision=revision)
        found.list_tensors(folder / name for name in files)
        lost = next((name for name in own if name not in found.files), None)
        if lost is not None:
            raise bad(f"{folder / INDEX} says that {lost} is in {index[lost]}, and it is not")
    found.rename(own.get)
    found.published = lambda name: layout.published_name(name, prefix)
    return found, layout


def listed(found: Checkpoint) -> tuple[dict[str, str] | None, list[str]]:
    """A checkpoint's index, or ``None`` with the header of its only file read; and the names of its tensors.

    Raises:
        BadCheckpoint: neither is there, or it is unreadable.
    """
    index, file = found.index(), found.folder / WEIGHTS
    if index is None:
        if not file.is_file():
            raise bad(f"no {WEIGHTS} and no {INDEX} in {found.folder}, where the multi-token-prediction heads would be")
        found.list_tensors([file])
    return index, list(found.files if index is None else index)


def own_heads(target: PreTrainedModel) -> str | None:
    """A tensor of the heads in the target's checkpoint, as far as that is on this machine; ``None`` without any."""
    try:
        where, revision = place_of(target)
        layers = len(decoder_of(target)[0])
        folder = fetch(where, wanted=("*.json", WEIGHTS), revision=revision, download=False)
        heads = layouts.find_heads(listed(Checkpoint(folder, {}))[1], layers)
    except ValueError:  # no checkpoint, or none that can be read: nothing to mention
        return None
    return None if heads is None else heads[0].recognised_by(layers)


def mention_heads(target: PreTrainedModel) -> None:
    """Say in a line of the log if the target's checkpoint, as far as it is on this machine, has heads to draft with."""
    if not logger.isEnabledFor(logging.INFO):  # looking is reading the names of all tensors
        return
    found = own_heads(target)
    if found is not None:
        logger.info(
            "the checkpoint of this model has multi-token-prediction heads (%s …), which are not used; "
            'drafter="mtp" drafts with them',
            found,
        )
