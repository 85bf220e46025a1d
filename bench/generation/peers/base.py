"""What an engine is to the race: how its files are made, and how they decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Setting:
    """A way of decoding: ``plain``, with the ``draft``, or by ``lookup`` in the text; drafting ``tokens`` at a time."""

    kind: str
    tokens: int = 0


@dataclass(frozen=True)
class Place:
    """What a decoding process is given.

    Attributes:
        folder: what :meth:`Engine.prepare` wrote.
        dtype: of weights, arithmetic and cache: ``float32`` or ``bfloat16``.
        threads: torch's, for the engine too.
        longest: tokens of the longest text, the new ones among them.
    """

    folder: Path
    dtype: str
    threads: int
    longest: int


class Runner(Protocol):
    """An engine at work."""

    def open(self, setting: Setting) -> None:
        """Load what ``setting`` needs, once."""

    def decode(self, setting: Setting, ids: Sequence[int], new_tokens: int) -> list[int]:
        """Decode exactly ``new_tokens`` tokens greedily, with nothing kept of earlier calls."""


class Engine(Protocol):
    """One engine. It is pickled to its process, where only :meth:`start` is called.

    Attributes:
        name: of its plain decoding; the others are ``name-draft`` and ``name-lookup``.
        packages: modules without which it is missing.
    """

    name: str
    packages: tuple[str, ...]

    def prepare(self, target: PreTrainedModel, draft: PreTrainedModel, folder: Path) -> None:
        """Write both models to ``folder`` as the engine reads them."""

    def start(self, place: Place) -> Runner: ...

    def about(self) -> str:
        """Name the version, and what the engine found of the CPU where it says so."""
