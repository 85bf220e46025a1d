"""However a model is changed, its text is its own: by the operator, its modules or transformers, which say why."""

from __future__ import annotations

import copy
from contextlib import ExitStack

import pytest
import torch
from changes import CHANGES, SAME
from models import noised, tiny
from ops.contracts.backends import needs_cpu

import gsd_kernels as gsd
from gsd_kernels_hf.validate import Unsupported

pytestmark = [pytest.mark.quick, needs_cpu]
PADS = 3
SHAPE = gsd.GraphConfig.preset("graph", depth=2)  # each level is a forward of the draft, often through its modules
PROMPT = torch.randint(3, 97, (1, 30), generator=torch.Generator().manual_seed(4))
OPTIONS = {
    "attention_mask": (torch.arange(30) >= PADS)[None].long(),
    "max_new_tokens": 8,
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def target(dtype: torch.dtype = torch.float32):
    model = tiny(dtype=dtype, num_hidden_layers=3, num_attention_heads=4)
    for number, layer in enumerate(model.model.layers):
        layer.mlp.number = number
    return model


def plain(model) -> torch.Tensor | Exception:
    """What transformers says."""
    try:
        return type(model).generate(model, PROMPT, **OPTIONS)
    except Exception as error:
        return error


def served(model, handle, **options) -> tuple[torch.Tensor | Exception, str | None]:
    """The patched model's text, and what kept it from the operator."""
    try:
        out = model.generate(PROMPT, return_dict_in_generate=True, **OPTIONS, **options)
    except Exception as error:
        return error, str(error)
    stats = getattr(out, "stats", None)
    return out.sequences, handle.stats.why if stats is None else stats.why_modules


def begun(model, draft) -> tuple[torch.Tensor | Exception, str | None]:
    """The same of a call that nothing was kept from; a refusal names what it refuses."""
    try:
        out = gsd.generate(
            model, PROMPT, assistant_model=draft, graph_config=SHAPE, return_dict_in_generate=True, **OPTIONS
        )
    except Exception as error:
        return error, str(error)
    return out.sequences, out.stats.why_modules


class Case:
    """One model, patched, with what it says unchanged."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.operator = dtype == torch.float32
        self.model = target(dtype)
        self.draft = noised(self.model)
        self.before = plain(self.model)
        self.handle = gsd.patch(self.model, assistant_model=self.draft, graph_config=SHAPE)
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """The operator writes the model's text."""
        text, why = served(self.model, self.handle)
        assert (why is None) == self.operator, why
        assert torch.equal(text, self.before)

    def check(self, name: str, ways: tuple[str, ...] = ("patched", "without a draft", "begun")) -> None:
        """What ``name`` of the changes makes of the model's text is what it says, in these ways to ask."""
        asked = {
            "patched": lambda: served(self.model, self.handle),
            "without a draft": lambda: served(self.model, self.handle, assistant_model=False),
            "begun": lambda: begun(self.model, self.draft),
        }
        with ExitStack() as stack:
            CHANGES[name](self.model, stack)
            want = plain(self.model)
            found = [asked[way]() for way in ways]
        for way, (text, why) in zip(ways, found, strict=True):
            if isinstance(want, Exception):
                assert isinstance(text, Exception), "transformers cannot forward it"
            elif way != "begun" or not isinstance(text, Unsupported):
                assert torch.equal(text, want), why
        shows = isinstance(want, Exception) or not torch.equal(want, self.before)
        assert shows or name in SAME or found[0][1] is not None, "neither shows nor was noticed"
        self.check_unchanged()


@pytest.fixture(scope="module")
def single():
    case = Case(torch.float32)
    yield case
    gsd.unpatch(case.model)


@pytest.fixture(scope="module")
def double():
    case = Case(torch.float64)
    yield case
    gsd.unpatch(case.model)


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_says_what_it_says(name, single):
    single.check(name)


@pytest.mark.parametrize("case", ["single", "double"])
def test_a_change_in_place_of_another_is_looked_at_anew(case, request):
    """What was found out with one hook, whose rows are rows, holds for no other."""
    case = request.getfixturevalue(case)
    with ExitStack() as stack:
        CHANGES["a hook of model.norm"](case.model, stack)
        text, why = served(case.model, case.handle)
        assert why is not None and torch.equal(text, plain(case.model))
    case.check("a hook of single rows")


DOUBLE = [
    pytest.param(name, marks=pytest.mark.many if number % 4 else ())
    for number, name in enumerate(sorted(CHANGES.keys() - {"eager attention"}))  # whose pads are NaN in float64
]


@pytest.mark.slow
@pytest.mark.parametrize("name", DOUBLE)
def test_and_so_does_one_whose_rows_go_through_its_modules(name, double):
    """Every way to ask meets every kind of change, one of two each change."""
    double.check(name, ("patched", ("without a draft", "begun")[sorted(CHANGES).index(name) % 2]))


def test_frequencies_changed_in_place_are_read_anew_in_half_precision():
    """The operator reads a copy of them, in float32, which a session keeps."""
    model = target(torch.bfloat16)
    handle = gsd.patch(model, draft_sources=("history",), graph_config="tree")
    (before, why), fresh = served(model, handle), copy.deepcopy(model)
    assert why is None
    for turned in (model, fresh):
        turned.model.rotary_emb.inv_freq.mul_(3.0)
    after, why = served(model, handle)
    gsd.unpatch(model)
    assert why is None and not torch.equal(after, before)
    assert torch.equal(after, gsd.generate(fresh, PROMPT, draft_sources=("history",), graph_config="tree", **OPTIONS))
