"""Tensors that are saved for another process, in one file with its version: read as they were written, or refused."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..files import write_file


def write_saved(file: Path, form: str, version: int, tensors: Mapping[str, Tensor], **about: object) -> None:
    """Write tensors and what is said of them as one safetensors file, which is whole or not there; with their sum."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    told = {name: str(value) for name, value in {"format": form, "version": version, **about}.items()}
    told["sum"] = _sum(tensors, told)
    write_file(file, lambda partial: save_file(tensors, partial, metadata=told))


def read_saved(
    file: Path, what: str, form: str, version: int, *, foreign: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read what :func:`write_saved` wrote, bit by bit: the tensors and what is said of them.

    Args:
        file: to be read.
        what: it holds, the first word of every error.
        form: its ``format``.
        version: the newest that can be read.
        foreign: what is said of a file of another format.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, foreign, or of a newer version.
    """
    if file.is_dir():
        raise ValueError(f"{what}: {file} is a folder; expected the file")
    if not file.is_file():
        raise FileNotFoundError(f"{what}: no such file: {file}")
    try:
        with safe_open(file, framework="pt") as opened:
            about = opened.metadata() or {}
            if about.get("format") != form:
                raise ValueError(f"{what}: {file} {foreign}")
            if (found := about.get("version", "")) != str(version) and re.fullmatch(r"[1-9]\d{0,8}", found):
                raise ValueError(f"{what}: {file} has version {found}, newer than {version}; update gsd_kernels")
            # Copies: pages of a mapped file that is shortened later end the process.
            tensors = {name: opened.get_tensor(name).clone() for name in list(opened.keys())}
    except SafetensorError as error:
        raise ValueError(f"{what}: {file} is damaged or something else: it {foreign}") from error
    except OSError as error:
        raise OSError(f"{what}: {file} cannot be read: {error.strerror or type(error).__name__}") from error
    if about.pop("sum", "") != _sum(tensors, about):
        raise damaged(what, file, "its content is not what was written")
    return tensors, about


def _sum(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """A checksum of tensors and of what is said of them."""
    found = zlib.crc32(repr(sorted(about.items())).encode())
    for name, tensor in sorted(tensors.items()):
        found = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), found)
        found = zlib.crc32(tensor.flatten().view(torch.uint8).numpy(), found)
    return str(found)


def damaged(what: str, file: Path, why: str) -> ValueError:
    """The error of a file of our own that does not hold what it should; the user decides what becomes of it."""
    return ValueError(f"{what}: {file} is damaged ({why}); nothing was loaded, save it anew")
