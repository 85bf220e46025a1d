"""A pair in the shapes of an 8B target and a 1B draft: what capturing costs and holds, and a step by kernel.

Random weights: they cost what trained ones cost, and nothing that the draft proposes is accepted, so the first text
takes a step a token. The second is the same text, which the history remembers: it takes fewer.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from transformers import PreTrainedModel

from gsd_kernels import GraphConfig, patch, unpatch

from ..generation.competitors import fixed_configs
from ..kernels.rows import random_model
from ..lib.compilations import compilations, summary
from .graphs import pretended, watched
from .work import Work

TARGET, DRAFT = "llama-3-8b", "llama-3.2-1b"
PROMPT, NEW_TOKENS = 512, 64


def run(work: Work) -> None:
    """Points ``plain`` and ``graph``: the same ``generate`` twice on a patched model, each with its costs."""
    if work.rehearse:
        work.skip("capturing by CUDA, nodes by cuGraphGetNodes, mem_get_info, kernels by CUPTI")
    configs: dict[str, GraphConfig | str] = {"plain": "plain", "graph": fixed_configs(work.device)["graph"]}
    if all(work.is_done(name) for name in configs):
        return
    torch.manual_seed(0)
    before, begin = memory(work), time.monotonic()
    names = ("tiny", "tiny") if work.rehearse else (TARGET, DRAFT)
    target, draft = (random_model(name, work.dtype, work.device.type) for name in names)
    for model in (target, draft):
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    work.keep("models", {"names": names, "seconds": time.monotonic() - begin, "bytes": used(before, memory(work))})
    work.each(configs, lambda name: twice(work, target, draft, configs[name]))


def memory(work: Work) -> int | None:
    """Free bytes of the GPU, graphs and libraries counted, which the allocator does not see."""
    gc.collect()
    if work.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(work.device)[0]


def used(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else before - after


def twice(work: Work, target: PreTrainedModel, draft: PreTrainedModel, config: GraphConfig | str) -> dict[str, Any]:
    """Seconds, compilations, captures and memory of the first and of the second of two equal calls.

    Raises:
        RuntimeError: the two texts differ, or no step was captured.
    """
    prompt, new = (12, 12) if work.rehearse else (PROMPT, NEW_TOKENS)
    ids = torch.randint(3, target.config.vocab_size, (1, prompt), device=work.device)
    options = {"assistant_model": draft, "graph_config": config}
    begin_memory, calls, texts = memory(work), [], []
    handle = patch(target, **options)
    try:
        with pretended() if work.rehearse else watched() as watch:
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
                        "bytes": used(begin_memory, memory(work)),
                    }
                )
                print(f"  call {number + 1}: {seconds:.2f} s, {len(watch.graphs) - seen} captures", flush=True)
    finally:
        unpatch(target)
    if texts[0] != texts[1]:
        raise RuntimeError(f"the second of two equal calls gave another text: {texts}")
    if not watch.graphs:
        raise RuntimeError("no step was captured: see the log for the reason")
    # The second call's time includes a profiled replay.
    return {"prompt": prompt, "new_tokens": new, "calls": calls, "replay": watch.profiled, "text": texts[0][:16]}
