"""``patch`` and ``unpatch``: every way to the model's own generate, and back."""

from __future__ import annotations

import copy
import functools
import io
import os
import signal
import threading
from contextlib import ExitStack

import models
import pytest
import torch
import transformers

import gsd_kernels as gsd
from gsd_kernels_hf import locks

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
