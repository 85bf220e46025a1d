"""Large answers: their JSON, and who makes it."""

from __future__ import annotations

import asyncio
import json

import pytest
from served import row_id

from gsd_kernels_serve import fields
from gsd_kernels_serve.fields import CHAT, COMPLETIONS, RESPONSES
from gsd_kernels_serve.logprobs import Pieces

pytestmark = pytest.mark.slow

ROWS = [{"token": "\u044f", "top": [{"a": -1.5, "bytes": [1, 2]}]}, {}, []]
VALUE = {"choices": [{"logprobs": {"content": ROWS, "refusal": None}, "n": 1}, None], "text": 'x"\u2028', "none": []}


@pytest.mark.parametrize("depth", range(8))
@pytest.mark.parametrize("ascii", [True, False])
def test_spelled_in_parts_it_is_the_same_json(depth, ascii):
    from gsd_kernels_serve.spelling import Spelled, spelled

    found = spelled(VALUE, depth, ascii=ascii)
    assert found == json.dumps(VALUE, ensure_ascii=ascii, separators=(",", ":"))
    within = {"a": [{"b": Spelled(found)}]}
    assert json.loads(spelled(within, 4, ascii=ascii)) == {"a": [{"b": VALUE}]}
    with pytest.raises(ValueError):
        spelled({"a": float("nan")}, depth)


def test_a_token_that_is_ruled_out_has_a_number():
    import torch

    from gsd_kernels_serve.logprobs import entries_of

    log_probs = torch.tensor([[0.0, -torch.inf, -torch.inf]], dtype=torch.float32, device="cpu")
    (entry,) = entries_of(log_probs, torch.tensor([1], dtype=torch.int64, device="cpu"), 2)
    assert entry.log_prob == -9999.0 and [log_prob for _, log_prob in entry.top] == [0.0, -9999.0]


NAMED = {
    CHAT: {"logprobs": True, "top_logprobs": 5},
    COMPLETIONS: {"logprobs": 5, "echo": True},
    RESPONSES: {"include": ["message.output_text.logprobs"], "top_logprobs": 5},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("endpoint", fields.ENDPOINTS, ids=row_id)
def test_log_probabilities_are_formed_once_and_beside_the_event_loop(endpoint, stream, server, monkeypatch):
    formed: list[int] = []
    in_loop: list[int] = []

    def watch(name: str) -> None:
        whole = getattr(Pieces, name)

        def counted(self, entries, *rest):
            entries = list(entries)
            formed.append(len(entries))
            try:
                asyncio.get_running_loop()
                in_loop.append(len(entries))
            except RuntimeError:
                pass
            return whole(self, entries, *rest)

        monkeypatch.setattr(Pieces, name, counted)

    watch("chat")
    watch("completion")
    found = server.got(endpoint, stream=stream, **NAMED[endpoint])
    prompt = 9 if endpoint == COMPLETIONS else 0
    assert sum(formed) == 8 + prompt
    parts = stream and endpoint != RESPONSES
    assert max(in_loop, default=0) <= 8 * parts, "but for parts of a text"
    if stream and endpoint == RESPONSES:
        last = json.loads(found[-1])["response"]["output"][0]["content"][0]["logprobs"]
        whole = server.got(endpoint, **NAMED[endpoint])["output"][0]["content"][0]["logprobs"]
        assert last == whole
