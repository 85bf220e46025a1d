"""Calls whose steps are captured, by what they draft with."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from models import prompts

from gsd_kernels import DraftHeads, GraphConfig, LayerSkip, generate

SAMPLED = {"do_sample": True, "temperature": 0.8, "seed": 3}
CONFIGS = {
    "plain": None,
    "chain": GraphConfig.preset("chain", depth=3),
    "tree": GraphConfig(depth=3, width=2, branch=2, max_rows=8, merge_context=-1),
    "graph": GraphConfig(depth=3, width=2, branch=2, max_rows=8, history_depth=2),
    "layer_skip": GraphConfig(depth=3, width=2, branch=2, max_rows=8, history_depth=2),
    "heads": GraphConfig(depth=0, branch=2, max_rows=8, history_depth=3),
}


def sources(name, target, draft):
    """Arguments of ``generate`` for one of :data:`CONFIGS`."""
    if name == "plain":
        return {"graph_config": "plain"}
    drafts = {"layer_skip": {"assistant_model": LayerSkip(target, mlp=[1])}}
    drafts["heads"] = {"draft_heads": DraftHeads.for_model(target, 2)}
    return {**drafts.get(name, {"assistant_model": draft}), "graph_config": CONFIGS[name]}


def text(pair, name, rows=2, **options):
    """A text of one of :data:`CONFIGS`."""
    options = {"max_new_tokens": 24, "pad_token_id": 0, **sources(name, *pair), **options}
    return generate(pair[0], **prompts(rows, 9), **options)


def both(work):
    """Two threads that begin at once; what one raises is raised."""
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work, i) for i in range(2)]:
            done.result(60)
