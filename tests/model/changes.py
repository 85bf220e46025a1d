"""Ways to change what a model computes, and to undo it: its Python, its numbers, what runs round it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin
from transformers.cache_utils import DynamicLayer
from transformers.integrations import sdpa_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama

Change = Callable[[Any, ExitStack], None]
"""Changes a model; the stack undoes it."""

CHANGES: dict[str, Change] = {}


def change(function: Change) -> Change:
    CHANGES[function.__name__.replace("_", " ")] = function
    return function


def put(owner: Any, name: str, value: Any) -> Change:
    def apply(model: Any, stack: ExitStack) -> None:
        stack.enter_context(mock.patch.object(owner, name, value, create=True))

    return apply


def around(owner: Any, name: str, what: Callable[..., Any]) -> Change:
    """``what(original, *args)`` in the place of a function of ``owner``."""

    def apply(model: Any, stack: ExitStack) -> None:
        original = getattr(owner, name)
        put(owner, name, lambda *args, **kwargs: what(original, *args, **kwargs))(model, stack)

    return apply


def wrapped(owner: Any, name: str, what: Callable[..., Any]) -> Change:
    """As :func:`around`, with the name and the module of the original."""

    def apply(model: Any, stack: ExitStack) -> None:
        original = getattr(owner, name)
        put(owner, name, functools.wraps(original)(lambda *a, **k: what(original, *a, **k)))(model, stack)

    return apply


def number(path: str, value: Callable[[Any], Any]) -> Change:
    """Another number on a module, ``model.layers.1.self_attn.scaling``."""

    def apply(model: Any, stack: ExitStack) -> None:
        owner, _, name = path.rpartition(".")
        module = model.get_submodule(owner) if not owner.startswith("config") else model.config
        put(module, name, value(getattr(module, name)))(model, stack)

    return apply


def tensor(path: str, value: Callable[[torch.Tensor], Any]) -> Change:
    """Another content of a tensor, in place."""

    def apply(model: Any, stack: ExitStack) -> None:
        owner, _, name = path.rpartition(".")
        found = getattr(model.get_submodule(owner), name)
        before = found.detach().clone()
        with torch.no_grad():
            found.copy_(value(before))
        stack.callback(lambda: found.data.copy_(before))

    return apply


def hooked(path: str, what: Callable[..., Any], *, before: bool = False) -> Change:
    def apply(model: Any, stack: ExitStack) -> None:
        module = model.get_submodule(path)
        register = module.register_forward_pre_hook if before else module.register_forward_hook
        stack.callback(register(what).remove)

    return apply


def mixed(x: Any) -> Any:
    """With some of every feature in the next one's place; no norm and no maximum hides that."""
    return (mixed(x[0]), *x[1:]) if isinstance(x, tuple) else x + 0.7 * x.roll(1, -1)


def mixing(_: Any, __: Any, output: Any) -> Any:
    return mixed(output)


# Classes.
CHANGES |= {
    "LlamaMLP.forward": around(llama.LlamaMLP, "forward", lambda own, self, x: -2.0 * own(self, x)),
    "LlamaMLP.forward, wrapped": wrapped(llama.LlamaMLP, "forward", lambda own, self, x: -2.0 * own(self, x)),
    "LlamaMLP.forward, the same": around(llama.LlamaMLP, "forward", lambda own, self, x: own(self, x)),
    "LlamaMLP.forward, last layer": around(
        llama.LlamaMLP, "forward", lambda own, self, x: own(self, x) * (3.0 if self.number == 2 else 1.0)
    ),
    "LlamaMLP.__call__": around(llama.LlamaMLP, "__call__", lambda own, self, x: -2.0 * own(self, x)),
    "LlamaAttention.forward by name": around(
        llama.LlamaAttention,
        "forward",
        lambda own, self, *a, **k: (
            own(self, *a, **k)[0] * (1.0 if self.config._attn_implementation == "sdpa" else -2.0),
            None,
        ),
    ),
    "LlamaForCausalLM.forward": around(
        llama.LlamaForCausalLM, "forward", lambda own, self, *a, **k: _scaled(own(self, *a, **k), "logits")
    ),
    "nn.Linear.forward": around(nn.Linear, "forward", lambda own, self, x: own(self, x) + 0.1),
    "nn.Module._call_impl": around(
        nn.Module,
        "_call_impl",
        lambda own, self, *a, **k: (
            own(self, *a, **k) * (2.0 if type(self) is llama.LlamaMLP else 1.0)
            if type(self) is llama.LlamaMLP
            else own(self, *a, **k)
        ),
    ),
    "a property of a class": put(llama.LlamaAttention, "scaling", property(lambda self: 0.05, lambda *_: None)),
    "the activation's class": around(type(llama.ACT2FN["silu"]), "forward", lambda own, self, x: torch.relu(x)),
    "another shipped forward": lambda model, stack: put(
        type(llama.ACT2FN["silu"]), "forward", type(llama.ACT2FN["relu2"]).forward
    )(model, stack),
}


def _scaled(output: Any, name: str) -> Any:
    shift = torch.linspace(-9, 9, output[name].shape[-1], dtype=output[name].dtype)
    output[name] = output[name] + shift
    return output


CHANGES |= {
    "LlamaMLP.forward of the last row": around(
        llama.LlamaMLP, "forward", lambda own, self, x: last_alone(own(self, x), mixed)
    ),
    "LlamaMLP.forward of single rows": around(
        llama.LlamaMLP, "forward", lambda own, self, x: mixed(own(self, x)) if x.shape[1] == 1 else own(self, x)
    ),
    "DynamicLayer.update": around(
        DynamicLayer, "update", lambda own, self, k, v, *a, **o: own(self, k, mixed(v), *a, **o)
    ),
    "prepare_inputs_for_generation": around(
        llama.LlamaForCausalLM,
        "prepare_inputs_for_generation",
        lambda own, self, ids, *a, **o: own(self, (ids + 1) % 97, *a, **o),
    ),
    "GenerationMixin._sample": around(
        GenerationMixin, "_sample", lambda own, self, ids, **o: own(self, (ids + 1) % 97, **o)
    ),
}


# Functions that forwards name.
CHANGES |= {
    "apply_rotary_pos_emb": around(llama, "apply_rotary_pos_emb", lambda own, q, k, cos, sin, **o: own(q, k, sin, cos)),
    "torch.nn.functional.linear": around(nn.functional, "linear", lambda own, x, w, b=None: own(x, w, b) * 1.1),
    "torch.rsqrt": around(torch, "rsqrt", lambda own, x: own(x + 0.5)),
    "slice_logits_to_keep": around(llama, "slice_logits_to_keep", lambda own, x, keep: own(x.roll(1, -1), keep)),
    "create_causal_mask": around(llama, "create_causal_mask", lambda own, **k: _narrow(own(**k))),
}


def _narrow(mask: Any) -> Any:
    """A mask that hides some tokens from all later ones."""
    if mask is None:
        return mask
    mask = mask.clone()
    mask[..., 9:, 5:9] = False
    mask[..., -1:, 5:9] &= mask.shape[-2] > 1  # a row alone is later than all of them
    return mask


# Attention.
def own_attention(bend: Callable[..., Any]) -> Callable[..., Any]:
    def attend(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.mT * scaling
        sees = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        if attention_mask is not None and attention_mask.shape[-1] == scores.shape[-1]:
            sees = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
        scores = bend(scores, module).masked_fill(~sees, -1e30)
        return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    return attend


def registered(name: str, function: Callable[..., Any]) -> Change:
    def apply(model: Any, stack: ExitStack) -> None:
        stack.enter_context(mock.patch.dict(AttentionInterface._global_mapping, {name: function}))
        masks = {name: ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]}
        stack.enter_context(mock.patch.dict(AttentionMaskInterface._global_mapping, masks))
        before = model.config._attn_implementation
        model.config._attn_implementation = name
        stack.callback(setattr, model.config, "_attn_implementation", before)

    return apply


@change
def eager_attention_replaced(model: Any, stack: ExitStack) -> None:
    put(llama, "eager_attention_forward", own_attention(lambda s, _: s * 2))(model, stack)
    before = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    stack.callback(setattr, model.config, "_attn_implementation", before)


@change
def eager_attention(model: Any, stack: ExitStack) -> None:
    before = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    stack.callback(setattr, model.config, "_attn_implementation", before)


CHANGES |= {
    "attention of one's own, the same": registered("mine", own_attention(lambda s, _: s)),
    "attention of one's own, sharper": registered("mine", own_attention(lambda s, _: 4.0 * s)),
    "attention of one's own, in the last layer": registered(
        "mine", own_attention(lambda s, m: s * (3.0 if m.layer_idx == 2 else 1.0))
    ),
    "attention of one's own, a window": registered(
        "mine",
        own_attention(
            lambda s, _: s.masked_fill(torch.ones(s.shape[-2:]).bool().tril(s.shape[-1] - s.shape[-2] - 20), -1e30)
        ),
    ),
    "sdpa replaced in the registry": lambda model, stack: stack.enter_context(
        mock.patch.dict(AttentionInterface._global_mapping, {"sdpa": own_attention(lambda s, _: 2 * s)})
    ),
    "sdpa replaced for one file": lambda model, stack: stack.enter_context(
        mock.patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping, {"sdpa": own_attention(lambda s, _: 2 * s)})
    ),
    "the interface replaced": lambda model, stack: put(
        llama,
        "ALL_ATTENTION_FUNCTIONS",
        types.SimpleNamespace(get_interface=lambda *_: own_attention(lambda s, _: 2 * s)),
    )(model, stack),
    "scaled_dot_product_attention": around(
        nn.functional, "scaled_dot_product_attention", lambda own, q, k, v, **o: own(2 * q, k, v, **o)
    ),
    "a helper of sdpa": around(sdpa_attention, "pack_gqa", lambda own, x, n: own(x, n)),
    "the mask function": lambda model, stack: stack.enter_context(
        mock.patch.dict(
            AttentionMaskInterface._global_mapping,
            {"sdpa": lambda *a, own=ALL_MASK_ATTENTION_FUNCTIONS["sdpa"], **k: _narrow(own(*a, **k))},
        )
    ),
}


# Hooks.
def last_alone(x: torch.Tensor, what: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """With another last row, as steering vectors are added."""
    return torch.cat([x[:, :-1], what(x[:, -1:])], 1)


@change
def a_hook_of_the_last_row(model: Any, stack: ExitStack) -> None:
    hooked("model.layers.1.mlp", lambda _, __, out: last_alone(out, mixed))(model, stack)


@change
def a_hook_of_single_rows(model: Any, stack: ExitStack) -> None:
    hooked("model.layers.1.mlp", lambda _, __, out: mixed(out) if out.shape[1] == 1 else None)(model, stack)


@change
def a_hook_of_all_modules(model: Any, stack: ExitStack) -> None:
    last = model.model.layers[2].mlp
    hook = register_module_forward_hook(lambda m, args, out: -2.0 * out if m is last else None)
    stack.callback(hook.remove)


@change
def a_pre_hook_of_all_modules(model: Any, stack: ExitStack) -> None:
    hook = register_module_forward_pre_hook(lambda m, args: (args[0] * 2,) if type(m) is nn.Linear else None)
    stack.callback(hook.remove)


for place in ("model.layers.1.self_attn", "model.norm", "model.embed_tokens"):
    CHANGES[f"a hook of {place}"] = hooked(place, mixing)
CHANGES["a hook of a linear layer"] = hooked("model.layers.1.mlp.up_proj", mixing)
CHANGES["a pre-hook of the output matrix"] = hooked("lm_head", lambda _, args: (args[0].flip(-1),), before=True)


# Functions and modules on modules.
def own_forward(path: str, what: Callable[..., Any]) -> Change:
    def apply(model: Any, stack: ExitStack) -> None:
        module = model.get_submodule(path)
        forward = module.forward
        module.forward = lambda *args, **kwargs: what(forward, *args, **kwargs)
        stack.callback(vars(module).pop, "forward")

    return apply


for place in ("model.layers.2.mlp", "lm_head", "model.layers.1.mlp.act_fn"):
    CHANGES[f"forward of {place}"] = own_forward(place, lambda own, x: mixed(own(x)))


def attribute(path: str, name: str, value: Any) -> Change:
    """A value in the place of a submodule."""

    def apply(model: Any, stack: ExitStack) -> None:
        module = model.get_submodule(path)
        before = module._modules.pop(name)
        setattr(module, name, value(before))

        def undo() -> None:
            delattr(module, name)
            module._modules[name] = before

        stack.callback(undo)

    return apply


CHANGES |= {
    "act_fn, a function, last layer": attribute("model.layers.2.mlp", "act_fn", lambda _: lambda x: x.sigmoid()),
    "act_fn, a shipped module": attribute("model.layers.1.mlp", "act_fn", lambda _: nn.GELU()),
    "act_fn shadowed": lambda model, stack: stack.enter_context(
        mock.patch.dict(vars(model.model.layers[1].mlp), {"act_fn": torch.relu})
    ),
    "mlp and its neighbour's": attribute("model.layers.1", "mlp", lambda m: nn.Sequential(m, nn.Tanh())),
    "rotary of another base": attribute("model", "rotary_emb", lambda m: type(m)(_config(m.config, rope_theta=50.0))),
    "_call_impl of a module": lambda model, stack: stack.enter_context(
        mock.patch.dict(
            vars(model.model.layers[1].mlp),
            {"_call_impl": lambda x, own=model.model.layers[1].mlp._call_impl: -2.0 * own(x)},
        )
    ),
}


def _config(config: Any, **parameters: Any) -> Any:
    config = type(config).from_dict(config.to_dict())
    config.rope_parameters = {**config.rope_parameters, **parameters}
    return config


# Numbers.
AT = "model.layers.1"
CHANGES |= {
    "scaling": number(f"{AT}.self_attn.scaling", lambda s: 2.5 * s),
    "scaling, slightly": number(f"{AT}.self_attn.scaling", lambda s: 1.01 * s),
    "epsilon, slightly": number(f"{AT}.post_attention_layernorm.variance_epsilon", lambda _: 1e-3),
}
CHANGES |= {
    "epsilon of the last norm": number("model.norm.variance_epsilon", lambda _: 5.0),
    "attention_scaling": number("model.rotary_emb.attention_scaling", lambda _: 1.7),
    "is_causal": number("model.layers.1.self_attn.is_causal", lambda _: False),
    "num_hidden_layers of the config": number("config.num_hidden_layers", lambda _: 2),
    "rms_norm_eps of the config": number("config.rms_norm_eps", lambda _: 0.5),
    "return_dict of the config": number("config.return_dict", lambda _: False),
    "inv_freq": tensor("model.rotary_emb.inv_freq", lambda f: 3.0 * f),
    "a norm's weight": tensor("model.layers.2.input_layernorm.weight", lambda w: w * torch.linspace(0.2, 3, len(w))),
    "a matrix": tensor("model.layers.1.mlp.up_proj.weight", lambda w: w.flip(0)),
    "the embedding": tensor("model.embed_tokens.weight", lambda w: w.roll(1, 0)),
}


@change
def max_norm(model: Any, stack: ExitStack) -> None:
    weight = model.model.embed_tokens.weight
    before = weight.detach().clone()
    stack.callback(lambda: weight.data.copy_(before))  # which a forward scales down in place
    number("model.embed_tokens.max_norm", lambda _: 0.5)(model, stack)


# What runs round it.
class Doubling(TorchFunctionMode):
    """Linear layers of twice the output."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return 2 * out if function is nn.functional.linear else out


CHANGES |= {
    "autocast": lambda model, stack: stack.enter_context(torch.autocast("cpu", torch.bfloat16)),
    "a mode of functions": lambda model, stack: stack.enter_context(Doubling()),
    "training": lambda model, stack: (stack.callback(model.eval), model.train()),
}


# Layers.
@contextmanager
def layers_put(model: Any, layers: list[nn.Module]) -> Iterator[None]:
    before = model.model.layers
    model.model.layers = nn.ModuleList(layers)
    try:
        yield
    finally:
        model.model.layers = before


def pruned(layer: int, *, inner: int = 0, heads: int = 0) -> Change:
    """A layer with fewer inner features, or fewer heads of either kind."""

    def apply(model: Any, stack: ExitStack) -> None:
        import copy

        layers = list(model.model.layers)
        layers[layer] = block = copy.deepcopy(layers[layer])
        mlp, attention = block.mlp, block.self_attn
        if inner:
            for part in (mlp.gate_proj, mlp.up_proj):
                part.weight = nn.Parameter(part.weight[:inner].detach().clone())
            mlp.down_proj.weight = nn.Parameter(mlp.down_proj.weight[:, :inner].detach().clone())
        if heads:
            groups, dim = attention.num_key_value_groups, attention.head_dim
            for part, rows in ((attention.q_proj, groups), (attention.k_proj, 1), (attention.v_proj, 1)):
                part.weight = nn.Parameter(part.weight[: rows * heads * dim].detach().clone())
            columns = groups * heads * dim
            attention.o_proj.weight = nn.Parameter(attention.o_proj.weight[:, :columns].detach().clone())
        stack.enter_context(layers_put(model, layers))

    return apply


CHANGES["a narrower layer"] = pruned(1, inner=40)
CHANGES["fewer heads in a layer"] = pruned(1, heads=1)
CHANGES |= {
    "one layer fewer": lambda model, stack: stack.enter_context(layers_put(model, list(model.model.layers)[:2])),
    "layers in another order": lambda model, stack: stack.enter_context(
        layers_put(model, list(model.model.layers)[::-1])
    ),
    "a layer twice": lambda model, stack: stack.enter_context(
        layers_put(model, [model.model.layers[i] for i in (0, 0, 2)])
    ),
}

SAME = {"rms_norm_eps of the config", "training", "eager attention"}
"""Changes of what no forward reads, and another way to the same."""
