"""What honoured fields do, seen in answers: those that say what is asked, and which text it gets."""

from __future__ import annotations

import json
import typing
from functools import partial

import pytest
import torch
from served import LENGTH, OFFERED, PROMPT, SCHEMA, Server, read, tokens
from transformers import LogitsProcessorList

from gsd_kernels_hf import generate
from gsd_kernels_serve import fields
from gsd_kernels_serve.fields import BOTH, CHAT, COMPLETIONS, RESPONSES, TEMPLATED
from gsd_kernels_serve.processors import Grammar, Grammars

EFFECTS: dict[tuple[str, str], typing.Callable[[Server, str], None]] = {}
"""Of honoured fields by endpoint: what shows that they act."""


def effect(name: str, *endpoints: str):
    def keep(test):
        EFFECTS.update({(endpoint, name): test for endpoint in endpoints or fields.ENDPOINTS})
        return test

    return keep


@effect("model")
def model(server, endpoint):
    assert server.got(endpoint)["model"] == "small"
    status, found = server.ask(endpoint, model="other")
    assert status == 404 and found["error"]["param"] == "model"


@effect("messages", CHAT)
def messages(server, endpoint):
    two = [{"role": "user", "content": "import os"}, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}]
    assert server.got(endpoint, messages=two)["usage"]["prompt_tokens"] == tokens(server, "import os\nx\n")


@effect("prompt", COMPLETIONS)
def prompt(server, endpoint):
    other = "import os\n"
    texts = [server.text(endpoint, prompt=one) for one in (PROMPT, other)]
    ids = [server.tokenizer(one)["input_ids"] for one in (PROMPT, other)]
    assert server.text(endpoint, prompt=ids[0]) == texts[0]
    for given in ([PROMPT, other], ids):
        found = server.got(endpoint, prompt=given)
        assert [choice["text"] for choice in found["choices"]] == texts
        assert [choice["index"] for choice in found["choices"]] == [0, 1] and len(found["gsd_kernels"]) == 2
        assert found["usage"]["prompt_tokens"] == sum(map(len, ids)) and found["usage"]["completion_tokens"] == 16


@effect("input", RESPONSES)
def input_(server, endpoint):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "import os"}]},
        {"type": "function_call", "call_id": "1", "name": "paint", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
    ]
    assert server.got(endpoint, input=items)["usage"]["input_tokens"] == tokens(
        server, "import os\n# calls paint\n\nx\n"
    )


@effect("instructions", RESPONSES)
def instructions(server, endpoint):
    spoken = [{"role": "developer", "content": "import re"}, {"role": "user", "content": PROMPT}]
    found = server.got(endpoint, instructions="import os", input=spoken)
    both = "system import os\nsystem import re\n" + PROMPT + "\n"
    assert found["usage"]["input_tokens"] == tokens(server, both)
    found = server.got(endpoint, instructions="import os")
    assert found["usage"]["input_tokens"] == tokens(server, "system import os\n" + PROMPT + "\n")
    assert found["instructions"] == "import os"


@effect("tools", *TEMPLATED)
def tools(server, endpoint):
    usage = server.got(endpoint, tools=OFFERED[endpoint])["usage"]
    assert usage["total_tokens"] == tokens(server, "# paint\n" + PROMPT + "\n") + 8


@effect("tool_choice", *TEMPLATED)
def tool_choice(server, endpoint):
    offered = {"tools": OFFERED[endpoint], LENGTH[endpoint]: 64}
    shown = server.text(endpoint, **offered)
    assert server.text(endpoint, **offered, tool_choice="auto") == shown
    assert server.text(endpoint, **offered, tool_choice="none") == server.text(endpoint, **{LENGTH[endpoint]: 64})
    assert not server.text(endpoint, **{LENGTH[endpoint]: 64}).startswith(shown), "the template shows them"
    pytest.importorskip("xgrammar")
    named = {"type": "function", "name": "paint"}
    for choice in ("required", named if endpoint == RESPONSES else {"type": "function", "function": {"name": "paint"}}):
        found = server.got(endpoint, **offered, tool_choice=choice)
        text, ((name, arguments),) = read(found)
        assert (text, name) == ("", "paint") and json.loads(arguments)["colour"] in ("red", "blue")
        events = server.got(endpoint, **offered, tool_choice=choice, stream=True)
        assert read(events) == (text, [(name, arguments)])
        if endpoint == CHAT:
            last = json.loads(events[-2])["choices"][0]
            assert found["choices"][0]["finish_reason"] == last["finish_reason"] == "tool_calls"
        else:
            assert found["status"] == json.loads(events[-1])["response"]["status"] == "completed"


@effect("chat_template_kwargs", CHAT, RESPONSES)
def chat_template_kwargs(server, endpoint):
    plain, other = server.got(endpoint), server.got(endpoint, chat_template_kwargs={"flavour": "sweet"})
    assert other["usage"]["total_tokens"] - plain["usage"]["total_tokens"] == tokens(server, "# sweet\n") - tokens(
        server, ""
    )


@effect("reasoning_effort", CHAT)
def reasoning_effort(server, endpoint):
    assert server.got(endpoint, reasoning_effort="low")["usage"]["prompt_tokens"] > tokens(server, PROMPT + "\n")


@effect("reasoning", RESPONSES)
def reasoning(server, endpoint):
    found = server.got(endpoint, reasoning={"effort": "low"})
    assert found["usage"]["input_tokens"] > tokens(server, PROMPT + "\n")
    assert server.text(endpoint, reasoning={"summary": "auto"}) == server.text(endpoint)


@effect("temperature")
def temperature(server, endpoint):
    greedy = server.text(endpoint, temperature=...)
    assert server.text(endpoint, temperature=0) == greedy
    assert len({server.text(endpoint, temperature=2) for _ in range(3)}) > 1


def narrowed(name: str, narrow: float, wide: float):
    def test(server, endpoint):
        assert server.text(endpoint, temperature=2, **{name: narrow}) == server.text(endpoint)
        long = {LENGTH[endpoint]: 24, "temperature": ..., name: wide}
        assert len({server.text(endpoint, **long) for _ in range(3)}) > 1, "it samples without a temperature"

    effect(name)(test)


narrowed("top_p", 1e-6, 0.999)
narrowed("top_k", 1, 0)
narrowed("min_p", 1.0, 0.001)


@effect("seed")
def seed(server, endpoint):
    first, second = (server.text(endpoint, temperature=2, seed=number) for number in (1, 2))
    assert server.text(endpoint, temperature=2, seed=1) == first != second


def penalised(server, endpoint, name) -> None:
    """As OpenAI defines it, token by token, of the bare model's logits."""
    prompt = "x = [0, 0, 0, 0, "
    shown = {"prompt": prompt} if endpoint == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
    ids = server.tokenizer(prompt + ("\n" if endpoint == CHAT else ""), return_tensors="pt")["input_ids"]
    start, text = ids.shape[1], server.text(endpoint, max_tokens=16, **shown)
    for _ in range(16):
        with torch.no_grad():
            logits = server.target(ids).logits[0, -1]
        counts = torch.bincount(ids[0, start:], minlength=len(logits))
        logits = logits - 1.5 * (counts if name == "frequency_penalty" else (counts > 0))
        ids = torch.cat([ids, logits.argmax()[None, None]], 1)
    expected = server.tokenizer.decode(ids[0, start:])
    assert server.text(endpoint, max_tokens=16, **{name: 1.5}, **shown) == expected != text


for name in ("frequency_penalty", "presence_penalty"):
    effect(name, *BOTH)(partial(penalised, name=name))


@effect("repetition_penalty")
def repetition_penalty(server, endpoint):
    assert server.text(endpoint, repetition_penalty=5.0) != server.text(endpoint)


@effect("logit_bias", CHAT, COMPLETIONS)
def logit_bias(server, endpoint):
    token = server.tokenizer(" x", add_special_tokens=False)["input_ids"][0]
    assert server.text(endpoint, logit_bias={str(token): 100}).count(server.tokenizer.decode([token])) == 8
    assert server.text(endpoint, logit_bias={}) == server.text(endpoint)


@effect("response_format", CHAT)
@effect("text", RESPONSES)
def form(server, endpoint):
    def held(kind: str, **more: object) -> dict[str, object]:
        if endpoint == RESPONSES:
            return {"text": {"format": {"type": kind, **more}}}
        return {"response_format": {"type": kind, **({"json_schema": more} if more else {})}}

    assert server.text(endpoint, **held("text")) == server.text(endpoint)
    if endpoint == RESPONSES:
        assert server.text(endpoint, text={"verbosity": "low"}) == server.text(endpoint)
    pytest.importorskip("xgrammar")
    assert server.text(endpoint, **held("json_object")).startswith("{")
    form = held("json_schema", name="one", schema=SCHEMA, strict=True)
    for sampled in ({"temperature": 0}, {"temperature": 1.5, "seed": 5}):
        text = server.text(endpoint, **{LENGTH[endpoint]: 64}, **sampled, **form)
        found = json.loads(text)
        assert set(found) == {"kind", "full"} and found["kind"] in ("list", "dict") and isinstance(found["full"], bool)
    statistics = server.got(endpoint, **{LENGTH[endpoint]: 64}, temperature=0, **form)["gsd_kernels"]
    assert "grammar" in statistics["sources"]
    ids = server.tokenizer(PROMPT + "\n", return_tensors="pt")["input_ids"]
    compiled = Grammars(server.tokenizer, server.target.config.vocab_size).of(SCHEMA, "schema", [2])
    bare = LogitsProcessorList([Grammar(compiled, ids.shape[1])])
    options = {"max_new_tokens": 64, "do_sample": True, "temperature": 1.5, "seed": 5}
    out = generate(server.target, ids, logits_processor=bare, tokenizer=server.tokenizer, **options)
    assert server.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == text, "as without a draft"


@effect("generation_config")
def generation_config(server, endpoint):
    given = json.dumps({"max_new_tokens": 3, "transformers_version": "5", "num_beams": 1})
    found = server.got(endpoint, generation_config=given, **{LENGTH[endpoint]: ...})
    assert found["gsd_kernels"]["new_tokens"] == 3
