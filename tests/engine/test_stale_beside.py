"""Numbers and modules beside a model's weights that change between two calls are noticed, too."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from chats import GRAPH, Reads, ask, expected, pair, patched, words
from engine.test_stale import through_half
from torch import nn

import gsd_kernels as gsd


@pytest.mark.parametrize("patches", [False, True])
@pytest.mark.parametrize("number", ["tensor", "numpy"])
@pytest.mark.parametrize("name", ["self_attn.scaling", "input_layernorm.variance_epsilon"])
def test_a_number_of_another_kind_that_changes(name, number, patches):
    """It stays where it is, and is no setting that is looked at."""
    target, draft = pair()
    target = target.float()
    part, _, attribute = name.rpartition(".")
    modules = [layer.get_submodule(part) for layer in target.model.layers]

    def put(factor: float) -> None:
        for module in modules:
            value = own * factor
            if number == "numpy":
                setattr(module, attribute, np.float32(value))
            elif isinstance(getattr(module, attribute), torch.Tensor):
                getattr(module, attribute).fill_(value)
            else:
                setattr(module, attribute, torch.tensor(value, dtype=torch.float32, device="cpu"))

    own = getattr(modules[0], attribute)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    with patched(target, assistant_model=draft) if patches else nullcontext():
        for factor in (1.0, 1e4 if "eps" in name else 5.0):
            put(factor)
            text = words(1, 12, seed=3)
            found = target.generate(text, **options) if patches else gsd.generate(target, text, **options)
            assert torch.equal(found, type(target).generate(target, text, **options))


@pytest.mark.parametrize("kind", ["heads", "a source of one's own", "a script"])
def test_what_sources_forward_beside_models_is_looked_at(kind):
    """Captured steps read its storage. What it holds changes as it learns, and no key or value depends on that."""
    target, _ = pair()
    if kind == "heads":
        module = gsd.DraftHeads.for_model(target, 2)
        options = {"draft_heads": module}
    else:
        module, source = nn.Linear(2, 2), gsd.DraftSource()
        module = torch.jit.script(module) if kind == "a script" else module
        source.forwards, source.propose = (module,), lambda level: None
        options = {"draft_sources": (source,)}
    reads = Reads(target)
    with patched(target, **options, graph_config=GRAPH) as handle:
        text = torch.cat([ask(target, words(1, 12, seed=1)), words(1, 4, seed=2)], 1)
        (first,) = handle.engines.idle.sessions
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.01)
        reads.since()
        out = ask(target, text)
        assert reads.since() == 4 and handle.engines.idle.sessions == [first]
        assert torch.equal(out, expected(target, text))
        old = [parameter.data for parameter in module.parameters()]  # whose place is not taken, therefore
        through_half(module)
        module.to(target.dtype)
        assert torch.equal(ask(target, text), expected(target, text))
        (second,) = handle.engines.idle.sessions
        assert second is not first and old
