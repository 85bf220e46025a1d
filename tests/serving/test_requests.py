"""Beside the server's table: what fields hold within, what contradicts, streams that break, servers without a draft."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from served import ASKED, LENGTH, PROMPT, TOOLS, Server, read, row_id, spoken

from gsd_kernels_cli import demo
from gsd_kernels_hf import generate
from gsd_kernels_serve import fields
from gsd_kernels_serve.fields import CHAT, COMPLETIONS, RESPONSES
from gsd_kernels_serve.logprobs import Pieces, entries_of

pytestmark = pytest.mark.slow


TEXTS = (  # what a request asks for, and how generate is
    ({}, {}),
    ({"seed": 7, "temperature": 0.9}, {"do_sample": True, "temperature": 0.9, "seed": 7}),
    ({"stop": ["nowhere", "("]}, {"stop_strings": ["nowhere", "("]}),
    ({"stop": "self"}, {"stop_strings": "self"}),
)
PROMPTS = ("def add(a, b):\n", "class Queue:\n    def put(self, item):\n")


@pytest.mark.parametrize("endpoint", fields.ENDPOINTS, ids=row_id)
def test_a_text_is_that_of_generate_whole_and_streamed_and_with_others_at_once(endpoint, server):
    target, _, tokenizer = demo.load()
    rows = [(prompt, *row) for prompt in PROMPTS for row in TEXTS if endpoint != RESPONSES or "stop" not in row[0]]

    def asked(prompt: str) -> dict[str, object]:
        return {fields.NEEDED[endpoint]: [{"role": "user", "content": prompt}] if endpoint == CHAT else prompt}

    def ask(prompt: str, named: dict[str, object], stream: bool) -> str:
        named = {**asked(prompt), LENGTH[endpoint]: 24, **named}
        return read(server.got(endpoint, stream=stream, **named))[0]

    with ThreadPoolExecutor(8) as pool:
        texts = [(pool.submit(ask, *row[:2], False), pool.submit(ask, *row[:2], True)) for row in rows]
        found = [(whole.result(), stream.result()) for whole, stream in texts]
    for (prompt, _, options), (whole, stream) in zip(rows, found, strict=True):
        shown = prompt if endpoint == COMPLETIONS else prompt + "\n"
        ids = tokenizer(shown, return_tensors="pt")["input_ids"]
        options = {"max_new_tokens": 24, "do_sample": False, "graph_config": "plain", **options}
        out = generate(target, ids, tokenizer=tokenizer, **options)
        expected = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert whole == stream == expected, (prompt, options)


def test_a_top_k_beyond_all_integers_is_off(server):
    named = {"temperature": 1.5, "seed": 3}
    assert server.text(CHAT, top_k=10**30, **named) == server.text(CHAT, top_k=0, **named)


def test_what_a_generation_config_holds_is_honoured_or_refused_by_name(server):
    for bad in (
        {"temperature": 0.7},  # the request has 0
        {"eos_token_id": "x"},
        {"max_new_tokens": -5},
        {"max_new_tokens": 5},  # the request has max_tokens
        {"repetition_penalty": 3.0},  # and repetition_penalty
        {"do_sample": True},  # and temperature 0
    ):
        refused = server.refusal(COMPLETIONS, generation_config=json.dumps(bad), repetition_penalty=2)
        assert refused["param"] == f"generation_config.{list(bad)[-1]}", refused
    for bad in ({"do_sample": True, "temperature": -1}, {"temperature": 0.7}):  # which is nothing without do_sample
        refused = server.refusal(COMPLETIONS, temperature=..., generation_config=json.dumps(bad))
        assert refused["param"] == "generation_config.temperature"
    for bad in ({"stop_strings": 5}, {"sequence_bias": 5}, {"watermarking_config": {}}):
        for stream in (False, True):
            refused = server.refusal(COMPLETIONS, generation_config=json.dumps(bad), stream=stream)
            assert refused["param"].startswith("generation_config")
    given = json.dumps({"max_new_tokens": 8, "do_sample": False})
    assert server.text(COMPLETIONS, generation_config=given) == server.text(COMPLETIONS)


@pytest.mark.parametrize("endpoint", fields.ENDPOINTS, ids=row_id)
def test_a_length_that_is_named_goes_beyond_the_positions_and_no_other(endpoint, server, caplog):
    positions, needed = server.target.config.max_position_embeddings, fields.NEEDED[endpoint]

    def usage(count: int, **named: object) -> int:
        given = [5] * count if endpoint == COMPLETIONS else spoken(server, count)
        found = server.got(endpoint, **{needed: given, LENGTH[endpoint]: ..., **named})["usage"]
        return found["total_tokens"] - count

    assert usage(positions - 3) == 3
    assert not any("positions" in line for line in caplog.messages)
    assert usage(positions - 3, **{LENGTH[endpoint]: 40}) == 40 and usage(positions + 1, **{LENGTH[endpoint]: 2}) == 2
    assert any(f"beyond the {positions} positions" in line for line in caplog.messages)
    if endpoint != RESPONSES:  # which has no stop strings
        whole = server.got(endpoint, max_tokens=2**31 - 1, stop=server.text(endpoint).split()[0])
        assert whole["choices"][0]["finish_reason"] == "stop"


def test_a_prediction_drafts_where_the_server_decodes_plainly():
    server = Server(speculates=False)
    try:
        named = {"max_tokens": 48, "temperature": 2, "seed": 11}
        plain = server.got(CHAT, **named)
        text = plain["choices"][0]["message"]["content"]
        drafted = server.got(CHAT, prediction={"type": "content", "content": PROMPT + text}, **named)
        again = server.got(CHAT, **named)
    finally:
        server.stop()
    assert text == drafted["choices"][0]["message"]["content"] == again["choices"][0]["message"]["content"]
    assert plain["gsd_kernels"]["tokens_per_step"] == again["gsd_kernels"]["tokens_per_step"] == 1
    assert drafted["gsd_kernels"]["tokens_per_step"] > 1


def test_without_xgrammar_the_extra_is_named(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    refused = server.refusal(CHAT, response_format={"type": "json_object"})
    assert refused["param"] == "response_format" and ".[grammar]" in refused["message"]


def test_an_answer_can_be_handed_back(server):
    said = server.got(CHAT)["choices"][0]["message"]
    server.got(CHAT, messages=[*ASKED[CHAT]["messages"], said, {"role": "user", "content": "x"}])
    told = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    output = server.got(RESPONSES, **told)["output"]
    server.got(RESPONSES, input=[{"role": "user", "content": PROMPT}, *output, {"role": "user", "content": "x"}])
    cached = [{"type": "text", "text": PROMPT, "cache_control": {"type": "ephemeral"}}]
    server.got(CHAT, messages=[{"role": "user", "content": cached}])


def test_a_forced_call_that_was_cut_can_be_handed_back(server):
    pytest.importorskip("xgrammar")
    asked = ASKED[CHAT]["messages"]
    choice = server.got(CHAT, tools=TOOLS, tool_choice="required", max_tokens=20)["choices"][0]
    assert choice["finish_reason"] == "length"
    call = {"id": "a", "type": "function", "function": {"name": "paint", "arguments": '{"colour": "re'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    back = {"messages": [*asked, said, {"role": "user", "content": "x"}]}
    written = {"messages": [*asked, {"role": "assistant", "content": 'paint: {"colour": "re'}, back["messages"][-1]]}
    assert server.text(CHAT, **back) == server.text(CHAT, **written)


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_tokens_are_told_by_their_bytes(kind):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if kind == "bytes":
        vocabulary = {"\u0120a": 0, "\u00c3": 1, "\u00a9": 2, "<s>": 3}
        inner = Tokenizer(models.BPE(vocabulary, []))
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    else:
        vocabulary = {"\u2581a": 0, "<0xC3>": 1, "<0xA9>": 2, "<s>": 3}
        inner = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        inner.decoder = decoders.Sequence(steps)
    pieces = Pieces(PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>"))
    assert [pieces.bytes_of(token) for token in range(5)] == [b" a", b"\xc3", b"\xa9", b"<s>", b""]
    assert [pieces.text_of(token) for token in range(3)] == [" a", "bytes:\\xc3", "bytes:\\xa9"]


def test_a_token_that_is_ruled_out_has_a_number_of_json():
    log_probs = torch.tensor([[0.0, -torch.inf, -torch.inf]], dtype=torch.float32, device="cpu")
    (entry,) = entries_of(log_probs, torch.tensor([1], dtype=torch.int64, device="cpu"), 2)
    assert entry.log_prob == -9999.0 and [log_prob for _, log_prob in entry.top] == [0.0, -9999.0]


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS], ids=row_id)
def test_an_error_behind_the_first_token_is_the_last_event(endpoint, server, monkeypatch):
    from gsd_kernels_serve.calls import Writer

    def put(self, value, whole=Writer.put):
        if len(self.call.entries) >= 3:
            raise ValueError("the text broke")
        whole(self, value)

    monkeypatch.setattr(Writer, "put", put)
    status, events = server.raw(endpoint, {**ASKED[endpoint], "stream": True, "temperature": 0})
    assert status == 200 and len(events) > 1 and "[DONE]" not in events
    assert json.loads(events[0])["choices"] and json.loads(events[-1])["error"]["message"] == "the text broke"
