"""Unusual targets and all kinds of drafts: the target's own text, or a refusal by name before a token is written."""

from __future__ import annotations

import functools
import random
import re
from types import SimpleNamespace

import models
import pytest
import tiny_configs
import torch
import transformers
from sources import drafters
from sources.test_gemma_assistant import random_assistant

import gsd_kernels as gsd
from gsd_kernels import Gemma4Assistant
from gsd_kernels_hf.model.recurrent import mixers
from gsd_kernels_train.mtp import block_to_train, new_head

pytestmark = pytest.mark.skipif(not mixers.READABLE, reason=f"the classes are of transformers {mixers.FIRST}")

SHAPE = gsd.GraphConfig(depth=3, width=2, branch=2, max_rows=12, merge_context=-1)
PROMPTS = ((1, 1), (1, 7), (2, 6))  # sequences, tokens
CALL = {"max_new_tokens": 6, "do_sample": False}
OWN_HEADS = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
TARGETS = {
    "llama": ("LlamaForCausalLM", {}),
    "llama4": ("Llama4ForCausalLM", {"no_rope_layers": [1, 1, 1, 0]}),
    "llama4 begins": ("Llama4ForCausalLM", {"no_rope_layers": [0, 1, 1, 0]}),
    "gpt-oss": ("GptOssForCausalLM", {}),
    "gemma4": ("Gemma4ForCausalLM", OWN_HEADS | {"global_head_dim": 8}),
    "gemma4 shared": ("Gemma4ForCausalLM", {}),
    "gemma3": ("Gemma3ForCausalLM", {}),
    "gemma3n": ("Gemma3nForCausalLM", {}),
    "mllama": ("MllamaForCausalLM", {}),
    "qwen3.5": ("Qwen3_5ForCausalLM", {}),
    "lfm2": ("Lfm2ForCausalLM", {}),
    "zaya": ("ZayaForCausalLM", {}),
    "falcon-h1": ("FalconH1ForCausalLM", {}),
    "zamba2": ("Zamba2ForCausalLM", {}),
    "deepseek": ("DeepseekV3ForCausalLM", {}),
    "diffllama": ("DiffLlamaForCausalLM", {}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "olmo": ("OlmoForCausalLM", {}),
}


@functools.cache
def target_of(name: str):
    transformers.logging.set_verbosity_error()
    kind, more = TARGETS[name]
    return tiny_configs.build(kind, 4, **more)


@functools.cache
def texts_of(name: str):
    """Prompts, and transformers' own texts of them."""
    found = []
    for batch, length in PROMPTS:
        ids = torch.randint(3, tiny_configs.VOCAB - 4, (batch, length), generator=torch.Generator().manual_seed(length))
        found.append((ids, target_of(name).generate(ids, **CALL)))
    return found


def alike(target):
    """What the configs of drafters are made of, where a target has its text config inside."""
    return SimpleNamespace(config=target.config.get_text_config(decoder=True))


def head_of(target):
    return new_head(block_to_train(target)).requires_grad_(False).eval().double()


def eagle3_of(target, shape=None, **changes):
    return drafters.random_eagle3(drafters.eagle3_config(alike(target), **changes), mask_shape=shape)


def assistant(**changes):
    return {"drafter": Gemma4Assistant(random_assistant(**changes))}


ONE_TYPE = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "num_kv_shared_layers": 1}
DRAFTS = {
    "history": lambda target: {"draft_sources": ("history",)},
    "itself": lambda target: {"assistant_model": models.noised(target, 0.02)},
    "llama": lambda target: {"assistant_model": models.tiny(vocab_size=tiny_configs.VOCAB)},
    "gpt2": lambda target: {"assistant_model": tiny_configs.build("GPT2LMHeadModel", 2, n_positions=9)},
    "skips attention": lambda target: {"assistant_model": gsd.LayerSkip(target, attention=[1])},
    "skips the last": lambda target: {"assistant_model": gsd.LayerSkip(target, attention=[3], mlp=[3])},
    "skips an mlp": lambda target: {"assistant_model": gsd.LayerSkip(target, mlp=[1])},
    "heads": lambda target: {"draft_heads": gsd.DraftHeads.for_model(target, 2).requires_grad_(False)},
    "eagle3": lambda target: {"drafter": eagle3_of(target)},
    "p-eagle": lambda target: {"drafter": eagle3_of(target, (96,), mask_token_id=3)},
    "dflash": lambda target: {"drafter": drafters.random_dflash(drafters.dflash_config(alike(target)))},
    "mtp": lambda target: {"drafter": head_of(target)},
    "assistant": lambda target: assistant(),
    "assistant of one type": lambda target: assistant(**ONE_TYPE),
    "assistant of other heads": lambda target: assistant(num_key_value_heads=1),
    "assistant of another size": lambda target: assistant(head_dim=16, global_head_dim=16),
}
ENDED = {  # calls, each of which ended in another error once: how they are refused now; None: served
    ("llama4", "history"): None,
    ("llama4 begins", "llama"): None,
    ("llama4", "eagle3"): "hidden states of Llama4ForCausalLM cannot be read",
    ("gpt-oss", "skips an mlp"): r"mlp: the blocks of GptOssForCausalLM \(GptOssMLP\) return more than hidden states",
    ("gpt-oss", "skips attention"): None,
    ("gemma4 shared", "skips attention"): "attention, mlp: without these blocks Gemma4ForCausalLM cannot be forwarded",
    ("gemma4 shared", "skips the last"): None,
    ("gemma4 shared", "eagle3"): None,
    ("gemma4 shared", "dflash"): None,
    ("gemma4 shared", "mtp"): r"a Gemma4TextDecoderLayer cannot be forwarded as a multi-token-prediction head",
    ("gemma4", "assistant"): None,
    ("gemma4", "assistant of one type"): None,
    ("gemma4", "assistant of other heads"): "reads 1 heads of 8 of sliding_attention layers, and .* store 2 of 8",
    ("gemma4", "assistant of another size"): "reads 2 heads of 16 of sliding_attention layers, and .* store 2 of 8",
    ("lfm2", "assistant of one type"): "reads 2 heads of 8 of full_attention layers, and those of Lfm2ForCausalLM",
    ("gemma3n", "skips attention"): "attention, mlp: without these blocks Gemma3nForCausalLM cannot be forwarded",
    ("gemma3n", "eagle3"): "eagle3 reads hidden states, and hidden state 0 of Gemma3nForCausalLM is .4, 1, 1, 32.",
    ("gemma3n", "mtp"): "a Gemma3nTextDecoderLayer cannot be forwarded as a multi-token-prediction head",
    ("mllama", "dflash"): "hidden states of MllamaForCausalLM cannot be read",
    ("diffllama", "mtp"): "a DiffLlamaDecoderLayer cannot be forwarded .* attends 2 times",
    ("falcon-h1", "mtp"): "a FalconH1DecoderLayer cannot be forwarded as a multi-token-prediction head",
    ("olmo", "mtp"): "drafter: the norm of OlmoForCausalLM cannot be made by itself",
}


def decode(target: str, draft: str) -> None:
    """Texts with a draft are the target's own.

    Raises:
        ValueError: it is refused, for the first of them.
    """
    decode_with(target, DRAFTS[draft](target_of(target)))


def decode_with(target: str, options: dict) -> None:
    """As :func:`decode`, with options of a call."""
    for number, (ids, text) in enumerate(texts_of(target)):
        try:
            out = gsd.generate(target_of(target), ids, **CALL, **options, graph_config=SHAPE)
        except ValueError as error:
            assert number == 0, f"served, and then not: {error}"
            raise
        assert torch.equal(out, text), (target, options, ids.shape)


def named(pair: tuple[str, str]) -> str:
    return " with ".join(pair)


@pytest.mark.parametrize("pair", ENDED, ids=named)
def test_a_draft_ends_no_call(pair):
    if ENDED[pair] is None:
        decode(*pair)
    else:
        with pytest.raises(ValueError, match=ENDED[pair]):
            decode(*pair)


def others() -> list[tuple[str, str]]:
    """All other pairs."""
    return [(target, draft) for target in TARGETS for draft in DRAFTS if (target, draft) not in ENDED]


@pytest.mark.parametrize("target", ["gemma4 shared", "gemma3n", "gemma4"])
def test_a_search_of_layers_to_skip_leaves_those_whose_keys_others_read(target):
    skip = gsd.LayerSkip.search(target_of(target), texts_of(target)[1][0], seconds=None)
    decode_with(target, {"assistant_model": skip})


@pytest.mark.many
@pytest.mark.parametrize("pair", random.Random(5).sample(others(), 20), ids=named)  # all of them take minutes
def test_the_targets_own_text_or_a_refusal(pair):
    try:
        decode(*pair)
    except ValueError as error:
        assert re.match(r"(model|assistant_model|drafter|draft_\w+|attention|mlp|attention, mlp|target): ", str(error))
