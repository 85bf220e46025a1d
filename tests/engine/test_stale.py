"""What is changed between two calls is noticed: the second is what a model that was never used says.

Changes of the model itself are rows of tests/model/changes.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chats import GRAPH, SAMPLED, Reads, ask, expected, pair, patched, words


def add_in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.add_(0.3)


def test_adapters():
    peft = pytest.importorskip("peft")
    target, draft = pair()
    texts = set()

    def check() -> None:
        nonlocal text
        want = expected(target, text)
        assert torch.equal(ask(target, text), want)
        texts.add(tuple(want[0].tolist()))
        text = torch.cat([text, words(1, 1, seed=4)], 1)

    def adapter() -> Any:
        return peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)

    with patched(target, assistant_model=draft, graph_config=GRAPH):
        text = words(1, 12, seed=1)
        check()
        torch.manual_seed(3)
        wrapped = peft.get_peft_model(target, adapter()).double()
        check()
        wrapped.add_adapter("other", adapter())
        wrapped.double()
        check()
        wrapped.set_adapter("other")
        check()
        with wrapped.disable_adapter():
            check()
        check()
        wrapped.merge_adapter()
        check()
        wrapped.unmerge_adapter()
        check()
        wrapped.set_adapter("default")
        check()
        wrapped.base_model.scaling = None
        for module in wrapped.modules():
            if hasattr(module, "scale_layer"):
                module.scale_layer(4.0)
        check()
        wrapped.unload()
        check()
    assert len(texts) > 3


@pytest.mark.parametrize(
    "changed",
    [
        {"eos_token_id": 14},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.5},
        {"seed": 6},
        {"do_sample": False},
        {"repetition_penalty": 1.9},
        {"tokens": 3},
        {"tokens": 40},
        {"prefill_chunk_size": 3},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_other_settings_of_generation(changed):
    target, draft = pair()
    with patched(target, assistant_model=draft, graph_config=GRAPH):
        text = ask(target, words(1, 12, seed=1), **SAMPLED)
        for options in (SAMPLED, {**SAMPLED, **changed}, SAMPLED):
            assert torch.equal(ask(target, text, **options), expected(target, text, **options)), options


def test_a_change_in_the_middle_of_a_text():
    """Keys of the first half are of other weights; the next call must not begin with them."""
    target, draft = pair()
    calls = []

    def change(record) -> None:
        calls.append(record)
        if len(calls) == 2:
            add_in_place(target)

    with patched(target, assistant_model=draft, graph_config=GRAPH):
        text = torch.cat([ask(target, words(1, 12, seed=1), observer=change, tokens=20), words(1, 4, seed=2)], 1)
        assert len(calls) > 2
        assert torch.equal(ask(target, text), expected(target, text))


def test_what_is_not_noticed_is_forgotten_by_hand():
    """A single element through ``.data`` changes neither a counter nor a sampled element; see model/identity.py."""
    target, draft = pair()
    reads = Reads(target)
    with patched(target, assistant_model=draft, graph_config=GRAPH) as handle:
        text = torch.cat([ask(target, words(1, 12, seed=1)), words(1, 4, seed=2)], 1)
        target.model.layers[0].self_attn.k_proj.weight.data[3, 5] += 40.0
        reads.since()
        ask(target, text)
        assert reads.since() == 4
        handle.clear()
        assert torch.equal(ask(target, text), expected(target, text))
