"""All products of every level that can run here, with tensors between protected pages; for backends/test_decoder.py."""

from __future__ import annotations

import torch
from decoders import SIZES, Sizes, Text, decoder, random_parents, random_tokens, tree
from guards import guarded

from gsd_kernels import cpu_levels

SMALLEST = Sizes(hidden=1, inner=1, heads=1, kv_heads=1, head_dim=2, layers=1)


def touch(sizes: Sizes, dtype: torch.dtype) -> None:
    """A prompt and a tree that fill the caches to their last position."""
    text = Text(decoder(sizes, dtype, guarded), sizes, dtype, [0, 2], 64)
    text.caches = tuple([guarded(t) for t in caches] for caches in text.caches)
    text.read(random_tokens(2, 24), 24)
    count = 64 - int(text.kv_len.max())
    text.rows(random_tokens(2, count, 1), *tree(random_parents(count)), 0, count)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in ("amx_in_software", *(name for name, why in cpu_levels.levels().items() if why is None)):
        print(name, flush=True)
        with cpu_levels.forced(name):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for sizes in (*SIZES.values(), SMALLEST):
                    touch(sizes, dtype)
    print("done")
