"""Answers as models of a known kind write them: calls, calls that nobody can read, and white space without end."""

from __future__ import annotations

import json

import pytest
import regex
import torch
from served import PROMPT, QWEN, SCHEMA, TOOL, TOOLS, row_id
from tokenizers import decoders
from transformers.cli.serving import utils

from gsd_kernels_serve.answers import Answers, bounded
from gsd_kernels_serve.fields import CHAT, COMPLETIONS, RESPONSES
from gsd_kernels_serve.text_options import TextOptions

pytestmark = pytest.mark.slow

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
    found = server.got(endpoint, **named)
    if endpoint == CHAT:
        message = found["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls") or []]
        text = message["content"]
    else:
        calls = [item for item in found["output"] if item["type"] == "function_call"]
        text = "".join(item["content"][0]["text"] for item in found["output"] if item["type"] == "message")
    return text, [(call["name"], call["arguments"]) for call in calls]


def streamed(server, endpoint: str, **named: object) -> tuple[str, list[tuple[str, str]]]:
    """The same, of a stream."""
    text, calls = "", []
    for event in server.got(endpoint, stream=True, **named):
        data = json.loads(event) if event != "[DONE]" else {}
        assert "error" not in data and data.get("type") != "error", data
        if data.get("choices"):
            delta = data["choices"][0]["delta"]
            text += delta.get("content") or ""
            calls += [(call["function"]["name"], call["function"]["arguments"]) for call in delta.get("tool_calls", [])]
        elif data.get("type") == "response.output_text.delta":
            text += data["delta"]
        elif data.get("type") == "response.function_call_arguments.done":
            calls.append((data["name"], data["arguments"]))
    return text, calls


def asked(endpoint: str, length: int) -> dict[str, object]:
    tools = TOOLS if endpoint == CHAT else [{"type": "function", "strict": None, **TOOL}]
    return {"tools": tools, "max_tokens" if endpoint == CHAT else "max_output_tokens": length}


UNREAD = {
    "cut": '<tool_call>\n{"name": "paint", "argum',
    "told": "Use <tool_call>...</tool_call> marks.",
    "without arguments": 'So: <tool_call>{"name": "paint"}</tool_call>',
    "a list": "So: <tool_call>[1]</tool_call>",
    "no name": 'So: <tool_call>{"name": 5, "arguments": {}}</tool_call> it is',
    "behind a call": f"So: {CALL} and <tool_call>[1]</tool_call>",
    "before a call": f"<tool_call>x</tool_call> or {CALL}",
    "behind a bracket": "<<tool_call>{bad</tool_call>",
    "behind a bracket and a space": "a< <tool_call>{bad</tool_call>",
    "behind many lines": "a" + "\n" * 40 + "<tool_call>bad</tool_call>",
    "half a character": 'So: <tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>',
    "half a character within": 'So: <tool_call>{"name": "paint", "arguments": "\\ud83d"}</tool_call>',
}


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES], ids=row_id)
@pytest.mark.parametrize("name", UNREAD)
def test_a_call_that_cannot_be_read_is_text(name, endpoint, server, says):
    text = UNREAD[name]
    length = says(text) - (name == "cut")
    found = whole(server, endpoint, **asked(endpoint, length))
    first = name == "behind a call"
    assert found == (text.replace(f" {CALL}", "") if first else text, [PAINT] * first)
    assert streamed(server, endpoint, **asked(endpoint, length)) == found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("name", UNREAD)
def test_nothing_of_a_text_is_lost_whatever_its_pieces(name, size, server, monkeypatch):
    monkeypatch.setattr(server.tokenizer, "response_template", QWEN, raising=False)
    answer = Answers(server.tokenizer, server.target).begin(server.tokenizer(":\n\n")["input_ids"], [])
    text = f"x <y> {UNREAD[name]} z"
    parts = [part for at in range(0, len(text), size) for part in answer.feed(text[at : at + size])] + answer.end()
    told = [part if isinstance(part, str) else f" {CALL}" for part in parts]
    assert "".join(told) == text and len(parts) - len([part for part in parts if isinstance(part, str)]) == (
        name == "behind a call"
    )


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_what_ends_a_thought_before_a_call_that_is_cut_is_no_text(size, server, monkeypatch):
    monkeypatch.setattr(server.tokenizer, "response_template", THINKING, raising=False)
    answer = Answers(server.tokenizer, server.target).begin(server.tokenizer(":\n\n")["input_ids"], [])
    cut = '\n\n<tool_call>\n{"name": "f", "argu'
    text = f"<think>abc</think>{cut}"
    parts = [part for at in range(0, len(text), size) for part in answer.feed(text[at : at + size])] + answer.end()
    assert "".join(part for part in parts if type(part) is str) == cut
    assert "".join(part for part in parts if type(part) is not str) == "abc"


QWEN_CALL = "<tool_call>\n<function=paint>\n<parameter=colour>\nred\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES], ids=row_id)
@pytest.mark.parametrize("gone", [0, 1, 12, 13, 25, 45, 60, 70, 72])
def test_a_cut_call_of_tags_is_text(gone, endpoint, server, says, monkeypatch):
    """It was told as a whole one, with those arguments that it had got to."""
    monkeypatch.setattr(server.tokenizer, "response_template", QWEN_3_5)
    text = f"So: {QWEN_CALL[: len(QWEN_CALL) - gone]}"
    length = says(text) - 1
    expected = (text.rstrip(), []) if gone else ("So:", [PAINT])
    assert whole(server, endpoint, **asked(endpoint, length)) == expected
    told, calls = streamed(server, endpoint, **asked(endpoint, length))
    assert (told.rstrip(), calls) == expected


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES], ids=row_id)
def test_text_round_a_call_is_told_as_a_whole(endpoint, server, says):
    """What came before a call made room for what came behind it."""
    length = says(f"Hello {CALL} Bye")
    assert whole(server, endpoint, **asked(endpoint, length)) == ("Hello Bye", [PAINT])
    assert streamed(server, endpoint, **asked(endpoint, length)) == ("Hello Bye", [PAINT])
    length = says(f"I check.\n{CALL}\n") - 1
    found, calls = whole(server, endpoint, **asked(endpoint, length))
    assert (found, calls) == ("I check.", [PAINT])


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES], ids=row_id)
@pytest.mark.parametrize("anchor", ["<|nowhere|>", "def"], ids=["absent", "unread"])
def test_of_a_prompt_that_begins_no_answer_nothing_is_told(anchor, endpoint, server, says, monkeypatch):
    """transformers' parser takes all of it for the beginning of an answer, which it may not be able to read."""
    monkeypatch.setattr(server.tokenizer, "response_template", {**THINKING, "start_anchor": anchor})
    prompt = "Call it: def <tool_call>x</tool_call>, <think>."
    asks = {"messages": [{"role": "user", "content": prompt}]} if endpoint == CHAT else {"input": prompt}
    length = says(f"So: {CALL}")
    assert whole(server, endpoint, **asks, **asked(endpoint, length)) == ("So:", [PAINT])
    assert streamed(server, endpoint, **asks, **asked(endpoint, length)) == ("So:", [PAINT])


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


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES], ids=row_id)
def test_a_text_that_ends_within_a_character_is_told_to_its_end(endpoint, server, says):
    says("x \u20ac")
    length = len(server.tokenizer("x \u20ac", add_special_tokens=False)["input_ids"]) - 1
    assert streamed(server, endpoint, **asked(endpoint, length)) == ("x \ufffd", [])
    assert whole(server, endpoint, **asked(endpoint, length)) == ("x \ufffd", [])


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES], ids=row_id)
def test_calls_that_can_be_read_are_calls(endpoint, server, says):
    length = says(f"So: {CALL}\n{CALL}")
    assert whole(server, endpoint, **asked(endpoint, length)) == ("So:", [PAINT, PAINT])
    assert streamed(server, endpoint, **asked(endpoint, length)) == ("So:", [PAINT, PAINT])


def test_one_text_that_cannot_be_read_takes_none_of_its_fellows(server, says):
    says(UNREAD["told"])
    found = server.got(CHAT, **asked(CHAT, 60), n=2)
    assert [choice["message"]["content"] for choice in found["choices"]] == [UNREAD["told"]] * 2


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


@pytest.mark.parametrize(
    "pattern", [r"\s*<a>", r"\\s*<a>", r"[\s*]<a>", r"\s+<a>\s*(?P<value>.*?)\s*</a>", r"\w+\s*+<a>"]
)
def test_patterns_with_bounded_spaces_find_what_they_found(pattern):
    for text in (
        "<a>x</a>",
        " \n <a> x \n</a>",
        "\\s<a>",
        "*<a>",
        "a  <a>",
        f"{' ' * 20}<a>{' ' * 90}x y{' ' * 20}</a>",
    ):
        found, expected = (regex.search(one, text, regex.DOTALL) for one in (bounded(pattern), pattern))
        assert (found and (found.span(), found.groups())) == (expected and (expected.span(), expected.groups())), text


def test_no_pattern_of_a_template_looks_at_white_space_again_and_again(server, monkeypatch):
    prompt = server.tokenizer("<|im_start|>assistant\n")["input_ids"]
    text = f"<tool_call>\n<function=paint>\n<parameter=colour>{' ' * 30_000}red</function></tool_call>{' ' * 30_000}."
    ids = server.tokenizer(text, add_special_tokens=False)["input_ids"]
    for template in utils._RESPONSE_TEMPLATE_FALLBACKS.values():
        monkeypatch.setattr(server.tokenizer, "response_template", template, raising=False)
        answers = Answers(server.tokenizer, server.target)
        assert not regex.search(r"\\s\*(?!\+)", repr(answers.response_template).replace("\\\\", "\\"))
        answers.read(ids, prompt, [])  # which takes an hour where one does
        assert template == answers.written, "the tokenizer's own stays"


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
    events = [json.loads(event)["choices"][0] for event in stripping.got(COMPLETIONS, stream=True, **named)[:-1]]
    assert "".join(event["text"] for event in events) == expected
    shown = stripping.text(COMPLETIONS, echo=True, **named)
    assert shown.endswith(expected) and (not isinstance(prompt, str) or shown.endswith(prompt + expected))


def test_a_prompt_that_ends_within_a_character_is_completed(server, says):
    euro = server.tokenizer("\u20ac", add_special_tokens=False)["input_ids"]
    assert len(euro) > 1
    length = says(" x")
    given = {"prompt": [5, *euro[:-1]], "max_tokens": length}
    assert server.text(COMPLETIONS, **given) == " x"
    pieces = server.got(COMPLETIONS, stream=True, **given)[:-1]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in pieces) == " x"
