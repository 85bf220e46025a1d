from __future__ import annotations

import torch
from torch import Tensor

from ...backends import implementations_of, resolve
from ...checks import check_tensor
from ...graph import Acceptance, Rows
from . import compiled, reference, triton_op

IMPLEMENTATIONS = implementations_of("verify", triton=triton_op, cpu=compiled, cuda=compiled, reference=reference)


def verify(
    rows: Rows,
    sampled: Tensor,
    *,
    eos_ids: Tensor,
    remaining: Tensor,
    done: Tensor,
    max_path: int,
    backend: str = "auto",
) -> Acceptance:
    """Accept the path on which every drafted token equals the target's own pick at its parent row.

    Args:
        rows: the verified rows.
        sampled: int32 [B, R], the token that the target picks after each row.
        eos_ids: int32 [E] (E may be 0); the walk ends with the first of these.
        remaining: int32 [B], tokens that may still be emitted (at least 1 unless done).
        done: bool [B], finished sequences accept nothing.
        max_path: depth of the deepest row.

    Returns:
        :class:`~gsd_kernels.Acceptance`. The step emits ``num_accepted`` tokens: those of the accepted rows without
        the root, then ``next_token``.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    batch, num_rows = rows.token_ids.shape
    device, int32 = rows.token_ids.device, (torch.int32,)
    check_tensor("sampled", sampled, (batch, num_rows), int32, device)
    check_tensor("eos_ids", eos_ids, (None,), int32, device)
    check_tensor("remaining", remaining, (batch,), int32, device)
    check_tensor("done", done, (batch,), (torch.bool,), device)
    return resolve(backend, device, IMPLEMENTATIONS)(rows, sampled, eos_ids, remaining, done, max_path)
