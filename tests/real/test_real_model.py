"""SmolLM2-135M-Instruct: texts, quantised weights, the demo."""

from __future__ import annotations

import copy
import json
import threading

import pytest
import torch
from checkpoints import corpus_of
from quantised import SCHEMES, dense_of
from transformers import TextIteratorStreamer
from typer.testing import CliRunner

import gsd_kernels as gsd
from gsd_kernels import Corpus, GraphConfig, LayerSkip
from gsd_kernels.backends import unavailable_reason
from gsd_kernels_cli import comparison
from gsd_kernels_cli.app import app
from gsd_kernels_cli.demo import smollm2
from gsd_kernels_cli.demo_command import HF, HF_LOOKUP, OURS, QUESTIONS

# A real chat model: the texts are transformers', or in bfloat16 those of plain decoding, whatever drafts.


of_real_model = pytest.mark.real
of_real_model1 = pytest.mark.slow
compiled = pytest.mark.skipif(
    unavailable_reason("cpu", torch.device("cpu")) is not None, reason="half precision has one text in the operator"
)

MESSAGES = (
    "Name three colours.",
    "What is the capital of France?",
    "Repeat this twice: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that adds two numbers.",
    "Correct: me and my brother goes to the market.",
    "Translate into German: Good morning, how are you?",
    'As JSON with the keys name and age: "Anna is 31 years old."',
    "Count from one to ten in words.",
    "Why is the sky blue? One sentence.",
    "Rewrite politely: send me the invoice now.",
    "List the days of the week.",
    "Begin a story about a lighthouse.",
)
# A fixed shape, where drafts are asserted: `auto` may find a busy machine's plain steps the fastest.
TREE = GraphConfig(depth=3, width=2, branch=2, max_rows=8)


def plainly(model, inputs, tokens, **options):
    """Sequences of plain decoding: a forward a token."""
    decoded = comparison.undrafted(model.model, **options)(inputs, tokens)
    assert decoded.stats.tokens_per_step == 1
    return decoded.sequences


def text_of(model, inputs, **options):
    """Sequences and statistics under ``options``, greedy by default."""
    options = {"do_sample": False, **options}
    return gsd.generate(model.model, **inputs, return_dict_in_generate=True, **options)


def skipping(model):
    """Every seventh attention and MLP left out."""
    layers = range(3, 28, 7)
    return LayerSkip(model.model, attention=layers, mlp=layers)


@of_real_model
@of_real_model1
def test_float32_texts_are_those_of_transformers(full, tmp_path):
    inputs, tokens = full.chats(*MESSAGES), 12
    assert len(MESSAGES) >= 12
    expected = full.model.generate(**inputs, do_sample=False, max_new_tokens=tokens)
    assert (expected[:, -1] == full.tokenizer.eos_token_id).any(), "some texts end, and some go on"
    assert not (expected[:, -1] == full.tokenizer.eos_token_id).all()
    answers = [row[inputs["input_ids"].shape[1] :].tolist() for row in expected[::2]]
    corpus = Corpus(corpus_of(tmp_path / "corpus", *answers), tokenizer=full.tokenizer)
    ways = {
        "history": {"draft_sources": ("history",), "graph_config": TREE},
        "layer skip": {"assistant_model": skipping(full), "graph_config": GraphConfig.preset("chain", depth=2)},
        "corpus": {"draft_sources": ("history", corpus), "graph_config": TREE},
    }
    assert torch.equal(plainly(full, inputs, tokens), expected)
    parts = {"history": slice(None), "layer skip": slice(0, None, 2), "corpus": slice(0, None, 2)}  # prompts of a way
    for name, options in ways.items():
        some = {key: value[parts[name]] for key, value in inputs.items()}
        out = text_of(full, some, max_new_tokens=tokens, **options)
        texts = expected[parts[name]]
        assert torch.equal(out.sequences, texts[:, : out.sequences.shape[1]]), name
        assert (texts[:, out.sequences.shape[1] :] == full.tokenizer.pad_token_id).all(), name
        assert out.stats.tokens_per_step > 1, f"{name} drafts"


@of_real_model
@of_real_model1
@compiled
def test_in_bfloat16_every_source_has_the_text_of_plain_decoding(half, tmp_path):
    inputs, tokens = half.chats(*MESSAGES[2:6]), 16
    plain = plainly(half, inputs, tokens)
    begin = inputs["input_ids"].shape[1]
    corpus = Corpus(corpus_of(tmp_path / "corpus", plain[0, begin:].tolist()), tokenizer=half.tokenizer)
    ways = {
        "history": {"draft_sources": ("history",), "graph_config": TREE},
        "history, graph": {"draft_sources": ("history",), "graph_config": "graph"},
        "layer skip": {"assistant_model": skipping(half), "graph_config": TREE},
        "corpus": {"draft_sources": (corpus,), "graph_config": TREE},
        "reference": {"draft_sources": ("history",), "graph_config": TREE, "reference_ids": plain[:, begin:]},
    }
    for name, options in ways.items():
        out = text_of(half, inputs, max_new_tokens=tokens, **options)
        assert torch.equal(out.sequences, plain), name
        assert out.stats.tokens_per_step > 1, f"{name} drafts"


@of_real_model
@of_real_model1
def test_streamed_text_holds_characters_of_several_bytes_whole(half):
    inputs = half.chats('Repeat exactly: "Grüße aus 東京 😀 – naïve café"')
    streamer = TextIteratorStreamer(half.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=100)
    found = {}

    def decode():
        found["ids"] = text_of(half, inputs, max_new_tokens=32, draft_sources=("history",), streamer=streamer).sequences

    thread = threading.Thread(target=decode)
    thread.start()
    pieces = list(streamer)
    thread.join()
    text = half.tokenizer.decode(found["ids"][0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "".join(pieces) == text and len(pieces) > 3
    assert any(ord(letter) > 127 for letter in text), "or nothing was tested"
    assert not any("\ufffd" in piece for piece in pieces)


@of_real_model
@of_real_model1
def test_json_by_a_grammar(half):
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor

    size = half.model.config.vocab_size
    info = xgrammar.TokenizerInfo.from_huggingface(half.tokenizer, vocab_size=size)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema))
    inputs = half.chats('Extract as JSON with the keys name and age: "Anna Berg is 31 years old."')
    plain = plainly(half, inputs, 40, logits_processor=[LogitsProcessor(grammar)])
    options = {"draft_sources": ("history",), "logits_processor": [LogitsProcessor(grammar)]}
    drafted = text_of(half, inputs, max_new_tokens=40, **options).sequences
    begin = inputs["input_ids"].shape[1]
    texts = [half.tokenizer.decode(ids[0, begin:], skip_special_tokens=True) for ids in (plain, drafted)]
    found = json.loads(texts[0])
    assert set(found) == {"name", "age"} and isinstance(found["age"], int)
    assert texts[0] == texts[1]
    options |= {"graph_config": GraphConfig(depth=0, history_depth=12, width=3, branch=3, history_width=3, max_rows=16)}
    options["learned"] = False  # which knows such texts by itself
    history, both = (
        text_of(half, inputs, max_new_tokens=40, **{**options, "logits_processor": [LogitsProcessor(grammar)], **more})
        for more in ({}, {"draft_sources": None, "tokenizer": half.tokenizer})
    )
    assert torch.equal(both.sequences, history.sequences) and torch.equal(both.sequences, drafted)
    assert both.stats.steps < 0.75 * history.stats.steps, "what the grammar forces is drafted"


@of_real_model
@of_real_model1
@compiled
def test_a_chat_of_five_turns_with_edits(half):
    """What a patched model keeps of earlier turns and texts changes no answer, edited turns included."""
    said = [
        "Say hello to Ada.",
        "And now to Grace.",
        "Repeat both, in one line.",
        "Spell the first name.",
        "Thank you! Say goodbye to both.",
    ]
    edits = {
        2: (2, "And now to Grace and Alan."),
        3: (0, "Say hi to Ada."),
    }  # after a turn: which message, its new text
    turns, answers = [], 0

    def encoded():
        text = half.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return dict(half.tokenizer(text, return_tensors="pt", add_special_tokens=False))

    handle = gsd.patch(half.model, draft_sources=("history",), graph_config=TREE)
    try:
        pairs = []
        for number, message in enumerate(said):
            turns.append({"role": "user", "content": message})
            inputs = encoded()
            out = half.model.generate(**inputs, do_sample=False, max_new_tokens=16)
            pairs.append((inputs, out))
            answer = half.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            turns.append({"role": "assistant", "content": answer})
            answers += bool(answer)
            if number in edits:
                place, text = edits[number]
                turns[place]["content"] = text
                out = half.model.generate(**(inputs := encoded()), do_sample=False, max_new_tokens=8)
                pairs.append((inputs, out))
        assert handle.stats.tokens_per_step > 1
    finally:
        gsd.unpatch(half.model)
    assert answers == 5 and len(pairs) == 7
    for inputs, out in pairs:
        assert torch.equal(out, plainly(half, inputs, out.shape[1] - inputs["input_ids"].shape[1]))


# A real chat model that a library quantised: read packed, with the text of the dense weights, whatever drafts.


on_bits = pytest.mark.skipif(
    unavailable_reason("cpu", torch.device("cpu")) is not None, reason="packed weights are for the operator"
)
SMALL_TREE = GraphConfig(depth=3, width=2, branch=2, max_rows=8, history_depth=3)


@pytest.mark.real
@pytest.mark.slow
@on_bits
@pytest.mark.parametrize("name", ["torchao int8", "bitsandbytes nf4"])
def test_its_text_is_that_of_the_dense_weights_with_any_draft(half, name):
    scheme = SCHEMES[name]
    model, inputs = scheme(copy.deepcopy(half.model)), half.chats("Count from one to ten in words.", "Name a colour.")
    call = {**inputs, "max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    plain = gsd.generate(model, **call, graph_config="plain")
    assert plain.stats.why_modules is None and plain.stats.tokens_per_step == 1
    ways = {
        "history": {"draft_sources": ("history",), "graph_config": SMALL_TREE},
        "the model as it was": {"assistant_model": half.model, "graph_config": SMALL_TREE},
        "auto": {},
    }
    for way, options in ways.items():
        out = gsd.generate(model, **call, **options)
        assert torch.equal(out.sequences, plain.sequences), way
        assert out.stats.why_modules is None and (way == "auto" or out.stats.tokens_per_step > 1), way
    dense = dense_of(model, scheme, copy.deepcopy(half.model))
    assert torch.equal(gsd.generate(dense, **call, graph_config="plain").sequences, plain.sequences)
    assert len(set(plain.sequences[:, inputs["input_ids"].shape[1] :].flatten().tolist())) > 15


@pytest.mark.real
@pytest.mark.slow
@on_bits
def test_the_published_file_has_the_text_of_its_dense_weights_with_any_draft(half):
    """``half`` is the file's model as transformers dequantises it, in bfloat16."""
    packed, inputs = gsd.from_gguf(smollm2.gguf_path()), half.chats("Count from one to ten in words.", "Name a colour.")
    call = {**inputs, "max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    plain = gsd.generate(half.model, **call, graph_config="plain")
    assert len(set(plain.sequences[:, inputs["input_ids"].shape[1] :].flatten().tolist())) > 15
    ways = {
        "plain": {"graph_config": "plain"},
        "history": {"draft_sources": ("history",), "graph_config": SMALL_TREE},
        "the dense model": {"assistant_model": half.model, "graph_config": SMALL_TREE},
    }
    for way, options in ways.items():
        out = gsd.generate(packed, **call, **options)
        assert out.stats.why_modules is None and torch.equal(out.sequences, plain.sequences), way


# The demo of the real model: answers, the race's table and the drawing; the embedded pair where there is no model.


of_demo = pytest.mark.real
of_demo1 = pytest.mark.slow


def run(*arguments):
    return CliRunner().invoke(app, ["demo", *map(str, arguments)])


@of_demo
@of_demo1
def test_the_demo_answers_races_compares_and_draws(place, tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(place))
    file = tmp_path / "numbers.json"
    result = run("--max-new-tokens", 8, "--seconds", 0, "--out", tmp_path / "out", "--json", file)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert [answer["question"] for answer in report["answers"]] == list(QUESTIONS)
    for answer in report["answers"]:
        assert answer["text"] in result.stdout and 0 < answer["tokens"] <= 8
    ways = {way["way"]: way for way in report["race"]["ways"]}
    assert list(ways) == [HF, HF_LOOKUP, OURS] and report["dtypes"] == ["float32"]
    assert ways[OURS]["compared_with"] == HF and ways[OURS]["equal"] == report["race"]["prompts"] == 1
    assert report["drawing"]["rows"] > 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"step.svg", "step.png"}


@of_demo
@of_demo1
def test_without_the_model_the_demo_says_so_and_shows_the_embedded_pair(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "why_missing", lambda: "the package is not installed: pip's line")
    result = run("--quick", "--max-new-tokens", 4, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("The embedded pair, since the package is not installed: pip's line")
    assert "trained on Python source" in result.stdout
