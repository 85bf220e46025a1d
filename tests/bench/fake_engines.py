"""Engines for tests of the race with peers. Their processes import this module: nothing of torch in it."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from gsd_kernels_bench.generation.peers.base import Place, Setting, usual_choices


@dataclass
class Recorded:
    """Knows the right continuations, is slow but with 5 drafted tokens, and wrong when it looks up."""

    texts: dict[tuple[int, ...], list[int]]
    name: str = "openvino"
    packages: tuple[str, ...] = ("json",)

    def prepare(self, target, draft, folder: Path) -> None:
        (folder / "seen").write_text(" ".join(str(model.config.vocab_size) for model in (target, draft) if model))

    def start(self, place: Place) -> Recorded:
        assert (place.folder / "seen").exists() and place.longest > 0
        self.place, self.opened = place, []
        return self

    def open(self, setting: Setting) -> None:
        time.sleep(0.2 * (setting not in self.opened))  # loading is not decoding
        self.opened.append(setting)

    def decode(self, setting: Setting, ids: list[int], new_tokens: int) -> list[int]:
        time.sleep(0.001 if setting.tokens == 5 else 0.01)
        text = self.texts.get(tuple(ids), [0] * 1000)[:new_tokens]
        return [*text[:-1], (text[-1] + 1) % 512] if setting.kind == "lookup" else text

    def choices(self, kind: str) -> list[Setting]:
        return usual_choices(kind)

    def weight_bytes(self, folder: Path) -> int | None:
        return None

    def about(self) -> str:
        return f"pid {os.getpid()}, torch {'torch' in sys.modules}"


@dataclass
class Failing(Recorded):
    """Fails at one point."""

    texts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    name: str = "llama-cpp"
    at: str = "prepare"

    def prepare(self, target, draft, folder: Path) -> None:
        super().prepare(target, draft, folder)
        if self.at == "prepare":
            raise ValueError("no such format")

    def decode(self, setting: Setting, ids: list[int], new_tokens: int) -> list[int]:
        if self.at == "die":
            os._exit(9)
        return [0] * (new_tokens - 1)
