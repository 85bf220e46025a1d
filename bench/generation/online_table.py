"""A draft that learns while serving: what is accepted by number of requests on one topic, with and without.

The topic is one file of the demo's held-out ones, whose pieces are the requests: a few that come again and again, or
every one new. Nothing of the ones before is in a prompt, the history is left out, and the shape is fixed, so that the
count is the draft's alone. Counts depend on no clock.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import gsd_kernels
from gsd_kernels_cli import demo
from gsd_kernels_hf.files import write_json

from ..lib.environment import environment
from ..lib.report import SCHEMA, markdown
from .corpus_tasks import demo_sources
from .pairs import load_pair

NAME = "online"
DEPTH = 5  # tokens of the chain
GROUP = 8  # requests of a row, and pieces that come again
TOPICS = {"again": f"{GROUP} pieces, again and again", "new": "every piece new"}


@dataclass(frozen=True)
class Settings:
    """One run: requests, tokens of each prompt and text, and the learner's options."""

    requests: int
    prompt_tokens: int
    new_tokens: int
    steps: int
    lr: float


def topic(requests: int, prompt_tokens: int) -> tuple[str, list[Tensor]]:
    """Name of a held-out file, and its pieces of ``prompt_tokens`` tokens, int64 [1, length], evenly spaced.

    Raises:
        ValueError: no file is that long.
    """
    _, _, tokenizer = demo.load()
    sources = sorted(demo_sources(), key=lambda source: (-len(source.text), source.name))
    ids = tokenizer(sources[0].text, return_tensors="pt", verbose=False).input_ids
    room = ids.shape[1] - prompt_tokens
    if room < requests:
        raise ValueError(f"requests: {sources[0].name} has only {ids.shape[1]} tokens, for {requests} requests")
    starts = [room * i // requests for i in range(requests)]
    return sources[0].name, [ids[:, at : at + prompt_tokens] for at in starts]


def accepted(
    target: PreTrainedModel, draft: PreTrainedModel, prompts: Sequence[Tensor], settings: Settings, *, learns: bool
) -> tuple[list[float], list[Tensor]]:
    """Drafted tokens that a step accepts, on average, by request; and the texts."""
    config = gsd_kernels.GraphConfig(depth=DEPTH, branch=1, max_rows=DEPTH + 1)
    handle = gsd_kernels.patch(target, assistant_model=draft, draft_sources=("model",), graph_config=config)
    learner = gsd_kernels.OnlineLearner(handle, draft, steps=settings.steps if learns else 0, lr=settings.lr)
    counts, texts = [], []
    try:
        for number, prompt in enumerate(prompts, 1):
            text = target.generate(prompt, max_new_tokens=settings.new_tokens, do_sample=False)
            texts.append(text)
            emitted = text.shape[1] - prompt.shape[1]
            counts.append(emitted / handle.stats.steps - 1)
            if number % GROUP == 0:
                print(f"{NAME}: {number} requests, learning {learns}", file=sys.stderr, flush=True)
    finally:
        learner.close()
        gsd_kernels.unpatch(target)
    return counts, texts


def run(settings: Settings, *, folder: Path, name: str = NAME) -> str:
    """Decode the topic with and without learning, write ``name``.json and .md, and return the table.

    Raises:
        RuntimeError: the texts differ, which none may.
    """
    pair = load_pair("demo", device=torch.device("cpu"), dtype=torch.float32)
    file, prompts = topic(settings.requests, settings.prompt_tokens)
    _, few = topic(min(GROUP, settings.requests), settings.prompt_tokens)
    again = [few[i % len(few)] for i in range(settings.requests)]
    found: dict[str, dict[str, list[float]]] = {}
    for kind, requests in (("again", again), ("new", prompts)):
        without, texts = accepted(pair.target, pair.draft, requests, settings, learns=False)
        learned, same = accepted(pair.target, pair.draft, requests, settings, learns=True)
        if not all(torch.equal(a, b) for a, b in zip(texts, same, strict=True)):
            raise RuntimeError(f"{NAME}: a text with learning differs from that without")
        found[kind] = {"without": without, "with": learned}
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "case": NAME,
        "settings": asdict(settings),
        "file": file,
        "topics": found,
    }
    result["environment"] = environment(torch.device("cpu"))
    written = table(result)
    write_json(folder / f"{name}.json", result, indent=None)
    (folder / f"{name}.md").write_text(written + "\n", encoding="utf-8")
    return written


def table(result: dict[str, Any]) -> str:
    """Mean accepted tokens of a step by group of requests, with and without."""
    settings, rows = result["settings"], []
    for first in range(0, settings["requests"], GROUP):
        last = min(first + GROUP, settings["requests"])
        row = [f"{first + 1}–{last}"]
        for kind in TOPICS:
            counts = result["topics"][kind]
            row += [f"{sum(counts[way][first:last]) / (last - first):.3f}" for way in ("without", "with")]
        rows.append(row)
    head = (
        f"Accepted of a chain of {DEPTH}, per step, by request: {settings['requests']} pieces of {result['file']}, "
        f"{settings['prompt_tokens']} tokens each, {settings['new_tokens']} new ones, greedy; after each request "
        f"{settings['steps']} steps at a learning rate of {settings['lr']:g}. All texts are equal with and without."
    )
    names = [f"{label}: {way}" for label in TOPICS.values() for way in ("without", "with learning")]
    return "\n\n".join([head, markdown(["requests", *names], rows)])
