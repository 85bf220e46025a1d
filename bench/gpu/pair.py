"""A pair in the shapes of an 8B target and a 1B draft: what capturing costs and holds, and a step by kernel.

Random weights: they cost what trained ones cost, and nothing that the draft proposes is accepted, so the first text
takes a step a token. The second is the same text, which the history remembers: it takes fewer.

Rows go through one operator, where it was found right, or through the modules. The operator's bits do not depend on the
rows, so with it speculation in captured steps has to give the text of plain decoding, in half precision too. Modules
in half precision round as cuBLAS likes with so many rows: whether their texts agree is kept, and no failure.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from transformers import PreTrainedModel

from gsd_kernels import GraphConfig, patch, unpatch
from gsd_kernels_hf.model.fused import SWITCH

from ..generation.configs import fixed_configs
from ..kernels.rows import random_model
from .graphs import compilations, summary, watched
from .right import passed
from .work import Work, switched

WAYS = {"operator": "cuda", "modules": "0"}  # of GSD_KERNELS_FUSED_ROWS
TARGET, DRAFT = "llama-3-8b", "llama-3.2-1b"
PROMPT, NEW_TOKENS = 512, 64


def run(work: Work) -> None:
    """Points ``graph operator``, ``plain operator``, ``graph modules``, ``plain modules``: the same call twice each."""
    if work.rehearse:
        work.skip("capturing by CUDA, nodes by cuGraphGetNodes, mem_get_info, kernels by CUPTI")
    names = [f"{config} {way}" for way in WAYS for config in ("graph", "plain")]
    if not passed(work, *shapes(work)):
        left = [name for name in names if name.endswith("operator")]
        work.leave(left, "not found right by the stage before")
        names = [name for name in names if name not in left]
    if all(work.is_done(name) for name in names):
        return
    before, begin = memory(work), time.monotonic()
    both = models(work)
    about = {"seconds": time.monotonic() - begin, "bytes": before - memory(work)}
    work.keep("models", {"names": shapes(work), **about})
    work.each({name: (work, *both, name) for name in names}, judged)


def shapes(work: Work) -> tuple[str, str]:
    """Of the target and the draft."""
    return ("tiny", "tiny") if work.rehearse else (TARGET, DRAFT)


def models(work: Work) -> list[PreTrainedModel]:
    """The pair, whose texts have no end."""
    torch.manual_seed(0)
    made = [random_model(name, work.dtype, work.device.type) for name in shapes(work)]
    for model in made:
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return made


def judged(work: Work, target: PreTrainedModel, draft: PreTrainedModel, name: str) -> dict[str, Any]:
    """Two equal calls in one way, held to what that way promises.

    Raises:
        RuntimeError: rows took the other way, or by the operator two texts differ: of two calls, plain and drafted.
    """
    config, way = name.split()
    with switched({SWITCH: WAYS[way]}):
        found = twice(work, target, draft, fixed_configs(work.device)["graph"] if config == "graph" else None)
    why = found["calls"][-1]["stats"]["why_modules"]
    if (why is None) != (way == "operator"):
        raise RuntimeError(f"rows went through {'the operator' if why is None else f'the modules: {why}'}")
    if way != "operator":
        return found
    if found["again"] != found["text"]:
        raise RuntimeError(f"the second of two equal calls gave another text: {found['text']}, {found['again']}")
    other = {"graph": "plain", "plain": "graph"}[config] + " operator"
    if work.is_done(other) and work.points[other]["text"] != found["text"]:
        raise RuntimeError(f"{name} wrote {found['text']}, {other} {work.points[other]['text']}")
    return found


def memory(work: Work) -> int:
    """Free bytes of the GPU, graphs and libraries counted, which the allocator does not see; 0 in a rehearsal."""
    gc.collect()
    if work.rehearse:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(work.device)[0]


def twice(work: Work, target: PreTrainedModel, draft: PreTrainedModel, config: GraphConfig | str) -> dict[str, Any]:
    """Seconds, compilations, captures and memory of the first and of the second of two equal calls.

    Raises:
        RuntimeError: no step was captured.
    """
    prompt, new = (12, 12) if work.rehearse else (PROMPT, NEW_TOKENS)
    gen = torch.Generator().manual_seed(1)  # the same prompt whichever way comes first
    ids = torch.randint(3, target.config.vocab_size, (1, prompt), generator=gen).to(work.device)
    options = {"graph_config": "plain"} if config is None else {"assistant_model": draft, "graph_config": config}
    begin_memory, calls, texts = memory(work), [], []
    handle = patch(target, **options)
    try:
        with watched() as watch:
            for number in range(2):
                seen, watch.wants_profile = len(watch.graphs), number == 1
                with compilations() as compiled:
                    begin = time.perf_counter()
                    text = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new)
                    texts.append(text[0, prompt:].tolist())  # waits for the device
                    seconds = time.perf_counter() - begin
                assert handle.stats is not None
                calls.append(
                    {
                        "seconds": seconds,
                        "tokens_per_second": len(texts[-1]) / seconds,
                        "captured": [graph.as_dict() for graph in watch.graphs[seen:]],
                        "compilations": summary(compiled),
                        "stats": handle.stats.as_dict(),
                        "bytes": begin_memory - memory(work),
                    }
                )
                print(f"  call {number + 1}: {seconds:.2f} s, {len(watch.graphs) - seen} captures", flush=True)
    finally:
        unpatch(target)
    if not watch.graphs and not work.rehearse:
        raise RuntimeError("no step was captured: see the log for the reason")
    # The second call's time includes a profiled replay.
    return {
        "prompt": prompt,
        "new_tokens": new,
        "calls": calls,
        "graphs": [graph.as_dict() for graph in watch.graphs],
        "replay": watch.profiled,
        "text": texts[0],
        "again": texts[1],
    }
