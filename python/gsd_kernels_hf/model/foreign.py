"""Reasons why a LLaMA-like model is not what the operator computes, as far as a proof of a few tokens cannot see them.

A proof sees another formula (:mod:`.proof`). Rounding hides a number that is slightly off, and a layer in the middle of
many in half precision; a few tokens do not show code that goes by how it is called. These stand here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.activations import ACT2CLS

from gsd_kernels.ops.packed.api import FLOATS

from ..packed.adapters import stored_in
from ..packed.modules import PackedEmbedding, PackedLinear, device_of_weights, dtype_of
from .attention import AttentionKind
from .facts import Facts, Space, called_by, described, fact, global_hooks, is_function, is_shipped
from .probe import examine, served

STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # one set of frequencies for all lengths
SILU = (nn.SiLU, ACT2CLS["silu"])
MATRICES = (nn.Linear, nn.Embedding, PackedLinear, PackedEmbedding)
PLAIN_MODULES = (*MATRICES, nn.ModuleList, *SILU)


@fact
def foreign(facts: Facts) -> str | None:
    """Name what keeps a LLaMA-like model from being what the operator computes, or ``None``."""
    return foreign_code(facts) or next(_unread(facts), None)


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
    for space in facts.spaces:
        if isinstance(space, Space) and space.foreign is not None:
            return space.foreign
        if is_function(space) and not is_shipped(space):
            return f"attention or its mask is {described(space)}"
    return None


def layers_of(model: Any) -> list[Any]:
    """The layers that a forward runs: no more than the config says."""
    return list(model.model.layers)[: model.config.num_hidden_layers]


def _unread(facts: Facts) -> Iterator[str]:
    """Name what a model has that the operator has no argument for, one thing after the other."""
    examine(facts)  # a forward: in the first one a library may rewrite its weights
    model, layers, rotary = facts.model, layers_of(facts.model), facts.model.model.rotary_emb
    dtype, device = dtype_of(model.lm_head), model.device
    if dtype not in FLOATS:
        yield f"an output matrix of {dtype}, which is none of float32, bfloat16 and float16"
    for name, module in facts.modules:
        kind, stored, found = type(module), stored_in(module), dtype
        if stored is not None:
            if stored.problem is not None:
                yield f"{name} {stored.problem}"
            found, places = dtype if stored.any_dtype else stored.dtype, {tensor.device for tensor in stored.tensors}
        elif kind.__module__ != type(model).__module__ and kind not in PLAIN_MODULES:
            yield f"{name} is not a plain module of transformers or PyTorch but {kind.__module__}.{kind.__qualname__}"
        elif isinstance(module, MATRICES):
            found, places = dtype_of(module), {device_of_weights(module)}
        else:
            places = {parameter.device for parameter in module.parameters(recurse=False)}
        if found != dtype:
            yield f"{name} stands for {found}, the output matrix is {dtype}"
        if places - {device}:
            yield f"{name} lies on another device than the output matrix"
    kinds = served(facts).kinds
    epsilons = [module.variance_epsilon for _, module in facts.modules if hasattr(module, "variance_epsilon")]
    scales = [layer.self_attn.scaling for layer in layers]
    # A number of another kind, such as a tensor, could change in its place, which nobody would look at again.
    if any(type(number) not in (float, int) for number in (*epsilons, *scales, rotary.attention_scaling)):
        yield "a scale or epsilon that is no number"
    for what, found in (
        ("a tensor-parallel model", getattr(model, "_device_mesh", None) is not None),
        ("a bias of the output matrix", model.lm_head.bias is not None),
        ("an embedding with max_norm", getattr(model.model.embed_tokens, "max_norm", None) is not None),
        ("rotary frequencies by length", getattr(rotary, "rope_type", "default") not in STATIC_ROPE),
        ("another activation than SiLU", any(type(layer.mlp.act_fn) not in SILU for layer in layers)),
        ("a forward of another class", any(map(_borrows, {type(module) for _, module in facts.modules}))),
        ("attention of another kind", any(kind != AttentionKind(kind.window) for kind in kinds)),
        ("another scale of attention", {*scales} != {(2 * rotary.inv_freq.numel()) ** -0.5}),
        ("norms of several epsilons", len({*epsilons}) > 1),
        (f"{len(layers)} layers with {len(kinds)} attention calls", len(layers) != len(kinds)),
    ):
        if found:
            yield what


def _borrows(kind: Any) -> bool:
    """Return whether a class forwards by a function that was written in another one."""
    written = getattr(kind.forward, "__qualname__", "").rpartition(".")[0]
    return written not in {"", *(base.__qualname__ for base in kind.__mro__)}
