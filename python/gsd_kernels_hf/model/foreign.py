"""Reasons why a LLaMA-like model is not what the operator computes, as far as a proof of a few tokens cannot see them.

A proof sees another formula (:mod:`.proof`). Rounding hides a number that is slightly off, and a layer in the middle of
many in half precision; a few tokens do not show code that goes by how it is called. These stand here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2CLS

from gsd_kernels.ops.packed.api import FLOATS

from ..packed.adapters import stored_in
from ..packed.modules import PackedEmbedding, PackedLinear, device_of_weights, dtype_of
from .attention import AttentionKind
from .facts import Facts, fact
from .fingerprint import Space, called_by, described, global_hooks, is_function, is_shipped
from .probe import served

STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # one set of frequencies for all lengths
SILU = (nn.SiLU, ACT2CLS["silu"])
MATRICES = (nn.Linear, nn.Embedding, PackedLinear, PackedEmbedding)
PLAIN_MODULES = (*MATRICES, nn.ModuleList, *SILU)


@fact
def foreign(facts: Facts) -> str | None:
    """Name what keeps a LLaMA-like model from being what the operator computes, or ``None``."""
    return facts.proved("foreign", lambda: foreign_code(facts) or _foreign_module(facts) or _foreign_number(facts))


@fact
def foreign_code(facts: Facts, *, shipped: bool = True) -> str | None:
    """Code in a model's forward that neither transformers nor PyTorch brought, or that runs round all code.

    ``shipped``: whether their own counts where it is a hook or stands in the place of a function or part of a module,
    as accelerate's does.
    """
    cast, *modes = facts.ambient
    if cast is not None:
        return f"autocast to {cast}"
    if modes:
        return f"a mode that PyTorch's operations go through, {modes[0].__qualname__}"
    for hook in global_hooks():
        return f"a hook of all modules, {described(hook)}"
    for (name, module), own in zip(facts.modules, facts.own, strict=True):
        if any(shipped or not is_shipped(hook) for hook in own.hooks.values()):
            return f"{name or 'the model'} has a hook"
        for function, value in own.functions.items():
            instead = shipped and (hasattr(type(module), function) or function in module._modules)
            if function in called_by(type(module)) and (instead or not is_shipped(value)):
                return f"{name or 'the model'} has a function of its own, {function}"
    return foreign_name(facts)


def foreign_name(facts: Facts) -> str | None:
    """A name that forwards read and that stands for code which neither transformers nor PyTorch brought."""
    for space in facts.spaces:
        if isinstance(space, Space) and space.foreign is not None:
            return space.foreign
        if is_function(space) and not is_shipped(space):
            return f"attention or its mask is {described(space)}"
    return None


def layers_of(model: Any) -> list[Any]:
    """The layers that a forward runs: no more than the config says."""
    return list(model.model.layers)[: model.config.num_hidden_layers]


def _foreign_module(facts: Facts) -> str | None:
    model = facts.model
    dtype, device = dtype_of(model.lm_head), model.device
    if dtype not in FLOATS:
        return f"an output matrix of {dtype}, which is none of float32, bfloat16 and float16"
    for name, module in facts.modules:
        if (found := _foreign_kind(module, type(model).__module__, dtype, device)) is not None:
            return f"{name} {found}"
    served(facts)  # a forward: in the first one a library may rewrite its weights
    for name, module in facts.modules:
        stored = stored_in(module)
        if stored and not (stored.is_for(dtype) and all(tensor.device == device for tensor in stored.tensors)):
            return f"{name} stands for {stored.dtype}, the output matrix is {dtype} on {device}"
    for name, parameter in model.named_parameters():
        if parameter.device != device:
            return f"{name} lies on another device"
    rotary = getattr(model.model.rotary_emb, "rope_type", "default")
    for what, found in (
        ("a tensor-parallel model", getattr(model, "_device_mesh", None) is not None),
        ("a bias of the output matrix", model.lm_head.bias is not None),
        ("an embedding with max_norm", getattr(model.model.embed_tokens, "max_norm", None)),
        ("rotary frequencies that depend on the length", rotary not in STATIC_ROPE),
    ):
        if found:
            return what
    return None


def _foreign_kind(module: nn.Module, home: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Name what keeps a module of a model that was written in ``home`` from being one of the operator's."""
    if (stored := stored_in(module)) is not None:
        return stored.problem
    kind = type(module)
    if kind.__module__ != home and kind not in PLAIN_MODULES:
        return f"is not a plain module of transformers or PyTorch but {kind.__module__}.{kind.__qualname__}"
    if isinstance(module, MATRICES) and (dtype_of(module), device_of_weights(module)) != (dtype, device):
        return f"is {dtype_of(module)}, the output matrix {dtype}, or lies elsewhere than on {device}"
    return None


def _foreign_number(facts: Facts) -> str | None:
    """Name what a layer does otherwise than the operator, which has one epsilon and scales by the size of heads."""
    model, layers, kinds = facts.model, layers_of(facts.model), served(facts).kinds
    if not layers or len(layers) != len(kinds):
        return f"{len(layers)} layers with {len(kinds)} attention calls"
    rotary, eps = model.model.rotary_emb, model.model.norm.variance_epsilon
    head_dim = 2 * rotary.inv_freq.numel()
    # A number of another kind, such as a tensor, could change in its place, which nobody would look at again.
    if any(type(number) not in (float, int) for number in (eps, rotary.attention_scaling)):
        return "a scale or epsilon that is no number"
    for number, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        attention = layer.self_attn
        of_norms = [norm.variance_epsilon for norm in _norms(layer)]
        for what, found, served_here in (
            ("attention", kind, kind == AttentionKind(kind.window)),
            ("scale of attention", attention.scaling, attention.scaling == head_dim**-0.5),
            ("activation", type(layer.mlp.act_fn), type(layer.mlp.act_fn) in SILU),
            ("epsilons", of_norms, all(type(of) is type(eps) and of == eps for of in of_norms)),
        ):
            if not (isinstance(served_here, bool) and served_here):
                return f"layer {number} is of another kind: {what} {found}"
    return None


def _norms(layer: Any) -> Iterator[Any]:
    yield from (layer.input_layernorm, layer.post_attention_layernorm)
    attention = layer.self_attn
    yield from (getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name))
