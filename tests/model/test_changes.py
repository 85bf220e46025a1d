"""However a model is changed, its text is its own, or the call is refused and says why."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from changes import CHANGES
from models import noised, tiny

import gsd_kernels as gsd
from gsd_kernels.backends import unavailable_reason

MISSING = unavailable_reason("cpu", torch.device("cpu"))
OPTIONS = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
PROMPT = torch.randint(3, 97, (1, 30), generator=torch.Generator().manual_seed(4))
REFUSED = "refused"


def target(dtype: torch.dtype = torch.float32):
    model = tiny(dtype=dtype, num_hidden_layers=3, num_attention_heads=4)
    for number, layer in enumerate(model.model.layers):
        layer.mlp.number = number
    return model


def plain(model) -> torch.Tensor | str:
    try:
        return type(model).generate(model, PROMPT, attention_mask=torch.ones_like(PROMPT), **OPTIONS)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def served(model, **options) -> tuple[torch.Tensor | str, str | None]:
    """The patched model's text and why its modules wrote it, or what was refused and why."""
    try:
        out = model.generate(
            PROMPT, attention_mask=torch.ones_like(PROMPT), return_dict_in_generate=True, **OPTIONS, **options
        )
    except ValueError as error:
        return REFUSED, str(error)
    return out.sequences, out.stats.why_modules


@pytest.fixture(scope="module")
def before() -> torch.Tensor:
    return plain(target())


SHOWS_NOTHING: set[str] = set()


@pytest.mark.skipif(MISSING is not None, reason=f"compiled CPU ops: {MISSING}")
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_says_what_it_says_or_why_not(name, before):
    model = target()
    handle = gsd.patch(model, assistant_model=noised(model), graph_config="graph")
    first, why = served(model)
    assert why is None and torch.equal(first, before), "an unchanged model takes the operator"
    with ExitStack() as stack:
        CHANGES[name](model, stack)
        want = plain(model)
        changed = [served(model), served(model, assistant_model=False)]
        gsd.unpatch(model)
        try:
            handle = gsd.patch(model, assistant_model=noised(model), graph_config="graph")
        except ValueError as error:
            changed.append((REFUSED, str(error)))
        else:
            changed.append(served(model))
    print(
        name,
        "|",
        "same"
        if isinstance(want, torch.Tensor) and torch.equal(want, before)
        else "differs"
        if isinstance(want, torch.Tensor)
        else want[:50],
        "|",
        changed[0][0] if isinstance(changed[0][0], str) else torch.equal(changed[0][0], want),
        "|",
        changed[0][1],
    )
    for text, why in changed:
        if isinstance(text, torch.Tensor):
            assert isinstance(want, str) or torch.equal(text, want), why
    if changed[-1][0] is not REFUSED:
        again, why = served(model)
        assert why is None and torch.equal(again, before), "and so does it again"
    gsd.unpatch(model) if "generate" in vars(model) else None
