"""Other people's kernels at the same work: each a contestant, or a name with the reason why it is missing."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..lib.runner import Contestant, Settings

ATTENTION = ("sdpa_mask", "flex_attention", "flash_attn", "flashinfer")
SAMPLING = ("torch_argmax", "torch_multinomial", "torch_sort", "torch_topk", "flashinfer_sampling")


def attention_peers(settings: Settings, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> list[Contestant]:
    """Attention under an arbitrary mask.

    Their masks are made beforehand and not timed; ours is read as it comes from ``flatten``.

    Args:
        q: [1, Hq, R, D].
        k, v: [1, Hkv, S, D], exactly as long as there are visible positions.
        visible: bool [R, S].
    """
    makers = {"sdpa_mask": _sdpa, "flex_attention": _flex, "flash_attn": _flash_attn, "flashinfer": _flashinfer}
    return [
        _contestant(name, settings, makers[name], q, k, v, visible) for name in ATTENTION if settings.wants_peer(name)
    ]


def _contestant(name: str, settings: Settings, make: Callable[..., Contestant], *args: Any) -> Contestant:
    try:
        found = make(settings, *args)
    except Exception as error:
        found = Contestant(name, missing=" ".join(f"{type(error).__name__}: {error}".split())[:300])
    found.name, found.peer = name, True
    return found


def _sdpa(settings: Settings, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Contestant:
    bias = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, float("-inf"))
    grouped = q.shape[1] != k.shape[1]

    def call() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=grouped)

    return Contestant("", call)


def _flex(settings: Settings, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Contestant:
    if settings.quick:
        return Contestant("", missing="compiling it takes longer than --quick allows")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    begin = time.perf_counter()
    mask = create_block_mask(lambda b, h, row, key: visible[row, key], None, None, *visible.shape, device=str(q.device))
    compiled = torch.compile(flex_attention, dynamic=False)
    grouped = q.shape[1] != k.shape[1]
    setup = time.perf_counter() - begin
    return Contestant("", lambda: compiled(q, k, v, block_mask=mask, enable_gqa=grouped), setup_seconds=setup)


def _flash_attn(settings: Settings, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Contestant:
    if importlib.util.find_spec("flash_attn") is None:
        return Contestant("", missing="not installed (and it has no mask for trees: only a chain could be compared)")
    causal = torch.ones_like(visible).tril(visible.shape[1] - visible.shape[0])
    if not torch.equal(visible, causal):
        return Contestant("", missing="it has no mask for trees")
    from flash_attn import flash_attn_func

    q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    return Contestant("", lambda: flash_attn_func(q, k, v, causal=True).transpose(1, 2))


def _flashinfer(settings: Settings, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Contestant:
    if q.device.type != "cuda":
        return Contestant("", missing="it needs a GPU")
    if importlib.util.find_spec("flashinfer") is None:
        return Contestant("", missing="not installed")
    import flashinfer

    rows, keys, values = q[0].transpose(0, 1).contiguous(), k[0], v[0]

    def call() -> Tensor:
        return flashinfer.single_prefill_with_kv_cache(rows, keys, values, custom_mask=visible, kv_layout="HND")

    # The kernel is compiled at its first call, which the runner adds to the set-up time.
    return Contestant("", lambda: call().transpose(0, 1)[None], setup_seconds=0.0)


def sampling_peers(
    settings: Settings, logits: Tensor, temperature: float, top_k: int, top_p: float
) -> list[Contestant]:
    """Picking a token from logits [R, V] with PyTorch, in the order of operations of transformers' warpers."""

    def wanted(name: str, call: Callable[[], Any] | None, missing: str | None = None) -> list[Contestant]:
        alike = temperature == 0.0  # random picks are the tests' matter
        return [Contestant(name, call, missing, peer=True, alike=alike)] if settings.wants_peer(name) else []

    if temperature == 0.0:
        return wanted("torch_argmax", lambda: logits.argmax(-1))

    def draw(scores: Tensor) -> Tensor:
        return torch.multinomial(scores.float().softmax(-1), 1)

    if top_k == 0 and top_p == 1.0:
        return wanted("torch_multinomial", lambda: draw(logits / temperature))

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

    return [
        *wanted("torch_sort", cut_by_sort),
        *wanted("torch_topk", cut_inside_topk),
        *wanted("flashinfer_sampling", *_flashinfer_sampling(logits, temperature, top_k, top_p)),
    ]


def _flashinfer_sampling(
    logits: Tensor, temperature: float, top_k: int, top_p: float
) -> tuple[Callable[[], Any] | None, str | None]:
    if logits.device.type != "cuda":
        return None, "it needs a GPU"
    if importlib.util.find_spec("flashinfer") is None:
        return None, "not installed"
    from flashinfer.sampling import top_k_top_p_sampling_from_logits

    def call() -> Tensor:
        return top_k_top_p_sampling_from_logits(
            logits.float() / temperature, top_k, top_p, filter_apply_order="top_k_first"
        )

    return call, None
