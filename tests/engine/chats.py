"""Chats of a few turns, what they read, and the same texts by models that keep nothing."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import VOCAB, endless, noised, prompts, tiny
from torch import Tensor, nn
from transformers import PreTrainedModel

import gsd_kernels as gsd
from gsd_kernels import DraftHeads, GraphConfig, LayerSkip
from gsd_kernels_hf.policy.learning import LearningPolicy
from gsd_kernels_hf.policy.shapes import ladder

CHAIN = GraphConfig.preset("chain", depth=3)
TREE = GraphConfig(depth=3, width=2, branch=2, max_rows=8, merge_context=-1)
GRAPH = GraphConfig(depth=3, width=2, branch=2, max_rows=8, history_depth=2)
FREE = GraphConfig(depth=0, branch=2, max_rows=8, history_depth=3)
SOURCES = ("plain", "model", "graph", "layer_skip", "heads", "history", "auto")
OF_MANY = ("model", "layer_skip", "heads", "auto")  # run where many cases do
GRAPHS = 3  # of a step: what is drafted, the target, the commit with what sources learn
CAPTURED = ("plain", "chain", "tree", "graph", "layer_skip", "heads")
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 0, "seed": 5}


def each(*more: Any) -> list[Any]:
    """The parameters of a test of every source."""
    return [pytest.param(name, *more, marks=pytest.mark.many if name in OF_MANY else ()) for name in SOURCES]


def sources(name: str, target: PreTrainedModel, draft: PreTrainedModel) -> dict[str, Any]:
    """Options of ``patch`` for :data:`SOURCES`, chains and trees; the draft of "model" goes through its modules."""
    if name == "plain":
        return {"graph_config": "plain"}
    if name == "heads":
        return {"draft_heads": DraftHeads.for_model(target, 2), "graph_config": FREE}
    if name == "history":
        return {"draft_sources": ("history",), "graph_config": FREE}
    if name == "layer_skip":
        return {"assistant_model": LayerSkip(target, mlp=[1]), "graph_config": GRAPH}
    if name == "model":
        draft.double()
    shapes = {"chain": CHAIN, "tree": TREE, "model": TREE, "graph": GRAPH, "auto": "auto"}
    return {"assistant_model": draft, "graph_config": shapes[name]}


def text(models: tuple[PreTrainedModel, PreTrainedModel], name: str, rows: int = 2, **options: Any) -> Any:
    """A text of one of :data:`CAPTURED`."""
    options = {"max_new_tokens": 24, "pad_token_id": 0, **sources(name, *models), **options}
    inputs = {key: value.to(models[0].device) for key, value in prompts(rows, 9).items()}
    return gsd.generate(models[0], **inputs, **options)


def on_a_gpu():
    """A pair that lies there."""
    target = tiny(dtype=torch.float32)
    draft = noised(target)
    return target.cuda(), draft.cuda()


def drafting(device="cpu"):
    """The drafting shapes of a ladder."""
    return [shape for shape in ladder(device, with_model=True).values() if shape.depth]


def in_turns(monkeypatch, *shapes):
    """Let ``"auto"`` take these, one a step."""
    taken, plan = itertools.cycle(shapes), LearningPolicy.plan
    monkeypatch.setattr(LearningPolicy, "plan", lambda self: plan(self)._replace(shape=next(taken)))


def words(batch: int, length: int, seed: int) -> Tensor:
    """What a user says, [batch, length]."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def pair(seed: int = 0, **config: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target without an end of text and a draft that agrees now and then."""
    target = endless(seed=seed, **config)
    return target, noised(target)


def ask(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, *, tokens: int = 10, **options: Any) -> Tensor:
    """The model's own ``generate``, greedy unless said otherwise."""
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=tokens,
        pad_token_id=0,
        **{**GREEDY, **options},
    )


def expected(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """What a copy of the model says that was never used: transformers' greedy text, or ours without any draft."""
    fresh = copy.deepcopy(model)
    if not options.get("do_sample"):
        options.pop("seed", None)
        return ask(fresh, ids, mask, **options)
    mask = torch.ones_like(ids) if mask is None else mask
    tokens = options.pop("tokens", 10)
    return gsd.generate(fresh, ids, attention_mask=mask, max_new_tokens=tokens, pad_token_id=0, **options)


class Reads:
    """Tokens of a model's forwards that are no graph rows: prompts."""

    def __init__(self, model: nn.Module) -> None:
        self.count = 0

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if kwargs.get("graph") is None:
                ids = args[0] if args else kwargs["input_ids"]
                self.count += ids.numel()

        model.register_forward_pre_hook(hook, with_kwargs=True)

    def since(self) -> int:
        """Tokens since the last time."""
        count, self.count = self.count, 0
        return count


@contextmanager
def patched(target: PreTrainedModel, **options: Any) -> Iterator[Any]:
    """The handle of a patch for a while."""
    handle = gsd.patch(target, **options)
    try:
        yield handle
    finally:
        if "generate" in vars(target):
            gsd.unpatch(target)
