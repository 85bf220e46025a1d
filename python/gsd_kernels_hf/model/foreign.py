"""Properties of a model that the operator would not compute, as far as they are written on it.

Numbers are read where a forward reads them, in every layer. What a list of them forgets, :mod:`.proof` finds; what
rounding or a few tokens would hide stands here: an epsilon, a scale, code that may do anything at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS

from gsd_kernels.ops.packed.api import FLOATS

from ..packed.adapters import stored_in
from ..packed.modules import Packed, PackedEmbedding, PackedLinear, dtype_of, shape_of
from .attention import AttentionKind
from .code import described, is_shipped
from .facts import Facts, fact, foreign_global_hooks
from .identity import places
from .probe import served

STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # one set of frequencies for all lengths
SILU = (nn.SiLU, ACT2CLS["silu"])
PLAIN_MODULES = (nn.Linear, nn.Embedding, nn.ModuleList, PackedLinear, PackedEmbedding, *SILU)


@fact
def foreign(facts: Facts) -> str | None:
    """Name what keeps a LLaMA-like model from being what the operator computes, or ``None``."""
    kept = facts.proofs.get(foreign)
    if kept is None or kept[0] != places(facts):
        found = (
            _foreign_config(facts.model)
            or foreign_code(facts)
            or _foreign_module(facts)
            or _foreign_parameter(facts)
            or _foreign_layer(facts)
        )
        kept = facts.proofs[foreign] = places(facts), found
    answer: str | None = kept[1]
    return answer


@fact
def foreign_code(facts: Facts, *, shipped: bool = True) -> str | None:
    """Code in a model's forward that neither transformers nor PyTorch brought, or that runs round all code.

    ``shipped``: whether their own counts where it is a hook or lies on a module, as accelerate's does. A function that
    a module of theirs keeps under a name of its own, as activations do, is none that was put there.
    """
    cast, *modes = facts.ambient
    if cast is not None:
        return f"autocast to {cast}"
    if modes:
        return f"a mode that PyTorch's operations go through, {modes[0].__qualname__}"
    for hook in foreign_global_hooks():
        return f"a hook of all modules, {described(hook)}"
    for (name, module), (hooks, functions) in zip(facts.modules, facts.put, strict=True):
        called = [*hooks.values(), *(functions[own] for own in functions if own == "forward")]
        if any(shipped or not is_shipped(hook) for hook in called):
            return f"{name or 'the model'} has a hook"
        for function, value in functions.items():
            if not is_shipped(value) or (shipped and not _is_kept(module, function, value)):
                return f"{name or 'the model'} has a function of its own, {function}"
    return facts.code.foreign


def _is_kept(module: nn.Module, name: str, function: Any) -> bool:
    """Return whether a function stands in the place of none of the module's class, and reaches no other module."""
    owner = getattr(function, "__self__", None)
    return not hasattr(type(module), name) and not (isinstance(owner, nn.Module) and owner._modules)


def layers_of(model: Any) -> list[Any]:
    """The layers that a forward runs: no more than the config says."""
    return list(model.model.layers)[: model.config.num_hidden_layers]


def _foreign_config(model: PreTrainedModel) -> str | None:
    config = model.config
    if config.hidden_act != "silu":
        return f"the activation {config.hidden_act} instead of silu"
    if (config.rope_parameters or {}).get("rope_type", "default") not in STATIC_ROPE:
        return "frequencies of the rotary embedding that depend on the length"
    if getattr(model, "_device_mesh", None) is not None:
        return "a tensor-parallel model"
    return None


def _foreign_module(facts: Facts) -> str | None:
    model = facts.model
    for name, module in facts.modules:
        kind, stored = type(module), stored_in(module)
        if stored is not None:
            if stored.problem is not None:
                return f"{name} {stored.problem}"
            continue
        if kind.__module__ != type(model).__module__ and kind not in PLAIN_MODULES:
            return f"{name} is not a plain module of transformers or PyTorch but {kind.__module__}.{kind.__qualname__}"
    if model.lm_head.bias is not None:
        return "a bias of the output matrix"
    if getattr(model.model.embed_tokens, "max_norm", None) is not None:
        return "an embedding whose rows are scaled down to max_norm"
    rotary = model.model.rotary_emb
    if getattr(rotary, "rope_type", "default") not in STATIC_ROPE:
        return "frequencies of the rotary embedding that depend on the length"
    if type(rotary.inv_freq) is not Tensor and type(rotary.inv_freq) is not nn.Buffer:
        return "frequencies of the rotary embedding that are no plain tensor"
    return None


def _foreign_parameter(facts: Facts) -> str | None:
    model = facts.model
    dtype, device = dtype_of(model.lm_head), model.device  # which looks for a parameter every time
    for name, module in facts.modules:
        if isinstance(module, Packed) and (module.packed.device != device or module.like.dtype != dtype):
            return f"{name} is packed on {module.packed.device} for {module.like.dtype}, not on {device} for {dtype}"
        dense = module._parameters.get("weight") if type(module) is nn.Linear else None
        if type(dense) is nn.Parameter and dense.dtype in FLOATS and dense.dtype != dtype:  # no forward would succeed
            return f"{name}.weight is {dense.dtype}, the output matrix {dtype}"
    served(facts)  # a forward: in the first one a library may rewrite its weights
    read: set[int] = set()
    for name, module in facts.modules:
        stored = stored_in(module)
        if stored is None:
            continue
        read.add(id(module._parameters.get("weight")))
        if not stored.is_for(dtype) or any(tensor.device != device for tensor in stored.tensors):
            return f"{name} stands for {stored.dtype}, the output matrix is {dtype} on {device}"
    for name, parameter in facts.parameters:
        if id(parameter) in read:
            continue
        if type(parameter) is not nn.Parameter or parameter.dtype not in FLOATS or not parameter.is_contiguous():
            return f"{name} is not a plain tensor of float32, bfloat16 or float16"
        if parameter.dim() == 2 and parameter.dtype != dtype:
            return f"{name} is {parameter.dtype}, the output matrix {dtype}"
        if parameter.device != device:
            return f"{name} lies on another device"
    return None


def _foreign_layer(facts: Facts) -> str | None:
    """Name what a layer does otherwise than the operator, or than the first one."""
    model, layers, kinds = facts.model, layers_of(facts.model), served(facts).kinds
    if not layers or len(layers) != len(kinds):
        return f"{len(layers)} layers with {len(kinds)} attention calls"
    head_dim, eps, first = 2 * model.model.rotary_emb.inv_freq.numel(), model.model.norm.variance_epsilon, layers[0]
    sizes = _sizes(first)
    for number, layer in enumerate(layers):
        attention, mlp = layer.self_attn, layer.mlp
        if kinds[number] != AttentionKind(kinds[number].window):
            return f"attention with more than a window in layer {number}, {kinds[number]}"
        if attention.head_dim != head_dim:
            return f"heads that are turned in part, or of another size, in layer {number}"
        if attention.scaling != head_dim**-0.5:
            return f"another scale of the attention in layer {number}, {attention.scaling}"
        if type(mlp.act_fn) not in SILU:
            return f"another activation in layer {number}, {type(mlp.act_fn).__name__}"
        # A number of another kind, such as a tensor, could change in its place, which nobody would look at again.
        read = (
            attention.scaling,
            model.model.rotary_emb.attention_scaling,
            *(n.variance_epsilon for n in _norms(layer)),
        )
        if any(type(number) not in (float, int) for number in (*read, eps)):
            return f"a scale or an epsilon that is no plain number in layer {number}"
        if any(norm.variance_epsilon != eps for norm in _norms(layer)):
            return f"a norm with another epsilon in layer {number}"
        own = _sizes(layer)
        if own != sizes:
            return f"layers of different sizes: {own} in layer {number}, {sizes} in layer 0"
    return _unfit(model, first, head_dim)


def _norms(layer: Any) -> Iterator[Any]:
    yield from (layer.input_layernorm, layer.post_attention_layernorm)
    attention = layer.self_attn
    yield from (getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name))


def _sizes(layer: Any) -> dict[str, torch.Size]:
    attention, mlp = layer.self_attn, layer.mlp
    parts = {"q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj, "o": attention.o_proj}
    parts |= {"gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj}
    return {name: shape_of(part) for name, part in parts.items()}


def _unfit(model: Any, layer: Any, head_dim: int) -> str | None:
    """Name the matrix of a layer that does not go with the others."""
    vocab, hidden = shape_of(model.model.embed_tokens)
    sizes = _sizes(layer)
    heads, kv_heads, inner = sizes["q"][0] // head_dim, sizes["k"][0] // head_dim, sizes["gate"][0]
    q, kv = (heads * head_dim, hidden), (kv_heads * head_dim, hidden)
    expected = {"q": q, "k": kv, "v": kv, "o": q[::-1], "gate": (inner, hidden), "up": (inner, hidden)}
    expected["down"] = (hidden, inner)
    if sizes != expected or not kv_heads or heads % kv_heads:
        return f"matrices of sizes that do not go together, {sizes}"
    output = tuple(shape_of(model.lm_head))
    if output != (model.config.vocab_size, hidden) or vocab < model.config.vocab_size:
        return f"an output matrix of {output} for {model.config.vocab_size} tokens"
    norms = [
        *(norm.weight for norm in (layer.input_layernorm, layer.post_attention_layernorm)),
        model.model.norm.weight,
    ]
    if any(tuple(weight.shape) != (hidden,) for weight in norms):
        return "a norm of another size"
    return None
