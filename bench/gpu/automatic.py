"""``auto`` for 128 tokens on a machine that has compiled nothing, step by step: what waits for a compiler, and where.

The demo pair inflated to the shapes of an 8B target and a 1B draft, so that candidates are accepted as in a trained
pair. The same text is written three times: cold, with what the first call learned and compiled, and by plain decoding.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from gsd_kernels import patch, unpatch
from gsd_kernels_hf.records import Verified

from ..generation.pairs import Pair, load_pair
from ..lib.compilations import Compilation, compilations, summary
from .work import Work

TARGET, DRAFT = "llama-3-8b", "llama-3.2-1b"
NEW_TOKENS = 128


class Steps(BaseStreamer):
    """When each step's tokens came, and how many; observer and streamer of one call."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens: list[int] = []

    def begin(self) -> None:
        self.times, self.tokens = [time.perf_counter()], []

    def observe(self, verified: Verified) -> None:
        """Called once a step, when all of it is launched."""
        self.tokens.append(0)

    def put(self, value: Tensor) -> None:
        """Called with the prompt, then with every token, when the host has read the step's."""
        if self.tokens:
            self.tokens[-1] += value.numel()
            self.times[len(self.tokens) :] = [time.perf_counter()]

    def end(self) -> None:
        pass

    def table(self, compiled: list[Compilation]) -> list[dict[str, Any]]:
        """Seconds and tokens of every step, and what was compiled in it; the first one includes the prompt."""
        rows = []
        for before, at, tokens in zip(self.times[:-1], self.times[1:], self.tokens, strict=True):
            inside = [c for c in compiled if before < c.at <= at and not c.cached]
            row: dict[str, Any] = {"seconds": round(at - before, 6), "tokens": tokens}
            if inside:
                row |= {"compiled": len(inside), "compile_seconds": round(sum(c.seconds for c in inside), 3)}
            rows.append(row)
        return rows


def run(work: Work) -> None:
    """Points ``cold``, ``again`` and ``plain``.

    In half precision it is recorded whether the texts are equal.

    Raises:
        RuntimeError: texts differ in float32.
    """
    names = ("cold", "again", "plain")
    if all(work.is_done(name) for name in names):
        return
    begin = time.monotonic()
    small, new = work.rehearse, 16 if work.rehearse else NEW_TOKENS
    shapes = {} if small else {"target_shape": TARGET, "draft_shape": DRAFT}
    pair = load_pair("tiny" if small else "demo", device=work.device, dtype=work.dtype, prompts=1, **shapes)
    work.keep("models", {**shapes, "seconds": time.monotonic() - begin})
    handle = patch(pair.target, assistant_model=pair.draft, graph_config="auto")
    try:
        for name in names[:2]:  # both: the second begins where the first ended
            work.points.pop(name, None)
        work.each(names[:2], lambda _: decode(work, pair, handle, new))
    finally:
        unpatch(pair.target)
    plain = patch(pair.target, graph_config="plain")
    try:
        work.each(names[2:], lambda _: decode(work, pair, plain, new))
    finally:
        unpatch(pair.target)
    texts = {name: work.points[name]["text"] for name in names if work.is_done(name)}
    same = {name: text == texts.get("plain") for name, text in texts.items()}
    work.keep("same as plain", same)
    if small and not all(same.values()):
        raise RuntimeError(f"texts differ: {texts}")


def decode(work: Work, pair: Pair, handle: Any, new: int) -> dict[str, Any]:
    """One text with its steps."""
    ids, steps = pair.prompts[0].input_ids, Steps()
    with compilations() as compiled:
        begin = time.perf_counter()
        steps.begin()
        options = {"max_new_tokens": new, "streamer": steps, "observer": steps.observe}
        text = pair.target.generate(ids, attention_mask=torch.ones_like(ids), **options)
        tokens = text[0, ids.shape[1] :].tolist()
        seconds = time.perf_counter() - begin
    found = {
        "seconds": seconds,
        "tokens_per_second": len(tokens) / seconds,
        "compilations": summary(compiled),
        "steps": steps.table(compiled),
        "stats": handle.stats.as_dict(),
        "text": tokens,
    }
    made = found["compilations"]
    print(f"  {seconds:.2f} s, {made['compiled']} compilations in {made['compile_seconds']:.1f} s", flush=True)
    return found
