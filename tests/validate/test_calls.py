"""Options, values and inputs of one call: read and exact, or refused by name and cure before anything changes."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import math
import re

import models
import pytest
import tiny_configs
import torch
import transformers
from models import rotated
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, StoppingCriteria

import gsd_kernels as gsd
from gsd_kernels_hf import validate
from gsd_kernels_hf.engine import resolved
from gsd_kernels_hf.validate import check_generation_config

torch.set_num_threads(1)
VOCAB, LENGTH, NEW = 32, 9, 16
PATCHED = 2  # of the ways: a call of a patched model, which hands over to transformers what is not served


@functools.lru_cache
def pair():
    target = models.endless(vocab_size=VOCAB)
    return target, models.noised(target, 0.01)


def prompt(batch: int = 2, **more) -> dict:
    return {**models.prompts(batch, LENGTH, seed=3, vocab=VOCAB), "max_new_tokens": NEW, "do_sample": False, **more}


@contextlib.contextmanager
def refused(model, error: type[Exception], match: str):
    """The block's call is refused; the model is bit-equal and as patched as before, and its next call exact."""
    weights, variables = copy.deepcopy(model.state_dict()), dict(vars(model))
    attention = model.config._attn_implementation
    with pytest.raises(error, match=match):
        yield
    assert dict(vars(model)) == variables and model.config._attn_implementation == attention
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    assert torch.equal(gsd.generate(model, graph_config="tree", **prompt()), type(model).generate(model, **prompt()))


def ways(model, draft, **call):
    """The three ways to the decoder."""
    yield lambda: gsd.generate(model, assistant_model=draft, graph_config="tree", **call)
    yield lambda: model.generate(custom_generate=gsd.GraphDecoder(draft, "tree"), **call)

    def patched():
        with gsd.patch(model, assistant_model=draft, graph_config="tree"):
            return model.generate(**call)

    yield patched


# Inputs of the model


class Reads(transformers.LlamaForCausalLM):
    """A family whose forward takes more."""

    def forward(self, input_ids, logits_to_keep=0, token_type_ids=None, **kwargs):
        return super().forward(input_ids, logits_to_keep=logits_to_keep, **kwargs)


class Feeds(transformers.LlamaForCausalLM):
    """A family that feeds its forward in a way of its own."""

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return {**inputs, "input_ids": inputs["input_ids"].clamp(max=9)}


@pytest.mark.parametrize(
    ("kind", "more", "words"),
    [
        (Reads, {"token_type_ids": torch.arange(LENGTH).repeat(2, 1)}, "^token_type_ids"),
        (Feeds, {}, "^model: Feeds has its own prepare_inputs_for_generation"),
    ],
)
def test_what_another_family_reads_is_refused_by_name_and_left_to_transformers(kind, more, words):
    target, draft = pair()
    model = kind(target.config).double().eval()
    model.load_state_dict(target.state_dict())
    model.generation_config.eos_token_id = None
    call = prompt() | more
    expected = model.generate(**call)
    for number, way in enumerate(ways(model, draft, **call)):
        if number == PATCHED:
            assert torch.equal(way(), expected)
            continue
        with pytest.raises(ValueError, match=words):
            way()
    assert torch.equal(model.generate(**call), expected)


def test_the_positions_that_transformers_makes_itself_are_no_reason():
    target, draft = pair()
    call = prompt(3)
    mask, plain = call["attention_mask"], target.generate(**call)
    decoder = gsd.GraphDecoder(draft, "tree")
    made = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    assert torch.equal(target.generate(custom_generate=decoder, position_ids=made, **call), plain)
    with refused(target, ValueError, "position_ids"):
        target.generate(custom_generate=decoder, position_ids=mask.cumsum(1) + 1, **call)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16])
def test_a_mask_of_another_dtype_is_exact(dtype):
    target, draft = pair()
    call = prompt(3)
    assert (call["attention_mask"] == 0).any()
    expected = target.generate(**call)
    call["attention_mask"] = call["attention_mask"].to(dtype)
    for way in ways(target, draft, **call):
        assert torch.equal(way(), expected)


PADS = {  # where a prompt has the token 0
    "behind the padding": (0, 1, 3),
    "last": (LENGTH - 1,),
    "all": tuple(range(LENGTH)),
    "padding": (0, 1, 2),
    "none": (),
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
    if ends or where in ("padding", "none") or way == PATCHED:
        assert torch.equal(called(), expected)
        return
    with refused(target, ValueError, "^attention_mask: a prompt (has a hole|is right-padded or empty)"):
        called()


ADAPTERS = {  # of a target and peft: a config, and what is named
    "PromptTuningConfig": ({"num_virtual_tokens": 4}, r"^model: Peft.*virtual tokens"),
    "LoraConfig": (
        {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False, "alora_invocation_tokens": [3, 5]},
        "alora_invocation_tokens",
    ),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_that_read_the_prompt_in_their_own_way(kind):
    peft = pytest.importorskip("peft")
    target = copy.deepcopy(pair()[0]).float()
    plain, (config, words) = target.generate(**prompt()), ADAPTERS[kind]
    with gsd.patch(target, graph_config="tree"):
        wrapped = peft.get_peft_model(target, getattr(peft, kind)(task_type="CAUSAL_LM", **config)).eval()
        with pytest.raises(ValueError, match=words):
            wrapped.generate(**prompt(), custom_generate=gsd.GraphDecoder())
        wanted = wrapped.generate(**prompt())
        with wrapped.disable_adapter():
            assert torch.equal(wrapped.generate(**prompt()), plain)
    assert torch.equal(wrapped.generate(**prompt()), wanted), "transformers serves a patched model's"


# Scores


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
def test_scores_that_nothing_can_be_drawn_from(value):
    target, draft = pair()
    call = prompt(do_sample=True, top_k=0, logits_processor=[Everything(value)])
    with pytest.raises(RuntimeError, match="probability tensor"):
        target.generate(**call)
    for sources in ({}, {"assistant_model": draft, "graph_config": "chain"}):
        with refused(target, ValueError, "logits.*logits_processor"):
            gsd.generate(target, seed=3, **sources, **call)
    if value == -math.inf:  # greedy, that is token 0 in transformers
        greedy = prompt(logits_processor=[Everything(value)])
        out = gsd.generate(target, assistant_model=draft, graph_config="tree", **greedy)
        assert torch.equal(out, target.generate(**greedy))


@pytest.mark.parametrize("criterion", ["exact", "speculative", gsd.Typical()])
def test_a_target_that_says_infinity(criterion):
    """Without a processor everything stays on the device; the step's tokens are looked at there."""
    target, draft = copy.deepcopy(pair()[0]), pair()[1]
    hook = target.lm_head.register_forward_hook(lambda module, inputs, output: output.fill_(math.inf))
    call = prompt(do_sample=True, top_k=0, seed=3)
    with pytest.raises(ValueError, match="logits"):
        gsd.generate(target, assistant_model=draft, graph_config="chain", criterion=criterion, **call)
    hook.remove()
    assert torch.equal(gsd.generate(target, **prompt()), target.generate(**prompt()))


# Names and cures


class Wide(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), 5, 1, dtype=torch.bool)


IDS = models.prompts(2, LENGTH, seed=3, vocab=VOCAB)["input_ids"]
TEMPERATURE = transformers.TemperatureLogitsWarper(2.0)
TEMPERATURE.temperature = math.inf
TOKENIZERS = models.tokenizer(VOCAB), models.tokenizer(VOCAB + 3)

# What, error, what the message says, arguments beside a good prompt; more are rows of WRONG in goldens.py.
NAMED = {
    **{
        f"{name} {value!r}": (TypeError, f"^{name}: expected an int, got {value!r}", {name: value})
        for name, value in (("max_new_tokens", 2.5), ("min_new_tokens", "5"), ("prefill_chunk_size", True))
    },
    "a chunk of 0": (ValueError, "^prefill_chunk_size", {"prefill_chunk_size": 0}),
    **{
        f"a mask with {value}": (
            ValueError,
            "^attention_mask: expected 0",
            {"attention_mask": torch.ones(2, LENGTH).index_fill(1, torch.tensor([6]), value)},
        )
        for value in (2, 0.5, math.nan)
    },
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
    "max_length below the prompt": (ValueError, "max_length", {"max_length": 5, "max_new_tokens": None}),
    "an image": (ValueError, "pixel_values", {"pixel_values": torch.ones(2, 3, 8, 8)}),
    "none as sources": (ValueError, '^draft_sources: .* pass graph_config="plain"$', {"draft_sources": "none"}),
    "meta ids": (ValueError, "^input_ids: on the meta device", {"input_ids": IDS.to("meta")}),
    "an infinite warper": (
        ValueError,
        "^temperature: expected a finite number above 0, got inf",
        {"do_sample": True, "logits_processor": [TEMPERATURE]},
    ),
    "a word for a streamer": (TypeError, "^streamer: .*got str", {"streamer": "x"}),
    "a wide criterion": (ValueError, "stopping_criteria: Wide", {"stopping_criteria": [Wide()]}),
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


def test_what_is_no_model_that_can_generate_is_named():
    config = transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    target, _ = pair()  # made before: a device that is the default is that of all that is made
    with torch.device("meta"):
        nowhere = transformers.LlamaForCausalLM(target.config)
    tuples = models.endless(vocab_size=VOCAB)
    tuples.config.return_dict = False
    for model, error, words in (
        (torch.nn.Linear(2, 2), TypeError, "expected"),
        (transformers.T5ForConditionalGeneration(config), ValueError, "T5"),
        (nowhere, ValueError, ".*meta device"),
        (tuples, ValueError, r"LlamaForCausalLM.*model\.config\.return_dict is False: set it to True"),
    ):
        with pytest.raises(error, match=f"^model: {words}"):
            gsd.generate(model, **prompt())


DOORS = {
    "generate": lambda target, **given: gsd.generate(target, **prompt(), **given),
    "patch": gsd.patch,
    "GraphDecoder": lambda target, **given: gsd.GraphDecoder(**given),
}


@pytest.mark.parametrize("door", DOORS)
def test_an_unknown_option_names_the_nearest(door):
    target = pair()[0]
    with refused(target, TypeError, r"unknown (option|argument) 'reuse_histroy'; did you mean 'reuse_history'\?"):
        DOORS[door](target, reuse_histroy="graph")
    known = {*inspect.signature(target.forward).parameters} - {"self", "kwargs"}
    resolved.check_names(known, target)  # what the model's own code takes is no misspelling


def test_patching_twice_and_unpatching_the_unpatched():
    target, draft = pair()
    same = torch.ones(3, dtype=torch.int64)
    with gsd.patch(target, assistant_model=draft, reference_ids=same) as handle:
        assert gsd.patch(target, assistant_model=draft, reference_ids=same) is handle, "a notebook's cell, run again"
        for other in ({}, {"assistant_model": draft, "reference_ids": same + 1}):
            with pytest.raises(ValueError, match=r"model: already patched with other options; .*unpatch\(model\)"):
                gsd.patch(target, **other)
        with pytest.raises(ValueError, match="patch: this handle's with block is entered already"), handle:
            pass
        with pytest.raises(TypeError, match=r"unknown argument 'do_sampel'; did you mean 'do_sample'\?"):
            target.generate(**prompt(), do_sampel=True)
        assert handle.patched and handle.stats is None, "what was refused ended nothing"
    with pytest.raises(ValueError, match="patch: this handle's model was unpatched; patch it anew"), handle:
        pass
    for model in (target, "model"):
        with pytest.raises(ValueError, match="model: not patched"):
            gsd.unpatch(model)
    with refused(target, TypeError, "assistant_model"):
        gsd.patch(target, assistant_model="x")


def test_a_patched_models_draft_and_heads_can_be_left_out_for_one_call():
    target, draft = copy.deepcopy(pair())
    heads = gsd.DraftHeads.for_model(target, 2).requires_grad_(False)
    expected, alone = target.generate(**prompt()), {"assistant_model": False, "draft_heads": False}
    with gsd.patch(target, assistant_model=draft, draft_heads=heads, graph_config="graph") as handle:
        with pytest.raises(ValueError, match=r"draft_sources: .*assistant_model=False leaves a patched model's out"):
            target.generate(**prompt(), draft_sources=("history",))
        for call, drafted in (
            ({}, (True, True)),
            (alone | {"draft_sources": ("history",)}, (False, True)),
            (alone, (False, True)),
            ({"graph_config": "plain"}, (False, False)),
            ({"assistant_model": False}, (False, True)),
            ({}, (True, True)),
        ):
            assert torch.equal(target.generate(**prompt(), **call), expected)
            assert (handle.stats.draft_rows > 0, handle.stats.drafted_nodes > 0) == drafted, call


def test_references_of_prompts_with_several_sequences_each():
    target, _ = pair()
    call = prompt(2, do_sample=True, top_k=3, temperature=0.5, num_return_sequences=3, seed=4)
    plain = gsd.generate(target, **call)
    assert plain.shape[0] == 6
    texts = torch.stack([plain[0], plain[3]])
    shape = gsd.GraphConfig(depth=0, branch=2, history_depth=6, max_rows=16)
    sources, steps = {"draft_sources": ("history",), "graph_config": shape, "return_dict_in_generate": True}, []
    for reference in (None, texts, texts.repeat_interleave(3, 0), texts[0]):
        out = gsd.generate(target, **sources, reference_ids=reference, **call)
        assert torch.equal(out.sequences, plain)
        steps.append(out.stats.sequence_steps)
    assert steps[1] == steps[2] < steps[0], "every sequence reads its own prompt's"


# What is honoured, irrelevant or refused: complete for the installed transformers


def test_every_field_and_parameter_of_transformers_is_listed():
    fields = set(vars(GenerationConfig()))
    fields |= {name for name in vars(models.tiny().generation_config) if not name.startswith("_")}
    assert len(fields) > 50 and fields <= validate.CONFIG_FIELDS
    parameters = set(inspect.signature(GenerationMixin.generate).parameters) - {"self"}
    read = set(inspect.signature(GenerationMixin._extract_generation_mode_kwargs).parameters)
    parameters |= read - {"self", "custom_generate", "kwargs"}
    assert parameters <= validate.SERVED_PARAMETERS | validate.REFUSED_PARAMETERS.keys()


REFUSED_VALUES = {
    "num_beams": 2,
    "num_beam_groups": 2,
    "constraints": [1],
    "force_words_ids": [[1]],
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "guidance_scale": 1.5,
    "prompt_lookup_num_tokens": 4,
    "assistant_early_exit": 1,
    "use_mtp": True,
    "speculation_type": "x",
    "is_assistant": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "token_healing": True,
    "cache_implementation": "quantized",
}


def test_every_refused_field_is_refused_by_name():
    assert validate.REFUSED.keys() == set(REFUSED_VALUES)
    for name, value in REFUSED_VALUES.items():
        config = GenerationConfig(return_dict_in_generate=True)
        check_generation_config(config)
        setattr(config, name, value)
        with pytest.raises(ValueError, match=name):
            check_generation_config(config)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("num_assistant_tokens", "num_assistant_tokens=7 has no effect"),
        ("codebooks", "generation option codebooks=7 is not known to gsd_kernels"),
    ],
)
def test_an_option_without_effect_is_reported_once(name, words, caplog):
    logging.Logger.warning_once.cache_clear()
    caplog.set_level(logging.WARNING, logger="gsd_kernels")
    target = models.tiny(vocab_size=VOCAB)
    expected = gsd.generate(target, **prompt())
    assert not caplog.records, "transformers' own default is nobody's wish"
    setattr(target.generation_config, name, 7)
    for _ in range(2):
        # A config of the call's own says nothing of it, so the model's counts.
        assert gsd.generate(target, **prompt(), generation_config=GenerationConfig()).equal(expected)
    (record,) = (record for record in caplog.records if record.name == "gsd_kernels")
    assert re.search(words, record.message)


def test_what_a_config_asks_for_beside_logits_changes_no_text():
    target = tiny_configs.build("MixtralForCausalLM", 2)
    target.set_attn_implementation("eager")  # which alone returns attention weights
    call = models.prompts(2, 7, ragged=False, vocab=tiny_configs.VOCAB) | {"max_new_tokens": 9, "do_sample": False}
    text = target.generate(**call)
    for field in ("output_router_logits", "output_attentions", "output_hidden_states"):
        setattr(target.config, field, True)
        found = gsd.generate(target, **call, assistant_model=models.noised(target, 0.02), graph_config="tree")
        assert torch.equal(found, text) and getattr(target.config, field), field
    # A checkpoint without generation options: transformers takes the fields over, and returns what they ask for.
    target.generation_config = GenerationConfig.from_model_config(target.config)
    with pytest.raises(ValueError, match=r"output_attentions=True.*a forward of the finished text has them"):
        gsd.generate(target, **call)
    with gsd.patch(target):
        out = target.generate(**call)
    assert torch.equal(out.sequences, text) and out.attentions is not None


def test_stop_strings_of_the_models_own_generation_config():
    target = models.tiny()
    ids = models.prompts(1, 8)["input_ids"]
    text = models.tokenizer().decode(target.generate(ids, max_new_tokens=8, do_sample=False)[0, 8:])
    target.generation_config.stop_strings = [text[3]]
    shared = {"tokenizer": models.tokenizer(), "max_new_tokens": 8, "do_sample": False}
    expected = target.generate(ids, **shared)
    assert expected.shape[1] < 16
    assert torch.equal(gsd.generate(target, ids, assistant_model=target, graph_config="tree", **shared), expected)
