"""Options, values and inputs of one call: read and exact, or refused by name and cure before anything changes."""

from __future__ import annotations

import copy
import functools
import math

import models
import numpy as np
import pytest
import tiny_vision
import torch
import transformers
from models import rotated
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer
from validate.calls import LENGTH, VOCAB, pair, prompt, refused, ways

import gsd_kernels as gsd
from gsd_kernels_hf.model.properties import cache_argument
from gsd_kernels_hf.sources.history import per_sequence

PATCHED = 2  # of the ways: a call of a patched model, which hands over to transformers what is not served

# Model inputs ---------------------------------------------------------------------------------------------------------


LLAVA = "LlavaForConditionalGeneration"


@functools.cache
def llava():
    return tiny_vision.build(LLAVA)


@pytest.mark.skipif(not tiny_vision.PREPARED, reason="an older transformers")
@pytest.mark.parametrize("way", range(3))
def test_an_image_is_not_ignored(way):
    model, calls = llava(), [tiny_vision.prompts(LLAVA, seed) for seed in (1, 2)]
    texts = [model.generate(**call, max_new_tokens=12, do_sample=False) for call in calls]
    assert not torch.equal(*texts), "the image must matter"
    for call, text in zip(calls, texts, strict=True):
        assert torch.equal(list(ways(model, None, **call, max_new_tokens=12, do_sample=False))[way](), text)


@pytest.mark.parametrize("way", range(3))
def test_a_model_of_text_alone_has_no_image(way):
    target, draft = pair()
    pixels = tiny_vision.prompts(LLAVA, 1)["pixel_values"]
    with refused(target, ValueError, "pixel_values"):
        list(ways(target, draft, **prompt(), pixel_values=pixels))[way]()


@pytest.mark.parametrize("way", range(3))
@pytest.mark.parametrize("name", ["token_type_ids", "position_ids", "num_items_in_batch", "cache_position"])
def test_a_model_input_that_is_not_read_is_refused_by_name(name, way):
    target, draft = pair()

    class Reads(type(target)):
        """A family whose forward takes more."""

        def forward(self, input_ids, logits_to_keep=0, token_type_ids=None, cache_position=None, **kwargs):
            return super().forward(input_ids, logits_to_keep=logits_to_keep, **kwargs)

    model = Reads(target.config).double().eval()
    model.load_state_dict(target.state_dict())
    model.generation_config.eos_token_id = None
    value = 3 if name == "num_items_in_batch" else torch.arange(LENGTH)[None].repeat(2, 1) + 2
    called = list(ways(model, draft, **prompt(), **{name: value}))[way]
    if way == PATCHED:
        try:
            wanted = model.generate(**prompt(), **{name: value})
        except Exception as error:
            with pytest.raises(type(error)):
                called()
        else:
            assert torch.equal(called(), wanted)
        return
    with refused(model, ValueError, f"^{name}"):
        called()


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("ragged", [False, True])
def test_the_positions_that_transformers_makes_itself_are_no_reason(ragged, copies):
    target, draft = pair()
    call = prompt(3, num_return_sequences=copies, do_sample=copies > 1)
    if not ragged:
        call |= models.prompts(3, LENGTH, ragged=False, vocab=VOCAB)
    plain = gsd.generate(target, seed=3, **call)
    if copies == 1:
        assert torch.equal(plain, target.generate(**call))
    mask = call["attention_mask"]
    for positions in (None, (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)):
        decoder = gsd.GraphDecoder(draft, "tree", seed=3)
        assert torch.equal(target.generate(custom_generate=decoder, position_ids=positions, **call), plain)
    if copies == 1:
        with refused(target, ValueError, "position_ids"):
            target.generate(custom_generate=gsd.GraphDecoder(draft), position_ids=mask.cumsum(1) + 1, **call)


def test_an_empty_cache_of_ones_own_is_refused():
    target, draft = pair()
    marked = transformers.DynamicCache()
    name = cache_argument(target)
    target.generate(**prompt(), **{name: marked})
    if not hasattr(marked, "_is_user_defined"):
        pytest.skip("this transformers does not mark a caller's own cache")
    with refused(target, ValueError, name):
        target.generate(custom_generate=gsd.GraphDecoder(draft), **{name: transformers.DynamicCache()}, **prompt())


@pytest.mark.parametrize("value", [2, -1, 0.5, 255, math.nan, -math.inf])
def test_a_mask_of_other_values_is_refused(value):
    target, draft = pair()
    mask = prompt()["attention_mask"].to(torch.int64 if isinstance(value, int) else torch.float64)
    mask[1, -3] = value
    for way in ways(target, draft, **prompt(attention_mask=mask)):
        with refused(target, ValueError, "attention_mask: expected 0"):
            way()
    with refused(target, ValueError, "attention_mask: expected 0"):
        gsd.generate(target, **prompt(attention_mask=torch.full_like(mask, value)))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8, torch.float32, torch.bfloat16])
def test_a_mask_of_another_dtype_is_exact(dtype):
    target, draft = pair()
    call = prompt(3)
    assert (call["attention_mask"] == 0).any()
    expected = target.generate(**call)
    call["attention_mask"] = call["attention_mask"].to(dtype)
    for way in ways(target, draft, **call):
        assert torch.equal(way(), expected)


PADS = {  # where a prompt has the token 0
    "second": (1,),
    "behind the padding": (0, 1, 3),
    "in the middle": (5,),
    "last": (LENGTH - 1,),
    "all": tuple(range(LENGTH)),
    "padding": (0, 1, 2),
    "none": (),
    **{
        f"seed {seed}": tuple(
            torch.randperm(LENGTH, generator=torch.Generator().manual_seed(seed))[: 1 + seed].tolist()
        )
        for seed in (1, 3)
    },
}


@pytest.mark.parametrize(("where", "way", "ends"), rotated(PADS, range(3), (False, True)))
def test_a_mask_that_transformers_infers(where, way, ends):
    """Without a mask, transformers takes pad tokens for padding wherever they are, unless they end a text."""
    target, draft = pair()
    call = prompt(pad_token_id=0, eos_token_id=0 if ends else None)
    del call["attention_mask"]
    call["input_ids"] = models.prompts(2, LENGTH, seed=4, ragged=False, vocab=VOCAB)["input_ids"]
    call["input_ids"][1, list(PADS[where])] = 0
    expected = target.generate(**call)
    called = list(ways(target, draft, **call))[way]
    padding = PADS[where] == tuple(range(len(PADS[where]))) and len(PADS[where]) < LENGTH
    if ends or padding or way == PATCHED:
        assert torch.equal(called(), expected)
        return
    with refused(target, ValueError, "^attention_mask: a prompt (has a hole|is right-padded or empty)"):
        called()


# Models that are fed in another way -----------------------------------------------------------------------------------


class Feeds(transformers.LlamaForCausalLM):
    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return {**inputs, "input_ids": inputs["input_ids"].clamp(max=9)}


def test_an_own_preparation_of_inputs_is_not_ignored():
    target, draft = pair()
    model = Feeds(target.config).double().eval()
    model.load_state_dict(target.state_dict())
    expected = model.generate(**prompt(eos_token_id=None))
    assert not torch.equal(expected, target.generate(**prompt())), "the preparation must matter"
    for number, way in enumerate(ways(model, draft, **prompt())):
        if number == PATCHED:
            assert torch.equal(way(), expected)
            continue
        with pytest.raises(ValueError, match=r"^model: Feeds has its own prepare_inputs_for_generation"):
            way()
        assert torch.equal(model.generate(**prompt(eos_token_id=None)), expected)
    target.prepare_inputs_for_generation = functools.partial(Feeds.prepare_inputs_for_generation, target)
    try:
        with pytest.raises(ValueError, match="prepare_inputs_for_generation"):
            gsd.generate(target, **prompt())
    finally:
        del target.prepare_inputs_for_generation
    assert torch.equal(gsd.generate(target, **prompt()), target.generate(**prompt()))


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
@pytest.mark.parametrize("patched", [True, False])
def test_prompt_learning_round_a_base_model(kind, patched):
    peft = pytest.importorskip("peft")
    target, draft = copy.deepcopy(pair()[0]).float(), None
    plain = target.generate(**prompt())
    more = {"encoder_hidden_size": 16} if kind == "PromptEncoderConfig" else {}
    if patched:
        gsd.patch(target, assistant_model=draft, graph_config="tree")
    wrapped = peft.get_peft_model(target, getattr(peft, kind)(num_virtual_tokens=4, task_type="CAUSAL_LM", **more))
    wrapped.eval()
    weights = copy.deepcopy(target.state_dict())
    decoder = gsd.GraphDecoder(None, "tree", draft_sources=("history",))
    with pytest.raises(ValueError, match=r"^model: Peft.*virtual tokens"):
        wrapped.generate(**prompt(), custom_generate=decoder)
    wanted = wrapped.generate(**prompt()) if patched else None
    assert all(torch.equal(tensor, weights[name]) for name, tensor in target.state_dict().items())
    assert torch.equal(gsd.generate(target, **prompt()), plain), "the base model itself is as before"
    if patched:
        gsd.unpatch(target)
    own = wrapped.generate(**prompt())
    assert wanted is None or torch.equal(wanted, own), "transformers serves a patched model's"


def test_activated_lora():
    peft = pytest.importorskip("peft")
    target = copy.deepcopy(pair()[0]).float()
    plain = target.generate(**prompt())
    gsd.patch(target, graph_config="tree")
    config = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
    invocation = prompt()["input_ids"][0, 3:5].tolist()
    wrapped = peft.get_peft_model(target, peft.LoraConfig(**config, alora_invocation_tokens=invocation)).eval()
    activated = wrapped.generate(**prompt())
    for way in (
        lambda: gsd.generate(wrapped, **prompt()),
        lambda: wrapped.generate(**prompt(), custom_generate=gsd.GraphDecoder()),
    ):
        with pytest.raises(ValueError, match="alora_invocation_tokens"):
            way()
    with wrapped.disable_adapter():
        assert torch.equal(wrapped.generate(**prompt()), plain)
    wrapped.add_adapter("other", peft.LoraConfig(**config))
    wrapped.set_adapter("other")
    with_other = wrapped.generate(**prompt())
    gsd.unpatch(target)
    assert torch.equal(wrapped.generate(**prompt()), with_other)
    wrapped.set_adapter("default")
    assert torch.equal(wrapped.generate(**prompt()), activated), "transformers serves a patched model's"
    assert not torch.equal(with_other, plain)


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

# What, error, what the message says, arguments beside a good prompt; more are rows of WRONG in goldens.py.
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
    "no new tokens": (ValueError, "max_new_tokens|max_length", {"max_new_tokens": 0}),
    "max_length below the prompt": (ValueError, "max_length", {"max_length": 5, "max_new_tokens": None}),
    "an invented argument": (ValueError, "depth", {"depth": 4}),
    "history and a draft": (
        ValueError,
        "^draft_sources",
        lambda: {"assistant_model": pair()[1], "draft_sources": ("history",)},
    ),
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


class Counts(StoppingCriteria):
    """Stops all sequences at its n-th call, and writes down what it was shown."""

    def __init__(self, calls: int):
        self.calls, self.seen = calls, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids.tolist(), None if scores is None else [s.shape for s in scores]))
        return torch.full((input_ids.shape[0],), len(self.seen) >= self.calls)


class AnyRow(StoppingCriteria):
    """Stops all sequences as soon as one has said a token."""

    def __init__(self, token: int):
        self.token, self.seen = token, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids.tolist(), None))
        return torch.as_tensor((input_ids[:, LENGTH:] == self.token).any())


class OwnRow(StoppingCriteria):
    """Stops each sequence after a token of its own."""

    def __init__(self, tokens: list[int]):
        self.tokens, self.seen = torch.tensor(tokens), []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids.tolist(), None))
        return (input_ids[:, -1] == self.tokens[: len(input_ids)]) & (input_ids.shape[1] > LENGTH + 1)


CRITERIA = {
    "counts": lambda tokens: Counts(6),
    "counts to the end": lambda tokens: Counts(100),
    "any row": lambda tokens: AnyRow(tokens[0][7]),
    "own row": lambda tokens: OwnRow([row[3 + 2 * b] for b, row in enumerate(tokens)]),
}


@pytest.mark.parametrize(("kind", "batch", "eos"), rotated(CRITERIA, (1, 2, 4), (False, True)))
def test_stopping_criteria_are_called_as_transformers_calls_them(kind, batch, eos):
    """The same calls with the same ids, in the same order; so counting, and looking at the whole batch, is right."""
    target, draft = pair()
    slower = 0
    for seed in range(2):
        call = prompt(batch, max_new_tokens=24) | models.prompts(batch, LENGTH, seed=seed, vocab=VOCAB)
        free = target.generate(**call)[:, LENGTH:].tolist()
        if eos:
            call |= {"eos_token_id": [free[-1][5]], "pad_token_id": 0}
        theirs, ours = CRITERIA[kind](free), CRITERIA[kind](free)
        expected = target.generate(stopping_criteria=[theirs], **call)
        for config in ("chain", "tree", gsd.GraphConfig(depth=4, width=3, branch=3, max_rows=24, history_depth=3)):
            ours.seen.clear()
            out = gsd.generate(
                target,
                assistant_model=draft,
                graph_config=config,
                stopping_criteria=[ours],
                return_dict_in_generate=True,
                **call,
            )
            assert out.sequences.tolist() == expected.tolist()
            assert ours.seen == theirs.seen
            slower += out.stats.steps < len(theirs.seen)
    assert slower, "nothing was speculated"


@pytest.mark.parametrize("eos", [False, True])
def test_stopping_criteria_see_scores_and_scores_end_with_the_text(eos):
    target, draft = pair()
    call = prompt(3, return_dict_in_generate=True, output_scores=True, output_logits=True)
    free = target.generate(**prompt(3))[:, LENGTH:]
    if eos:
        call |= {"eos_token_id": [int(free[1, 1])], "pad_token_id": 0}
    theirs, ours = Counts(7), Counts(7)
    expected = target.generate(stopping_criteria=[theirs], **call)
    out = gsd.generate(target, assistant_model=draft, graph_config="tree", stopping_criteria=[ours], **call)
    assert torch.equal(out.sequences, expected.sequences) and ours.seen == theirs.seen
    assert [len(scores) for _, scores in ours.seen] == list(range(1, 8))
    said = out.sequences[:, LENGTH:]
    ends = [row.index(int(free[1, 1])) + 1 if eos and int(free[1, 1]) in row else 7 for row in said.tolist()]
    assert ends == ([7, 2, 7] if eos else [7, 7, 7]) and out.stats.new_tokens == sum(ends)
    for name in ("scores", "logits"):
        ours, theirs = getattr(out, name), getattr(expected, name)
        assert len(ours) == len(theirs) == 7
        for row, end in enumerate(ends):
            for step in range(end):
                torch.testing.assert_close(ours[step][row], theirs[step][row], rtol=0, atol=1e-4)


def test_a_stopped_sequence_asks_its_processors_no_more_than_transformers_does():
    """Alone, so that the processor is the caller's own."""
    target, draft = pair()

    class Count(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            return scores

    theirs, ours = Count(), Count()
    call = prompt(1, max_new_tokens=24)
    expected = target.generate(logits_processor=[theirs], stopping_criteria=[Counts(6)], **call)
    out = gsd.generate(
        target,
        assistant_model=draft,
        graph_config="tree",
        logits_processor=[ours],
        stopping_criteria=[Counts(6)],
        **call,
    )
    assert torch.equal(out, expected) and ours.calls == theirs.calls == 6


def test_a_criterion_of_the_wrong_shape_is_named():
    target, draft = pair()

    class Wide(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.zeros(len(input_ids), 5, 1, dtype=torch.bool)

    with refused(target, ValueError, "stopping_criteria: Wide"):
        gsd.generate(target, assistant_model=draft, graph_config="tree", stopping_criteria=[Wide()], **prompt())
