"""One layer's attention of a verified tree over a cache: the prefix, and the ancestors that each row's mask names."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from gsd_kernels import dag_attention
from gsd_kernels.graph import pack_bits
from gsd_kernels.ops.dag_attention import cuda
from gsd_kernels.ops.dag_attention.api import ATTENTION

from ..lib.runner import Op, Settings
from ..lib.shapes import SHAPES
from .peers import attention_peers

NAME = "attention"


def entries(settings: Settings) -> Iterator[Op]:
    """Every shape × prefix × rows."""
    rows_grid = settings.pick(settings.rows, (1, 16), (1, 8, 16, 32, 64), (1, 8, 16, 32, 64, 128))
    prefixes = settings.pick(settings.prefixes, (256,), (1024, 4096), (1024, 4096, 8192, 32768))
    device, dtype = settings.device, settings.dtype
    for name in settings.shape_names():
        shape = SHAPES[name]
        for prefix in prefixes:
            for rows in rows_grid:
                gen = torch.Generator().manual_seed(0)
                size = prefix + rows

                def new(heads: int, length: int, gen: torch.Generator = gen, head_dim: int = shape.head_dim) -> Tensor:
                    return torch.randn(1, heads, length, head_dim, generator=gen).to(device, dtype)

                q = new(shape.num_attention_heads, rows)
                k, v = (new(shape.num_key_value_heads, size) for _ in range(2))
                tree = random_tree(rows, gen).to(device)
                visible = torch.cat([torch.ones(rows, prefix, dtype=torch.bool, device=device), tree], 1)
                mask, kv_len = pack_bits(tree)[None], torch.tensor([prefix], dtype=torch.int32, device=device)
                attend = functools.partial(dag_attention, q, k, v, mask, kv_len)
                yield Op(
                    ATTENTION,
                    lambda backend, attend=attend: attend(backend=backend),
                    right=dag_attention(q.float(), k.float(), v.float(), mask, kv_len, backend="reference"),
                    tolerance=8 * torch.finfo(dtype).eps if dtype != torch.float32 else ATTENTION.tolerance,
                    refused=functools.partial(refused, q, k, v),
                    peers=attention_peers(q, k, v, visible, quick=settings.quick),
                    shape=name,
                    parameters={"rows": rows, "prefix": prefix},
                    bytes_moved=2 * q.nbytes + k.nbytes + v.nbytes + mask.nbytes,
                )


def refused(q: Tensor, k: Tensor, v: Tensor, backend: str) -> str | None:
    """Why a backend does not run here, or not with these tensors."""
    if backend == "cuda":
        try:
            cuda.check(q, k, v)
        except (TypeError, ValueError) as error:
            return str(error)
    return None


def random_tree(rows: int, gen: torch.Generator) -> Tensor:
    """The rows that each row of a random tree sees: bool [R, R]."""
    sees = torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        sees[row] |= sees[int(torch.randint(max(0, row - 8), row, (), generator=gen))]
    return sees
