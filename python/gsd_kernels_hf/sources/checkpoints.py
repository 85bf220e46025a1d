"""Reading drafter checkpoints as they are published: a folder or hub id with a config and safetensors.

Nothing is executed: no code that a checkpoint brings, and no pickle. Names and shapes of all tensors are compared with
what the config promises before the first of them is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..files import checkpoint_place
from ..model.hidden import decoder_of
from ..model.properties import device_of, text_config, vocabulary
from ..validate import MAX_VOCABULARY_PADDING

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "medusa_lm_head.pt")
WANTED = ["*.json", "*.safetensors"]
"""What is fetched from the hub."""
SCALE = "_scale_inv"
"""What the name of a weight in blocks of FP8 has behind it where its scales are, one a block."""
BELONGS = "a drafter belongs to the model that it was trained on"
"""Why another's does not do, for errors."""

_snapshots: dict[tuple[str, tuple[str, ...], str | None], Path] = {}
"""Folders of what the hub gave this process, by id, patterns and commit: it is asked for each of them once."""


class BadCheckpoint(ValueError):
    """A drafter checkpoint that cannot be served; the message names what, and the cure."""


def bad(why: str, option: str = "drafter") -> BadCheckpoint:
    """The error of what ``drafter``, or another option, named."""
    return BadCheckpoint(f"{option}: {why}")


def refuse(reasons: Mapping[str, object], option: str = "drafter") -> None:
    """Raise for the first reason that holds.

    Raises:
        BadCheckpoint: one does.
    """
    for why, holds in reasons.items():
        if holds:
            raise bad(why, option)


def fetch(
    where: str | os.PathLike[str],
    what: str = "drafter",
    *,
    wanted: Sequence[str] = WANTED,
    revision: str | None = None,
    download: bool = True,
) -> Path:
    """The folder of a checkpoint: a local one, or a hub id's snapshot, of which only JSON and safetensors are fetched.

    The hub is asked once in a process; what it has later is seen by a new one.

    Args:
        where: as the user gave it.
        what: the first word of every error.
        wanted: patterns of the files to fetch.
        revision: commit of the hub; ``None``: its newest.
        download: whether the hub may be asked; else what was fetched before is taken.

    Raises:
        BadCheckpoint: neither.
    """
    try:
        place = checkpoint_place(where, what)
    except ValueError as error:
        raise BadCheckpoint(str(error)) from None
    if Path(place).is_dir():
        return Path(place)
    asked = (place, tuple(wanted), revision)
    if (known := _snapshots.get(asked)) and known.is_dir():
        return known
    try:
        found = Path(
            snapshot_download(place, allow_patterns=list(wanted), revision=revision, local_files_only=not download)
        )
    except (ValueError, OSError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise bad(f"{where} is no folder here and could not be fetched from the hub: {first}", what) from error
    if download:  # else it may be a part of what is there
        _snapshots[asked] = found
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        BadCheckpoint: the file is missing or holds none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise bad(f"no {path.name} in {path.parent}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise bad(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise bad(f"{path} holds no JSON object but {type(found).__name__}")
    return found


class Place(NamedTuple):
    """The place of a tensor: its file, which is open, its name there, and its shape."""

    file: Any
    name: str
    shape: tuple[int, ...]


def headers(path: Path) -> dict[str, Place]:
    """The place of every tensor of a file, by its name; no more than the header is read.

    Raises:
        BadCheckpoint: it is missing or unreadable.
    """
    if not path.is_file():
        raise bad(f"no {path.name} in {path.parent}, where it should be")
    try:
        file: Any = safe_open(path, "pt")
        return {name: Place(file, name, tuple(file.get_slice(name).get_shape())) for name in list(file.keys())}
    except (SafetensorError, OSError) as error:
        raise bad(f"{path} is no readable safetensors file: {error}") from error


def files_of(folder: Path) -> dict[str, str]:
    """The file of every tensor of a folder, by its name; of no file but an only one the header is read.

    Raises:
        BadCheckpoint: no weights, or pickled ones, or an index that is unreadable or names files outside the folder.
    """
    medusa, whole, listed = folder / MEDUSA_WEIGHTS, folder / WEIGHTS, folder / INDEX
    if medusa.is_file():
        return dict.fromkeys(headers(medusa), MEDUSA_WEIGHTS)
    index = read_json(listed).get("weight_map") if listed.is_file() else {}
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise bad(f"{listed} has no weight_map of file names")
    outside = [name for name in index.values() if Path(name).name != name]
    if outside:
        raise bad(f"{listed} names {outside[0]!r}, which is outside the folder")
    if whole.is_file():  # which may have others beside it
        index |= dict.fromkeys(headers(whole), WEIGHTS)
    if index:
        return index
    pickled = [name for name in PICKLES if (folder / name).is_file()]
    if pickled:
        raise bad(
            f"{folder} has {pickled[0]} alone, a pickle, which is not loaded since it may run code; convert it where "
            'you trust it: python -c "import torch; from safetensors.torch import save_file; '
            f"w = torch.load('{folder / pickled[0]}', map_location='cpu', weights_only=True); "
            f"save_file({{k: v.contiguous() for k, v in w.items()}}, '{whole}')\""
        )
    raise bad(f"no {WEIGHTS} in {folder}")


Shapes = Mapping[str, tuple[int, ...]]
"""Of tensors, by name."""


@dataclass
class Checkpoint:
    """A drafter's folder: its config, and where each tensor lies.

    Attributes:
        folder: of the files.
        config: of ``config.json``.
        files: of every tensor by its name here.
        published: what a tensor that is not there would be called.
    """

    folder: Path
    config: dict[str, Any]
    files: dict[str, Place]
    published: Callable[[str], str] = str

    @classmethod
    def open(cls, folder: Path, new_name: Callable[[str], str | None]) -> Checkpoint:
        """Read the config of a folder, and the headers of the files with tensors that have a name here.

        Raises:
            BadCheckpoint: not there, unreadable, or pickled; or two tensors of one name.
        """
        config, files = read_json(folder / CONFIG), files_of(folder)
        named = {name: new for name in files if (new := new_name(name)) is not None}
        there: dict[str, Place] = {}
        for file in sorted({files[name] for name in named}):
            there |= headers(folder / file)
        found: dict[str, Place] = {}
        for name in sorted(named.keys() & there):
            if named[name] in found:
                raise bad(f"{folder} has {found[named[name]].name} and {name}, which are the same weight")
            found[named[name]] = there[name]
        return cls(folder, config, found)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor by its name, but for scales of others."""
        return {name: place.shape for name, place in self.files.items() if not name.endswith(SCALE)}

    def name_in_file(self, name: str) -> str:
        """Name of a tensor there, whether it has it or not."""
        return self.files[name].name if name in self.files else self.published(name)

    def load_into(self, module: nn.Module) -> None:
        """Give ``module``, whose weights are on the meta device, those of the files.

        Raises:
            BadCheckpoint: see :meth:`read`.
        """
        module.load_state_dict(self.read(shapes_of(module)), assign=True)

    def stacked(self, parts: Mapping[str, Shapes], shapes: Shapes) -> dict[str, Tensor]:
        """Tensors of these ``shapes``, each made of ``parts`` that lie one after the other in it.

        Raises:
            BadCheckpoint: see :meth:`read`.
        """
        found = self.read({name: shape for each in parts.values() for name, shape in each.items()})
        return {
            name: torch.stack([found.pop(part) for part in each]).view(shapes[name]) for name, each in parts.items()
        }

    def read(self, expected: Shapes) -> dict[str, Tensor]:
        """The tensors, once all of them are known to have the shapes that are expected; FP8 with its scales as floats.

        Raises:
            BadCheckpoint: a tensor is missing, not known, of another shape, or not finite.
        """
        scaled = [name for name in expected if name + SCALE in self.files]
        quantised, expected = self.config.get("quantization_config"), dict(expected)
        block = (quantised if isinstance(quantised, dict) else {}).get("weight_block_size", [128, 128])
        # Rows and columns of a weight that share a scale.
        pair = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
        if scaled and not pair:
            raise bad(f"weight_block_size in its config: expected two positive integers, got {block!r}")
        for name in scaled:
            expected[name + SCALE] = tuple(-(-n // step) for n, step in zip(expected[name], block, strict=True))
        for name, shape in expected.items():
            called = self.name_in_file(name)
            if name not in self.files:
                raise bad(f"{self.folder} has no tensor {called}, which its config calls for")
            if (found := self.files[name].shape) != shape:
                raise bad(f"{called} in {self.folder} is {list(found)}, and its config means {list(shape)}")
        unknown = sorted(set(self.files) - set(expected))
        if unknown:
            raise bad(
                f"{self.folder} has a tensor {self.name_in_file(unknown[0])}, which this kind of drafter has "
                "no use for; it may be of a variant that is not served"
            )
        tensors = self._read()
        for name, value in tensors.items():
            numbers = value.float() if value.element_size() == 1 else value  # FP8 is compared as wider
            if value.is_floating_point() and not numbers.isfinite().all():
                raise bad(f"{self.name_in_file(name)} in {self.folder} holds NaN or infinity")
        for name in scaled:
            factors = tensors.pop(name + SCALE).float()
            for dim, size in enumerate(block):  # a scale for every block of the weight
                factors = factors.repeat_interleave(size, dim).narrow(dim, 0, tensors[name].shape[dim])
            tensors[name] = tensors[name].float() * factors
        return tensors

    def _read(self) -> dict[str, Tensor]:
        return {name: place.file.get_tensor(place.name).clone() for name, place in self.files.items()}


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of a module's tensors, by name."""
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


def number(config: Mapping[str, Any], name: str, *, default: int | None = None, least: int = 1) -> int:
    """An integer of a config; ``default`` where it is missing or null.

    Raises:
        BadCheckpoint: it is missing, no integer, or too small.
    """
    value = default if config.get(name) is None else config[name]
    if type(value) is not int or value < least:
        raise bad(f"{name} in its config: expected an integer of at least {least}, got {value!r}")
    return value


def flag(config: Mapping[str, Any], name: str) -> bool:
    """A switch of a config, off where it is missing.

    Raises:
        BadCheckpoint: neither true nor false.
    """
    value = config.get(name)
    if value not in (None, True, False):
        raise bad(f"{name} in its config: expected true or false, got {value!r}")
    return bool(value)


def check_sizes(
    kind: str,
    vocab_size: int,
    width: int,
    target: PreTrainedModel,
    layers: tuple[int, ...] = (),
    option: str = "drafter",
) -> None:
    """Raise unless the target has the vocabulary, and hidden states of this width and these numbers.

    Target ids must mean the same to the drafter; a few padded entries may differ.

    Raises:
        BadCheckpoint: another vocabulary or hidden size, or layers that the target lacks.
    """
    theirs, size = vocabulary(target), text_config(target).hidden_size
    last = len(decoder_of(target)[0]) if layers else 0
    beyond = next((layer for layer in layers if not 0 <= layer <= last), None)
    this = f"this {kind} drafter"
    refuse(
        {
            f"{this} was made for a vocabulary of {vocab_size} tokens, and the target has {theirs}; {BELONGS}": (
                abs(vocab_size - theirs) > MAX_VOCABULARY_PADDING
            ),
            f"{this} reads hidden states of size {width}, and the target's are {size} wide; {BELONGS}": size != width,
            f"{this} reads hidden state {beyond}, and the target has {last} layers; {BELONGS}": beyond is not None,
        },
        option,
    )


def check(module: Any, target: PreTrainedModel) -> None:
    """Raise unless the drafter fits the target, and lies where the target takes its input.

    Raises:
        BadCheckpoint: it does not, or is elsewhere.
    """
    module.check_target(target)
    mine, theirs = next(module.parameters()).device, device_of(target)
    if mine != theirs:
        raise bad(f"this {module.kind} drafter is on {mine}, and the target takes its input on {theirs}; move it")


def move_to(module: nn.Module, target: PreTrainedModel | None) -> None:
    """Put a drafter where ``target`` takes its input, in its dtype; in evaluation mode, without gradients."""
    module.eval().requires_grad_(False)
    if target is not None:
        module.to(device_of(target), target.dtype)
