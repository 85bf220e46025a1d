"""The rows of the contract of sources: targets, and what a call of each is given to draft with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_configs
import torch
from corpora import corpus_of
from models import noised, prompts, tiny
from sources import (
    test_dflash_kinds,
    test_gemma_assistant,
    test_hybrid_targets,
    test_medusa,
    test_mtp,
    test_parallel_eagle,
    test_retokenised,
    test_translated,
)
from sources.drafters import (
    dflash_config,
    eagle3_config,
    fit_dflash,
    fit_eagle3,
    fit_parallel,
    random_dflash,
    random_eagle3,
    save,
)

from gsd_kernels import Corpus, DraftHeads, LayerSkip
from gsd_kernels_hf.sources.load import source_of

VOCAB = 41
EAGLE3 = {
    "plain": {},
    "reduced": {"draft_vocab_size": 29},
    "norms": {"norm_before_residual": True, "fc_norm": True, "norm_output": True, "num_key_value_heads": 4},
    "before": {"norm_before_fc": True, "attention_bias": True, "draft_vocab_size": 35},
    "layers": {"num_hidden_layers": 2, "eagle_aux_hidden_state_layer_ids": [1, 3]},
}


@dataclass(frozen=True)
class Row:
    """A source and the target that it drafts for.

    Attributes:
        target: made once.
        options: of a call, by an empty folder; what they have of ``draft_sources`` is the source alone.
        inputs: prompts by number.
    """

    target: Callable[[], Any]
    options: Callable[[Path], dict[str, Any]]
    inputs: Callable[[int], dict[str, torch.Tensor]] = lambda seed: prompts(3, 14, seed=seed, vocab=VOCAB)


@functools.cache
def llama(layers: int = 3):
    return tiny(num_hidden_layers=layers, vocab_size=VOCAB)


@functools.cache
def repeating():
    """Its texts repeat a token now and then."""
    target = tiny(vocab_size=VOCAB)
    target.lm_head.weight.data[7] *= 4
    return target


@functools.cache
def eagle3(name: str):
    config = eagle3_config(llama(), **EAGLE3[name])
    return fit_eagle3(random_eagle3(config, own_embedding=name == "before"), llama())


def drafter(given: Any) -> dict[str, Any]:
    return {"drafter": given, "draft_sources": ("drafter",)}


def models(*given: Any) -> dict[str, Any]:
    return {"assistant_model": list(given), "draft_sources": ("model",)}


def heads(given: Any) -> dict[str, Any]:
    return {"draft_heads": given, "draft_sources": ("heads",)}


def skip(target: Any, **layers: Any) -> dict[str, Any]:
    return {"assistant_model": LayerSkip(target, **layers), "draft_sources": ("layer_skip",)}


def noisy_heads(target: Any, std: float) -> DraftHeads:
    given = DraftHeads.for_model(target, 3).requires_grad_(False)
    given.weight.normal_(std=std, generator=torch.Generator().manual_seed(0))
    return given


def every() -> dict[str, Any]:
    """All of them in one graph."""
    target = llama()
    masked = random_eagle3(eagle3_config(target, mask_token_id=3), mask_shape=(96,))
    drafters = (
        fit_eagle3(random_eagle3(eagle3_config(target)), target, steps=40),
        fit_parallel(masked, target, steps=40),
        test_dflash_kinds.drafter_of("dflash shared"),
    )
    given = models(noised(target, 0.03, seed=1), noised(target, 0.06, seed=2)) | heads(noisy_heads(target, 0.2))
    return given | {"draft_sources": ("model", "heads", *map(source_of, drafters))}


def of_drafter(module: Any, *names: str) -> dict[str, Row]:
    """Rows of a test file's drafters: ``target_of`` and ``drafter_of`` of a name."""
    return {name: Row(module.target_of, lambda _, name=name: drafter(module.drafter_of(name))) for name in names}


def of_mtp(family: str) -> Row:
    target = functools.partial(test_mtp.target_of, family)
    return Row(
        target,
        lambda _: drafter(test_mtp.head_of(family)),
        lambda seed: prompts(3, 14, seed=seed, vocab=target().config.get_text_config(decoder=True).vocab_size),
    )


def assistant(ordered: bool) -> Row:
    vocab = test_gemma_assistant.VOCAB
    return Row(
        test_gemma_assistant.target_of,
        lambda _: drafter(test_gemma_assistant.assistant_of(ordered)),
        lambda seed: prompts(3, 14, seed=seed, vocab=vocab),
    )


def of_hybrid(family: str, options: Callable[[Any], dict[str, Any]]) -> Row:
    target = functools.partial(test_hybrid_targets.target_of, family)
    texts = functools.partial(prompts, 3, 9, vocab=tiny_configs.VOCAB)
    return Row(target, lambda _: options(target()), lambda seed: texts(seed=seed))


def of_text(pair: str) -> Row:
    """A draft of a tokenizer that shares few tokens with the target's."""
    made = functools.partial(test_retokenised.models_of, pair, 0.04)
    return Row(
        lambda: made()[0],
        lambda _: models(made()[1]) | made()[2],
        lambda _: test_retokenised.encoded(made()[2]["tokenizer"]),
    )


def corpus(folder: Path) -> dict[str, Any]:
    """Of the target's own texts."""
    options = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    texts = [llama().generate(**prompts(3, 14, seed=seed, vocab=VOCAB), **options) for seed in range(9)]
    return {"draft_sources": (Corpus(corpus_of(folder / "index", *texts)),)}


def medusa(folder: Path) -> dict[str, Any]:
    save(folder, test_medusa.CONFIG, test_medusa.tensors_of(repeating()))
    (folder / "model.safetensors").rename(folder / "medusa_lm_head.safetensors")
    return {"drafter": folder, "draft_sources": ("drafter",)}


def fitted(target: Any, kind: str) -> dict[str, Any]:
    if kind == "eagle3":
        return drafter(fit_eagle3(random_eagle3(eagle3_config(target)), target, steps=20))
    return drafter(fit_dflash(random_dflash(dflash_config(target)), target, steps=20))


def translated() -> Row:
    """A draft of a tokenizer that shares most tokens with the target's."""
    return Row(
        test_translated.target_of,
        lambda _: models(test_translated.draft_of()) | test_translated.BOTH,
        lambda seed: prompts(3, 13, seed=seed, vocab=test_translated.VOCAB),
    )


ROWS = {
    "every": Row(llama, lambda _: every()),
    "history": Row(repeating, lambda _: {"draft_sources": ("history",)}),
    "a model": Row(llama, lambda _: models(noised(llama(), 0.03))),
    "models": Row(llama, lambda _: models(noised(llama(), 0.03, seed=1), noised(llama(), 0.06, seed=2))),
    "heads": Row(llama, lambda _: heads(noisy_heads(llama(), 0.2))),
    "medusa": Row(repeating, medusa),
    "layer skip": Row(functools.partial(llama, 4), lambda _: skip(llama(4), attention=[2], mlp=[1])),
    "own corpus": Row(llama, corpus),
    **{f"eagle3 {name}": Row(llama, lambda _, name=name: drafter(eagle3(name))) for name in EAGLE3},
    **{f"p-eagle {name}": row for name, row in of_drafter(test_parallel_eagle, "reduced", "norms").items()},
    **of_drafter(test_dflash_kinds, *test_dflash_kinds.KINDS),
    **{f"mtp {name}": of_mtp(name) for name in ("glm", "deepseek", "mimo", "mimo-v2", "mellum", "exaone")},
    "assistant": assistant(False),
    "assistant ordered": assistant(True),
    "translated": translated(),
    **{f"text, {pair}": of_text(pair) for pair in test_retokenised.PAIRS},
    **{
        f"{name}, a model": of_hybrid(name, lambda t: models(noised(t, 0.02)))
        for name in ("qwen3.5", "falcon-h1", "kimi")
    },
    **{f"qwen3.5, {kind}": of_hybrid("qwen3.5", functools.partial(fitted, kind=kind)) for kind in ("eagle3", "dflash")},
    "qwen3.5, heads": of_hybrid("qwen3.5", lambda t: heads(noisy_heads(t, 0.02))),
    "lfm2, heads": of_hybrid("lfm2", lambda t: heads(noisy_heads(t, 0.02))),
}
