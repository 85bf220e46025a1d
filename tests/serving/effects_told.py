"""What honoured fields do, seen in answers: where texts end, how many there are, and what is told of them."""

from __future__ import annotations

import json
import math
from itertools import chain

import torch
from effects import effect
from served import PROMPT, read

from gsd_kernels_serve.fields import CHAT, COMPLETIONS, RESPONSES


@effect("max_tokens", CHAT, COMPLETIONS)
@effect("max_completion_tokens", CHAT)
def length(server, endpoint, names=("max_tokens", "max_completion_tokens")):
    for name in names[: 2 if endpoint == CHAT else 1]:
        found = server.got(endpoint, **{"max_tokens": ..., name: 3})
        assert found["usage"]["completion_tokens"] == 3 and found["choices"][0]["finish_reason"] == "length"


@effect("max_output_tokens", RESPONSES)
def max_output_tokens(server, endpoint):
    found = server.got(endpoint, max_output_tokens=3)
    assert found["usage"]["output_tokens"] == 3 and found["status"] == "incomplete"


@effect("stop", CHAT, COMPLETIONS)
def stop(server, endpoint):
    whole = server.text(endpoint)
    word = whole.split()[0]
    for given in (word, ["nowhere", word]):
        found = server.got(endpoint, stop=given)
        assert found["choices"][0]["finish_reason"] == "stop" and found["usage"]["completion_tokens"] < 8
    assert server.text(endpoint, stop=[]) == whole


@effect("n", CHAT, COMPLETIONS)
def n(server, endpoint):
    found = server.got(endpoint, n=2, temperature=2, seed=4)
    alone = [server.got(endpoint, temperature=2, seed=number)["choices"][0] for number in (4, 5)]
    keys = ("message", "text")
    assert [[c.get(k) for k in keys] for c in found["choices"]] == [[c.get(k) for k in keys] for c in alone]
    assert found["usage"]["completion_tokens"] == 16
    events = server.got(endpoint, n=2, temperature=2, seed=4, stream=True)
    assert [read(events, index) for index in (0, 1)] == [read(found, index) for index in (0, 1)]


@effect("best_of", COMPLETIONS)
def best_of(server, endpoint):
    assert len(server.got(endpoint, n=2, best_of=2)["choices"]) == 2


@effect("prediction", CHAT)
def prediction(server, endpoint):
    text = server.text(endpoint, max_tokens=48, temperature=2, seed=11)

    steps = [
        server.got(endpoint, max_tokens=48, temperature=2, seed=11, prediction=given)["gsd_kernels"]["tokens_per_step"]
        for given in (None, {"type": "content", "content": PROMPT + text}, {"type": "content", "content": "zzz"})
    ]
    assert steps[1] > max(steps[0], steps[2])
    parts = {"type": "content", "content": [{"type": "text", "text": text}]}
    assert server.text(endpoint, max_tokens=48, temperature=2, seed=11, prediction=parts) == text


@effect("stream")
def stream(server, endpoint):
    events = server.got(endpoint, stream=True)
    if endpoint == RESPONSES:
        found = [json.loads(event) for event in events]
        assert found[-1]["type"] == "response.incomplete"
        response = found[-1]["response"]
        assert response["gsd_kernels"]["new_tokens"] == response["usage"]["output_tokens"] == 8
    else:
        found = [json.loads(event)["choices"][0] for event in events[:-1]]
        assert events[-1] == "[DONE]" and [c["finish_reason"] for c in found if c["finish_reason"]] == ["length"]
        assert json.loads(events[-2])["gsd_kernels"]["new_tokens"] == 8
    assert read(events)[0] == server.text(endpoint) == server.text(endpoint, stream=False)


@effect("stream_options", CHAT, COMPLETIONS)
def stream_options(server, endpoint):
    def events(**options):
        return [json.loads(e) for e in server.got(endpoint, stream=True, stream_options=options)[:-1]]

    with_usage, without = events(include_usage=True), events(include_usage=False, include_obfuscation=False)
    assert with_usage[-1]["choices"] == [] and with_usage[-1]["usage"]["completion_tokens"] == 8
    assert not any(event.get("usage") for event in [*with_usage[:-1], *without])


@effect("logprobs", CHAT, COMPLETIONS)
@effect("top_logprobs", CHAT)
def logprobs(server, endpoint):
    named = {"logprobs": True, "top_logprobs": 2} if endpoint == CHAT else {"logprobs": 2}
    choice = server.got(endpoint, **named)["choices"][0]
    found = choice["logprobs"]
    text = server.text(endpoint)
    ids = server.tokenizer(PROMPT + ("\n" if endpoint == CHAT else ""), return_tensors="pt")["input_ids"]
    answer = server.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = server.target(torch.cat([ids, answer], 1)).logits[0, ids.shape[1] - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, answer[0, :, None])[:, 0].tolist()
    if endpoint == CHAT:
        assert "".join(one["token"] for one in found["content"]) == text
        assert b"".join(bytes(one["bytes"]) for one in found["content"]).decode() == text
        got = [one["logprob"] for one in found["content"]]
        assert all(len(one["top_logprobs"]) == 2 for one in found["content"])
        assert all(one["top_logprobs"][0]["token"] == one["token"] for one in found["content"])
        assert server.got(endpoint)["choices"][0].get("logprobs") is None
    else:
        assert "".join(found["tokens"]) == text
        assert [text[a:].startswith(t) for a, t in zip(found["text_offset"], found["tokens"], strict=True)]
        got = found["token_logprobs"]
        assert all(len(top) == 2 for top in found["top_logprobs"])
    assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(got, expected, strict=True))
    events = [json.loads(event)["choices"][0] for event in server.got(endpoint, stream=True, **named)[:-1]]
    parts = [event["logprobs"] for event in events if event.get("logprobs")]
    joined: dict[str, list] = {}
    for part in parts:
        for key, values in part.items():
            joined[key] = joined.get(key, []) + (values or [])
    assert {key: value for key, value in joined.items() if value} == {k: v for k, v in found.items() if v}


@effect("include", RESPONSES)
@effect("top_logprobs", RESPONSES)
def logprobs_of_responses(server, endpoint):
    named = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (item,) = server.got(endpoint, **named)["output"]
    expected = server.got(CHAT, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    found = item["content"][0]["logprobs"]
    assert found == expected
    events = [json.loads(event) for event in server.got(endpoint, stream=True, **named)]
    parts = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert list(chain.from_iterable(parts)) == found == events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert not server.got(endpoint, include=[])["output"][0]["content"][0].get("logprobs")


@effect("echo", COMPLETIONS)
def echo(server, endpoint):
    whole = PROMPT + server.text(endpoint)
    assert server.text(endpoint, echo=True) == whole
    assert read(server.got(endpoint, echo=True, stream=True))[0] == whole
    assert server.text(endpoint, echo=True, max_tokens=0) == PROMPT
    choice = server.got(endpoint, echo=True, logprobs=2, max_tokens=3)["choices"][0]
    found, ids = choice["logprobs"], server.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = server.target(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    length = ids.shape[1]
    assert found["token_logprobs"][0] is None is found["top_logprobs"][0]
    for got, log_prob, top in zip(found["token_logprobs"][1:length], expected, found["top_logprobs"][1:], strict=False):
        assert math.isclose(got, log_prob, abs_tol=1e-4) and 2 <= len(top) <= 3
    first, *others = found["tokens"]
    assert len(others) == length + 2 and first == "<|bos|>" and "".join(others) == choice["text"]
    places = zip(found["text_offset"][1:], others, strict=True)
    assert all(choice["text"][at:].startswith(token) for at, token in places)
    after = server.got(endpoint, logprobs=2, max_tokens=3)["choices"][0]["logprobs"]
    assert found["token_logprobs"][length:] == after["token_logprobs"]
    alone = server.got(endpoint, echo=True, logprobs=2, max_tokens=0, prompt=ids[0].tolist())
    assert alone["choices"][0]["finish_reason"] == "length" and alone["usage"]["completion_tokens"] == 0
    assert alone["choices"][0]["logprobs"]["token_logprobs"] == found["token_logprobs"][:length]
    for most in (0, 3):
        parts: dict[str, list] = {}
        for event in server.got(endpoint, echo=True, logprobs=2, max_tokens=most, stream=True, n=2)[:-1]:
            (told,) = json.loads(event)["choices"]
            if told["index"] == 1:
                for key, values in (told["logprobs"] or {}).items():
                    parts[key] = parts.get(key, []) + values
        assert parts["token_logprobs"] == found["token_logprobs"][: length + most]
        assert parts["text_offset"] == found["text_offset"][: length + most]


@effect("metadata", RESPONSES)
def metadata(server, endpoint):
    assert server.got(endpoint, metadata={"a": "b"})["metadata"] == {"a": "b"}
