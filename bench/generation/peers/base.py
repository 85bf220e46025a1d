"""An engine as the race sees it: how its files are made, and how it decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Setting:
    """A way of decoding: ``plain``, with the ``draft``, or by ``lookup`` in the text; drafting ``tokens`` at a time.

    Attributes:
        mode: of a lookup, where the engine has several.
        round: of the race; what remembers earlier texts begins a round without them.
    """

    kind: str
    tokens: int = 0
    mode: str = ""
    round: int = 0

    def __str__(self) -> str:
        return f"{self.mode} {self.tokens}".strip()


#: kind → numbers of drafted tokens to choose from
TOKENS = {"plain": (0,), "draft": (3, 5, 8), "lookup": (3, 5, 10)}


def usual_choices(kind: str) -> list[Setting]:
    """List the settings that are tried of an engine with one mode a kind."""
    return [Setting(kind, tokens) for tokens in TOKENS[kind]]


@dataclass(frozen=True)
class Place:
    """The arguments of a decoding process.

    Attributes:
        folder: what :meth:`Engine.prepare` wrote.
        dtype: of weights, arithmetic and cache: ``float32`` or ``bfloat16``.
        threads: torch's, for the engine too.
        longest: tokens of the longest text, the new ones among them.
        ends: tokens that end a text; none of them: all texts have the same length.
    """

    folder: Path
    dtype: str
    threads: int
    longest: int
    ends: tuple[int, ...] = ()


class Runner(Protocol):
    """An engine at work."""

    def open(self, setting: Setting) -> None:
        """Load what ``setting`` needs, once."""

    def decode(self, setting: Setting, ids: Sequence[int], new_tokens: int) -> list[int]:
        """Decode ``new_tokens`` tokens greedily, or up to one that ends the text, which may be among them."""


class Engine(Protocol):
    """One engine. It is pickled to its process, where only :meth:`start` is called.

    Attributes:
        name: of its plain decoding; the others are ``name-draft`` and ``name-lookup``.
        packages: modules without which it is missing.
    """

    name: str
    packages: tuple[str, ...]

    def prepare(self, target: PreTrainedModel, draft: PreTrainedModel | None, folder: Path) -> None:
        """Write both models to ``folder`` as the engine reads them."""

    def choices(self, kind: str) -> list[Setting]:
        """Settings to choose from, on prompts that are not reported."""

    def weight_bytes(self, folder: Path) -> int | None:
        """Of the target in ``folder``, as they are read for a token; ``None``: as many as in the torch model."""

    def start(self, place: Place) -> Runner: ...

    def about(self) -> str:
        """Name the version, and what the engine found of the CPU where it says so."""
