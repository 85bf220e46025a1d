"""Other people's kernels at the same work."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..lib.missing import Missing
from ..lib.runner import Peer, lacking, ready

Call = Callable[[], Any]


def attention_peers(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, quick: bool) -> dict[str, Peer]:
    """Attention under an arbitrary mask.

    Their masks are made beforehand and not timed; ours is read as it comes from ``flatten``.

    Args:
        q: [1, Hq, R, D].
        k, v: [1, Hkv, S, D], exactly as long as there are visible positions.
        visible: bool [R, S].
        quick: whether nothing is compiled that takes long.
    """
    makers = {"sdpa_mask": _sdpa, "flex_attention": _flex, "flash_attn": _flash_attn, "flashinfer": _flashinfer}
    found: dict[str, Peer] = {name: partial(make, q, k, v, visible) for name, make in makers.items()}
    slow = {"flex_attention": lacking("compiling it takes longer than --quick allows")}
    return found | slow if quick else found


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Call:
    bias = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, float("-inf"))
    attend, grouped = torch.nn.functional.scaled_dot_product_attention, q.shape[1] != k.shape[1]
    return partial(attend, q, k, v, attn_mask=bias, enable_gqa=grouped)


def _flex(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, row, key: visible[row, key], None, None, *visible.shape, device=str(q.device))
    attend, grouped = torch.compile(flex_attention, dynamic=False), q.shape[1] != k.shape[1]
    return partial(attend, q, k, v, block_mask=mask, enable_gqa=grouped)


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Call:
    if importlib.util.find_spec("flash_attn") is None:
        raise Missing("not installed (and it has no mask for trees: only a chain could be compared)")
    causal = torch.ones_like(visible).tril(visible.shape[1] - visible.shape[0])
    if not torch.equal(visible, causal):
        raise Missing("it has no mask for trees")
    from flash_attn import flash_attn_func

    q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    return lambda: flash_attn_func(q, k, v, causal=True).transpose(1, 2)


def _needs_flashinfer(tensor: Tensor) -> None:
    if tensor.device.type != "cuda":
        raise Missing("it needs a GPU")
    if importlib.util.find_spec("flashinfer") is None:
        raise Missing("not installed")


def _flashinfer(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Call:
    _needs_flashinfer(q)
    import flashinfer

    rows, keys, values = q[0].transpose(0, 1).contiguous(), k[0], v[0]
    attend = partial(flashinfer.single_prefill_with_kv_cache, custom_mask=visible, kv_layout="HND")
    return lambda: attend(rows, keys, values).transpose(0, 1)[None]


def sampling_peers(logits: Tensor, temperature: float, top_k: int, top_p: float) -> dict[str, Peer]:
    """Picking a token from logits [R, V] with PyTorch, in the order of operations of transformers' warpers."""
    if temperature == 0.0:
        return {"torch_argmax": ready(lambda: logits.argmax(-1))}

    def draw(scores: Tensor) -> Tensor:
        return torch.multinomial(scores.float().softmax(-1), 1)

    if top_k == 0 and top_p == 1.0:
        return {"torch_multinomial": ready(lambda: draw(logits / temperature))}

    def cut_by_sort() -> Tensor:
        scores = logits / temperature
        scores = scores.masked_fill(scores < scores.topk(top_k).values[:, -1:], float("-inf"))
        ordered, order = scores.sort(descending=False)
        drop = ordered.softmax(-1).cumsum(-1) <= 1.0 - top_p
        drop[:, -1] = False
        return draw(scores.masked_fill(drop.scatter(1, order, drop), float("-inf")))

    def cut_inside_topk() -> Tensor:
        values, tokens = (logits / temperature).topk(top_k)
        probs = values.softmax(-1)
        kept = torch.where(probs.cumsum(-1) - probs < top_p, probs, 0.0)
        return tokens.gather(1, torch.multinomial(kept.float(), 1))

    def flashinfer_sampling() -> Call:
        _needs_flashinfer(logits)
        from flashinfer.sampling import top_k_top_p_sampling_from_logits as sample

        return lambda: sample(logits.float() / temperature, top_k, top_p, filter_apply_order="top_k_first")

    made = {"torch_sort": ready(cut_by_sort), "torch_topk": ready(cut_inside_topk)}
    return {**made, "flashinfer_sampling": flashinfer_sampling}
