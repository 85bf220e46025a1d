from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...backends import implementations_of, resolve
from ...checks import check_tensor
from . import compiled, cuda, reference
from .weights import DecoderWeights

# The CUDA operator reads nothing back and so checks no token ids: by name only, behind the reference.
IMPLEMENTATIONS = implementations_of("decoder_rows", cpu=compiled, reference=reference, cuda=cuda)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def decoder_rows(
    weights: DecoderWeights,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    ancestor_mask: Tensor,
    node_depths: Tensor,
    kv_len: Tensor,
    kv_start: Tensor,
    k_caches: list[Tensor],
    v_caches: list[Tensor],
    *,
    keep: int,
    states: Sequence[int] = (),
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward rows of a token graph through all layers of a decoder in one call.

    LLaMA's layers (RMSNorm, rotary embedding, grouped attention, SwiGLU; arXiv 2302.13971) with what Mistral, Qwen2
    and Qwen3 add: a sliding window, biases, norms of queries and keys. The caches get the rows' keys and values.

    Sums and the hidden state are float32; what is multiplied with bfloat16 weights or keys is rounded to bfloat16
    first (the CUDA operator rounds to float16 likewise). The compiled operators are row-invariant: the bits of a row
    depend on its token, its position and what it sees, not on other rows and sequences, where its ancestors lie, what
    of them is committed, padding, threads, or how it is launched. (Another instruction set may round differently, see
    :mod:`gsd_kernels.cpu_levels`.)

    The CUDA operator (``backend="cuda"``; ``"auto"`` never takes it) is for float16 and bfloat16, heads of 64 and 128,
    on compute capability 8.0 and newer, and for packed matrices of some kinds (``cuda.PACKED``). It reads nothing back,
    so that a CUDA graph can hold it: token ids are not checked against the vocabulary, nor slots against the cache.

    Args:
        weights: matrices of one dtype, float32, bfloat16 or float16, or packed, with the bits of those they stand for.
        token_ids: int32 [B, R], inside the vocabulary.
        positions: int32 [B, R], text positions.
        slots: int32 [B, R], cache positions to store keys and values at.
        ancestor_mask: int32 [B, R, words], as in :func:`~gsd_kernels.dag_attention`.
        node_depths: int32 [B, N], text positions of the slots behind the prefix minus that of the first of them.
        kv_len, kv_start: int32 [B], the prefix.
        k_caches, v_caches: a layer each, [B, Hkv, S, D].
        keep: logits of the last so many rows, 0 … R.
        states: numbers of layers, from 0, whose input is returned; the number of layers: what leaves the norm behind
            them, of every row (not on a GPU).
        backend: see :mod:`gsd_kernels.backends`.

    Returns:
        Logits [B, keep, V], float32, and by the CUDA operator rounded to the weights' dtype; what the output matrix
        read, float32 [B, keep, hidden]; and what the layers of ``states`` read, float32 [len(states), B, R, hidden].

    Raises:
        TypeError, ValueError, RuntimeError: an argument has the wrong type, shape or range.
    """
    graph = token_ids, positions, slots, ancestor_mask, node_depths, kv_len, kv_start
    check_rows(weights, *graph, k_caches, v_caches, keep)
    if any(not 0 <= state <= len(weights.layers) for state in states):
        raise ValueError(f"states: expected layers 0 … {len(weights.layers)}, got {list(states)}")
    function = resolve(backend, token_ids.device, IMPLEMENTATIONS)
    return function(weights, *graph, k_caches, v_caches, states, keep)


def check_rows(
    weights: DecoderWeights,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    ancestor_mask: Tensor,
    node_depths: Tensor,
    kv_len: Tensor,
    kv_start: Tensor,
    k_caches: list[Tensor],
    v_caches: list[Tensor],
    keep: int,
) -> None:
    """Check arguments of :func:`decoder_rows` and of ops like it.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or range.
    """
    int32, device, (batch, rows) = (torch.int32,), token_ids.device, token_ids.shape
    check_tensor("token_ids", token_ids, (None, None), int32, device)
    check_tensor("positions", positions, (batch, rows), int32, device)
    check_tensor("slots", slots, (batch, rows), int32, device)
    check_tensor("ancestor_mask", ancestor_mask, (batch, rows, None), int32, device)
    check_tensor("node_depths", node_depths, (batch, None), int32, device)
    check_tensor("kv_len", kv_len, (batch,), int32, device)
    check_tensor("kv_start", kv_start, (batch,), int32, device)
    if len(k_caches) != len(weights.layers) or len(v_caches) != len(weights.layers):
        raise ValueError(f"k_caches: expected {len(weights.layers)} layers, got {len(k_caches)} and {len(v_caches)}")
    if not 0 <= keep <= rows:
        raise ValueError(f"keep: expected 0 … {rows}, the number of rows, got {keep}")
