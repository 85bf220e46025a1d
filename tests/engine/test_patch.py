"""``patch`` and ``unpatch``: every way to the model's own generate, and back."""

from __future__ import annotations

import functools
import threading

import models
import pytest
import torch
import transformers
from chats import both

import gsd_kernels as gsd
from gsd_kernels_hf import api

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


def test_nothing_given_drafts_from_the_history_under_auto():
    """And plain decoding is asked for by name; the text is the same."""
    target, _ = fresh()
    expected = plain(40)
    own = gsd.generate(target, **prompt(), max_new_tokens=40, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(own.sequences, expected) and own.stats.drafted_nodes > 0
    with gsd.patch(target) as handle:
        for options, drafts in (({}, True), ({"graph_config": "plain"}, False), ({"graph_config": "graph"}, True)):
            assert torch.equal(target.generate(**prompt(), max_new_tokens=40, do_sample=False, **options), expected)
            assert (handle.stats.drafted_nodes > 0) is drafts, options
            assert drafts or handle.stats.plain_steps == handle.stats.steps
    draft = {"assistant_model": models.noised(target, 0.01), "graph_config": "plain"}
    out = gsd.generate(target, **prompt(), max_new_tokens=8, do_sample=False, **draft, return_dict_in_generate=True)
    assert out.stats.draft_rows == out.stats.drafted_nodes == 0, "the name decides, whatever is given"


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


def test_generate_needs_no_patch_and_leaves_no_trace():
    target, draft = fresh()
    variables = set(vars(target))
    seen = []
    out = gsd.generate(
        target,
        **prompt(),
        assistant_model=draft,
        graph_config="graph",
        max_new_tokens=16,
        do_sample=False,
        observer=lambda record: seen.append((target.config._attn_implementation, int(record.rows.num_rows.min()))),
    )
    assert torch.equal(out, plain())
    assert {name for name, _ in seen} == {"sdpa"}, "what a call hands out is called between forwards"
    assert min(rows for _, rows in seen) > 1
    assert set(vars(target)) == variables and target.config._attn_implementation == "sdpa"


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


@pytest.mark.parametrize("patch_wrapped", [True, False])
def test_lora_wrapped_model(patch_wrapped):
    peft = pytest.importorskip("peft")
    target, draft = fresh()
    base = plain()
    wrapped = peft.get_peft_model(
        target, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    gen = torch.Generator().manual_seed(0)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=gen, dtype=parameter.dtype)
    expected = wrapped.generate(**prompt(), max_new_tokens=16, do_sample=False)
    assert not torch.equal(expected, base), "the adapter must matter"
    handle = gsd.patch(wrapped if patch_wrapped else target, assistant_model=draft, graph_config="tree")
    out = wrapped.generate(**prompt(), max_new_tokens=16, do_sample=False)
    assert handle.stats.steps > 0 and torch.equal(out, expected)
    gsd.unpatch(wrapped if patch_wrapped else target)
    assert torch.equal(wrapped.generate(**prompt(), max_new_tokens=16, do_sample=False), expected)
    again = gsd.generate(
        wrapped, **prompt(), assistant_model=draft, graph_config="tree", max_new_tokens=16, do_sample=False
    )
    assert torch.equal(again, expected)


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


def test_a_draft_that_shares_the_targets_config():
    target, _ = fresh()
    draft = transformers.LlamaForCausalLM(target.config).double().eval()
    draft.load_state_dict(models.noised(target, 0.01).state_dict())
    draft.config = draft.model.config = target.config
    assert draft.config is target.config
    arguments = {"max_new_tokens": 16, "do_sample": False}
    out = gsd.generate(target, **prompt(), assistant_model=draft, graph_config="tree", **arguments)
    assert torch.equal(out, plain()) and target.config._attn_implementation == "sdpa"
    handle = gsd.patch(target, assistant_model=draft, graph_config="tree")
    assert torch.equal(target.generate(**prompt(), **arguments), plain()) and handle.stats.tokens_per_step > 1
    gsd.unpatch(target)
    assert target.config._attn_implementation == "sdpa"


def test_the_target_as_its_own_draft():
    target, _ = fresh()
    arguments = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    config = gsd.GraphConfig.preset("chain", depth=3)
    out = gsd.generate(target, **prompt(), assistant_model=target, graph_config=config, **arguments)
    assert torch.equal(out.sequences, plain())
    assert out.stats.steps == 4 and out.stats.tokens_per_step == 4.0, "a perfect draft is always accepted"
    handle = gsd.patch(target, assistant_model=target, graph_config=config)
    assert torch.equal(target.generate(**prompt(), **arguments).sequences, plain()) and handle.stats.steps == 4
    gsd.unpatch(target)
    assert target.config._attn_implementation == "sdpa"


def test_custom_generate():
    target, draft = fresh()
    decoder = gsd.GraphDecoder(draft, "tree")
    out = target.generate(**prompt(), max_new_tokens=16, do_sample=False, custom_generate=decoder)
    assert torch.equal(out, plain()) and decoder.stats.steps > 0 and decoder.stats.tokens_per_step > 1
    sampled = {**prompt(), "max_new_tokens": 16, "do_sample": True, "top_k": 0}
    first = target.generate(**sampled, custom_generate=decoder, seed=3)
    assert torch.equal(first, gsd.generate(target, **sampled, seed=3))
    assert torch.equal(target.generate(**sampled, custom_generate=gsd.GraphDecoder(draft, "chain", seed=3)), first)
    # It wins over a patch, and its exceptions leave nothing behind.
    gsd.patch(target, graph_config="tree")
    assert torch.equal(target.generate(**sampled, custom_generate=decoder, seed=3), first)
    gsd.unpatch(target)
    with pytest.raises(ValueError, match="num_beams"):
        target.generate(**prompt(), num_beams=2, custom_generate=decoder)
    assert target.config._attn_implementation == "sdpa"


def test_two_patches_at_once_are_one(monkeypatch):
    """One thread enters, the other gets its handle, and nothing is left switched or half written."""
    target, draft = fresh()
    engines, inside = api.Engines, threading.Barrier(2)

    def meet(**options):  # the last thing that is made before a patch is set
        inside.wait(10)
        return engines(**options)

    monkeypatch.setattr(api, "Engines", meet)
    handles = []
    both(lambda _: handles.append(gsd.patch(target, assistant_model=draft, graph_config="tree")))
    assert handles[0] is handles[1] and handles[0].patched
    target.generate(**prompt(), max_new_tokens=4, do_sample=False)
    gsd.unpatch(target)
    assert target.config._attn_implementation == draft.config._attn_implementation == "sdpa"
    assert "generate" not in vars(target)


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

TOKENS = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def alone():
    model = models.tiny()
    yield model
    if "generate" in vars(model):
        gsd.unpatch(model)


def test_the_block_patches_and_its_end_unpatches(alone):
    prompt = models.prompts(1, 9)
    expected = alone.generate(**prompt, **TOKENS)
    with gsd.patch(alone) as handle:
        assert torch.equal(alone.generate(**prompt, **TOKENS), expected)
        assert handle.stats.new_tokens == 12 and handle.patched
        assert len(handle.engines.idle.sessions) == 1
    assert "generate" not in vars(alone) and not handle.patched
    assert not handle.engines.idle.sessions and not len(handle.history), "what it kept is returned"
    assert handle.stats.new_tokens == 12, "the counts of its last call can be read behind it"


def test_an_exception_unpatches_and_gets_out(alone):
    with pytest.raises(KeyError, match="mine"), gsd.patch(alone):
        raise KeyError("mine")
    assert "generate" not in vars(alone)


def test_a_handle_serves_before_its_block_and_unpatching_inside_is_fine(alone):
    handle = gsd.patch(alone)
    alone.generate(**models.prompts(1, 9), **TOKENS)
    assert handle.stats.steps
    with handle as same:
        assert same is handle
        gsd.unpatch(alone)
    with gsd.patch(alone):
        gsd.unpatch(alone)
        other = gsd.patch(alone)  # of somebody else: the block's end leaves it alone
    assert other.patched and "generate" in vars(alone)


def test_nested_and_late_blocks_are_refused_by_name(alone):
    with gsd.patch(alone) as handle:
        with pytest.raises(ValueError, match=r"model: already patched with other options; .*unpatch\(model\)"):
            gsd.patch(alone, graph_config="plain")
        with pytest.raises(ValueError, match="patch: this handle's with block is entered already"), handle:
            pass
        assert handle.patched, "the refused block ended nothing"
    with pytest.raises(ValueError, match="patch: this handle's model was unpatched; patch it anew"), handle:
        pass


def test_what_a_handle_keeps_is_said_in_a_line(alone):
    with gsd.patch(alone) as handle:
        assert repr(handle) == "<Patch of LlamaForCausalLM: 0 texts kept in 0.0 MiB of caches, history of 0 contexts>"
        alone.generate(**models.prompts(1, 9), **TOKENS)
        assert repr(handle).startswith("<Patch of LlamaForCausalLM: 1 text kept in 0.")
        assert f"history of {len(handle.history)} contexts" in repr(handle) and len(handle.history)
    assert repr(handle) == "<Patch of LlamaForCausalLM: unpatched>"
