"""Options and values of one call: read and exact, or refused by a message that names the argument and the cure."""

from __future__ import annotations

import copy
import math

import models
import numpy as np
import pytest
import torch
import transformers
from transformers import GenerationConfig, LogitsProcessor
from transformers.generation.streamers import BaseStreamer
from validate.calls import LENGTH, VOCAB, pair, prompt, refused

import gsd_kernels as gsd
from gsd_kernels_hf.sources.history import per_sequence


@pytest.mark.parametrize("place", ["call", "config", "model"])
def test_a_number_of_tokens_of_another_library_is_an_int(place, monkeypatch):
    target, _ = pair()
    plain = target.generate(**prompt(max_new_tokens=120))
    counts = {"max_new_tokens": np.int8(120)}  # and 9 of the prompt
    config, given = GenerationConfig(**counts, do_sample=False, pad_token_id=0), prompt()
    del given["max_new_tokens"]
    monkeypatch.setattr(target, "generation_config", config)
    given = {"call": given | counts, "config": given | {"generation_config": config}, "model": given}[place]
    with gsd.patch(target):
        assert torch.equal(target.generate(**given), plain)
    assert type(config.max_new_tokens) is np.int8, "the user's is as it was"


class Everything(LogitsProcessor):
    """Sets every score to one value, in one row, at one length."""

    def __init__(self, value: float):
        self.value = value

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == LENGTH + 3:
            scores = scores.clone()
            scores[-1] = self.value
        return scores


@pytest.mark.parametrize(
    ("value", "backend"), [(-math.inf, "cpu"), (-math.inf, "reference"), (math.inf, "cpu"), (math.nan, "reference")]
)
def test_scores_that_nothing_can_be_drawn_from(value, backend):
    target, draft = pair()
    call = prompt(do_sample=True, top_k=0, logits_processor=[Everything(value)])
    with pytest.raises(RuntimeError, match="probability tensor"):
        target.generate(**call)
    for sources in ({}, {"assistant_model": draft, "graph_config": "chain"}):
        with refused(target, ValueError, "logits.*logits_processor"):
            gsd.generate(target, seed=3, backend=backend, **sources, **call)
    if value == -math.inf:  # greedy, that is token 0 in transformers
        greedy = prompt(logits_processor=[Everything(value)])
        out = gsd.generate(target, assistant_model=draft, graph_config="tree", backend=backend, **greedy)
        assert torch.equal(out, target.generate(**greedy))


@pytest.mark.parametrize("value", [-math.inf, math.inf])
@pytest.mark.parametrize("criterion", ["exact", "speculative", gsd.Typical()])
def test_a_target_that_says_infinity(value, criterion):
    """Without a processor everything stays on the device; the step's tokens are looked at there."""
    target = copy.deepcopy(pair()[0])
    draft = pair()[1]

    def spoil(module, inputs, output):
        output[...] = value
        return output

    hook = target.lm_head.register_forward_hook(spoil)
    with pytest.raises(ValueError, match="logits"):
        gsd.generate(
            target,
            assistant_model=draft,
            graph_config="chain",
            criterion=criterion,
            **prompt(do_sample=True, top_k=0, seed=3),
        )
    hook.remove()
    assert torch.equal(gsd.generate(target, **prompt()), target.generate(**prompt()))


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("with_draft", [False, True])
def test_a_vocabulary_smaller_than_a_branch(sampled, with_draft):
    target = models.endless(vocab_size=5)
    call = {"input_ids": torch.tensor([[3, 4, 3, 3, 4]]), "max_new_tokens": 24, "do_sample": sampled, "top_k": None}
    plain = gsd.generate(target, seed=3, **call)
    if not sampled:
        assert torch.equal(plain, target.generate(**call))
    sources = {"draft_sources": ("history",)}
    if with_draft:
        sources = {"assistant_model": models.noised(target, 0.02), "draft_sources": ("model", "history")}
    config = gsd.GraphConfig(depth=3, width=3, branch=8, max_rows=32, history_depth=3)
    for backend in ("cpu", "reference"):
        assert torch.equal(gsd.generate(target, seed=3, graph_config=config, backend=backend, **sources, **call), plain)


# Names and cures -----------------------------------------------------------------------------------------------------


def falcon():
    return transformers.FalconForCausalLM(
        transformers.FalconConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            alibi=False,
            bos_token_id=1,
            eos_token_id=2,
        )
    ).eval()


IDS = models.prompts(2, LENGTH, seed=3, vocab=VOCAB)["input_ids"]
TEMPERATURE = transformers.TemperatureLogitsWarper(2.0)
TEMPERATURE.temperature = math.inf

TOKENIZERS = models.tokenizer(VOCAB), models.tokenizer(VOCAB + 3)

# what, error, what the message says, arguments beside a good prompt
NAMED = {
    **{
        f"{name} {value!r}": (TypeError, f"^{name}: expected an int, got {value!r}", {name: value})
        for name in ("max_new_tokens", "min_new_tokens", "prefill_chunk_size")
        for value in (2.5, "5", True)
    },
    **{f"a chunk of {n}": (ValueError, "^prefill_chunk_size", {"prefill_chunk_size": n}) for n in (-1, 0)},
    "another vocabulary": (ValueError, "^assistant_model", lambda: {"assistant_model": models.tiny(vocab_size=4000)}),
    "another end of texts": (
        ValueError,
        "^assistant_model",
        lambda: {"assistant_model": models.tiny(vocab_size=VOCAB, eos_token_id=20)},
    ),
    "a tokenizer of another model": (
        ValueError,
        "^assistant_tokenizer: its largest id is 34, and the draft model has 32 tokens",
        lambda: {"assistant_model": pair()[1], "tokenizer": TOKENIZERS[0], "assistant_tokenizer": TOKENIZERS[1]},
    ),
    "a mask of another shape": (ValueError, "^attention_mask", {"attention_mask": torch.ones_like(IDS)[:, :7]}),
    "ids beyond the vocabulary": (ValueError, "^input_ids", {"input_ids": IDS + 60}),
    "negative ids": (ValueError, "^input_ids", {"input_ids": IDS - 60}),
    "float ids": (TypeError, "^input_ids", {"input_ids": IDS.float()}),
    "a list of ids": (TypeError, "^input_ids", {"input_ids": IDS.tolist()}),
    "no tokens": (ValueError, "^input_ids", {"input_ids": IDS[:, :0], "attention_mask": None}),
    "no new tokens": (ValueError, "max_new_tokens|max_length", {"max_new_tokens": 0}),
    "max_length below the prompt": (ValueError, "max_length", {"max_length": 5, "max_new_tokens": None}),
    "a word for a seed": (TypeError, "^seed", {"seed": "7", "do_sample": True}),
    "true for a seed": (TypeError, "^seed", {"seed": True}),
    "a seed of 65 bits": (ValueError, "^seed", {"seed": 2**64}),
    "a dictionary for a graph": (TypeError, "^graph_config", {"graph_config": {"depth": 3}}),
    "an unknown backend": (ValueError, "^backend", {"backend": "tpu"}),
    "stop strings without a tokenizer": (ValueError, "stop_strings", {"stop_strings": ["x"]}),
    "an invented argument": (ValueError, "depth", {"depth": 4}),
    "history and a draft": (
        ValueError,
        "^draft_sources",
        lambda: {"assistant_model": pair()[1], "draft_sources": ("history",)},
    ),
    "no sources": (ValueError, '^draft_sources: .* pass graph_config="plain"$', {"draft_sources": ()}),
    "none as sources": (ValueError, '^draft_sources: .* pass graph_config="plain"$', {"draft_sources": "none"}),
    "a number of sources": (TypeError, "^draft_sources: expected a tuple .*got 3", {"draft_sources": 3}),
    "a Falcon for a draft": (ValueError, "^assistant_model: Falcon", lambda: {"assistant_model": falcon()}),
    "meta ids": (ValueError, "^input_ids: on the meta device", {"input_ids": IDS.to("meta")}),
    "a meta mask": (ValueError, "^attention_mask: on the meta device", {"attention_mask": IDS.to("meta")}),
    "a meta reference": (
        ValueError,
        "^reference_ids: on the meta device",
        {"reference_ids": IDS.to("meta"), "draft_sources": ("history",)},
    ),
    "no sequences": (
        ValueError,
        r"^input_ids: expected a non-empty prompt .*\[0, 9\]",
        {"input_ids": IDS[:0], "attention_mask": None},
    ),
    "an infinite temperature": (
        ValueError,
        "^temperature: expected a finite number above 0, got inf",
        {"do_sample": True, "temperature": math.inf},
    ),
    "an infinite warper": (
        ValueError,
        "^temperature: expected a finite number above 0, got inf",
        {"do_sample": True, "logits_processor": [TEMPERATURE]},
    ),
    "a list for an observer": (TypeError, "^observer: expected a function .*got list", {"observer": []}),
    "a word for a streamer": (TypeError, "^streamer: .*got str", {"streamer": "x"}),
    "a class for a streamer": (TypeError, "^streamer: .*got the class BaseStreamer", {"streamer": BaseStreamer}),
    "references of another batch": (
        ValueError,
        r"^reference_ids: expected \[length\] or \[1, length\], \[2, length\], \[4, length\], got shape \[3, 5\]",
        {
            "reference_ids": IDS[:1, :5].repeat(3, 1),
            "draft_sources": ("history",),
            "num_return_sequences": 2,
            "do_sample": True,
        },
    ),
}


@pytest.mark.parametrize("what", NAMED)
def test_a_message_names_the_argument_and_what_was_expected(what):
    target, _ = pair()
    error, match, arguments = NAMED[what]
    call = prompt(**(arguments() if callable(arguments) else arguments))
    with refused(target, error, match):
        gsd.generate(target, **{"graph_config": "tree", **call})


def test_a_model_without_weights_is_named():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(pair()[0].config)
    with pytest.raises(ValueError, match=r"^model: .*meta device"):
        gsd.generate(model, **prompt())


def test_a_patched_models_draft_and_heads_can_be_left_out_for_one_call():
    target, draft = copy.deepcopy(pair())
    heads = gsd.DraftHeads.for_model(target, 2).requires_grad_(False)
    expected = target.generate(**prompt())
    handle = gsd.patch(target, assistant_model=draft, draft_heads=heads, graph_config="graph")
    with pytest.raises(ValueError, match=r"draft_sources: .*assistant_model=False leaves a patched model's out"):
        target.generate(**prompt(), draft_sources=("history",))
    drafted = {}
    for name, call in {
        "all": {},
        "history": {"assistant_model": False, "draft_heads": False, "draft_sources": ("history",)},
        "free": {"assistant_model": False, "draft_heads": False},
        "plain": {"graph_config": "plain"},
        "heads": {"assistant_model": False},
        "again": {},
    }.items():
        assert torch.equal(target.generate(**prompt(), **call), expected)
        drafted[name] = (handle.stats.draft_rows > 0, handle.stats.drafted_nodes > 0)
    assert drafted == {
        "all": (True, True),
        "history": (False, True),
        "free": (False, True),
        "plain": (False, False),
        "heads": (False, True),
        "again": (True, True),
    }
    gsd.unpatch(target)


def test_references_of_prompts_with_several_sequences_each():
    target, _ = pair()
    call = prompt(2, do_sample=True, top_k=3, temperature=0.5, num_return_sequences=3, seed=4)
    plain = gsd.generate(target, **call)
    assert plain.shape[0] == 6
    texts = torch.stack([plain[0], plain[3]])
    for reference in (None, texts, texts.repeat_interleave(3, 0), texts[:1], texts[0]):
        out = gsd.generate(
            target,
            draft_sources=("history",),
            graph_config=gsd.GraphConfig(depth=0, branch=2, history_depth=6, max_rows=16),
            reference_ids=reference,
            **call,
        )
        assert torch.equal(out, plain)
    own = [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert per_sequence(torch.tensor([[1, 2], [3, 4]]), 4).tolist() == own, "every sequence reads its own prompt's"
    assert per_sequence(torch.tensor(own), 4).tolist() == own
    for one in ([1, 2], [[1, 2]]):
        assert per_sequence(torch.tensor(one), 4).tolist() == [[1, 2]] * 4
