"""Hidden states of chosen layers, at the prompt and at graph rows, equal transformers' own."""

from __future__ import annotations

import threading

import pytest
import torch
from models import FAMILIES, prompts, tiny

import gsd_kernels as gsd
from gsd_kernels import DraftHeads, DraftSource, GraphConfig, Proposal
from gsd_kernels_hf.engine.engine import engines_of
from gsd_kernels_hf.model.fused import FusedRows, rows_of, why_not
from gsd_kernels_hf.model.hidden import LAST, decoder_of, listening

LAYERS = (0, 1, 2, 3, LAST)
CONFIG = GraphConfig(depth=0, branch=2, max_rows=12, history_depth=3, history_width=3)


class Listening(DraftSource):
    """Proposes the token after next in the vocabulary, and keeps all hidden states of the committed text."""

    name = "listening"

    def __init__(self, layers=LAYERS):
        self.hidden_layers, self.used = layers, []

    def attach(self, text):
        self.text, self.pieces, self.states = text, [], {}
        self.used.append(self)  # the session's copy

    def propose(self, level):
        after = ((level.frontier.token_ids + 1) % 97)[..., None]
        return Proposal(after, torch.full_like(after, -0.5, dtype=torch.float32))

    def observe(self, verified):
        if isinstance(verified, gsd.Prefilled):
            self.read(verified.hidden, verified.begin)
            return
        place = int(self.text.state.out_len[0] - verified.accepted.num_accepted[0])
        for i in range(int(verified.accepted.num_accepted[0])):
            row = int(verified.accepted.accepted_rows[0, i])
            for number, found in verified.hidden.items():
                self.states[number, place - 1 + i] = found[:, row]

    def read(self, hidden, begin):
        self.pieces.append(begin)
        for number, found in hidden.items():
            for i in range(found.shape[1]):  # of the last layer, the last position alone
                first = hidden[0].shape[1] - found.shape[1]
                self.states[number, begin + first + i] = found[:, i]


@pytest.mark.parametrize("operator", [False, True], ids=["modules", "operator"])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_the_text_equal_those_of_a_plain_forward(family, operator):
    layers = tuple(layer for layer in LAYERS if layer != 3) if operator else LAYERS
    target = tiny(family, num_hidden_layers=3, dtype=torch.float32 if operator else torch.float64)
    source = Listening(layers)
    if operator and why_not(target, "auto", layers) is not None:
        pytest.skip(f"{family}: no operator")
    inputs = prompts(1, 14)
    text = gsd.generate(
        target,
        **inputs,
        draft_sources=(source, "history"),
        graph_config=CONFIG,
        max_new_tokens=20,
        eos_token_id=None,
        do_sample=False,
        prefill_chunk_size=5,
    )
    with torch.no_grad():
        want = target(text, output_hidden_states=True).hidden_states
    (used,) = source.used
    close = {"atol": 1e-4, "rtol": 1e-4} if operator else {}
    assert used.pieces == [0, 5, 10]
    for number in layers:
        for place in range(text.shape[1] - 1):
            if number == LAST and place < 13 and place not in ((12,) if operator else (4, 9, 12)):
                assert (number, place) not in used.states
                continue
            torch.testing.assert_close(used.states[number, place], want[number][:, place], **close)


def test_only_what_is_asked_for_is_kept_and_hooks_go_with_the_forward():
    target = tiny(num_hidden_layers=3)
    with torch.no_grad(), listening(target, (1,)) as found:
        target(prompts(1, 4)["input_ids"])
        assert set(found) == {1}
    with listening(target, ()) as found:
        target(prompts(1, 4)["input_ids"])
    assert found == {}
    blocks, norm = decoder_of(target)
    for module in (*blocks, norm, target.lm_head):
        assert not module._forward_pre_hooks and not module._forward_hooks


def test_another_threads_forward_is_not_kept():
    target, ids = tiny(num_hidden_layers=3), prompts(1, 4)["input_ids"]
    with torch.no_grad(), listening(target, LAYERS) as found:
        thread = threading.Thread(target=lambda: target(ids))
        thread.start()
        thread.join()
    assert found == {}


def test_the_operator_hands_out_the_state_behind_the_last_norm():
    target = tiny(dtype=torch.float32)
    start, layers = torch.zeros(1, dtype=torch.int32), target.config.num_hidden_layers
    assert why_not(target, "auto") is None and why_not(target, "auto", (0, layers - 1, LAST)) is None
    assert why_not(target, "auto", (0, layers)) is None
    assert type(rows_of(target, 8, start, "auto", (layers,))) is FusedRows
    assert type(rows_of(target, 8, start, "auto", (0, LAST))) is FusedRows


def test_a_model_whose_layers_lie_elsewhere_is_refused():
    target = tiny()
    target.model.layers = torch.nn.Sequential(*target.model.layers)
    with pytest.raises(ValueError, match="its decoder has no layers"):
        decoder_of(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)  # one operator, and modules
@pytest.mark.parametrize("turns", [1, 3])
def test_heads_see_in_the_first_step(dtype, turns):
    """Untrained heads repeat the target's own next token; there is none in a first step without the prompt's state."""
    target = tiny(dtype=dtype)
    target.lm_head.weight.data.zero_()
    target.lm_head.weight.data[5] = 1.0  # the same token forever, or never
    inputs, heads = prompts(2, 9), DraftHeads.for_model(target, 3).requires_grad_(False)
    with torch.no_grad():
        if target(**inputs).logits[0, -1].argmax() != 5:
            target.lm_head.weight.data[5] = -1.0
    options = {"max_new_tokens": 2, "eos_token_id": None, "do_sample": False, "return_dict_in_generate": True}
    engines_of(target).clear()
    gsd.patch(target, draft_heads=heads, draft_sources=("heads",), graph_config=GraphConfig(depth=1, branch=2))
    try:
        for _ in range(turns):  # the same prompt again: all of it is in the cache
            out = target.generate(inputs["input_ids"][:1], **options)
            assert out.stats.steps == 1, "the first step accepted nothing"
    finally:
        gsd.unpatch(target)
