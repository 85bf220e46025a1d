"""Launch configurations of the Triton attention kernels: a static table, chosen by shape, never tuned at run time.

``attention_configs.json`` maps a compute capability to a list of entries, first match wins. ``gsd-kernels bench
tune-attention`` measures on a GPU and writes it; entries without ``measured_on`` were chosen from what the compiler
reports (registers, shared memory, spills) and have not been timed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

TABLE = Path(__file__).with_name("attention_configs.json")
MAX_SPLITS = 32
"""Prefix and graph splits of a row together; the combining kernel holds that many partial outputs in registers."""


@dataclass(frozen=True)
class AttentionConfig:
    """One way to launch the split kernel."""

    block_m: int  # query vectors of one cache head in a tile
    block_n: int  # cache positions in a tile, a multiple of 32
    num_warps: int
    num_stages: int
    programs: int  # thread blocks to aim for: the prefix is split until there are that many

    def prefix_splits(self, programs_per_split: int, capacity: int, min_blocks: int, graph_splits: int) -> int:
        """How many ways to cut the prefix: fixed by shapes, so that a captured graph serves every length."""
        wanted = self.programs // max(1, programs_per_split)
        useful = -(-capacity // (min_blocks * self.block_n))
        return max(1, min(wanted, useful, MAX_SPLITS - graph_splits))


@lru_cache(maxsize=1)
def load_table() -> dict[int, list[dict]]:
    """Compute capability → entries, in order of preference."""
    return {int(arch): entries for arch, entries in json.loads(TABLE.read_text())["archs"].items()}


@lru_cache(maxsize=256)
def attention_config(
    arch: int, element_size: int, head_dim: int, size_m: int, capacity: int, extras: bool = False
) -> AttentionConfig:
    """The first entry of the table for these shapes; an unknown arch takes the entries of the next older one.

    Args:
        arch: compute capability, e.g. 90.
        element_size: bytes of one element of the cache.
        head_dim: the larger of the key and value sizes.
        size_m: query heads per cache head times rows.
        capacity: cache positions.
        extras: with a soft cap or a sliding window, which take more registers.

    Raises:
        ValueError: no entry covers the shapes.
    """
    table = load_table()
    known = max((a for a in table if a <= arch), default=min(table))
    for entry in table[known]:
        if (
            entry["element_size"] == element_size
            and head_dim <= entry["max_head_dim"]
            and size_m <= (entry["max_m"] or size_m)
            and capacity <= (entry["max_capacity"] or capacity)
            and (entry["with_extras"] or not extras)
        ):
            return AttentionConfig(*(entry[field.name] for field in fields(AttentionConfig)))
    raise ValueError(f"q: no launch configuration for head_dim {head_dim} with {element_size}-byte elements")
