"""What one call hands over: read and exact, or refused by name before anything changes."""

from __future__ import annotations

import contextlib
import copy
import functools
import math

import models
import pytest
import torch
import transformers
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import gsd_kernels as gsd
from gsd_kernels_hf.sources.history import per_sequence

torch.set_num_threads(1)

VOCAB = 32
LENGTH, NEW = 9, 16


@functools.lru_cache
def pair():
    target = models.tiny(vocab_size=VOCAB)
    target.generation_config.eos_token_id = None
    return target, models.noised(target, 0.01)


def prompt(batch: int = 2, **more) -> dict:
    return {**models.prompts(batch, LENGTH, seed=3, vocab=VOCAB), "max_new_tokens": NEW, "do_sample": False, **more}


@contextlib.contextmanager
def refused(model, error: type[Exception], match: str, **exact):
    """The block's call is refused; the model is bit-equal and as patched as before, and its next call exact."""
    weights, variables = copy.deepcopy(model.state_dict()), dict(vars(model))
    attention = model.config._attn_implementation
    with pytest.raises(error, match=match):
        yield
    assert dict(vars(model)) == variables and model.config._attn_implementation == attention
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    call = {**prompt(), **exact}
    assert torch.equal(gsd.generate(model, graph_config="tree", **call), type(model).generate(model, **call))


def ways(model, draft, **call):
    """The three ways to the decoder."""
    yield lambda: gsd.generate(model, assistant_model=draft, graph_config="tree", **call)
    yield lambda: model.generate(custom_generate=gsd.GraphDecoder(draft, "tree"), **call)

    def patched():
        gsd.patch(model, assistant_model=draft, graph_config="tree")
        try:
            return model.generate(**call)
        finally:
            gsd.unpatch(model)

    yield patched


# Model inputs --------------------------------------------------------------------------------------------------------


def llava():
    text = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        projection_dim=16,
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=3, image_token_id=3)
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.double()


@pytest.mark.parametrize("way", range(3))
def test_an_image_is_not_ignored(way):
    model = llava()
    ids = torch.tensor([[1, 3, 3, 3, 3, 7, 8]])
    images = [torch.full((1, 3, 8, 8), value, dtype=torch.float64) for value in (0.0, 3.0)]
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    texts = [model.generate(pixel_values=image, **call) for image in images]
    assert not torch.equal(*texts), "the image must matter"
    with refused(model, ValueError, "pixel_values", input_ids=ids + 3, attention_mask=None):
        list(ways(model, None, pixel_values=images[0], **call))[way]()


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
    with refused(model, ValueError, f"^{name}"):
        list(ways(model, draft, **prompt(), **{name: value}))[way]()


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
    target.generate(**prompt(), past_key_values=marked)
    if not hasattr(marked, "_is_user_defined"):
        pytest.skip("this transformers does not mark a caller's own cache")
    with refused(target, ValueError, "past_key_values"):
        target.generate(
            custom_generate=gsd.GraphDecoder(draft), past_key_values=transformers.DynamicCache(), **prompt()
        )


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


# Models that are fed in another way ----------------------------------------------------------------------------------


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
    for way in ways(model, draft, **prompt()):
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
    call = {} if patched else {"custom_generate": gsd.GraphDecoder(None, "tree", draft_sources=("history",))}
    with pytest.raises(ValueError, match=r"^model: Peft.*virtual tokens"):
        wrapped.generate(**prompt(), **call)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in target.state_dict().items())
    assert torch.equal(gsd.generate(target, **prompt()), plain), "the base model itself is as before"
    if patched:
        gsd.unpatch(target)
    wrapped.generate(**prompt())


def test_activated_lora():
    peft = pytest.importorskip("peft")
    target = copy.deepcopy(pair()[0]).float()
    plain = target.generate(**prompt())
    gsd.patch(target, graph_config="tree")
    config = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
    invocation = prompt()["input_ids"][0, 3:5].tolist()
    wrapped = peft.get_peft_model(target, peft.LoraConfig(**config, alora_invocation_tokens=invocation)).eval()
    for way in (
        lambda: wrapped.generate(**prompt()),
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
    assert torch.equal(wrapped.generate(**prompt()), with_other) and not torch.equal(with_other, plain)


# Stopping criteria ---------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", CRITERIA)
@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("eos", [False, True])
def test_stopping_criteria_are_called_as_transformers_calls_them(kind, batch, eos):
    """The same calls with the same ids, in the same order; so counting, and looking at the whole batch, is right."""
    target, draft = pair()
    seeds = range(4) if batch > 1 else range(2)
    slower = 0
    for seed in seeds:
        call = prompt(batch, max_new_tokens=24) | models.prompts(batch, LENGTH, seed=seed, vocab=VOCAB)
        free = target.generate(**call)[:, LENGTH:].tolist()
        if eos:
            call |= {"eos_token_id": [free[-1][5]], "pad_token_id": 0}
        theirs, ours = CRITERIA[kind](free), CRITERIA[kind](free)
        expected = target.generate(stopping_criteria=[theirs], **call)
        for config in ("chain", "tree", gsd.GraphConfig(depth=4, width=3, branch=3, max_rows=24, reuse_depth=3)):
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


def test_what_a_faster_sequence_said_beyond_its_end_is_taken_back():
    """Each sequence stops at an own place, others are slower; a second criterion has no say."""
    target, _ = pair()
    draft = models.noised(target, 0.03)
    call = prompt(3, max_new_tokens=24, eos_token_id=[1], pad_token_id=0)
    free = target.generate(**call)[:, LENGTH:].tolist()
    taken_back = 0
    for at in range(2, 16):
        stops = [OwnRow([row[(at + 5 * b) % 23] for b, row in enumerate(free)]), Counts(100)]
        expected = target.generate(**call, stopping_criteria=stops)
        out = gsd.generate(
            target,
            assistant_model=draft,
            graph_config="chain",
            stopping_criteria=[stops[0], Counts(100)],
            return_dict_in_generate=True,
            **call,
        )
        assert out.sequences.tolist() == expected.tolist()
        taken_back += sum(n * steps for n, steps in enumerate(out.stats.accepted)) - out.stats.new_tokens
    assert taken_back > 0, "no sequence was ahead of its end"


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


# Options and values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [-1, 0])
def test_a_chunk_of_no_tokens(chunk):
    target, draft = pair()
    for way in ways(target, draft, **prompt(prefill_chunk_size=chunk)):
        with refused(target, ValueError, "prefill_chunk_size"):
            way()


@pytest.mark.parametrize("value", [2.5, "5", True])
@pytest.mark.parametrize("name", ["max_new_tokens", "min_new_tokens", "prefill_chunk_size"])
def test_a_number_of_tokens_that_is_none(name, value):
    target, draft = pair()
    with refused(target, TypeError, f"^{name}: expected an int, got {value!r}"):
        gsd.generate(target, assistant_model=draft, **prompt(**{name: value}))


class Everything(LogitsProcessor):
    """Sets every score to one value, in one row, at one length."""

    def __init__(self, value: float):
        self.value = value

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == LENGTH + 3:
            scores = scores.clone()
            scores[-1] = self.value
        return scores


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_scores_that_nothing_can_be_drawn_from(value, backend):
    target, draft = pair()
    call = prompt(do_sample=True, top_k=0, logits_processor=[Everything(value)])
    with pytest.raises(RuntimeError, match="probability tensor"):
        target.generate(**call)
    for sources in ({}, {"assistant_model": draft, "graph_config": "tree"}):
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
    target = models.tiny(vocab_size=5)
    target.generation_config.eos_token_id = None
    call = {"input_ids": torch.tensor([[3, 4, 3, 3, 4]]), "max_new_tokens": 24, "do_sample": sampled, "top_k": None}
    plain = gsd.generate(target, seed=3, **call)
    if not sampled:
        assert torch.equal(plain, target.generate(**call))
    sources = {"draft_sources": ("history",)}
    if with_draft:
        sources = {"assistant_model": models.noised(target, 0.02), "draft_sources": ("model", "history")}
    config = gsd.GraphConfig(depth=3, width=3, branch=8, max_rows=32, reuse_depth=3)
    for backend in ("cpu", "reference"):
        assert torch.equal(gsd.generate(target, seed=3, graph_config=config, backend=backend, **sources, **call), plain)


# Names and cures -----------------------------------------------------------------------------------------------------


class Silent(BaseStreamer):
    def put(self, value):
        raise AssertionError("nothing is streamed")

    end = put


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

# what, error, what the message says, arguments beside a good prompt
NAMED = {
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
    "a class for a streamer": (TypeError, "^streamer: .*got the class Silent", {"streamer": Silent}),
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


def test_a_falcon_draft_is_refused_by_patch_and_leaves_both_as_they_were():
    target, draft = copy.deepcopy(pair()[0]), falcon()
    with pytest.raises(ValueError, match=r"^assistant_model: Falcon"):
        gsd.patch(target, assistant_model=draft)
    assert target.config._attn_implementation == "sdpa" and "generate" not in vars(target)
    gsd.patch(target)
    gsd.unpatch(target)


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
        "plain": {"assistant_model": False, "draft_heads": False},
        "heads": {"assistant_model": False},
        "again": {},
    }.items():
        assert torch.equal(target.generate(**prompt(), **call), expected)
        drafted[name] = (handle.stats.draft_rows > 0, handle.stats.drafted_nodes > 0)
    assert drafted == {
        "all": (True, True),
        "history": (False, True),
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
            graph_config=gsd.GraphConfig(depth=0, branch=2, reuse_depth=6, max_rows=16),
            reference_ids=reference,
            **call,
        )
        assert torch.equal(out, plain)
    own = [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert per_sequence(torch.tensor([[1, 2], [3, 4]]), 4).tolist() == own, "every sequence reads its own prompt's"
    assert per_sequence(torch.tensor(own), 4).tolist() == own
    for one in ([1, 2], [[1, 2]]):
        assert per_sequence(torch.tensor(one), 4).tolist() == [[1, 2]] * 4
