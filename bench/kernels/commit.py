"""Moving the accepted rows' keys and values of all layers behind the prefix."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gsd_kernels import commit_kv
from gsd_kernels.ops.commit_kv.api import IMPLEMENTATIONS

from ..lib.runner import Contestant, Entry, Settings
from ..lib.shapes import SHAPES

NAME, X = "commit", "accepted"
ROWS, PREFIX = 64, 256


def entries(settings: Settings) -> Iterator[Entry]:
    """Every shape × number of accepted rows; ``--rows`` names these numbers."""
    grid = settings.pick(settings.rows, (2, 8), (1, 4, 8, 16), (1, 4, 8, 16))
    device = settings.device
    for name in settings.shape_names():
        shape = SHAPES[name]
        gen = torch.Generator().manual_seed(0)
        size = (1, shape.num_key_value_heads, PREFIX + ROWS, shape.head_dim)
        source = torch.randn(size, generator=gen).to(device, settings.dtype)
        caches = [[source.clone() for _ in range(shape.num_layers)] for _ in range(2)]
        for accepted in grid:
            if not 1 <= accepted <= ROWS:
                raise ValueError(f"--rows: commit accepts 1 … {ROWS} rows, not {accepted}")
            path = torch.cat([torch.zeros(1), 1 + torch.randperm(ROWS - 1, generator=gen)[: accepted - 1].sort()[0]])
            rows = path.to(device, torch.int32)[None]
            count = torch.full((1,), accepted, dtype=torch.int32, device=device)
            start = torch.full((1,), PREFIX, dtype=torch.int32, device=device)
            kv_len = start.clone()

            def commit(
                backend: str,
                caches: list[list[Tensor]] = caches,
                rows: Tensor = rows,
                count: Tensor = count,
                start: Tensor = start,
                kv_len: Tensor = kv_len,
            ) -> Tensor:
                kv_len.copy_(start)
                commit_kv(*caches, rows, count, kv_len, backend=backend)
                return kv_len

            def layer_by_layer(
                caches: list[list[Tensor]] = caches, rows: Tensor = rows, accepted: int = accepted
            ) -> None:
                source_rows = rows[0].long() + PREFIX
                for cache in (*caches[0], *caches[1]):
                    cache[:, :, PREFIX : PREFIX + accepted] = cache.index_select(2, source_rows)

            ours = settings.ours(IMPLEMENTATIONS, commit)
            peers = [Contestant("torch_per_layer", layer_by_layer, peer=True)]
            yield Entry(
                shape=name,
                parameters={"accepted": accepted, "layers": shape.num_layers},
                operation="commit_kv",
                bytes_moved=2 * 2 * shape.num_layers * accepted * source[0, :, 0].nbytes,
                contestants=[*ours, *(p for p in peers if settings.wants_peer(p.name))],
                error=lambda output, accepted=accepted: (
                    0.0 if output is None else float((output - PREFIX - accepted).abs().max())
                ),
            )
