"""The engines of a race: who is there, with what settings, and why the others are missing."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from gsd_kernels_cli.comparison import Decoded
from gsd_kernels_hf.extras import cure

from ..competitors import Competitor, Decode, in_a_line
from ..pairs import Pair, Prompt
from .base import TOKENS, Engine, Place, Setting
from .llama_server import VARIABLE, LlamaServer
from .process import EngineProcess

TUNING_TOKENS, WARM_UP_TOKENS = 64, 8
DTYPES = (torch.float32, torch.bfloat16)


def name_of(engine: Engine, kind: str) -> str:
    """``openvino``, ``openvino-draft``, ``openvino-lookup``, ``llama-cpp``, …"""
    return engine.name if kind == "plain" else f"{engine.name}-{kind}"


class Peers:
    """Engines in their processes, until the ``with`` block ends.

    Args:
        pair: whose target and draft they get, and with them its longest prompt's length.
        names: of the engines' ways; others are none of this room's.
        tuning: prompts that are not reported, to choose the numbers of drafted tokens on.
        new_tokens: of the race.
        engines: to be started.
        ends: tokens that end a text.

    Attributes:
        competitors: in the order of ``names``.
        notes: per engine its version and bits a weight, per name the chosen setting and what it was chosen by.
    """

    def __init__(
        self,
        pair: Pair,
        names: Sequence[str],
        tuning: Sequence[Prompt],
        *,
        new_tokens: int,
        engines: Sequence[Engine],
        ends: Sequence[int] = (),
    ) -> None:
        self.pair, self.tuning, self.engines = pair, tuning, engines
        self.new_tokens, self.ends = new_tokens, tuple(ends)
        known = {name_of(engine, kind) for engine in self.engines for kind in TOKENS}
        self.names = [name for name in dict.fromkeys(names) if name in known]
        self.notes: dict[str, Any] = {}
        self.competitors: list[Competitor] = []

    def __enter__(self) -> Peers:
        with ExitStack() as stack:
            ways: dict[str, Competitor] = {}
            for engine in self.engines:
                kinds = {name_of(engine, kind): kind for kind in TOKENS if name_of(engine, kind) in self.names}
                if kinds:
                    ways |= self._competitors(engine, kinds, stack)
            self.competitors = [ways[name] for name in self.names]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _competitors(self, engine: Engine, kinds: dict[str, str], stack: ExitStack) -> dict[str, Competitor]:
        reason = missing(engine, self.pair)
        if reason is None:
            try:
                process = self._started(engine, stack)
            except Exception as error:
                reason = in_a_line(error)
        if reason is not None:
            return {name: Competitor(name, missing=reason) for name in kinds}
        ways = {}
        for name, kind in kinds.items():
            try:
                ways[name] = Competitor(name, _decoder(process, self._chosen(process, name, kind)))
            except Exception as error:
                ways[name] = Competitor(name, missing=in_a_line(error))
        return ways

    def _started(self, engine: Engine, stack: ExitStack) -> EngineProcess:
        print(f"peers: converting for {engine.name}", file=sys.stderr, flush=True)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gsd-kernels-")))
        engine.prepare(self.pair.target, self.pair.draft, folder)
        prompts = [*self.pair.prompts, *self.tuning]
        longest = max(prompt.input_ids.shape[1] for prompt in prompts) + max(self.new_tokens, TUNING_TOKENS)
        dtype = str(self.pair.target.dtype).removeprefix("torch.")
        process = EngineProcess(engine, Place(folder, dtype, torch.get_num_threads(), longest, self.ends))
        stack.callback(process.close)
        size = engine.weight_bytes(folder)
        bits = self.pair.target.dtype.itemsize * 8 if size is None else 8 * size / self.pair.target.num_parameters()
        self.notes[engine.name] = {"version": process.about(), "bits": bits}
        return process

    def _chosen(self, process: EngineProcess, name: str, kind: str) -> Setting:
        """The fastest setting on the tuning prompts."""
        settings = process.engine.choices(kind)
        if len(settings) == 1:
            return settings[0]
        rates = {}
        for setting in settings:
            print(f"peers: tuning {name}, {setting} drafted tokens", file=sys.stderr, flush=True)
            process.decode(setting, self.tuning[0].input_ids[0].tolist(), WARM_UP_TOKENS)
            runs = [process.decode(setting, p.input_ids[0].tolist(), TUNING_TOKENS) for p in self.tuning]
            rates[setting] = sum(len(tokens) for tokens, _ in runs) / sum(seconds for _, seconds in runs)
        best = max(settings, key=lambda setting: rates[setting])
        self.notes[name] = {
            "drafted_tokens": best.tokens,
            **({"mode": best.mode} if best.mode else {}),
            "chosen_on": [prompt.name for prompt in self.tuning],
            "tokens_per_second": {str(setting): rates[setting] for setting in settings},
        }
        return best


def missing(engine: Engine, pair: Pair) -> str | None:
    """Why ``engine`` cannot take part; ``None`` where it can."""
    absent = [package for package in engine.packages if importlib.util.find_spec(package) is None]
    if absent:
        return f"{absent[0]} is not installed: {cure('peers')}"
    if isinstance(engine, LlamaServer) and engine.binaries is None:
        return f"there is no llama-server: build llama.cpp and name its folder by ${VARIABLE}, or on PATH"
    for model in (pair.target, pair.draft):
        if model is None:
            continue
        if model.dtype not in DTYPES:
            return f"compared in float32 and bfloat16, not {str(model.dtype).removeprefix('torch.')}"
        if not isinstance(model, LlamaForCausalLM) or model.config.attention_bias or model.config.mlp_bias:
            return f"the converter knows LLaMA models without biases, not {type(model).__name__}"
    return None


def _decoder(process: EngineProcess, setting: Setting) -> Decode:
    def decode(ids: Tensor, new_tokens: int, seed: int) -> Decoded:
        tokens, seconds = process.decode(replace(setting, round=seed), ids[0].tolist(), new_tokens)
        return Decoded(torch.cat([ids, torch.tensor([tokens], dtype=ids.dtype)], 1), None, seconds=seconds)

    return decode
