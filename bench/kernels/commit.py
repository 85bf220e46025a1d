"""Moving the accepted rows' keys and values of all layers behind the prefix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from gsd_kernels import commit_kv
from gsd_kernels.ops.commit_kv.api import COMMIT

from ..lib.runner import Op, Settings, ready
from ..lib.shapes import SHAPES

NAME = "commit"
ROWS, PREFIX = 64, 256


Caches = list[list[Tensor]]
"""Keys, then values, [B, Hkv, S, D] a layer."""


def random_caches(
    shape: LlamaConfig, device: torch.device, dtype: torch.dtype, gen: torch.Generator, rows: int, batch: int = 1
) -> Caches:
    """Of all layers, the prefix and ``rows`` rows of a step, the same in every layer."""
    size = (batch, shape.num_key_value_heads, PREFIX + rows, shape.head_dim)
    source = torch.randn(size, generator=gen).to(device, dtype)
    return [[source.clone() for _ in range(shape.num_hidden_layers)] for _ in range(2)]


def copied(caches: Caches) -> Caches:
    """The same in other storage."""
    return [[tensor.clone() for tensor in part] for part in caches]


def commit_op(caches: Caches, rows: Tensor, count: Tensor, **about: Any) -> Op:
    """The accepted rows [B, P] behind the prefix of every layer; what is compared are copies of the caches."""

    def commit(backend: str, caches: Caches = caches) -> tuple[Tensor, ...]:
        kv_len = torch.full_like(count, PREFIX)
        commit_kv(*caches, rows, count, kv_len, backend=backend)
        return (kv_len, *caches[0], *caches[1])

    before = copied(caches)
    return Op(COMMIT, commit, lambda backend: commit(backend, copied(before)), **about)


def entries(settings: Settings) -> Iterator[Op]:
    """Every shape × number of accepted rows; ``--rows`` names these numbers."""
    grid = settings.pick(settings.rows, (2, 8), (1, 4, 8, 16), (1, 4, 8, 16))
    device = settings.device
    for name in settings.shape_names():
        shape = SHAPES[name]
        gen = torch.Generator().manual_seed(0)
        caches = random_caches(shape, device, settings.dtype, gen, ROWS)
        for accepted in grid:
            if not 1 <= accepted <= ROWS:
                raise ValueError(f"--rows: commit accepts 1 … {ROWS} rows, not {accepted}")
            path = torch.cat([torch.zeros(1), 1 + torch.randperm(ROWS - 1, generator=gen)[: accepted - 1].sort()[0]])
            rows = path.to(device, torch.int32)[None]
            count = torch.full((1,), accepted, dtype=torch.int32, device=device)

            def layer_by_layer(caches: Caches = caches, rows: Tensor = rows, accepted: int = accepted) -> None:
                source_rows = rows[0].long() + PREFIX
                for cache in (*caches[0], *caches[1]):
                    cache[:, :, PREFIX : PREFIX + accepted] = cache.index_select(2, source_rows)

            yield commit_op(
                caches,
                rows,
                count,
                peers={"torch_per_layer": ready(layer_by_layer)},
                alike=False,
                shape=name,
                parameters={"accepted": accepted, "layers": shape.num_hidden_layers},
                bytes_moved=2 * 2 * shape.num_hidden_layers * accepted * caches[0][0][0, :, 0].nbytes,
            )
