"""``patch`` and ``unpatch``: every way to the model's own generate, and back; what it alone serves it still does."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import logging
import os
import signal
import threading
from contextlib import ExitStack
from dataclasses import fields
from typing import get_args, get_type_hints

import models
import pytest
import torch
import transformers
from transformers import DynamicCache, GenerationConfig

import gsd_kernels
import gsd_kernels as gsd
from gsd_kernels.config import AUTO, PLAIN, PRESETS, GraphName
from gsd_kernels_hf import locks, validate
from gsd_kernels_hf.engine.arguments import GenerateArguments, OptionArguments
from gsd_kernels_hf.engine.options import Options
from gsd_kernels_hf.model.properties import cache_argument
from gsd_kernels_hf.validate.options import CONFIG_FIELDS, GENERATE_PARAMETERS, HONOURED

torch.set_num_threads(1)

VOCAB = 32


def fresh(dtype: torch.dtype = torch.float64, **config):
    """An own pair: these tests change models."""
    target = models.endless(vocab_size=VOCAB, dtype=dtype, **config)
    return target, models.noised(target, 0.01)


@functools.lru_cache
def prompt() -> dict[str, torch.Tensor]:
    return models.prompts(2, 9, seed=3, vocab=VOCAB)


@functools.lru_cache
def plain(tokens: int = 16) -> torch.Tensor:
    return fresh()[0].generate(**prompt(), max_new_tokens=tokens, do_sample=False)


@pytest.fixture
def patched():
    target, draft = fresh()
    handle = gsd.patch(target, assistant_model=draft, graph_config="tree")
    yield target, draft, handle
    if "generate" in vars(target):
        gsd.unpatch(target)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_unpatch_restores_everything(attention):
    # In float64 transformers' eager attention makes NaN of padding.
    target, draft = fresh(torch.float64 if attention == "sdpa" else torch.float32)
    for model in (target, draft):
        model.set_attn_implementation(attention)
    variables, logits = set(vars(target)), target(**prompt()).logits
    handle = gsd.patch(target, assistant_model=draft, graph_config="graph")
    # A forward of the patched model is what it was, too.
    assert torch.equal(target(**prompt()).logits, logits)
    out = target.generate(**prompt(), max_new_tokens=16, do_sample=False)
    assert handle.stats.steps > 0 and handle.stats.tokens_per_step > 1
    gsd.unpatch(target)
    assert set(vars(target)) == variables
    assert target.generate.__func__ is transformers.GenerationMixin.generate
    assert target.config._attn_implementation == draft.config._attn_implementation == attention
    assert torch.equal(target(**prompt()).logits, logits)
    expected = target.generate(**prompt(), max_new_tokens=16, do_sample=False)
    assert torch.equal(expected, out)
    assert handle.stats.steps > 0, "the handle keeps what it knew"


def test_pipeline(patched):
    target, _, handle = patched
    tokenizer = models.tokenizer(VOCAB)
    text = tokenizer.decode(prompt()["input_ids"][0])
    gsd.unpatch(target)
    expected = transformers.pipeline("text-generation", model=target, tokenizer=tokenizer)(
        [text, text[:5]], max_new_tokens=12, do_sample=False
    )
    handle = gsd.patch(target, assistant_model=patched[1], graph_config="tree")
    pipe = transformers.pipeline("text-generation", model=target, tokenizer=tokenizer)
    assert pipe([text, text[:5]], max_new_tokens=12, do_sample=False) == expected
    assert handle.stats.steps > 0 and handle.stats.tokens_per_step > 1
    assert len(expected[0][0]["generated_text"]) >= len(text) + 12
    handle.stats = None
    both = pipe([text, text[:5]], max_new_tokens=12, do_sample=False, batch_size=2)
    assert handle.stats.sequences == 2 and both[0] == expected[0]


def test_arguments_go_before_the_patch_and_the_patch_before_defaults(patched):
    target, _, handle = patched
    rows = {}
    for name, more in {
        "patch": {},
        "call": {"graph_config": gsd.GraphConfig(depth=1, width=1, branch=2, max_rows=3)},
    }.items():
        out = target.generate(**prompt(), max_new_tokens=16, do_sample=False, **more)
        assert torch.equal(out, plain())
        rows[name] = handle.stats.target_rows // handle.stats.steps // 2
    assert rows == {"patch": gsd.GraphConfig.preset("tree").max_rows, "call": 3}
    # generate's own precedence: keyword, generation_config, the model's defaults.
    config = transformers.GenerationConfig(max_new_tokens=5, pad_token_id=0)
    assert target.generate(**prompt(), generation_config=config).shape[1] == 9 + 5
    assert target.generate(prompt()["input_ids"], config, max_new_tokens=7).shape[1] == 9 + 7
    target.generation_config.max_new_tokens = 4
    assert target.generate(**prompt()).shape[1] == 9 + 4
    other = models.noised(target, 0.0)
    target.generate(**prompt(), max_new_tokens=16, do_sample=False, assistant_model=other)
    assert handle.stats.steps < 8, "another draft, this time a perfect one"


@pytest.mark.slow
def test_a_compiled_model_is_unwrapped():
    target, draft = fresh()
    compiled, compiled_draft = torch.compile(target), torch.compile(draft)
    arguments = {"max_new_tokens": 16, "do_sample": False}
    out = gsd.generate(compiled, **prompt(), assistant_model=compiled_draft, graph_config="tree", **arguments)
    assert torch.equal(out, plain())
    handle = gsd.patch(compiled, assistant_model=compiled_draft, graph_config="tree")
    assert torch.equal(compiled.generate(**prompt(), **arguments), plain()) and handle.stats.steps > 0
    gsd.unpatch(compiled)
    assert target.config._attn_implementation == "sdpa"


def own_generate(*args, **kwargs) -> str:
    """What somebody set on a model before it was patched."""
    return "own"


@pytest.mark.parametrize("before", [{}, {"generate": own_generate}], ids=["nothing", "own"])
@pytest.mark.parametrize("since", ["patched", "deleted", "wrapped"])
def test_unpatch_leaves_what_others_set_and_puts_back_what_was_before(before, since):
    target, _ = fresh()
    vars(target).update(before)
    variables = vars(target).copy()
    handle = gsd.patch(target)
    inner = target.generate
    if since == "deleted":
        del target.generate
    elif since == "wrapped":
        target.generate = lambda *args, **kwargs: inner(*args, **kwargs)
    wrapper = vars(target).get("generate")
    gsd.unpatch(target)
    assert not handle.patched
    assert vars(target) == (variables | {"generate": wrapper} if since == "wrapped" else variables)
    made = target.generate(**prompt(), max_new_tokens=4, do_sample=False)
    assert made == "own" if before else torch.equal(made, plain(4))
    assert handle.stats is None, "nothing is accelerated behind unpatch, whoever kept the patch's generate"


# ``with patch(model):``, and what a handle says of itself.


@pytest.fixture
def alone():
    model = models.tiny()
    yield model
    if "generate" in vars(model):
        gsd.unpatch(model)


def test_nested_and_late_blocks_are_refused_by_name(alone):
    with gsd.patch(alone) as handle:
        with pytest.raises(ValueError, match=r"model: already patched with other options; .*unpatch\(model\)"):
            gsd.patch(alone, graph_config="plain")
        with pytest.raises(ValueError, match="patch: this handle's with block is entered already"), handle:
            pass
        assert handle.patched, "the refused block ended nothing"
    with pytest.raises(ValueError, match="patch: this handle's model was unpatched; patch it anew"), handle:
        pass


# Copies and pickles, which are of the model, not of the patch; children of a fork.


def ask(model) -> torch.Tensor:
    return model.generate(**prompt(), max_new_tokens=16, do_sample=False)


def pickled(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickled}


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_not_patched_and_can_be(way, patched):
    target, draft, handle = patched
    clone = WAYS[way](target)
    assert vars(clone).keys() == vars(fresh()[0]).keys()
    assert clone.generate.__func__ is transformers.GenerationMixin.generate and clone.generate.__self__ is clone
    assert torch.equal(ask(clone), plain())
    assert handle.stats is None
    with pytest.raises(ValueError, match="model: not patched, as a copy of a patched model is not"):
        gsd.unpatch(clone)
    own = gsd.patch(clone, assistant_model=draft, graph_config="tree")
    assert torch.equal(ask(clone), plain())
    assert own.stats.steps > 0 and handle.stats is None
    gsd.unpatch(clone)
    assert clone.config._attn_implementation == "sdpa" and handle.patched
    assert torch.equal(ask(target), plain()) and handle.stats.steps > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_no_lock_of_another_thread_is_held_in_a_child():
    """Other threads are inside of what is locked when it is forked, and the child decodes."""
    target, held, over = models.tiny(), threading.Event(), threading.Event()

    def hold():
        with ExitStack() as every:
            for lock in list(locks._locks):
                every.enter_context(lock)
            held.set()
            over.wait()

    with gsd.patch(target):
        ids = target.generate(max_new_tokens=4)
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        if (child := os.fork()) == 0:
            signal.alarm(60)  # a child that hangs is killed
            torch.set_num_threads(1)  # threads of its pool are not in the child either
            os._exit(not target.generate(max_new_tokens=4).equal(ids))
        status = os.waitpid(child, 0)[1]
        over.set()
        thread.join()
    assert status == 0


# A patched model loses no feature: what this package does not serve, transformers' own ``generate`` does.


SERVED_VOCAB, LENGTH = 40, 9


@functools.lru_cache
def served():
    target = models.endless(vocab_size=SERVED_VOCAB, num_hidden_layers=3)
    return target, models.noised(target, 0.02)


def asked(batch: int = 2, **more) -> dict:
    ragged = models.prompts(batch, LENGTH, seed=3, vocab=SERVED_VOCAB)
    return {**ragged, "max_new_tokens": 10, "do_sample": False, **more}


@pytest.fixture
def handed():
    target, draft = served()
    with gsd.patch(target, assistant_model=draft, graph_config="tree") as handle:
        yield target, handle


def filled(target, name):
    ids = asked()["input_ids"]
    cache = DynamicCache()
    with torch.no_grad():
        target(ids[:, :-1], use_cache=True, **{cache_argument(target): cache})
    return asked() | {name: cache, "attention_mask": torch.ones_like(ids)}


def embedded(target):
    ids = asked()["input_ids"]
    return asked(input_ids=None, inputs_embeds=target.get_input_embeddings()(ids).detach())


def one(**more) -> dict:
    return models.prompts(1, LENGTH, seed=3, vocab=SERVED_VOCAB) | {"max_new_tokens": 10, "do_sample": False, **more}


def holed(at: int) -> torch.Tensor:
    mask = torch.ones_like(asked()["input_ids"])
    mask[0, at] = 0
    return mask


@functools.lru_cache
def bloom():
    """A draft that places tokens by the cache's length (ALiBi)."""
    sizes = {"hidden_size": 32, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    return transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=SERVED_VOCAB, **sizes)).double().eval()


@functools.lru_cache
def dynamic():
    """A draft whose rotary frequencies depend on the length."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    return models.tiny(vocab_size=SERVED_VOCAB, rope_parameters=rope, max_position_embeddings=64)


def decoding(model, input_ids, logits_processor, stopping_criteria, generation_config, seed=None, **kwargs):
    """A custom_generate that wants an argument of the same name as one of ours."""
    assert seed == 3
    return torch.cat([input_ids, input_ids[:, :2]], 1)


def of_a_folder(folder):
    (folder / "custom_generate").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "custom_generate" / "generate.py").write_text(
        "def generate(model, input_ids, max_new_tokens=4, **kwargs):\n"
        "    return model.generate(input_ids, max_new_tokens=max_new_tokens, do_sample=False)\n"
    )
    call = {"input_ids": one()["input_ids"], "max_new_tokens": 5}
    return call | {"custom_generate": str(folder), "trust_remote_code": True}


DICT = {"return_dict_in_generate": True}
TOKENIZER = models.tokenizer(SERVED_VOCAB)
MODES = {  # of a target and an empty folder: the call; its reason begins the name, but for what has none
    "num_beams=3": lambda *_: asked(num_beams=3),
    "num_beams=2": lambda *_: asked(num_beams=2, num_return_sequences=2, output_scores=True, **DICT),
    "num_beams=4": lambda *_: asked(num_beams=4, do_sample=True, top_k=5),
    "prompt_lookup_num_tokens": lambda *_: one(prompt_lookup_num_tokens=3),
    "assistant_early_exit": lambda *_: one(assistant_early_exit=1),
    "output_hidden_states": lambda *_: asked(output_hidden_states=True, **DICT),
    "output_attentions": lambda *_: asked(output_attentions=True, **DICT),
    "guidance_scale": lambda *_: one(guidance_scale=1.5),
    "cache": lambda target, _: filled(target, cache_argument(target)),
    "past_key_values": lambda target, _: filled(target, "past_key_values"),  # the name before transformers 5.24
    "inputs_embeds": lambda target, _: embedded(target),
    "position_ids": lambda *_: asked(position_ids=asked()["attention_mask"].cumsum(1)),
    "negative_prompt_ids": lambda *_: one(guidance_scale=2.0, negative_prompt_ids=one()["input_ids"][:, :4]),
    "attention_mask": lambda *_: asked(attention_mask=holed(3)),
    "right-padded": lambda *_: asked(attention_mask=holed(-1)),
    "assistant_model: BloomForCausalLM": lambda *_: one(assistant_model=bloom(), num_assistant_tokens=2),
    "assistant_model: rope type 'dynamic'": lambda *_: one(assistant_model=dynamic(), num_assistant_tokens=2),
    "custom_generate: a function": lambda *_: asked(seed=3, custom_generate=decoding),
    "custom_generate: '/": lambda _, folder: of_a_folder(folder / "another"),
}
LIKE_UNPATCHED = {
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 4},
    "DoLa": {"dola_layers": "low"},
    "constraints": {"constraints": [1]},
    "forced words": {"force_words_ids": [[3]], "num_beams": 2},
    "groups of beams": {"num_beam_groups": 2, "num_beams": 4},
    "heads of the model's own": {"use_mtp": True},
    "a way of speculating": {"speculation_type": "mtp"},
    "healing": {"token_healing": True, "tokenizer": TOKENIZER},
    "labels": {"labels": torch.ones(1, LENGTH, dtype=torch.int64)},
    "an encoder's outputs": {"encoder_outputs": (torch.ones(1, 2),)},
    "synchronised GPUs": {"synced_gpus": True},
    "stop strings and beams": {"stop_strings": ["a"], "num_beams": 2, "tokenizer": TOKENIZER},
    "padding alone": {"attention_mask": torch.zeros(1, LENGTH, dtype=torch.int64)},
    "a tuple for a cache": {"past_key_values": ((torch.ones(1),),)},
    "no beams": {"num_beams": 0},
    "no tokens": {"max_new_tokens": 0},
    "an invented argument": {"depth": 3},
}
"""Calls that transformers may refuse as well, by whatever reason."""


def outcome(model, call):
    torch.manual_seed(5)
    try:
        out = model.generate(**copy.deepcopy(call))
    except Exception as error:
        return type(error), str(error)
    return type(out), getattr(out, "sequences", out).tolist()


@pytest.mark.parametrize("name", [*MODES, *LIKE_UNPATCHED])
def test_output_or_error_is_that_of_the_unpatched_model(name, caplog, tmp_path):
    """Of a mode that transformers alone serves one line names the reason, and the next call is this package's."""
    target, draft = served()
    call = MODES[name](target, tmp_path) if name in MODES else one(**LIKE_UNPATCHED[name])
    expected, next_one = outcome(target, call), outcome(target, asked())
    caplog.set_level(logging.INFO, logger="gsd_kernels")
    with gsd.patch(target, assistant_model=draft) as handle:
        assert outcome(target, call) == expected
        if name in MODES:
            said = [line for line in caplog.messages if "transformers' own generate" in line]
            assert len(said) == 1 and name in said[0] and name in handle.stats.why, said
            assert handle.stats.steps == 0 and handle.stats.seconds["total"] > 0 and type(expected[1]) is list
        assert outcome(target, asked()) == next_one
        assert handle.stats.why is None and handle.stats.steps > 0


@pytest.mark.parametrize(
    "ours",
    [
        {"graph_config": "chain"},
        {"seed": 3},
        {"draft_sources": ("history",)},
        {"reference_ids": torch.tensor([3, 4])},
        {"backend": "reference"},
        {"reuse_prefix": False},
        {"assistant_model": [models.noised(served()[0], 0.1)]},
    ],
    ids=lambda ours: next(iter(ours)),
)
def test_an_option_of_ours_in_such_a_call_is_named(handed, ours):
    target, _ = handed
    if "draft_sources" in ours:
        ours = ours | {"assistant_model": False}
    with pytest.raises(ValueError, match=f"^{next(iter(ours))}: .*num_beams=2") as caught:
        target.generate(**asked(), num_beams=2, **ours)
    assert not isinstance(caught.value, validate.Unsupported)


def test_arguments_by_position(handed):
    target, handle = handed
    ids, config = one()["input_ids"], GenerationConfig(max_new_tokens=6, pad_token_id=0)
    penalty = transformers.LogitsProcessorList([transformers.RepetitionPenaltyLogitsProcessor(1.4)])
    expected = type(target).generate(target, ids, config, penalty)
    assert torch.equal(target.generate(ids, config, penalty), expected) and handle.stats.why is None
    beams = GenerationConfig(max_new_tokens=6, pad_token_id=0, num_beams=3)
    assert torch.equal(target.generate(ids, beams, penalty), type(target).generate(target, ids, beams, penalty))
    assert handle.stats.why.startswith("num_beams=3")
    with pytest.raises(TypeError, match="generation_config"):
        target.generate(ids, config, generation_config=config)
    with pytest.raises(TypeError, match="position"):
        target.generate(ids, *([None] * 20))


# The keywords that type checkers know are those that the options and transformers' own arguments are.


def test_options_agree_name_by_name_and_type_by_type():
    declared = get_type_hints(Options)
    options = {field.name: declared[field.name] for field in fields(Options)}
    assert get_type_hints(OptionArguments) == options
    assert list(OptionArguments.__annotations__) == list(options), "in the same order, for editors"
    assert not OptionArguments.__required_keys__ and not GenerateArguments.__required_keys__


def test_what_is_honoured_of_transformers_own_arguments_is_known_to_type_checkers():
    treated = {name for name, (treatment, *_) in CONFIG_FIELDS.items() if treatment == HONOURED}
    treated |= {name for name, treatment in GENERATE_PARAMETERS.items() if treatment == HONOURED}
    explicit = set(inspect.signature(inspect.unwrap(gsd_kernels.generate)).parameters)
    # generate gives its own custom_generate; use_cache changes nothing, and transformers' users pass it.
    expected = treated - explicit - {field.name for field in fields(Options)} - {"custom_generate"} | {"use_cache"}
    known = set(get_type_hints(GenerateArguments)) - set(get_type_hints(OptionArguments))
    assert known == expected


def test_shapes_are_known_to_type_checkers():
    assert set(get_args(GraphName)) == {AUTO, PLAIN, *PRESETS}
