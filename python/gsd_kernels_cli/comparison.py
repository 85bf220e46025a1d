"""Several ways of decoding the same prompts in one run: what each took, and where its text differs from plain."""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gsd_kernels.ops.sampling.philox import gumbel_of
from gsd_kernels_hf.api import generate
from gsd_kernels_hf.engine.stats import GenerationStats
from gsd_kernels_hf.model.properties import cache_argument, device_of, logits_alone, text_config
from gsd_kernels_hf.progress import tracked

from .busy import Others, distrust
from .output import out, table

Inputs = Mapping[str, Tensor]
"""``input_ids`` and ``attention_mask`` of one prompt, [1, P]."""

UNDRAFTED = "undrafted"
"""Name of the way of :func:`undrafted`, where it takes part."""
NOISE_FACTOR = 1.1
"""Drafts cannot give more than their tokens per step; beyond this multiple of it the times are not believed."""
WARM_UP_TOKENS = 4
"""That every contender decodes of the first prompt before a race."""


@dataclass(frozen=True)
class Run:
    """One prompt, decoded once.

    Attributes:
        tokens: the new ones.
        target_forwards: those that gave tokens. transformers' forward of the prompt gives the first one; ours reads
            the prompt but for its last token, gives none, and is not among them. ``None`` where they are not counted.
        stats: of our own decoding.
        seconds: of wall time, by :func:`measure`; of the decoding alone, where it ran in another process.
        peak_bytes: see :func:`peak_memory`.
    """

    tokens: list[int]
    target_forwards: int | None
    stats: GenerationStats | None = None
    seconds: float | None = None
    peak_bytes: int | None = None

    @property
    def tokens_per_second(self) -> float:
        assert self.seconds is not None
        return len(self.tokens) / self.seconds

    @property
    def tokens_per_forward(self) -> float:
        return len(self.tokens) / (self.target_forwards or 1)

    def as_dict(self) -> dict[str, Any]:
        figures = {name: getattr(self, name) for name in FIGURES}
        return figures if self.stats is None else {**figures, "stats": self.stats.as_dict()}


FIGURES = ("seconds", "tokens_per_second", "tokens_per_forward", "target_forwards", "peak_bytes")
"""Of a :class:`Run`, what is reported."""


def together(runs: Sequence[Run]) -> Run:
    """Several prompts as one: all tokens and seconds, the highest peak."""
    return Run(
        [token for run in runs for token in run.tokens],
        sum(run.target_forwards or 0 for run in runs),
        seconds=sum(run.seconds or 0.0 for run in runs),
        peak_bytes=max((run.peak_bytes for run in runs if run.peak_bytes is not None), default=None),
    )


Contender = Callable[[Inputs, int], Run]
"""A way of decoding: (inputs, new tokens) → what it gave."""


def new_tokens(inputs: Inputs, sequences: Tensor) -> list[int]:
    """Return those behind the prompt, of ``generate``'s sequences [1, L]."""
    return sequences[0, inputs["input_ids"].shape[1] :].tolist()


@dataclass(frozen=True)
class Divergence:
    """The first new token that differs.

    Attributes:
        index: its place among the new tokens.
        plain, other: the two tokens; ``None`` where that text had ended.
        gap: how far apart the target's logits of the two are, with the noise of sampling times the temperature;
            infinite if one text had ended.
        bound: how far rounding can move it in the target's dtype, estimated and measured.
    """

    index: int
    plain: int | None
    other: int | None
    gap: float
    bound: float

    @property
    def within_rounding(self) -> bool:
        """Return whether the two tokens are equal within rounding."""
        return self.gap <= self.bound

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "within_rounding": self.within_rounding}


@dataclass(frozen=True)
class Race:
    """Results of several ways on the same prompts; the first one is plain, and the last one is held against it.

    Attributes:
        rounds: runs by way, a round a prompt.
        divergences: where the last way's text parts from the first one's, by prompt.
        others_share: of the machine's processors, what other programs took meanwhile.
    """

    rounds: list[dict[str, Run]]
    divergences: list[Divergence | None]
    others_share: float | None

    @property
    def totals(self) -> dict[str, Run]:
        """All prompts as one, by way."""
        return {way: together([runs[way] for runs in self.rounds]) for way in self.rounds[0]}

    @property
    def doubt(self) -> str | None:
        """Why the times say nothing, or ``None``: others were at work, or drafts seem to give more than they can."""
        runs = self.totals
        if UNDRAFTED in runs:
            ours = runs[[*runs][-1]]
            by_drafts, most = ours.tokens_per_second / runs[UNDRAFTED].tokens_per_second, ours.tokens_per_forward
            if by_drafts > NOISE_FACTOR * most:
                return (
                    f"Drafts seem to make it {by_drafts:.2f}× as fast, more than {most:.2f} tokens a step can: "
                    "the runs are too short, or the machine was busy."
                )
        return distrust(self.others_share)

    def as_dict(self) -> dict[str, Any]:
        """Everything but single prompts, as plain data."""
        near = [divergence.within_rounding for divergence in self.divergences if divergence is not None]
        runs = self.totals
        rate = next(iter(runs.values())).tokens_per_second
        return {
            "verdict": "equal" if not near else "rounding" if all(near) else "differs",
            "prompts": len(self.rounds),
            "equal": len(self.divergences) - len(near),
            "within_rounding": sum(near),
            "beyond_rounding": len(near) - sum(near),
            "ways": [{"way": w, **run.as_dict(), "speedup": run.tokens_per_second / rate} for w, run in runs.items()],
            "others_share": self.others_share,
            "why_not_believed": self.doubt,
        }

    def show(self) -> None:
        """Print a table of the ways, behind it how many texts are the same."""
        found = self.as_dict()
        doubt = found["why_not_believed"]
        if doubt is not None:
            out.print(doubt, style="bold yellow")
        rows = [
            [
                run["way"],
                f"{run['tokens_per_second']:.1f}",
                "–" if doubt else f"{run['speedup']:.2f}",
                f"{run['tokens_per_forward']:.2f}",
                "–" if run["peak_bytes"] is None else f"{run['peak_bytes'] / 2**20:.1f} MiB",
            ]
            for run in found["ways"]
        ]
        out.print(table(["", "tokens/s", "×", "tokens/step", "peak memory"], rows))
        said = f"{found['equal']} of {found['prompts']}"
        if found["within_rounding"]:
            said += f", {found['within_rounding']} by rounding"
        if found["beyond_rounding"]:
            said += f", {found['beyond_rounding']} DIFFER BEYOND ROUNDING: a bug"
        out.print(f"The same tokens: {said}")


def plain(target: PreTrainedModel, *, counted: bool = True, **options: Any) -> Contender:
    """transformers' own ``generate`` with its ``options``; greedy by default.

    Args:
        target: the model.
        counted: whether to count its forwards by a hook: not of a compiled model, which a hook would compile anew, nor
            of one that also drafts.
        **options: of ``generate``.
    """
    options = {"do_sample": False, **options}

    def decode(inputs: Inputs, max_new_tokens: int) -> Run:
        calls: list[None] = []  # never of ours: rows of a model with a hook go through its modules, one by one
        with target.register_forward_pre_hook(lambda *_: calls.append(None)) if counted else nullcontext():
            sequences = target.generate(**inputs, **options, max_new_tokens=max_new_tokens)
        return Run(new_tokens(inputs, sequences), len(calls) if counted else None)

    return decode


def assisted(
    target: PreTrainedModel, draft: PreTrainedModel, num_tokens: int | None = None, **options: Any
) -> Contender:
    """transformers' assisted generation; with ``num_tokens`` always that many drafted tokens, not its schedule."""
    constant = {
        "num_assistant_tokens": num_tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    decode = plain(target, assistant_model=draft, **options)

    def decode_with_settings(inputs: Inputs, max_new_tokens: int) -> Run:
        config = copy.copy(draft.generation_config)
        config.update(**({} if num_tokens is None else constant))
        with patch.object(draft, "generation_config", config):
            return decode(inputs, max_new_tokens)

    return decode_with_settings


def graph(target: PreTrainedModel, **options: Any) -> Contender:
    """:func:`gsd_kernels.generate` with its ``options``, greedy by default; chain and tree are graph configs."""
    options = {"do_sample": False, **options}

    def decode(inputs: Inputs, max_new_tokens: int) -> Run:
        output = generate(target, **inputs, **options, max_new_tokens=max_new_tokens, return_dict_in_generate=True)
        return Run(new_tokens(inputs, output.sequences), output.stats.steps, output.stats)

    return decode


def undrafted(target: PreTrainedModel, **options: Any) -> Contender:
    """:func:`graph` without any source of drafts: a forward a token."""
    return graph(target, graph_config="plain", **options)


def measure(target: PreTrainedModel, contender: Contender, inputs: Inputs, max_new_tokens: int) -> Run:
    """Decode one prompt: tokens, seconds, forwards of the target, peak memory."""
    device = device_of(target)
    peak = peak_memory(device)
    wait_for(device)
    begin = time.perf_counter()
    run = contender(inputs, max_new_tokens)
    wait_for(device)
    return replace(run, seconds=time.perf_counter() - begin, peak_bytes=peak())


def race(
    target: PreTrainedModel,
    contenders: Mapping[str, Contender],
    prompts: Sequence[Inputs],
    max_new_tokens: int,
    *,
    seconds: float = math.inf,
) -> Race:
    """Let the contenders decode each prompt in turn, so that whatever slows the machine down slows them all.

    Args:
        target: the model of all of them.
        contenders: by name. Each round begins with another one.
        prompts: one round each, after a warm-up of a few tokens.
        max_new_tokens: for each run.
        seconds: no further round is begun once this is spent; there is always one.
    """
    rounds: list[dict[str, Run]] = []
    names, total = list(contenders), len(contenders) * len(prompts)
    with tracked(f"decoding {len(prompts)} prompts, {len(names)} times each", total, "runs") as update:
        for name, contender in contenders.items():
            update(0, f"warming {name} up")
            contender(prompts[0], WARM_UP_TOKENS)
        begin, others = time.perf_counter(), Others()
        for number, inputs in enumerate(prompts):
            if rounds and (time.perf_counter() - begin) * (len(rounds) + 1) / len(rounds) > seconds:
                break
            turn = number % len(names)
            runs = {}
            for name in names[turn:] + names[:turn]:
                update(number * len(names) + len(runs), f"{name} on prompt {number + 1}")
                runs[name] = measure(target, contenders[name], inputs, max_new_tokens)
            rounds.append({name: runs[name] for name in names})
        share = others.share()
    divergences = [
        first_divergence(target, inputs["input_ids"], runs[names[0]].tokens, runs[names[-1]].tokens)
        for inputs, runs in zip(prompts, rounds, strict=False)
    ]
    return Race(rounds, divergences, share)


@torch.no_grad()
def first_divergence(
    target: PreTrainedModel,
    input_ids: Tensor,
    plain: Sequence[int],
    other: Sequence[int],
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> Divergence | None:
    """First difference of two continuations of one prompt [1, P], judged by the target's own logits there.

    Sampled ones are ours, with one seed and no other warper than the temperature: the token picked is then the one of
    the largest logit + temperature · noise.
    """
    index = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), min(len(plain), len(other)))
    if index == len(plain) == len(other):
        return None
    mine, theirs = (tokens[index] if index < len(tokens) else None for tokens in (plain, other))
    before = torch.tensor([list(plain[:index])], dtype=input_ids.dtype, device=input_ids.device)
    logits, noise = _logits_and_noise(target, torch.cat([input_ids, before], 1))
    gap = math.inf
    if mine is not None and theirs is not None:
        pair = torch.tensor([mine, theirs], device=logits.device, dtype=torch.int64)
        scores = logits[pair]
        if temperature > 0:
            key = torch.tensor(seed, device=logits.device, dtype=torch.int64)
            position = torch.tensor(input_ids.shape[1] + index, device=logits.device, dtype=torch.int64)
            scores = scores + temperature * gumbel_of(key, position, torch.zeros_like(position), pair)
        gap = float((scores[0] - scores[1]).abs())
    return Divergence(index, mine, theirs, gap, max(rounding_bound(target, logits), 2 * noise))


def rounding_bound(target: PreTrainedModel, logits: Tensor) -> float:
    """Bound on the difference of two logits [V] between row shapes that round differently.

    Each of the 2·layers additions to the residual stream rounds independently by half a unit in the last place, and so
    do the final norm and the head; their effects add up like a random walk. Two logits, two standard deviations.
    """
    dtype = next(p.dtype for p in target.parameters() if p.is_floating_point())
    half_unit = torch.finfo(dtype).eps / 2
    return 2 * math.sqrt(2 * (2 * text_config(target).num_hidden_layers + 2)) * half_unit * float(logits.abs().max())


def _logits_and_noise(target: PreTrainedModel, input_ids: Tensor) -> tuple[Tensor, float]:
    """The last position's logits [V], and how much they move if that position is forwarded alone.

    Only transformers' own forwards: it shows what the dtype does in this model's matrix products (TF32, quantised
    weights), which :func:`rounding_bound` cannot know.
    """
    kept: dict[str, Any] = {"logits_to_keep": 1, **logits_alone(target)}
    logits = target(input_ids, use_cache=False, **kept).logits[0, -1].double()
    if input_ids.shape[1] == 1:
        return logits, 0.0
    name = cache_argument(target)
    cache = {name: target(input_ids[:, :-1], use_cache=True, **kept)[name]}
    alone = target(input_ids[:, -1:], **cache, use_cache=True, **kept).logits[0, -1].double()
    return logits, float((logits - alone).abs().max())


def peak_memory(device: torch.device) -> Callable[[], int | None]:
    """Return the peak of memory from here on: allocated on a GPU, resident in a Linux process, elsewhere ``None``."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return lambda: torch.cuda.max_memory_allocated(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    except OSError:
        return lambda: None
    return _resident_peak


def _resident_peak() -> int | None:
    found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    return None if found is None else int(found[1]) * 1024


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all that it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
