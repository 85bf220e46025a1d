"""However a model is changed, and whenever, its text is its own: by the operator, its modules or transformers.

A row of :data:`CHANGES` is something that is noticed at the next call (see how-it-works.md, what is noticed).
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from models import noised, prompts, tiny
from ops.contracts.backends import needs_cpu
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer
from transformers.integrations import sdpa_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama

import gsd_kernels as gsd
from gsd_kernels_hf.model import fused
from gsd_kernels_hf.validate import Unsupported

pytestmark = [pytest.mark.quick, needs_cpu]

Change = Callable[[Any, ExitStack], Any]
"""Changes a model; the stack undoes it."""


def put(owner: Any, name: str, make: Callable[[Any], Any]) -> Change:
    """What is made of a function, module or number of ``owner`` in its place: an object, or a path in the model."""

    def apply(model: Any, stack: ExitStack) -> None:
        at = model.config if owner == "config" else model.get_submodule(owner) if isinstance(owner, str) else owner
        value, held, parts = make(getattr(at, name, None)), vars(at), vars(at).get("_modules", {})
        if (part := parts.pop(name, None)) is not None:
            stack.callback(parts.__setitem__, name, part)
        undo = (setattr, at, name, held[name]) if name in held else (delattr, at, name)
        setattr(at, name, value)
        stack.callback(*undo)

    return apply


def around(owner: Any, name: str, what: Callable[..., Any]) -> Change:
    """``what(original, *args)`` in the place of a function."""
    return put(owner, name, lambda own: lambda *args, **kwargs: what(own, *args, **kwargs))


def entry(held: Any, name: str, value: Any) -> Change:
    return lambda model, stack: stack.enter_context(mock.patch.dict(held, {name: value}))


def shadow(path: str, name: str, make: Callable[[Any], Any]) -> Change:
    """On a module itself, beside its part or its class's function of that name."""

    def apply(model: Any, stack: ExitStack) -> None:
        at = model.get_submodule(path)
        entry(vars(at), name, make(getattr(at, name)))(model, stack)

    return apply


def tensor(path: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Other numbers in a tensor, in place."""

    def apply(model: Any, stack: ExitStack) -> None:
        owner, _, name = path.rpartition(".")
        found = getattr(model.get_submodule(owner), name).detach()
        stack.callback(found.copy_, found.clone())
        found.copy_(make(found.clone()))

    return apply


def hooked(path: str, what: Callable[..., Any], kind: str = "register_forward_hook") -> Change:
    return lambda model, stack: stack.callback(getattr(model.get_submodule(path), kind)(what).remove)


def mixed(x: Any) -> Any:
    """With some of every feature in the next one's place; no norm and no maximum hides that."""
    return (mixed(x[0]), *x[1:]) if isinstance(x, tuple) else x + 0.7 * x.roll(1, -1)


def last_mixed(x: torch.Tensor) -> torch.Tensor:
    """With another last row, as steering vectors are added."""
    return torch.cat([x[:, :-1], mixed(x[:, -1:])], 1)


def narrowed(mask: Any) -> Any:
    """A mask that hides some tokens from all later ones."""
    if mask is None:
        return mask
    mask = mask.clone()
    mask[..., 9:, 5:9] = False
    mask[..., -1:, 5:9] &= mask.shape[-2] > 1  # a row alone is later than all of them
    return mask


def windowed(mask: Any) -> Any:
    """A mask that shows the last 20 tokens alone, as a few tokens do not tell."""
    return mask if mask is None else mask & mask.new_ones(mask.shape[-2:]).triu(mask.shape[-1] - mask.shape[-2] - 19)


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


def in_a_window(scores: torch.Tensor, _: Any) -> torch.Tensor:
    before = torch.ones(scores.shape[-2:]).bool().tril(scores.shape[-1] - scores.shape[-2] - 20)
    return scores.masked_fill(before, -1e30)


def named(name: str) -> Change:
    return put("config", "_attn_implementation_internal", lambda _: name)


def registered(bend: Callable[..., Any]) -> tuple[Change, ...]:
    masks = entry(AttentionMaskInterface._global_mapping, "mine", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return entry(AttentionInterface._global_mapping, "mine", own_attention(bend)), masks, named("mine")


SHARPER = own_attention(lambda scores, _: 2 * scores)


def cut(module: Any, **rows: int) -> Any:
    """A copy whose parts have so many outputs; ``o_proj`` and ``down_proj`` so many inputs."""
    module = copy.deepcopy(module)
    for name, count in rows.items():
        part, columns = getattr(module, name), name in ("o_proj", "down_proj")
        part.weight = nn.Parameter((part.weight[:, :count] if columns else part.weight[:count]).detach().clone())
    return module


def rotary(own: Any) -> Any:
    config = copy.deepcopy(own.config)
    config.rope_parameters["rope_theta"] = 50.0
    return type(own)(config)


class Doubling(TorchFunctionMode):
    """Linear layers of twice the output."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return 2 * out if function is nn.functional.linear else out


def default_dtype(model: Any, stack: ExitStack) -> None:
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float64)


AT, SILU, LAYERS = "model.layers.1", type(llama.ACT2FN["silu"]), "model.layers"
MLP, ATTENTION, F = llama.LlamaMLP, llama.LlamaAttention, nn.functional
CHANGES: dict[str, Change | tuple[Change, ...]] = {
    # Names that forwards read.
    "apply_rotary_pos_emb": around(llama, "apply_rotary_pos_emb", lambda own, q, k, cos, sin, **o: own(q, k, sin, cos)),
    "create_causal_mask, a window": around(llama, "create_causal_mask", lambda own, **k: windowed(own(**k))),
    "create_causal_mask": around(llama, "create_causal_mask", lambda own, **k: narrowed(own(**k))),
    "torch.nn.functional.linear": around(F, "linear", lambda own, x, w, b=None: own(x, w, b) * 1.1),
    "torch.rsqrt": around(torch, "rsqrt", lambda own, x: own(x + 0.5)),
    "the interface of attention": put(
        llama, "ALL_ATTENTION_FUNCTIONS", lambda _: types.SimpleNamespace(get_interface=lambda *_: SHARPER)
    ),
    "a helper of sdpa": around(sdpa_attention, "pack_gqa", lambda own, x, n: own(x, n)),
    "eager attention": named("eager"),
    "another eager attention": (put(llama, "eager_attention_forward", lambda _: SHARPER), named("eager")),
    # Functions of classes.
    "MLP": put(MLP, "forward", lambda own: functools.wraps(own)(lambda self, x: -2.0 * own(self, x))),
    "MLP of the last row": around(MLP, "forward", lambda own, self, x: last_mixed(own(self, x))),
    "MLP of single rows": around(
        MLP, "forward", lambda own, self, x: mixed(own(self, x)) if x.shape[1] == 1 else own(self, x)
    ),
    "attention by the implementation's name": around(
        ATTENTION,
        "forward",
        lambda own, self, *a, **k: (
            own(self, *a, **k)[0] * (1.0 if self.config._attn_implementation == "sdpa" else -2.0),
            None,
        ),
    ),
    "Linear": around(nn.Linear, "forward", lambda own, self, x: own(self, x) + 0.1),
    "a call of any module": around(
        nn.Module,
        "_call_impl",
        lambda own, self, *a, **k: own(self, *a, **k) * 2 if type(self) is MLP else own(self, *a, **k),
    ),
    "a property": put(ATTENTION, "scaling", lambda _: property(lambda self: 0.05, lambda *_: None)),
    "a forward of another class": put(SILU, "forward", lambda _: type(llama.ACT2FN["relu2"]).forward),
    "DynamicLayer.update": around(
        DynamicLayer, "update", lambda own, self, k, v, *a, **o: own(self, k, mixed(v), *a, **o)
    ),
    "prepare_inputs_for_generation": around(
        LlamaForCausalLM,
        "prepare_inputs_for_generation",
        lambda own, self, ids, *a, **o: own(self, (ids + 1) % 97, *a, **o),
    ),
    "GenerationMixin._sample": around(
        GenerationMixin, "_sample", lambda own, self, ids, **o: own(self, (ids + 1) % 97, **o)
    ),
    # Attention and masks by their name.
    "attention of one's own, a window": registered(in_a_window),
    "sdpa": entry(AttentionInterface._global_mapping, "sdpa", SHARPER),
    "sdpa of one file": entry(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", SHARPER),
    "the mask of sdpa": entry(
        AttentionMaskInterface._global_mapping,
        "sdpa",
        lambda *a, own=ALL_MASK_ATTENTION_FUNCTIONS["sdpa"], **k: narrowed(own(*a, **k)),
    ),
    # Hooks.
    "a hook of single rows": hooked(f"{AT}.mlp", lambda _, __, out: mixed(out) if out.shape[1] == 1 else None),
    "a hook of attention": hooked(f"{AT}.self_attn", lambda _, __, out: mixed(out)),
    "a hook of a linear layer": hooked(f"{AT}.mlp.up_proj", lambda _, __, out: mixed(out)),
    "a pre-hook": hooked("lm_head", lambda _, args: (args[0].flip(-1),), "register_forward_pre_hook"),
    "a hook of all modules": lambda model, stack: stack.callback(
        register_module_forward_hook(lambda m, _, out: -2.0 * out if getattr(m, "number", 0) == 2 else None).remove
    ),
    # Functions on modules, and other modules.
    "forward of a module": shadow(f"{LAYERS}.2.mlp", "forward", lambda own: lambda x: mixed(own(x))),
    "autocast in the model's forward": shadow(
        "", "forward", lambda own: types.MethodType(torch.autocast("cpu", torch.bfloat16)(own.__func__), own.__self__)
    ),
    "act_fn, a function that ships": put(f"{LAYERS}.2.mlp", "act_fn", lambda _: nn.functional.gelu),
    "a bias of the head": shadow(
        "lm_head", "_parameters", lambda own: {**own, "bias": nn.Parameter(torch.arange(97.0))}
    ),
    "act_fn, a module": put(f"{AT}.mlp", "act_fn", lambda _: nn.GELU()),
    "act_fn, shadowed": shadow(f"{AT}.mlp", "act_fn", lambda _: torch.relu),
    "a module more": put(AT, "mlp", lambda own: nn.Sequential(own, nn.Tanh())),
    "another rotary embedding": put("model", "rotary_emb", rotary),
    "fewer heads in a layer": put(AT, "self_attn", lambda own: cut(own, q_proj=16, k_proj=8, v_proj=8, o_proj=16)),
    "one layer fewer": put("model", "layers", lambda own: own[:2]),
    # Settings.
    "scaling, slightly": put(f"{AT}.self_attn", "scaling", lambda own: 1.01 * own),
    "epsilon, slightly": put(f"{AT}.post_attention_layernorm", "variance_epsilon", lambda _: 1e-3),
    "a tensor for epsilon": put("model.norm", "variance_epsilon", lambda _: torch.tensor(5.0)),
    "attention_scaling": put("model.rotary_emb", "attention_scaling", lambda _: 1.7),
    "is_causal": put(f"{AT}.self_attn", "is_causal", lambda _: False),
    "num_hidden_layers of the config": put("config", "num_hidden_layers", lambda _: 2),
    "return_dict of the config": put("config", "return_dict", lambda _: False),
    "fewer tokens by the config": put("config", "vocab_size", lambda _: 40),
    # A forward scales the embedding down in place.
    "max_norm": (
        tensor("model.embed_tokens.weight", lambda w: w),
        put("model.embed_tokens", "max_norm", lambda _: 0.5),
    ),
    # Numbers.
    "inv_freq": tensor("model.rotary_emb.inv_freq", lambda f: 3.0 * f),
    "a matrix": tensor(f"{AT}.mlp.up_proj.weight", lambda w: w.flip(0)),
    "another parameter": shadow(
        f"{AT}.mlp.up_proj", "_parameters", lambda own: {**own, "weight": nn.Parameter(own["weight"].flip(0))}
    ),
    # What runs round it.
    "autocast": lambda model, stack: stack.enter_context(torch.autocast("cpu", torch.bfloat16)),
    "a mode of functions": lambda model, stack: stack.enter_context(Doubling()),
    "the default dtype": default_dtype,
    "training": lambda model, stack: (stack.callback(model.eval), model.train()),
}
SAME = {"training", "eager attention", "the default dtype", "fewer tokens by the config"}
"""Changes of what no forward reads, and another way to the same."""

SHAPE = gsd.GraphConfig.preset("graph", depth=2)  # each level is a forward of the draft, often through its modules
PROMPT = torch.randint(3, 97, (1, 30), generator=torch.Generator().manual_seed(4))
OPTIONS: dict[str, Any] = {
    "attention_mask": (torch.arange(30) >= 3)[None].long(),
    "max_new_tokens": 8,
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def target(dtype: torch.dtype = torch.float32) -> Any:
    model = tiny(dtype=dtype, num_hidden_layers=3, num_attention_heads=4)
    for number, layer in enumerate(model.model.layers):
        layer.mlp.number = number
    return model


def changed(model: Any, name: str, stack: ExitStack) -> torch.Tensor | Exception:
    """The model after a change, and what transformers says then."""
    changes = CHANGES[name]
    for change in changes if isinstance(changes, tuple) else (changes,):
        change(model, stack)
    return tried(lambda: type(model).generate(model, PROMPT, **OPTIONS))


def tried(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


class Case:
    """One model, patched with a draft, and what it says unchanged."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.operator = dtype == torch.float32
        self.model = target(dtype)
        self.drafted = {"assistant_model": noised(self.model), "graph_config": SHAPE}
        self.before = type(self.model).generate(self.model, PROMPT, **OPTIONS)
        self.handle = gsd.patch(self.model, **self.drafted)

    def ask(self, **options: Any) -> tuple[torch.Tensor | Exception, str | None]:
        """The patched model's text, and what kept it from the operator."""
        text = tried(lambda: self.model.generate(PROMPT, **OPTIONS, **options))
        stats = self.handle.stats
        return text, str(text) if isinstance(text, Exception) else stats.why or stats.why_modules

    def check_unchanged(self, **options: Any) -> None:
        """The operator writes the model's text."""
        text, why = self.ask(**options)
        assert torch.equal(text, self.before) and (why is None) == self.operator, why

    def check(self, name: str, want: torch.Tensor | Exception, text: Any, why: str | None) -> None:
        """A text is what transformers says, or neither can forward the model."""
        assert isinstance(text, Exception) if isinstance(want, Exception) else torch.equal(text, want), why
        shows = isinstance(want, Exception) or not torch.equal(want, self.before)
        assert shows or name in SAME or why is not None, "neither shows nor was noticed"

    def before_the_patch(self, name: str) -> None:
        gsd.unpatch(self.model)
        with ExitStack() as stack:
            want = changed(self.model, name, stack)
            text = tried(lambda: gsd.generate(self.model, PROMPT, **self.drafted, **OPTIONS))
            if not isinstance(text, Unsupported):
                self.check(name, want, text, "by generate")
            self.handle = tried(lambda: gsd.patch(self.model, **self.drafted))
            if not isinstance(self.handle, Exception):
                self.check(name, want, *self.ask())
                gsd.unpatch(self.model)
        self.handle = gsd.patch(self.model, **self.drafted)

    def between_calls(self, name: str) -> None:
        with ExitStack() as stack:
            self.check(name, changed(self.model, name, stack), *self.ask())
        self.check_unchanged()

    def in_a_callback(self, name: str) -> None:
        """A call that a stopping criterion makes sees the model as the criterion left it."""
        nested: list[Any] = []

        def criterion(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            if not nested:
                with ExitStack() as stack:
                    nested.extend((changed(self.model, name, stack), *self.ask()))
            return torch.zeros(len(input_ids), dtype=torch.bool)

        self.check_unchanged(stopping_criteria=[criterion])
        self.check(name, *nested)


@pytest.fixture(scope="module")
def cases() -> dict[torch.dtype, Case]:
    return {dtype: Case(dtype) for dtype in (torch.float32, torch.float64)}


WHEN = ("between_calls", "before_the_patch", "in_a_callback")


@pytest.mark.parametrize(
    ("number", "when"),
    itertools.product(range(len(CHANGES)), WHEN),
    ids=lambda value: value if isinstance(value, str) else tuple(CHANGES)[value],
)
def test_a_changed_model_says_what_it_says(number, when, cases):
    """Between calls by the operator, at the other times by turns; in float64 eager attention makes NaN of pads."""
    name = tuple(CHANGES)[number]
    single = when == "between_calls" or (number + WHEN.index(when)) % 2 or "eager" in name
    getattr(cases[torch.float32 if single else torch.float64], when)(name)


def test_another_class_s_forward_is_named_in_half_precision():
    """There rounding hides which of two near activations a layer has."""
    model = target(torch.bfloat16)
    with ExitStack() as stack, gsd.patch(model, draft_sources=("history",)) as handle:
        put(SILU, "forward", lambda _: type(llama.ACT2FN["gelu_new"]).forward)(model, stack)
        model.generate(PROMPT, **OPTIONS)
        assert "a forward of another class" in handle.stats.why_modules


def test_a_change_in_place_of_another_is_looked_at_anew(cases):
    """What was found out with one hook, whose rows are rows, holds for no other."""
    case = cases[torch.float64]
    for name in ("a hook of attention", "a hook of single rows"):
        with ExitStack() as stack:
            case.check(name, changed(case.model, name, stack), *case.ask())


class Scaled(nn.Module):
    """A module whose output is scaled by what lies in a container beside it."""

    def __init__(self, inner: nn.Module, held: Any) -> None:
        super().__init__()
        self.inner, self.held = inner, held

    def forward(self, x):
        return self.inner(x) * (self.held["by"] if isinstance(self.held, dict) else sum(self.held))


HELD: dict[str, Any] = {
    "a dict of a number": ({"by": 1.0}, lambda held: held.update(by=-9.0)),
    "a tensor of a list, replaced": ([torch.ones(())], lambda held: held.__setitem__(0, torch.tensor(9.0))),
    "a tensor of a dict, written": ({"by": torch.ones(())}, lambda held: held["by"].mul_(-9.0)),
    "a tensor of a tuple, written": ((torch.ones(()),), lambda held: held[0].mul_(-9.0)),
}


@pytest.mark.parametrize("name", HELD)
def test_what_a_container_holds_is_a_setting(name):
    held, change = HELD[name]
    model = tiny()
    model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp, held)
    with gsd.patch(model, draft_sources=("history",), graph_config="tree"), torch.no_grad():
        before = model.generate(PROMPT, **OPTIONS)
        change(held)
        after = model.generate(PROMPT, **OPTIONS)
        assert torch.equal(after, type(model).generate(model, PROMPT, **OPTIONS)) and not torch.equal(after, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_frequencies_changed_in_place_are_read_anew_once(dtype):
    """The operator reads a copy of them in half precision, which a session keeps; the model's own are not written."""
    model, drafts = target(dtype), {"draft_sources": ("history",), "graph_config": "tree"}
    with gsd.patch(model, **drafts) as handle:
        before, fresh = model.generate(PROMPT, **OPTIONS), copy.deepcopy(model)
        for turned in (model, fresh):
            turned.model.rotary_emb.inv_freq.mul_(3.0)
        after, again = (model.generate(PROMPT, **OPTIONS) for _ in range(2))
        assert handle.stats.why_modules is None and not torch.equal(after, before)
        assert torch.equal(after, again) and all(session.target.reused for session in handle.engines.sessions)
    assert torch.equal(after, gsd.generate(fresh, PROMPT, **drafts, **OPTIONS))


def test_the_statistics_and_the_log_say_why(caplog, monkeypatch):
    model = tiny(dtype=torch.float32)
    logging.Logger.info_once.cache_clear()
    with caplog.at_level(logging.INFO, "gsd_kernels"), ExitStack() as stack:
        for reason in (None, "model.layers.1.mlp.up_proj has a hook", "GSD_KERNELS_FUSED_ROWS=0"):
            for _ in range(2):
                out = gsd.generate(model, **prompts(1, 6), max_new_tokens=3, return_dict_in_generate=True)
                assert out.stats.why_modules == reason
            changed(model, "a hook of a linear layer", stack)
            if reason is not None:
                monkeypatch.setenv(fused.SWITCH, "0")
    said = [record.getMessage() for record in caplog.records if "through its modules" in record.getMessage()]
    assert len(said) == 2
    assert said[0] == "rows of LlamaForCausalLM go through its modules: model.layers.1.mlp.up_proj has a hook"
