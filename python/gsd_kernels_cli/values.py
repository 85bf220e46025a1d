"""Values of options, checked as they are read: torch takes seconds to import, a checkpoint to load. Imports neither."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import partial

from gsd_kernels_hf.files import CONFIGS, GGUF, HUB_ID, checkpoint_place, model_place

BACKENDS = ("auto", "cpu", "cuda", "triton", "reference")
"""As :data:`gsd_kernels.BACKENDS`, whose package imports torch; a test holds them together."""

DEVICE = re.compile(r"(cpu|cuda|xpu|mps)(:\d+)?")
NICKNAMES = {"gpu": "cuda", "nvidia": "cuda", "gpu:0": "cuda:0"}
NONE = "none"
WITHOUT_MODEL = ("history", NONE)
"""Values of ``--draft`` that name no model."""

Check = Callable[[str | None], str | None]


def unknown(option: str, value: str, known: Iterable[str]) -> str:
    """An error's text: ``value`` is none of the ``known``, and which one is near."""
    known = list(known)
    near = get_close_matches(value.lower(), known, n=1, cutoff=0.5)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"{option}: there is no {value!r}; {meant}expected one of {', '.join(known)}"


def one_of(option: str, known: Sequence[str]) -> Check:
    """A check of an option whose value is one of those that are known, in whatever case."""

    def check(value: str | None) -> str | None:
        if value is not None and value.lower() not in known:
            raise ValueError(unknown(option, value, known))
        return value if value is None else value.lower()

    return check


backend = one_of("--backend", BACKENDS)


def device(value: str | None) -> str | None:
    """``--device``; whether this machine has it, torch says when it is imported.

    Raises:
        ValueError: no device's name.
    """
    if value is None or DEVICE.fullmatch(value):
        return value
    near = NICKNAMES.get(value.lower(), value.lower())
    meant = f"did you mean {near!r}? " if DEVICE.fullmatch(near) else ""
    raise ValueError(f"--device: {value!r} is no device; {meant}expected cpu, cuda or cuda:1")


def model(option: str) -> Check:
    """A check of an option that names a model: a folder with one, a GGUF file, or a hub id."""
    return _place(option, model_place)


def folder(option: str) -> Check:
    """A check like :func:`model`, without files: a folder with a checkpoint, or a hub id."""
    return _place(option, partial(model_place, gguf=False))


def draft(value: str | None) -> str | None:
    """``--draft``; see :func:`model`."""
    return value if value in WITHOUT_MODEL else model("--draft")(value)


def named_once(place: str | None, option: str | None) -> str | None:
    """The model that is named by its place or by ``--model``.

    Raises:
        ValueError: it is named in both ways.
    """
    if place is not None and option is not None:
        raise ValueError(f"--model: {place!r} names the model already; give one of them")
    return option if place is None else place


def model_before(prompts: list[str] | None, option: str | None) -> tuple[str | None, list[str]]:
    """The model of a command that takes prompts, and its prompts.

    Without ``--model`` the first of them is the model if it is a folder with one, a GGUF file or a hub id.
    """
    first, *rest = prompts or [""]
    folder = first and any(os.path.isfile(os.path.join(os.path.expanduser(first), name)) for name in CONFIGS)
    if option is None and (folder or first.endswith(GGUF) or HUB_ID.fullmatch(first)):
        return model("MODEL")(first), rest
    return option, prompts or []


SOURCES = ("assistant_model", "drafter", "draft_heads", "corpus")
"""Arguments of :func:`gsd_kernels.patch` that name what drafts."""


def drafter(value: str | None) -> str | None:
    """``--drafter``: a folder, a hub id, or ``mtp``."""
    return value if value == "mtp" else _place("--drafter", checkpoint_place)(value)


def check_draft(model: str | None, draft: str | None) -> None:
    """Raise where a draft is named without its target.

    Raises:
        ValueError: it is.
    """
    if model is None and draft is not None and draft not in WITHOUT_MODEL:
        raise ValueError("--draft: needs --model, the target that it drafts for; history and none go without one")


def _place(option: str, place: Callable[[str, str], str]) -> Check:
    def check(value: str | None) -> str | None:
        return None if value is None else place(value, option)

    return check
