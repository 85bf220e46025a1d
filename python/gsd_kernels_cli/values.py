"""Values of options, checked as they are read: torch takes seconds to import, a checkpoint to load. Imports neither."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

import typer

from gsd_kernels_hf.files import CONFIGS, GGUF, HUB_ID, checkpoint_place, model_place

BACKENDS = ("auto", "cpu", "cuda", "triton", "reference")
"""As :data:`gsd_kernels.BACKENDS`, whose package imports torch; a test holds them together."""

DEVICE = re.compile(r"(cpu|cuda|xpu|mps)(:\d+)?")
NICKNAMES = {"gpu": "cuda", "nvidia": "cuda", "gpu:0": "cuda:0"}
NONE = "none"
WITHOUT_MODEL = ("history", NONE)
"""Values of ``--draft`` that name no model."""


def unknown(option: str, value: str, known: Iterable[str]) -> str:
    """An error's text: ``value`` is none of the ``known``, and which one is near."""
    known = list(known)
    near = get_close_matches(value.lower(), known, n=1, cutoff=0.5)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"{option}: there is no {value!r}; {meant}expected one of {', '.join(known)}"


def check_by(check: Callable[[str, str], str]) -> Callable[..., Any]:
    """A callback of an option, or of the argument MODEL: ``check`` takes a value and the name."""

    def read(param: typer.CallbackParam, value: Any) -> Any:
        name = param.opts[0] if param.opts[0].startswith("-") else "MODEL"
        if isinstance(value, list | tuple):
            return [check(one, name) for one in value]
        return None if value is None else check(value, name)

    return read


def one_of(known: Sequence[str]) -> Callable[..., Any]:
    """A callback: the value is one of those that are known, in whatever case."""

    def check(value: str, option: str) -> str:
        if value.lower() not in known:
            raise ValueError(unknown(option, value, known))
        return value.lower()

    return check_by(check)


@check_by
def device(value: str, option: str) -> str:
    """A device's name; whether this machine has it, torch says when it is imported.

    Raises:
        ValueError: it is none.
    """
    if DEVICE.fullmatch(value):
        return value
    near = NICKNAMES.get(value.lower(), value.lower())
    meant = f"did you mean {near!r}? " if DEVICE.fullmatch(near) else ""
    raise ValueError(f"{option}: {value!r} is no device; {meant}expected cpu, cuda or cuda:1")


model = check_by(model_place)
"""Of a model: a folder with one, a GGUF file, or a hub id."""
folder = check_by(partial(model_place, gguf=False))
"""The same without files."""
draft = check_by(lambda value, option: value if value in WITHOUT_MODEL else model_place(value, option))
drafter = check_by(lambda value, option: value if value == "mtp" else checkpoint_place(value, option))


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
        return model_place(first, "MODEL"), rest
    return option, prompts or []


SOURCES = ("assistant_model", "drafter", "draft_heads", "corpus")
"""Arguments of :func:`gsd_kernels.patch` that name what drafts."""


def check_draft(model: str | None, draft: str | None) -> None:
    """Raise where a draft is named without its target.

    Raises:
        ValueError: it is.
    """
    if model is None and draft is not None and draft not in WITHOUT_MODEL:
        raise ValueError("--draft: needs --model, the target that it drafts for; history and none go without one")
