"""What is changed between two calls is noticed: the second is what a model that was never used says.

More changes, of one text: tests/model/changes.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from chats import GRAPH, SAMPLED, Reads, ask, expected, pair, patched, words

from gsd_kernels_hf.model.fused import why_not
from gsd_kernels_hf.validate import check_model


def add_in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.add_(0.3)


def data_in_place(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.weight.data.add_(0.3)


def load_state(model: Any) -> None:
    model.load_state_dict(pair(seed=9)[0].state_dict())


def hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: -2 * out)


def layer_replaced(model: Any) -> None:
    model.model.layers[1] = copy.deepcopy(pair(seed=9)[0].model.layers[1]).to(model.dtype)


def norm_epsilon(model: Any) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 30.0


def proved(model):
    """Forwards that show what a model computes, which one of another structure makes at its next call."""
    check_model("model", model)
    why_not(model, "auto")


@pytest.mark.parametrize("change", [add_in_place, data_in_place, load_state, layer_replaced, hook, norm_epsilon])
def test_a_changed_target_reads_all_of_its_prompt(change):
    """So does its draft. Where a draft's weights alone changed in place, as they do while it learns, the target reads
    what is new; where its structure did, nothing of before is used."""
    target, draft = pair()
    reads = {"target": Reads(target), "draft": Reads(draft)}
    with patched(target, assistant_model=draft, graph_config=GRAPH):
        for model in (target, draft):
            text = torch.cat([ask(target, words(1, 12, seed=1)), words(1, 4, seed=2)], 1)
            change(model)
            proved(model)
            for found in reads.values():
                found.since()
            ask(target, text)
            of_target, of_draft = (found.since() for found in reads.values())
            assert of_draft == text.shape[1] - 1
            weights_alone = model is draft and change in (add_in_place, data_in_place, load_state)
            assert of_target == (4 if weights_alone else of_draft)


@pytest.mark.parametrize("merged", [False, True])
def test_adapters(merged):
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
        if merged:
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
