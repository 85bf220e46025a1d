"""Random greedy cases: a family, a kind of graph, and everything else by the seed, which a failure prints."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from dataclasses import dataclass, field
from typing import Any

import models
import pytest
import torch
from transformers import (
    LogitsProcessor,
    StoppingCriteria,
)

import gsd_kernels as gsd
from gsd_kernels_hf.policy.base import Plan
from gsd_kernels_hf.policy.row_selector import EdgeModel, RowSelector
from gsd_kernels_hf.policy.shapes import ladder

LETTERS = models.CHARACTERS[:29]
VOCAB = 32  # small, so that sequences recur and merge edges are accepted
CASES = 7  # per chunk: 5 families × 10 kinds × 7 = 350
KINDS = {  # merge contexts
    "chain": (-1,),
    "tree": (-1,),
    "graph-0": (0,),
    "graph-1": (1,),
    "graph-2-3": (2, 3),
    "reuse": (0, 1, 2, -1),  # some levels come from the history
    "history": (0, 1, 2, -1),  # no draft model
    "layer_skip": (0, 1, 2, -1),  # the target drafts for itself
    "all": (0, 1, 2, -1),  # draft, prediction heads and history
    "switching": (0, 1, 2, -1),  # the shape changes from step to step, as an automatic budget's does
}
REUSE = ({"history_depth": 1, "history_width": 3}, {"history_depth": 4, "history_width": 8})
FAST = ("chain", "graph-1")  # kinds that also run, with the first family, when slow tests do not
NEW_TOKENS = (5, 6, 8, 12, 16)


@functools.lru_cache
def target_of(family: str, dtype: torch.dtype = torch.float64):
    model = models.tiny(family, vocab_size=VOCAB, dtype=torch.float64).to(dtype)
    model.generation_config.eos_token_id = None  # every case says when it stops
    return model


@functools.lru_cache
def draft_of(family: str, noise: float, dtype: torch.dtype = torch.float64):
    return models.noised(target_of(family), noise).to(dtype)


@functools.lru_cache
def skip_of(family: str, dtype: torch.dtype = torch.float64):
    return gsd.LayerSkip(target_of(family, dtype), mlp=[1])


@functools.lru_cache
def heads_of(family: str, dtype: torch.dtype = torch.float64):
    heads = gsd.DraftHeads.for_model(target_of(family, dtype), 3).requires_grad_(False)
    heads.weight.normal_(std=0.2, generator=torch.Generator().manual_seed(0))
    return heads


class Drifting(LogitsProcessor):
    """Counts its own calls: right only if called once for every emitted token of a sequence."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls * 7 % scores.shape[1]] += 4.0
        return scores


class RowBias(LogitsProcessor):
    """Depends on the row of the batch and on the history's length and last token."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row in range(scores.shape[0]):
            scores[row, (row * 5 + input_ids.shape[1] + int(input_ids[row, -1])) % scores.shape[1]] += 3.0
        return scores


class StopAfter(StoppingCriteria):
    """Stops a row whose last two tokens add up to a multiple of ``n``, once two tokens are new."""

    def __init__(self, n: int, prompt_length: int):
        self.n, self.prompt_length = n, prompt_length

    def __call__(self, input_ids, scores, **kwargs):
        old = input_ids.shape[1] >= self.prompt_length + 2
        return (input_ids[:, -2:].sum(1) % self.n == 0) & old


def every_third(batch_id: int, ids: torch.Tensor) -> list[int]:
    start = (batch_id + len(ids) + int(ids[-1])) % 3
    return [t for t in range(3, VOCAB) if t % 3 != start]


class SomeRows(RowSelector):
    """Any number of rows, and what became of them is observed as ever."""

    def __init__(self, edges: EdgeModel, seed: int):
        super().__init__(edges)
        self.counts = random.Random(seed)

    def __call__(self, *arguments):
        rows = super().__call__(*arguments)
        return rows.first(self.counts.randint(1, rows.token_ids.shape[1]))


class Switching(contextlib.AbstractContextManager):
    """Stands in for the automatic policy: another shape, or none, every few steps; where the seed is odd, some rows."""

    def __init__(self, config: gsd.GraphConfig, seed: int):
        on_ladders = [s for device in ("cpu", "cuda") for s in ladder(device, with_model=True).values()]
        largest = [s.replace(depth=s.depth and 10, max_rows=128) for s in on_ladders]
        self.shapes = [None, config.replace(depth=1), *on_ladders, *largest]
        self.rng = random.Random(seed)
        self.rows = SomeRows(EdgeModel(), seed) if seed % 2 else None
        self.current = self.rng.choice(self.shapes)

    def largest_shapes(self):
        return self.shapes[1:]

    def plan(self):
        return Plan(self.current, self.rows)

    def end(self):
        pass

    def observe(self, seen):
        if self.rows is not None:
            self.rows.observe(seen.verified)
        if self.rng.random() < 0.6:
            self.current = self.rng.choice(self.shapes)

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(gsd.GraphDecoder, "policy", lambda *_, **__: self)

    def __exit__(self, *_):
        self.patch.undo()


@dataclass
class Case:
    """One random case; ``arguments`` are fresh for every call, since processors may have a state."""

    family: str
    kind: str
    seed: int
    config: gsd.GraphConfig = field(init=False)
    noise: float = field(init=False)
    prompt: dict[str, torch.Tensor] = field(init=False)
    processor: str = field(init=False)
    stop: str = field(init=False)
    new_tokens: int = field(init=False)
    outputs: bool = field(init=False)

    def __post_init__(self):
        rng = random.Random(f"{self.family} {self.kind} {self.seed}")
        depth = min(rng.randint(1, 8), 4 if self.by_reference else 8)
        if self.kind == "chain":
            self.config = gsd.GraphConfig.preset("chain", depth=depth)
        else:
            rows = rng.choice((2, 3, 8, 17, 32, 33, 64, 128, 128))
            self.config = gsd.GraphConfig(
                depth=depth,
                width=rng.choice((1, 2, 4, 8, 11, 16)),
                branch=rng.randint(1, 4),
                max_rows=rows,
                max_path=rng.choice((None, None, rng.randint(1, rows - 1))),
                merge_context=rng.choice(KINDS[self.kind]),
                sibling_ratio=rng.choice((0.0, 0.0, 0.2)),
                min_prob=rng.choice((0.0, 0.0, 0.02)),
                **({} if self.kind.startswith(("tree", "graph")) else REUSE[self.seed % len(REUSE)]),
            )
        self.noise = rng.choice((0.01, 0.015, 0.02))
        batch = rng.randint(1, 4)
        length = rng.choice((1, 2, rng.randint(3, 20), rng.randint(3, 60), rng.randint(60, 130)))
        self.prompt = models.prompts(batch, length, seed=self.seed, vocab=VOCAB)
        self.processor = rng.choice(
            "none none none repetition no_repeat bad_words min_new suppress drifting row_bias prefix several".split()
        )
        self.stop = rng.choice("length length max_length eos eos strings custom custom+eos".split())
        self.new_tokens = min(rng.choice(NEW_TOKENS), 6 if self.by_reference else 16)
        self.outputs = rng.random() < 0.3
        if self.seed < 2:  # where much can happen: the conditions at the end of each chunk rest on these
            self.processor, self.stop, self.new_tokens, self.noise = "none", "length", 24, 0.01
            self.prompt = models.prompts(3, 20, seed=self.seed + 3, vocab=VOCAB)
            if self.kind != "chain":
                context = KINDS[self.kind][self.seed % len(KINDS[self.kind])]
                size = {"depth": 8, "width": 10, "branch": 3, "max_rows": 128, "merge_context": context}
                self.config = self.config.replace(**size, sibling_ratio=0.0, min_prob=0.0)

    @property
    def by_reference(self) -> bool:
        """Whether the ops are those in Python: bit-equal to what a user gets, and ten times slower."""
        return self.seed % 4 == 3

    def arguments(self) -> dict[str, Any]:
        length = self.prompt["input_ids"].shape[1]
        pick = random.Random(self.seed)
        kwargs: dict[str, Any] = {**self.prompt, "do_sample": False, "max_new_tokens": self.new_tokens}
        wanted = {self.processor} if self.processor != "several" else {"repetition", "suppress", "drifting", "row_bias"}
        own = []
        if "repetition" in wanted:
            kwargs["repetition_penalty"] = 1.3
        if "no_repeat" in wanted:
            kwargs["no_repeat_ngram_size"] = 2
        if "bad_words" in wanted:
            kwargs["bad_words_ids"] = [[5], [7, 9], [11, 4, 8], *[[a, b] for a in range(3, 12) for b in range(12, 20)]]
        if "min_new" in wanted:
            kwargs["min_new_tokens"] = 5
        if "suppress" in wanted:
            kwargs["suppress_tokens"], kwargs["begin_suppress_tokens"] = [3, 6, 9, 12], [4, 5]
        if "drifting" in wanted:
            own.append(Drifting())
        if "row_bias" in wanted:
            own.append(RowBias())
        if "prefix" in wanted:
            kwargs["prefix_allowed_tokens_fn"] = every_third
        if own:
            kwargs["logits_processor"] = own
        if self.stop == "max_length":
            del kwargs["max_new_tokens"]
            kwargs["max_length"] = length + self.new_tokens
        if "eos" in self.stop or "min_new" in wanted:
            kwargs["eos_token_id"] = [2, *pick.sample(range(3, VOCAB), 2)]
        if self.stop == "strings":
            kwargs["tokenizer"] = models.tokenizer(VOCAB)
            a, b, c, d = pick.choices(LETTERS, k=4)
            kwargs["stop_strings"] = [a, b + c, *[d + e for e in LETTERS[::2]]]
        if "custom" in self.stop:
            kwargs["stopping_criteria"] = [StopAfter(6, length)]
        if self.outputs:
            kwargs |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        return kwargs

    def expected(self, dtype: torch.dtype = torch.float64, **more: Any):
        return target_of(self.family, dtype).generate(**{**self.arguments(), **more})

    def actual(self, dtype: torch.dtype = torch.float64, **more: Any):
        in_single = dtype == torch.float64 and self.seed != 2  # the operator drafts in a tenth of the modules' time
        draft = draft_of(self.family, self.noise, torch.float32 if in_single else dtype)
        sources: dict[str, Any] = {"assistant_model": draft}
        if self.kind == "history":
            sources = {"draft_sources": ("history",)}
        if self.kind == "layer_skip":
            sources = {"assistant_model": skip_of(self.family, dtype)}
        if self.kind == "all":
            sources["draft_heads"] = heads_of(self.family, dtype)
        arguments = {**sources, **self.arguments(), "return_dict_in_generate": True, **more}
        switching = Switching(self.config, self.seed) if self.kind == "switching" else None
        with switching or contextlib.nullcontext():
            return gsd.generate(
                target_of(self.family, dtype),
                graph_config="auto" if switching else self.config,
                backend="reference" if self.by_reference else "auto",
                **arguments,
            )


def row_ends(case: Case, sequences: torch.Tensor) -> list[int]:
    """Tokens of the result before a row's padding; without an end-of-text id, rows are never padded."""
    new = sequences[:, case.prompt["input_ids"].shape[1] :]
    if "eos_token_id" not in case.arguments():
        return [new.shape[1]] * len(new)
    return [max(i + 1 for i, token in enumerate(row) if token != 0 or i == 0) for row in new.tolist()]


def assert_close_outputs(case: Case, expected, actual, tolerance: float = 1e-4) -> None:
    for name in ("scores", "logits"):
        ours, theirs = getattr(actual, name), getattr(expected, name)
        assert len(ours) == len(theirs), f"{name}: {len(ours)} steps, expected {len(theirs)}; {case}"
        for row, end in enumerate(row_ends(case, expected.sequences)):
            for step in range(end):
                assert ours[step].dtype == theirs[step].dtype == torch.float32
                torch.testing.assert_close(
                    ours[step][row], theirs[step][row], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m} {case}"
                )


def agreement(case: Case, sequences: torch.Tensor) -> tuple[int, int]:
    """How often the draft's best token is the target's, over the emitted text: (hits, tokens)."""
    length = case.prompt["input_ids"].shape[1]
    mask = torch.cat([case.prompt["attention_mask"], torch.ones_like(sequences[:, length:])], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        best = [
            m(sequences, attention_mask=mask, position_ids=positions).logits[:, length - 1 : -1].argmax(-1)
            for m in (target_of(case.family), draft_of(case.family, case.noise))
        ]
    return int((best[0] == best[1]).sum()), best[0].numel()


def first_difference(case: Case, a: torch.Tensor, b: torch.Tensor) -> list[tuple[int, int]]:
    """(row, step) of the first differing token of every row that differs."""
    length = case.prompt["input_ids"].shape[1]
    shared = min(a.shape[1], b.shape[1])
    found = []
    for row in range(a.shape[0]):
        differ = (a[row, length:shared] != b[row, length:shared]).nonzero()
        if len(differ):
            found.append((row, int(differ[0])))
    return found


@functools.lru_cache
def doubled(family: str, dtype: torch.dtype):
    """Weights of ``dtype``, in float64."""
    return copy.deepcopy(target_of(family, dtype)).double()


def exact_logits(
    family: str, dtype: torch.dtype, sequences: torch.Tensor, mask: torch.Tensor, length: int
) -> torch.Tensor:
    """Float64 logits of the same (half-precision) weights after every emitted position, [B, steps, V]."""
    exact = doubled(family, dtype)
    mask = torch.cat([mask, torch.ones_like(sequences[:, length:])], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        return exact(sequences, attention_mask=mask, position_ids=positions).logits[:, length - 1 : -1]
