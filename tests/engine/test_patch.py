"""``patch`` and ``unpatch``: every way to the model's own generate, and back; what it alone serves it still does."""

from __future__ import annotations

import copy
import functools
import io
import logging
import os
import signal
import threading
from contextlib import ExitStack

import goldens
import models
import pytest
import torch
import transformers
from transformers import DynamicCache, GenerationConfig

import gsd_kernels as gsd
from gsd_kernels_hf import locks, validate
from gsd_kernels_hf.model.properties import cache_argument

torch.set_num_threads(1)
VOCAB, LENGTH = 32, 9


def fresh(**config):
    """An own pair: these tests change models."""
    target = models.endless(vocab_size=VOCAB, **config)
    return target, models.noised(target, 0.01)


def asked(batch: int = 2, **more) -> dict:
    ragged = models.prompts(batch, LENGTH, seed=3, vocab=VOCAB)
    return {**ragged, "max_new_tokens": 16, "do_sample": False, **more}


@functools.cache
def plain() -> torch.Tensor:
    return fresh()[0].generate(**asked())


@pytest.fixture
def patched():
    target, draft = fresh()
    handle = gsd.patch(target, assistant_model=draft, graph_config="tree")
    yield target, draft, handle
    if "generate" in vars(target):
        gsd.unpatch(target)


def test_unpatch_restores_everything():
    target, draft = fresh()
    variables, logits = set(vars(target)), target(**models.prompts(2, LENGTH, vocab=VOCAB)).logits
    handle = gsd.patch(target, assistant_model=draft, graph_config="graph")
    assert torch.equal(target(**models.prompts(2, LENGTH, vocab=VOCAB)).logits, logits)
    assert torch.equal(target.generate(**asked()), plain()) and handle.stats.tokens_per_step > 1
    assert "text" in repr(handle) and "MiB of caches" in repr(handle)
    gsd.unpatch(target)
    assert set(vars(target)) == variables and repr(handle).endswith(": unpatched>")
    assert target.generate.__func__ is transformers.GenerationMixin.generate
    assert target.config._attn_implementation == draft.config._attn_implementation == "sdpa"
    assert torch.equal(target.generate(**asked()), plain())
    assert handle.stats.steps > 0, "the handle keeps what it knew"


def test_arguments_go_before_the_patch_and_the_patch_before_defaults(patched):
    target, _, handle = patched
    small = gsd.GraphConfig(depth=1, width=1, branch=2, max_rows=3)
    for more, rows in (({}, gsd.GraphConfig.preset("tree").max_rows), ({"graph_config": small}, 3)):
        assert torch.equal(target.generate(**asked(), **more), plain())
        assert handle.stats.target_rows == rows * handle.stats.steps * 2
    # generate's own precedence: keyword, generation_config, the model's defaults; by position too.
    ids, config = asked(1)["input_ids"], GenerationConfig(max_new_tokens=5, pad_token_id=0)
    penalty = transformers.LogitsProcessorList([transformers.RepetitionPenaltyLogitsProcessor(1.4)])
    assert torch.equal(target.generate(ids, config, penalty), type(target).generate(target, ids, config, penalty))
    assert target.generate(ids, config, max_new_tokens=7).shape[1] == LENGTH + 7
    target.generation_config.max_new_tokens = 4
    assert target.generate(ids).shape[1] == LENGTH + 4
    with pytest.raises(TypeError, match="generation_config"):
        target.generate(ids, config, generation_config=config)
    with pytest.raises(TypeError, match="position"):
        target.generate(ids, *([None] * 20))
    target.generate(**asked(), assistant_model=models.noised(target, 0.0))
    assert handle.stats.steps < 8, "another draft, this time a perfect one"


@pytest.mark.slow
def test_a_compiled_model_is_unwrapped():
    target, draft = fresh()
    compiled, compiled_draft = torch.compile(target), torch.compile(draft)
    options = {"assistant_model": compiled_draft, "graph_config": "tree"}
    assert torch.equal(gsd.generate(compiled, **asked(), **options), plain())
    with gsd.patch(compiled, **options) as handle:
        assert torch.equal(compiled.generate(**asked()), plain()) and handle.stats.steps > 0
    assert target.config._attn_implementation == "sdpa"


def own_generate(*args, **kwargs) -> str:
    """What somebody set on a model before it was patched."""
    return "own"


@pytest.mark.parametrize(
    ("before", "since"),
    [({}, "deleted"), ({}, "wrapped"), ({"generate": own_generate}, "patched")],
    ids=["deleted", "wrapped", "patched"],
)
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
    made = target.generate(**asked())
    assert made == "own" if before else torch.equal(made, plain())
    assert handle.stats is None, "nothing is accelerated behind unpatch, whoever kept the patch's generate"


# Copies and pickles, which are of the model, not of the patch; children of a fork.


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
    assert torch.equal(clone.generate(**asked()), plain())
    with pytest.raises(ValueError, match="model: not patched, as a copy of a patched model is not"):
        gsd.unpatch(clone)
    with gsd.patch(clone, assistant_model=draft, graph_config="tree") as own:
        assert torch.equal(clone.generate(**asked()), plain())
        assert own.stats.steps > 0 and handle.stats is None
    assert clone.config._attn_implementation == "sdpa" and handle.patched
    assert torch.equal(target.generate(**asked()), plain()) and handle.stats.steps > 0


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


@functools.cache
def served():
    return fresh(num_hidden_layers=3)


def filled(target, _):
    ids = asked()["input_ids"]
    cache, name = DynamicCache(), cache_argument(target)
    with torch.no_grad():
        target(ids[:, :-1], use_cache=True, **{name: cache})
    return asked() | {name: cache, "attention_mask": torch.ones_like(ids)}


def embedded(target, _):
    return asked(input_ids=None, inputs_embeds=target.get_input_embeddings()(asked()["input_ids"]).detach())


@functools.cache
def bloom():
    """A draft that places tokens by the cache's length (ALiBi)."""
    sizes = {"hidden_size": 32, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    return transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=VOCAB, **sizes)).double().eval()


def decoding(model, input_ids, logits_processor, stopping_criteria, generation_config, seed=None, **kwargs):
    """A custom_generate that wants an argument of the same name as one of ours."""
    assert seed == 3
    return torch.cat([input_ids, input_ids[:, :2]], 1)


def of_a_folder(_, folder):
    (folder / "another" / "custom_generate").mkdir(parents=True)
    (folder / "another" / "config.json").write_text("{}")
    (folder / "another" / "custom_generate" / "generate.py").write_text(
        "def generate(model, input_ids, max_new_tokens=4, **kwargs):\n"
        "    return model.generate(input_ids, max_new_tokens=max_new_tokens, do_sample=False)\n"
    )
    call = {"input_ids": asked(1)["input_ids"], "max_new_tokens": 5}
    return call | {"custom_generate": str(folder / "another"), "trust_remote_code": True}


DICT = {"return_dict_in_generate": True}
TOKENIZER = models.tokenizer(VOCAB)
REFUSED = ("contrastive search", "guidance", "prompt lookup", "an early exit", "forced words", "layers to contrast")
MODES = {  # of a target and an empty folder: the call; its reason begins the name, but for what has none
    "num_beams=2": lambda *_: asked(num_beams=2, num_return_sequences=2, output_scores=True, **DICT),
    "output_hidden_states": lambda *_: asked(output_hidden_states=True, **DICT),
    "cache": filled,
    "inputs_embeds": embedded,
    "position_ids": lambda *_: asked(position_ids=asked()["attention_mask"].cumsum(1)),
    "negative_prompt_ids": lambda *_: asked(1, guidance_scale=2.0, negative_prompt_ids=asked(1)["input_ids"][:, :4]),
    "attention_mask": lambda *_: asked(attention_mask=torch.ones(2, LENGTH).index_fill(1, torch.tensor([3]), 0)),
    "assistant_model: BloomForCausalLM": lambda *_: asked(1, assistant_model=bloom(), num_assistant_tokens=2),
    "custom_generate: a function": lambda *_: asked(seed=3, custom_generate=decoding),
    "custom_generate: '/": of_a_folder,
}
LIKE_UNPATCHED = {
    **{name: goldens.WRONG[name] for name in REFUSED},
    "heads of the model's own": {"use_mtp": True},
    "healing": {"token_healing": True, "tokenizer": TOKENIZER},
    "padding alone": {"attention_mask": torch.zeros(1, LENGTH, dtype=torch.int64)},
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
    call = MODES[name](target, tmp_path) if name in MODES else asked(1, **LIKE_UNPATCHED[name])
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


def test_an_option_of_ours_in_such_a_call_is_named(patched):
    target, draft, _ = patched
    for name, value in {"graph_config": "chain", "seed": 3, "assistant_model": [draft]}.items():
        with pytest.raises(ValueError, match=f"^{name}: .*num_beams=2") as caught:
            target.generate(**asked(), num_beams=2, **{name: value})
        assert not isinstance(caught.value, validate.Unsupported)
