"""Shapes of drafts that are raced. Imports nothing of the command line: stages of a bare GPU machine draft by them."""

from __future__ import annotations

import torch

from gsd_kernels import GraphConfig

BLOCK_DEPTH = 7  # of the embedded DFlash drafter's block, and of what train-drafter makes by default
PROMPT_LOOKUP_TOKENS = 10  # transformers' documentation's choice


def fixed_configs(device: torch.device) -> dict[str, GraphConfig]:
    """The chain, tree and graph that ``auto`` has to beat: rows cost time on a CPU and hardly any on a GPU."""
    if device.type == "cuda":
        tree = GraphConfig(depth=6, width=8, branch=4, max_rows=64, merge_context=-1)
        chain = GraphConfig.preset("chain", depth=8)
    else:
        tree = GraphConfig(depth=5, width=3, branch=3, max_rows=16, merge_context=-1)
        chain = GraphConfig.preset("chain", depth=5)
    merged = tree.replace(merge_context=2)
    rows = PROMPT_LOOKUP_TOKENS + 1
    block = merged.replace(depth=BLOCK_DEPTH, merge_context=0)  # its candidates hold below every path, at one forward
    return {
        "chain": chain,
        "tree": tree,
        "merged": merged,
        "graph": merged.replace(history_depth=4, history_width=8),
        "history": GraphConfig(
            depth=0, branch=3, max_rows=rows, merge_context=2, history_depth=PROMPT_LOOKUP_TOKENS, history_width=3
        ),
        "block-chain": GraphConfig.preset("chain", depth=BLOCK_DEPTH),
        "block": block,
        "block-history": block.replace(history_depth=4, history_width=8),
    }
