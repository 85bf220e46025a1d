"""The rows of the contract of sources: targets, and what a call of each is given to draft with."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_configs
import torch
import transformers
import two_tokenizers as two
from checkpoints import corpus_of
from models import noised, prompts, tiny
from sources.drafters import (
    Causal,
    descended,
    dflash_config,
    eagle3_config,
    fit_dflash,
    fit_eagle3,
    random_dflash,
    random_eagle3,
    save,
    saved,
    target_of,
    unrolled,
)

from gsd_kernels import Corpus, DFlash, DraftHeads, Eagle3, Gemma4Assistant, LayerSkip, Mtp
from gsd_kernels_hf.model.vocabulary import Translation
from gsd_kernels_hf.sources.load import source_of

VOCAB = 41
EAGLE3 = {
    "plain": {},
    "reduced": {"draft_vocab_size": 29},
    "norms": {"norm_before_residual": True, "fc_norm": True, "norm_output": True, "num_key_value_heads": 4},
    "before": {"norm_before_fc": True, "attention_bias": True, "draft_vocab_size": 35},
    "layers": {"num_hidden_layers": 2, "eagle_aux_hidden_state_layer_ids": [1, 3]},
}
P_EAGLE = {
    "reduced": {"draft_vocab_size": 29, "num_hidden_layers": 2},
    "norms": {"fc_norm": True, "norm_output": True, "norm_before_residual": True, "num_hidden_layers": 2},
    "before": {"norm_before_fc": True, "attention_bias": True},
}
SECOND = {"selector_rank": 6, "selector_top_k": 8, "conv_kernel_size": 2, "conv_group_size": 8, "block_size": 5}
DFLASH = {
    "dflash shared": {},
    "dflash reduced": {"draft_vocab_size": 31, "block_size": 4},
    "dflash window": {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
        "inner": {"sample_from_anchor": True},
    },
    "JetSpec": {"inner": {"causal_head": True}},
    "DSpark": {"inner": {"markov_rank": 6, "sample_from_anchor": True}},
    "DSpark gated": {"inner": {"markov_rank": 6, "markov_head_type": "gated"}},
    "DSpark recurrent": {"inner": {"markov_rank": 6, "markov_head_type": "rnn"}},
    "DSpark confident": {"inner": {"markov_rank": 6, "sample_from_anchor": True}},
    "DSpark reduced": {"inner": {"markov_rank": 6}, "draft_vocab_size": 31},
    "DFlash 2": {"inner": SECOND, "architectures": ["DFlash2DraftModel"], "block_size": None},
}
MEDUSA = {"model_type": "medusa", "medusa_num_heads": 2, "medusa_num_layers": 1}
OURS, THEIRS = two.byte_level(), two.renumbered(two.byte_level(), without=0.3)
BOTH = {"tokenizer": OURS, "assistant_tokenizer": THEIRS}
# Target and draft: words of several tokens on either side, ▁ for a space, bytes of a character apart.
PAIRS = {
    "byte-level to sentencepiece": (two.byte_level, two.sentencepiece),
    "sentencepiece to byte-level": (two.sentencepiece, two.byte_level),
    "of another text": (two.byte_level, lambda: two.byte_level(300, two.OTHER)),
}
GEMMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "sliding_window": 6,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
ASSISTANT = {"hidden_size": 16, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


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


def p_eagle(name: str) -> Eagle3:
    """Of random weights."""
    says = {"mask_token_id": 3, "speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]}}
    config = eagle3_config(llama(), **says, **P_EAGLE[name])
    return random_eagle3(config, own_embedding=name == "before", mask_shape=(1, 1, 96))


@functools.cache
def fitted_p_eagle(name: str) -> Eagle3:
    return fit_eagle3(p_eagle(name), llama())


@functools.cache
def dflash(name: str) -> DFlash:
    confidence = (1, 38) if name == "DSpark confident" else None
    config = dflash_config(llama(), **DFLASH[name])
    module = random_dflash(config, own=name.endswith("reduced"), confidence=confidence)
    return fit_dflash(module, llama(), steps=80 if name.startswith("dflash") else 50)


@functools.cache
def mtp(name: str) -> Mtp:
    """A head from a checkpoint, trained so that it is right now and then."""
    folder = Path(tempfile.mkdtemp())
    try:
        saved(name, folder)
        target = target_of(name)
        return fit_eagle3(Mtp.from_pretrained(folder, target), target, 40, rate=0.01)
    finally:
        shutil.rmtree(folder)


def filled(model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config.eos_token_id = None
    return model.double().eval()


@functools.cache
def gemma():
    return filled(transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**GEMMA)))


def random_assistant(*, ordered=False, **changes):
    config = transformers.Gemma4TextConfig(**{**GEMMA, **ASSISTANT, "num_kv_shared_layers": 2, **changes})
    more = {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 5} if ordered else {}
    own = transformers.Gemma4AssistantConfig(text_config=config, backbone_hidden_size=32, **more)
    model = filled(transformers.Gemma4AssistantForCausalLM(own))
    if ordered:
        model.masked_embedding.token_ordering.copy_(torch.randperm(GEMMA["vocab_size"]))
    return model


@functools.cache
def assistant(ordered: bool = False) -> Gemma4Assistant:
    """Fitted to the target's own text."""
    target, module = gemma(), Gemma4Assistant(random_assistant(ordered=ordered))
    ids = torch.randint(3, GEMMA["vocab_size"], (12, 4), generator=torch.Generator().manual_seed(9))
    text = target.generate(ids, max_new_tokens=26, do_sample=False)
    with torch.no_grad():
        out = target(text, output_hidden_states=True, return_shared_kv_states=True)
    states, embed = out.hidden_states[-1].float(), target.get_input_embeddings()

    def step(tokens, features):
        length = tokens.shape[1]
        stored = {kind: tuple(t[:, :, :length].float() for t in kv) for kind, kv in out.shared_kv_states.items()}
        positions = torch.arange(1, length + 1).expand(len(text), -1)
        vectors, logits = module(embed(tokens).detach().float(), features, positions, stored, Causal())
        return vectors, logits.clamp(min=-50)

    return descended(module, 50, 0.01, lambda: unrolled(text, text, states, step)).double()


@functools.cache
def hybrid(family: str):
    return tiny_configs.build_hybrid(family)


@functools.cache
def sharing():
    """A target of :data:`OURS`."""
    return two.target_of(OURS)


@functools.cache
def translated_draft():
    """A draft of :data:`THEIRS`, which shares most of its tokens."""
    between = Translation.between(OURS, THEIRS)
    return noised(two.behind(sharing(), between.target, between.draft), 0.015)


@functools.cache
def pair_of(name: str, noise: float = 0.0):
    """Target, draft and tokenizers that share few tokens; both know a text by heart."""
    ours, theirs = (make() for make in PAIRS[name])
    draft = noised(two.learned(theirs), noise)
    return two.learned(ours), draft, {"tokenizer": ours, "assistant_tokenizer": theirs}


def encoded(tokenizer: Any, texts: tuple[str, ...] = (two.TEXT[:60], two.TEXT[29:56], two.TEXT[100:152])):
    found = tokenizer(list(texts), return_tensors="pt", padding=True)
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def medusa_tensors(target, layers=1):
    """Heads near the target's own, which repeat its next token: right where a text repeats a token."""
    gen, size, found = torch.Generator().manual_seed(0), target.config.hidden_size, {}
    for head in range(3):
        for layer in range(layers):
            found[f"{head}.{layer}.linear.weight"] = 0.05 * torch.randn(size, size, generator=gen)
            found[f"{head}.{layer}.linear.bias"] = 0.05 * torch.randn(size, generator=gen)
        found[f"{head}.{layers}.weight"] = target.lm_head.weight.float() * (1 + head)
    return found


# The rows.


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
        fit_eagle3(masked, target, steps=40),
        dflash("dflash shared"),
    )
    given = models(noised(target, 0.03, seed=1), noised(target, 0.06, seed=2)) | heads(noisy_heads(target, 0.2))
    return given | {"draft_sources": ("model", "heads", *map(source_of, drafters))}


def of_mtp(family: str) -> Row:
    target = functools.partial(target_of, family)
    return Row(
        target,
        lambda _: drafter(mtp(family)),
        lambda seed: prompts(3, 14, seed=seed, vocab=target().config.get_text_config(decoder=True).vocab_size),
    )


def of_assistant(ordered: bool) -> Row:
    inputs = functools.partial(prompts, 3, 14, vocab=GEMMA["vocab_size"])
    return Row(gemma, lambda _: drafter(assistant(ordered)), lambda seed: inputs(seed=seed))


def of_hybrid(family: str, options: Callable[[Any], dict[str, Any]]) -> Row:
    texts = functools.partial(prompts, 3, 9, vocab=tiny_configs.VOCAB)
    return Row(functools.partial(hybrid, family), lambda _: options(hybrid(family)), lambda seed: texts(seed=seed))


def of_text(name: str) -> Row:
    """A draft of a tokenizer that shares few tokens with the target's."""
    made = functools.partial(pair_of, name, 0.04)
    return Row(lambda: made()[0], lambda _: models(made()[1]) | made()[2], lambda _: encoded(made()[2]["tokenizer"]))


def corpus(folder: Path) -> dict[str, Any]:
    """Of the target's own texts."""
    options = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    texts = [llama().generate(**prompts(3, 14, seed=seed, vocab=VOCAB), **options) for seed in range(9)]
    return {"draft_sources": (Corpus(corpus_of(folder / "index", *texts)),)}


def medusa(folder: Path) -> dict[str, Any]:
    save(folder, MEDUSA, medusa_tensors(repeating()))
    (folder / "model.safetensors").rename(folder / "medusa_lm_head.safetensors")
    return {"drafter": folder, "draft_sources": ("drafter",)}


def fitted(target: Any, kind: str) -> dict[str, Any]:
    if kind == "eagle3":
        return drafter(fit_eagle3(random_eagle3(eagle3_config(target)), target, steps=20))
    return drafter(fit_dflash(random_dflash(dflash_config(target)), target, steps=20))


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
    **{
        f"p-eagle {name}": Row(llama, lambda _, name=name: drafter(fitted_p_eagle(name)))
        for name in ("reduced", "norms")
    },
    **{name: Row(llama, lambda _, name=name: drafter(dflash(name))) for name in DFLASH},
    **{f"mtp {name}": of_mtp(name) for name in ("glm", "deepseek", "mimo", "mimo-v2", "mellum", "exaone")},
    "assistant": of_assistant(False),
    "assistant ordered": of_assistant(True),
    "translated": Row(
        sharing,
        lambda _: models(translated_draft()) | BOTH,
        lambda seed: prompts(3, 13, seed=seed, vocab=len(OURS)),
    ),
    **{f"text, {pair}": of_text(pair) for pair in PAIRS},
    **{
        f"{name}, a model": of_hybrid(name, lambda t: models(noised(t, 0.02)))
        for name in ("qwen3.5", "falcon-h1", "kimi")
    },
    **{f"qwen3.5, {kind}": of_hybrid("qwen3.5", functools.partial(fitted, kind=kind)) for kind in ("eagle3", "dflash")},
    "qwen3.5, heads": of_hybrid("qwen3.5", lambda t: heads(noisy_heads(t, 0.02))),
    "lfm2, heads": of_hybrid("lfm2", lambda t: heads(noisy_heads(t, 0.02))),
}
