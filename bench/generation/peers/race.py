"""The engines of a race: who is there, with what settings, and why the others are missing."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from gsd_kernels_hf.report.comparison import Decoded

from ..competitors import Competitor, Decode
from ..pairs import Pair, Prompt
from .base import Engine, Place, Setting
from .llama_cpp import LlamaCpp
from .openvino import OpenVino
from .process import EngineProcess

ENGINES: tuple[Engine, ...] = (OpenVino(), LlamaCpp())
#: kind → numbers of drafted tokens to choose from
CHOICES = {"plain": (0,), "draft": (3, 5, 8), "lookup": (3, 5, 10)}
TUNING_PROMPTS, TUNING_TOKENS, WARM_UP_TOKENS = 2, 64, 8
DTYPES = (torch.float32, torch.bfloat16)


def _name(engine: Engine, kind: str) -> str:
    return engine.name if kind == "plain" else f"{engine.name}-{kind}"


#: ``openvino``, ``openvino-draft``, ``openvino-lookup``, ``llama-cpp``, …
PEERS = tuple(_name(engine, kind) for engine in ENGINES for kind in CHOICES)


class Peers:
    """Engines in their processes, until the ``with`` block ends.

    Args:
        pair: whose target and draft they get, and with them its longest prompt's length.
        names: of :data:`PEERS`; others are none of this room's.
        tuning: prompts that are not reported, to choose the numbers of drafted tokens on.
        new_tokens: of the race.
        temperature: they decode greedily only.

    Attributes:
        competitors: in the order of ``names``.
        notes: per engine its version, per name the chosen number of drafted tokens and what it was chosen by.
    """

    def __init__(
        self, pair: Pair, names: Sequence[str], tuning: Sequence[Prompt], *, new_tokens: int, temperature: float = 0.0
    ) -> None:
        self.pair, self.tuning, self.temperature = pair, tuning, temperature
        self.new_tokens = new_tokens
        self.names = [name for name in dict.fromkeys(names) if name in PEERS]
        self.notes: dict[str, Any] = {}
        self.competitors: list[Competitor] = []

    def __enter__(self) -> Peers:
        with ExitStack() as stack:
            found: dict[str, Competitor] = {}
            for engine in ENGINES:
                kinds = {_name(engine, kind): kind for kind in CHOICES if _name(engine, kind) in self.names}
                if kinds:
                    found |= self._competitors(engine, kinds, stack)
            self.competitors = [found[name] for name in self.names]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _competitors(self, engine: Engine, kinds: dict[str, str], stack: ExitStack) -> dict[str, Competitor]:
        reason = missing(engine, self.pair, self.temperature)
        if reason is None:
            try:
                process = self._started(engine, stack)
            except Exception as error:
                reason = _said(error)
        if reason is not None:
            return {name: Competitor(name, missing=reason) for name in kinds}
        found = {}
        for name, kind in kinds.items():
            try:
                found[name] = Competitor(name, _decoder(process, self._chosen(process, name, kind)))
            except Exception as error:
                found[name] = Competitor(name, missing=_said(error))
        return found

    def _started(self, engine: Engine, stack: ExitStack) -> EngineProcess:
        print(f"generate: converting for {engine.name}", file=sys.stderr, flush=True)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gsd-kernels-")))
        engine.prepare(self.pair.target, self.pair.draft, folder)
        prompts = [*self.pair.prompts, *self.tuning]
        longest = max(prompt.input_ids.shape[1] for prompt in prompts) + max(self.new_tokens, TUNING_TOKENS)
        dtype = str(self.pair.target.dtype).removeprefix("torch.")
        process = EngineProcess(engine, Place(folder, dtype, torch.get_num_threads(), longest))
        stack.callback(process.close)
        self.notes[engine.name] = {"version": process.about()}
        return process

    def _chosen(self, process: EngineProcess, name: str, kind: str) -> Setting:
        """The fastest number of drafted tokens on the tuning prompts."""
        settings = [Setting(kind, tokens) for tokens in CHOICES[kind]]
        if len(settings) == 1:
            return settings[0]
        seconds = {}
        for setting in settings:
            print(f"generate: tuning {name}, {setting.tokens} drafted tokens", file=sys.stderr, flush=True)
            process.decode(setting, self.tuning[0].input_ids[0].tolist(), WARM_UP_TOKENS)
            times = [process.decode(setting, p.input_ids[0].tolist(), TUNING_TOKENS)[1] for p in self.tuning]
            seconds[setting] = sum(times)
        best = min(settings, key=lambda setting: seconds[setting])
        self.notes[name] = {
            "drafted_tokens": best.tokens,
            "chosen_on": [prompt.name for prompt in self.tuning],
            "tokens_per_second": {s.tokens: len(self.tuning) * TUNING_TOKENS / seconds[s] for s in settings},
        }
        return best


def missing(engine: Engine, pair: Pair, temperature: float) -> str | None:
    """Why ``engine`` cannot take part; ``None`` where it can."""
    absent = [package for package in engine.packages if importlib.util.find_spec(package) is None]
    if absent:
        return f"{absent[0]} is not installed: pip install 'gsd-kernels[peers]'"
    if pair.target.device.type != "cpu":
        return f"runs on a CPU here, and the pair is on {pair.target.device.type}"
    if pair.source is None:
        return "needs the whole target in one process"
    if temperature > 0:
        return "compared greedily only: its random numbers are its own"
    for model in (pair.target, pair.draft):
        if model.dtype not in DTYPES:
            return f"compared in float32 and bfloat16, not {str(model.dtype).removeprefix('torch.')}"
        if not isinstance(model, LlamaForCausalLM) or model.config.attention_bias or model.config.mlp_bias:
            return f"the converter knows LLaMA models without biases, not {type(model).__name__}"
    return None


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _decoder(process: EngineProcess, setting: Setting) -> Decode:
    def decode(ids: Tensor, new_tokens: int, seed: int) -> Decoded:
        tokens, seconds = process.decode(setting, ids[0].tolist(), new_tokens)
        return Decoded(torch.cat([ids, torch.tensor([tokens], dtype=ids.dtype)], 1), None, seconds=seconds)

    return decode
