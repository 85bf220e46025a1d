"""The engines of a race: who is there, with what settings, and why the others are missing."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from gsd_kernels_cli.comparison import Run
from gsd_kernels_hf.extras import cure

from ...lib.report import Missing, lacking, reason
from ..competitors import Decode, Ways
from ..pairs import Prompt
from .base import TOKENS, Engine, EngineProcess, Place, Setting
from .llama_server import VARIABLE, LlamaServer

TUNING_TOKENS, WARM_UP_TOKENS = 64, 8
DTYPES = (torch.float32, torch.bfloat16)


def name_of(engine: Engine, kind: str) -> str:
    """``openvino``, ``openvino-draft``, ``openvino-lookup``, ``llama-cpp``, …"""
    return engine.name if kind == "plain" else f"{engine.name}-{kind}"


@contextmanager
def peers(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    names: Sequence[str],
    tuning: Sequence[Prompt],
    *,
    longest: int,
    new_tokens: int,
    engines: Sequence[Engine],
    ends: tuple[int, ...] = (),
) -> Iterator[tuple[Ways, dict[str, Any]]]:
    """Engines in their processes, until the ``with`` block ends.

    Args:
        target, draft: the models that they get.
        names: of the engines' ways; others are none of this room's.
        tuning: prompts that are not reported, to choose the numbers of drafted tokens on.
        longest: tokens of the longest prompt of the race.
        new_tokens: of the race.
        engines: to be started.
        ends: tokens that end a text.

    Yields: their ways by name; and notes, per engine its version and bits a weight, per name the chosen setting and
        what it was chosen by.
    """
    longest = max(longest, *(prompt.input_ids.shape[1] for prompt in tuning)) + max(new_tokens, TUNING_TOKENS)
    ways: Ways = {}
    notes: dict[str, Any] = {}
    with ExitStack() as stack:

        def started(engine: Engine) -> EngineProcess:
            print(f"peers: converting for {engine.name}", file=sys.stderr, flush=True)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gsd-kernels-")))
            engine.prepare(target, draft, folder)
            dtype = str(target.dtype).removeprefix("torch.")
            process = EngineProcess(engine, Place(folder, dtype, torch.get_num_threads(), longest, ends))
            stack.callback(process.close)
            size = engine.weight_bytes(folder)
            bits = target.dtype.itemsize * 8 if size is None else 8 * size / target.num_parameters()
            notes[engine.name] = {"version": process.about(), "bits": bits}
            return process

        for engine in engines:
            kinds = {name: kind for kind in TOKENS if (name := name_of(engine, kind)) in names}
            if not kinds:
                continue
            try:
                check(engine, target, draft)
                process = started(engine)
            except Exception as error:
                ways |= dict.fromkeys(kinds, lacking(reason(error)))
                continue
            for name, kind in kinds.items():
                try:
                    ways[name] = _decoder(process, _chosen(process, name, kind, tuning, notes))
                except Exception as error:
                    ways[name] = lacking(reason(error))
        yield ways, notes


def _chosen(process: EngineProcess, name: str, kind: str, tuning: Sequence[Prompt], notes: dict[str, Any]) -> Setting:
    """The fastest setting on the tuning prompts."""
    settings = process.engine.choices(kind)
    if len(settings) == 1:
        return settings[0]
    prompts = [prompt.input_ids[0].tolist() for prompt in tuning]
    rates = {}
    for setting in settings:
        print(f"peers: tuning {name}, {setting} drafted tokens", file=sys.stderr, flush=True)
        process.decode(setting, prompts[0], WARM_UP_TOKENS)
        runs = [process.decode(setting, prompt, TUNING_TOKENS) for prompt in prompts]
        rates[setting] = sum(len(tokens) for tokens, _ in runs) / sum(seconds for _, seconds in runs)
    best = max(settings, key=lambda setting: rates[setting])
    notes[name] = {
        "drafted_tokens": best.tokens,
        **({"mode": best.mode} if best.mode else {}),
        "chosen_on": [prompt.name for prompt in tuning],
        "tokens_per_second": {str(setting): rates[setting] for setting in settings},
    }
    return best


def check(engine: Engine, *models: PreTrainedModel | None) -> None:
    """Raise :class:`Missing` where an engine cannot take part."""
    absent = [package for package in engine.packages if importlib.util.find_spec(package) is None]
    if absent:
        raise Missing(f"{absent[0]} is not installed: {cure('peers')}")
    if isinstance(engine, LlamaServer) and engine.binaries is None:
        raise Missing(f"there is no llama-server: build llama.cpp and name its folder by ${VARIABLE}, or on PATH")
    for model in filter(None, models):
        if model.dtype not in DTYPES:
            raise Missing(f"compared in float32 and bfloat16, not {str(model.dtype).removeprefix('torch.')}")
        if not isinstance(model, LlamaForCausalLM) or model.config.attention_bias or model.config.mlp_bias:
            raise Missing(f"the converter knows LLaMA models without biases, not {type(model).__name__}")


def _decoder(process: EngineProcess, setting: Setting) -> Decode:
    def decode(ids: Tensor, new_tokens: int, seed: int) -> Run:
        tokens, seconds = process.decode(replace(setting, round=seed), ids[0].tolist(), new_tokens)
        return Run(tokens, None, seconds=seconds)

    return decode
