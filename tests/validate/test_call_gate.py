"""What one call hands over: read and exact, or refused by name before anything changes."""

from __future__ import annotations

import copy
import functools
import math

import models
import pytest
import tiny_vision
import torch
import transformers
from rotated import rotated
from validate.calls import LENGTH, VOCAB, pair, prompt, refused, ways

import gsd_kernels as gsd
from gsd_kernels_hf.model.properties import cache_argument

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
