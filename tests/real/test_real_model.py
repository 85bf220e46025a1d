"""SmolLM2-135M-Instruct: texts, quantised weights, the demo; where its package is installed, converted once."""

from __future__ import annotations

import copy
import json
import os
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from checkpoints import corpus_of
from quantised import SCHEMES, dense_of
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextIteratorStreamer
from typer.testing import CliRunner

import gsd_kernels as gsd
from gsd_kernels import Corpus, GraphConfig, LayerSkip
from gsd_kernels.backends import unavailable_reason
from gsd_kernels_cli import demo
from gsd_kernels_cli.app import app
from gsd_kernels_cli.demo import smollm2
from gsd_kernels_cli.demo_command import HF, HF_LOOKUP, OURS
from gsd_kernels_hf.store import cache_dir

pytestmark = [pytest.mark.real, pytest.mark.slow]
compiled = pytest.mark.skipif(
    unavailable_reason("cpu", torch.device("cpu")) is not None, reason="half precision has one text in the operator"
)
USERS = cache_dir()  # before the tests have one of their own: what is converted there already is only read


@dataclass(frozen=True)
class Model:
    """The model in one dtype, and its chats."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def chats(self, *messages: str) -> dict[str, Any]:
        """A left-padded batch: one chat a message."""
        texts = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
            )
            for message in messages
        ]
        options = {"return_tensors": "pt", "padding": True, "padding_side": "left", "add_special_tokens": False}
        return dict(self.tokenizer(texts, **options))


@pytest.fixture(scope="session")
def place(tmp_path_factory, own_cache):
    """Where the converted model is: the user's cache if it is there, else one for all processes of this run."""
    reason = smollm2.why_missing()
    if reason is not None:
        pytest.skip(reason)
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GSD_KERNELS_CACHE", str(USERS))
        if not (smollm2.folder_path() / "config.json").is_file():
            patch.setenv("GSD_KERNELS_CACHE", str(shared / "smollm2"))
        return smollm2.folder().parent


def loaded(place, dtype: torch.dtype) -> Model:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GSD_KERNELS_CACHE", str(place))
        return Model(*smollm2.load(dtype))


@pytest.fixture(scope="session")
def full(place):
    """In float32."""
    return loaded(place, torch.float32)


@pytest.fixture(scope="session")
def half(place):
    """In bfloat16."""
    return loaded(place, torch.bfloat16)


# A real chat model: the texts are transformers', or in bfloat16 those of plain decoding, whatever drafts.


MESSAGES = (
    "Name three colours.",
    "What is the capital of France?",
    "Repeat this twice: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that adds two numbers.",
    "Correct: me and my brother goes to the market.",
    "Count from one to ten in words.",
)
# A fixed shape, where drafts are asserted: `auto` may find a busy machine's plain steps the fastest.
TREE = GraphConfig(depth=3, width=2, branch=2, max_rows=8, history_depth=3)


def text_of(model, inputs, tokens, **options):
    """Sequences and statistics under ``options``, greedy."""
    call = {**inputs, "max_new_tokens": tokens, "do_sample": False, "return_dict_in_generate": True}
    return gsd.generate(model, **call, **options)


def plainly(model, inputs, tokens, **options):
    """Sequences of plain decoding: a forward a token."""
    decoded = text_of(model, inputs, tokens, graph_config="plain", **options)
    assert decoded.stats.tokens_per_step == 1
    return decoded.sequences


def ways_of(model, texts, folder):
    """Options by name; ``texts``: what is said, int64 [batch, length]."""
    layers = range(3, 28, 7)
    skipping = LayerSkip(model.model, attention=layers, mlp=layers)
    corpus = Corpus(corpus_of(folder / "corpus", texts[0].tolist()), tokenizer=model.tokenizer)
    return {
        "history": {"draft_sources": ("history",), "graph_config": TREE},
        "layer skip": {"assistant_model": skipping, "graph_config": GraphConfig.preset("chain", depth=2)},
        "corpus": {"draft_sources": ("history", corpus), "graph_config": TREE},
        "reference": {"draft_sources": ("history",), "graph_config": "graph", "reference_ids": texts},
    }


@pytest.mark.parametrize("precision", ["full", pytest.param("half", marks=compiled)])
def test_every_source_has_the_text_of_transformers_or_in_half_precision_of_plain_decoding(precision, request, tmp_path):
    model, tokens = request.getfixturevalue(precision), 14
    inputs = model.chats(*MESSAGES)
    begin, expected = inputs["input_ids"].shape[1], plainly(model.model, inputs, tokens)
    if precision == "full":
        assert torch.equal(model.model.generate(**inputs, do_sample=False, max_new_tokens=tokens), expected)
    ended = expected[:, -1] == model.tokenizer.eos_token_id
    assert ended.any() and not ended.all(), "some texts end, and some go on"
    ways = ways_of(model, expected[:, begin:], tmp_path)
    # A forward in full precision takes long; in half precision all sources are held to the text of plain decoding.
    for name, options in ways.items() if precision == "half" else [("history", ways["history"])]:
        out = text_of(model.model, inputs, tokens, **options)
        assert torch.equal(out.sequences, expected), name
        assert out.stats.tokens_per_step > 1, f"{name} drafts"


def test_streamed_text_holds_characters_of_several_bytes_whole(half):
    inputs = half.chats('Repeat exactly: "Grüße aus 東京 😀 – naïve café"')
    streamer = TextIteratorStreamer(half.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=100)
    found = {}

    def decode():
        found["ids"] = text_of(half.model, inputs, 32, draft_sources=("history",), streamer=streamer).sequences

    thread = threading.Thread(target=decode)
    thread.start()
    pieces = list(streamer)
    thread.join()
    text = half.tokenizer.decode(found["ids"][0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "".join(pieces) == text and len(pieces) > 3
    assert any(ord(letter) > 127 for letter in text), "or nothing was tested"
    assert not any("\ufffd" in piece for piece in pieces)


@compiled
def test_a_chat_of_turns_with_edits(half):
    """What a patched model keeps of earlier turns and texts changes no answer, edited turns included."""
    said = ["Say hello to Ada.", "And now to Grace.", "Repeat both, in one line.", "Thank you! Say goodbye to both."]
    edits = {1: (0, "Say hi to Ada."), 2: (2, "And now to Grace and Alan.")}  # after a turn: a message's new text
    turns, pairs = [], []

    def answer(tokens):
        text = half.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        inputs = dict(half.tokenizer(text, return_tensors="pt", add_special_tokens=False))
        out = half.model.generate(**inputs, do_sample=False, max_new_tokens=tokens)
        pairs.append((inputs, out))
        return half.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    with gsd.patch(half.model, draft_sources=("history",), graph_config=TREE) as handle:
        for number, message in enumerate(said):
            turns.append({"role": "user", "content": message})
            turns.append({"role": "assistant", "content": answer(16)})
            if number in edits:
                place, text = edits[number]
                turns[place]["content"] = text
                last = turns.pop()
                answer(8)
                turns.append(last)
        assert handle.stats.tokens_per_step > 1
    for inputs, out in pairs:
        assert torch.equal(out, plainly(half.model, inputs, out.shape[1] - inputs["input_ids"].shape[1]))


@compiled
@pytest.mark.parametrize("name", ["torchao int8", "bitsandbytes nf4", "the published file"])
def test_packed_weights_have_the_text_of_the_dense_ones_with_any_draft(half, name):
    """``half`` is the published file's model as transformers dequantises it, in bfloat16."""
    if name in SCHEMES:
        model = SCHEMES[name](copy.deepcopy(half.model))
        dense = dense_of(model, SCHEMES[name], copy.deepcopy(half.model))
    else:
        model, dense = gsd.from_gguf(smollm2.gguf_path()), half.model
    inputs = half.chats("Count from one to ten in words.", "Name a colour.")
    plain = plainly(dense, inputs, 20)
    assert len(set(plain[:, inputs["input_ids"].shape[1] :].flatten().tolist())) > 15
    for options in (
        {"graph_config": "plain"},
        {"draft_sources": ("history",), "graph_config": TREE},
        {"assistant_model": half.model, "graph_config": TREE},
    ):
        out = text_of(model, inputs, 20, **options)
        assert out.stats.why_modules is None and torch.equal(out.sequences, plain), options


# The demo of the real model: answers, the race's table and the drawing; the embedded pair where there is no model.


def run(*arguments):
    result = CliRunner().invoke(app, ["demo", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_demo_answers_races_compares_and_draws(place, tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(place))
    file = tmp_path / "numbers.json"
    said = run("--max-new-tokens", 8, "--seconds", 0, "--out", tmp_path / "out", "--json", file)
    report = json.loads(file.read_text())
    assert [answer["question"] for answer in report["answers"]] == demo.questions("chat")
    for answer in report["answers"]:
        assert answer["text"] in said and 0 < answer["tokens"] <= 8
    race = report["race"]
    assert [way["way"] for way in race["ways"]] == [HF, HF_LOOKUP, OURS] and report["dtypes"] == ["float32"]
    assert race["equal"] == race["prompts"] == 1
    assert report["drawing"]["rows"] > 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"step.svg", "step.png"}


def test_without_the_model_the_demo_says_so_and_shows_the_embedded_pair(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "why_missing", lambda: "the package is not installed: pip's line")
    said = run("--quick", "--max-new-tokens", 4, "--out", tmp_path)
    assert said.startswith("The embedded pair, since the package is not installed: pip's line")
    assert "trained on Python source" in said
