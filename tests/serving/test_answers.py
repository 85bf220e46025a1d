"""What is answered: texts as generate's, logprobs, parts as models of a known kind write them, and items."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from served import ASKED, LENGTH, OFFERED, PROMPT, QWEN, SCHEMA, TOOLS, Server, read, row_id, spoken
from tokenizers import decoders
from transformers.cli.serving import utils

from gsd_kernels_cli import demo
from gsd_kernels_hf import generate
from gsd_kernels_serve import fields
from gsd_kernels_serve.answers import Answers
from gsd_kernels_serve.fields import CHAT, COMPLETIONS, RESPONSES
from gsd_kernels_serve.logprobs import Pieces, entries_of
from gsd_kernels_serve.text_options import TextOptions

pytestmark = pytest.mark.slow


# ---- Beside the server's table: what fields hold within, what contradicts, streams that break, servers without a draft


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
    rows = [
        row
        for row in zip(PROMPTS * 2, *zip(*TEXTS, strict=True), strict=True)
        if endpoint != RESPONSES or "stop" not in row[1]
    ]

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


# ---- Answers as models of a known kind write them: calls, calls that nobody can read, and white space without end


FALLBACKS = {kind: template for kinds, template in utils._RESPONSE_TEMPLATE_FALLBACKS.items() for kind in kinds}
QWEN_3_5 = {**FALLBACKS["qwen3_5"], "start_anchor": QWEN["start_anchor"]}
THINKS = {"reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"}, **QWEN["fields"]}
THINKING = {**QWEN, "fields": THINKS}
CALL = '<tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n</tool_call>'
PAINT = ("paint", '{"colour": "red"}')


@pytest.fixture
def says(server, monkeypatch):
    """Have the model, of a kind whose calls transformers knows, write a text; a function of it."""
    monkeypatch.setattr(server.tokenizer, "response_template", QWEN, raising=False)

    def say(text: str) -> int:
        ids = [*server.tokenizer(text, add_special_tokens=False)["input_ids"], server.tokenizer.eos_token_id]

        def script(prompt: int):
            def next_token(input_ids, scores):  # [1, n], [1, V]
                token = ids[min(input_ids.shape[1] - prompt, len(ids) - 1)]
                return torch.full_like(scores, float("-inf")).index_fill(
                    1, torch.tensor([token], dtype=torch.int64, device=scores.device), 0.0
                )

            return [next_token]

        monkeypatch.setattr(TextOptions, "processors", lambda _, prompt: script(prompt))
        return len(ids)

    return say


def whole(server, endpoint: str, **named: object) -> tuple[str, list[tuple[str, str]]]:
    """An answer's text and its calls."""
    return read(server.got(endpoint, **named))


def streamed(server, endpoint: str, **named: object) -> tuple[str, list[tuple[str, str]]]:
    """The same, of a stream."""
    return read(server.got(endpoint, stream=True, **named))


def asked(endpoint: str, length: int) -> dict[str, object]:
    return {"tools": OFFERED[endpoint], LENGTH[endpoint]: length}


QWEN_CALL = "<tool_call>\n<function=paint>\n<parameter=colour>\nred\n</parameter>\n</function>\n</tool_call>"
CUT = "\N{ZERO WIDTH SPACE}"
"""Where the length ends a text that goes on."""

READ = [  # how a kind of model writes, what it writes, the text that is told of it (None: all of it) and the calls
    *((QWEN, text, None, []) for text in (
        '<tool_call>\n{"name": "paint", "argum' + CUT,
        "Use <tool_call>...</tool_call> marks.",
        'So: <tool_call>{"name": "paint"}</tool_call>',
        "So: <tool_call>[1]</tool_call>",
        'So: <tool_call>{"name": 5, "arguments": {}}</tool_call> it is',
        f"<tool_call>x</tool_call> or {CALL}",
        "<<tool_call>{bad</tool_call>",
        "a< <tool_call>{bad</tool_call>",
        "a" + "\n" * 40 + "<tool_call>bad</tool_call>",
        'So: <tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>',
        'So: <tool_call>{"name": "paint", "arguments": "\\ud83d"}</tool_call>',
    )),
    (QWEN, f"So: {CALL} and <tool_call>[1]</tool_call>", "So: and <tool_call>[1]</tool_call>", [PAINT]),
    (QWEN, f"So: {CALL}\n{CALL}", "So:", [PAINT, PAINT]),
    (QWEN, f"Hello {CALL} Bye", "Hello Bye", [PAINT]),
    (QWEN, f"I check.\n{CALL}\n{CUT}", "I check.", [PAINT]),
    *((QWEN_3_5, f"So: {QWEN_CALL[:-gone]}{CUT}", None, []) for gone in (1, 12, 13, 25, 45, 60, 70, 72)),
    (QWEN_3_5, f"So: {QWEN_CALL}{CUT}", "So:", [PAINT]),
    *(({**THINKING, "start_anchor": anchor}, f"So: {CALL}", "So:", [PAINT]) for anchor in ("<|nowhere|>", "def")),
]  # fmt: skip


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES], ids=row_id)
@pytest.mark.parametrize(("template", "text", "told", "calls"), READ, ids=range(len(READ)))
def test_a_call_is_told_as_one_and_text_as_it_was_written(
    endpoint, template, text, told, calls, server, says, monkeypatch
):
    """A call that cannot be read is text; of a prompt that begins no answer, or one that cannot be read, nothing is."""
    monkeypatch.setattr(server.tokenizer, "response_template", template)
    length = says(text.removesuffix(CUT)) - text.endswith(CUT)
    asks = asked(endpoint, length)
    if template["start_anchor"] != QWEN["start_anchor"]:
        prompt = "Call it: def <tool_call>x</tool_call>, <think>."
        asks |= {"messages": [{"role": "user", "content": prompt}]} if endpoint == CHAT else {"input": prompt}
    expected = (text.removesuffix(CUT) if told is None else told, calls)
    for found, named in (whole(server, endpoint, **asks), streamed(server, endpoint, **asks)):
        assert (found.rstrip(), named) == (expected[0].rstrip(), calls)


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES], ids=row_id)
def test_a_text_that_ends_within_a_character_is_told_to_its_end(endpoint, server, says):
    asks = asked(endpoint, says("x \u20ac") - 2)
    assert streamed(server, endpoint, **asks) == whole(server, endpoint, **asks) == ("x \ufffd", [])


def test_a_thought_that_a_prompt_begins_begins_with_what_is_thought(server, says, monkeypatch):
    monkeypatch.setattr(server.tokenizer, "response_template", THINKING)
    named = {"messages": [{"role": "user", "content": "x:\n\n<think>\n"}], **asked(CHAT, says("hm</think>So"))}
    message = server.got(CHAT, **named)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "So")
    events = [json.loads(event) for event in server.got(CHAT, stream=True, **named)[:-1]]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    thoughts = [delta["reasoning_content"] for delta in deltas if delta.get("reasoning_content")]
    assert thoughts[0].strip() and "".join(thoughts) == "hm"


def test_a_forced_call_is_all_of_a_stream_behind_a_thought(server, says, monkeypatch):
    monkeypatch.setattr(server.tokenizer, "response_template", THINKING)
    text = '{"colour": "red"}'
    named = {**asked(RESPONSES, says(text)), "tool_choice": {"type": "function", "name": "paint"}}
    events = [json.loads(e) for e in server.got(RESPONSES, stream=True, input="x:\n\n<think>hm", **named)]
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["function_call"]


def test_an_answer_held_to_a_schema_is_content_whatever_the_prompt_has_begun(server, monkeypatch):
    pytest.importorskip("xgrammar")
    monkeypatch.setattr(server.tokenizer, "response_template", THINKING)
    thinking = [{"role": "user", "content": "x:\n\n<think>\n"}]
    form = {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA}}
    message = server.got(CHAT, messages=thinking, response_format=form, max_tokens=64)["choices"][0]["message"]
    assert json.loads(message["content"]) and "reasoning_content" not in message


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_calls_of_different_choices_have_names_of_their_own(stream, server, says):
    named = {**asked(CHAT, says(f"{CALL}\n{CALL}")), "n": 2}
    found = server.got(CHAT, stream=stream, **named)
    parts = (json.loads(event) for event in found[:-1]) if stream else [found]
    choices = [choice.get("delta") or choice.get("message", {}) for part in parts for choice in part["choices"]]
    names = [call["id"] for choice in choices for call in choice.get("tool_calls") or []]
    assert len(names) == len(set(names)) == 4


# ---- the items of /v1/responses


ITEMS = {
    "": ["message"],
    "Plain.": ["message"],
    CALL: ["function_call"],
    f"{CALL}\n{CALL}": ["function_call", "function_call"],
    f"So: {CALL}": ["message", "function_call"],
    f"{CALL} so": ["function_call", "message"],
    f"<think>hm</think>{CALL}": ["reasoning", "function_call"],
    f"<think>hm</think>So: {CALL}<think>hm!</think> and {CALL} done": (
        ["reasoning", "message", "function_call", "reasoning", "message", "function_call", "message"]
    ),
}


@pytest.mark.parametrize("top", [None, 1], ids=["bare", "logprobs"])
@pytest.mark.parametrize("text", ITEMS)
def test_the_items_of_a_stream_come_once_each_and_in_their_order(text, top, server, says, monkeypatch):
    monkeypatch.setattr(server.tokenizer, "response_template", THINKING)
    named = {} if top is None else {"include": ["message.output_text.logprobs"], "top_logprobs": top}
    named |= {"model": "small", "input": PROMPT, "temperature": 0, **asked(RESPONSES, says(text))}
    with server.client.responses.stream(**named) as events:
        found = list(events)
        final = events.get_final_response()
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert [item.type for item in final.output] == ITEMS[text]
    done = [event.item for event in found if event.type == "response.output_item.done"]
    assert sorted(item.id for item in done) == sorted({item.id for item in final.output})
    pieces = {event.output_index: "" for event in found if event.type == "response.output_item.added"}
    tokens = {index: 0 for index in pieces}
    for event in found:
        if event.type == "response.output_text.delta":
            pieces[event.output_index] += event.delta
            tokens[event.output_index] += len(event.logprobs or ())
    for index, item in enumerate(final.output):
        if item.type == "message":
            assert item.content[0].text == pieces[index] and len(item.content[0].logprobs or ()) == tokens[index]
    assert final.output_text == "".join(pieces.values())
    answer = server.client.responses.create(**named)
    assert sum(item.type == "function_call" for item in answer.output) == ITEMS[text].count("function_call")


# ---- white space without end


@pytest.mark.parametrize("template", utils._RESPONSE_TEMPLATE_FALLBACKS.values(), ids=lambda value: "")
def test_no_pattern_of_a_template_looks_at_white_space_again_and_again(template, server, monkeypatch):
    prompt = server.tokenizer("<|im_start|>assistant\n")["input_ids"]
    text = f"<tool_call>\n<function=paint>\n<parameter=colour>{' ' * 30_000}red</function></tool_call>{' ' * 30_000}."
    ids = server.tokenizer(text, add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(server.tokenizer, "response_template", template, raising=False)
    Answers(server.tokenizer, server.target).read(ids, prompt, [])  # which takes an hour where one does


# ---- texts behind a prompt


@pytest.fixture
def stripping(server):
    """Its tokenizer takes the first space off what it decodes, as SentencePiece's do."""
    inner = server.tokenizer._tokenizer
    own, inner.decoder = inner.decoder, decoders.Sequence([inner.decoder, decoders.Strip(" ", 1, 0)])
    yield server
    inner.decoder = own


@pytest.mark.parametrize("prompt", ["def", "", [4], [1, 4, 5], "x \u20ac"])
@pytest.mark.parametrize("text", [" world is", "s", "  x", " \u20ac \u20ac"])
def test_a_completion_goes_on_where_its_prompt_ends(prompt, text, stripping, says):
    named = {"prompt": prompt, "max_tokens": says(text), "logprobs": 0}
    expected = text.removeprefix(" ") if prompt == "" else text  # behind a special token alone a text begins
    found = stripping.got(COMPLETIONS, **named)["choices"][0]
    assert (found["text"], found["finish_reason"]) == (expected, "stop")
    assert streamed(stripping, COMPLETIONS, **named) == (expected, [])
    shown = stripping.text(COMPLETIONS, echo=True, **named)
    assert shown.endswith(expected) and (not isinstance(prompt, str) or shown.endswith(prompt + expected))


def test_a_prompt_that_ends_within_a_character_is_completed(server, says):
    euro = server.tokenizer("\u20ac", add_special_tokens=False)["input_ids"]
    assert len(euro) > 1
    length = says(" x")
    given = {"prompt": [5, *euro[:-1]], "max_tokens": length}
    assert whole(server, COMPLETIONS, **given) == streamed(server, COMPLETIONS, **given) == (" x", [])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_what_ends_a_thought_before_a_call_that_is_cut_is_no_text(size, server, monkeypatch):
    monkeypatch.setattr(server.tokenizer, "response_template", THINKING, raising=False)
    answer = Answers(server.tokenizer, server.target).begin(server.tokenizer(":\n\n")["input_ids"], [])
    cut = '\n\n<tool_call>\n{"name": "f", "argu'
    text = f"<think>abc</think>{cut}"
    parts = [part for at in range(0, len(text), size) for part in answer.feed(text[at : at + size])] + answer.end()
    assert "".join(part for part in parts if type(part) is str) == cut
    assert "".join(part for part in parts if type(part) is not str) == "abc"
