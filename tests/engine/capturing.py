"""Calls whose steps are captured, by what they draft with."""

from __future__ import annotations

import itertools

import torch
from engine.chats import sources
from models import noised, prompts, tiny

from gsd_kernels import generate
from gsd_kernels_hf.policy.learning import LearningPolicy
from gsd_kernels_hf.policy.shapes import ladder

SAMPLED = {"do_sample": True, "temperature": 0.8, "seed": 3}
GRAPHS = 4  # of a drafting step: what is drafted, the target, the commit, what sources learn
CAPTURED = ("plain", "chain", "tree", "graph", "layer_skip", "heads")


def text(pair, name, rows=2, **options):
    """A text of one of :data:`CAPTURED`."""
    options = {"max_new_tokens": 24, "pad_token_id": 0, **sources(name, *pair), **options}
    inputs = {key: value.to(pair[0].device) for key, value in prompts(rows, 9).items()}
    return generate(pair[0], **inputs, **options)


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
    taken = itertools.cycle(shapes)
    monkeypatch.setattr(LearningPolicy, "shape", lambda self: next(taken))
