"""Random calls of ``generate``: everything follows from a seed, which names the case."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
import transformers
from models import noised, tiny, tokenizer
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from gsd_kernels import DraftHeads, GraphConfig, LayerSkip

# Vocabularies above the widest history's branch; small ones make repeats, ties of contexts and merges.
TARGETS = {
    "llama": ("llama-gqa", {"vocab_size": 23}),
    "window": ("mistral-window", {"vocab_size": 17, "sliding_window": 5}),
    "qwen3": ("qwen3", {"vocab_size": 37}),
}
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3}
SOURCES = (
    (),
    ("history",),
    ("model",),
    ("model", "history"),
    ("heads",),
    ("heads", "history"),
    ("layer_skip",),
    ("layer_skip", "history"),
    ("model", "heads", "history"),
)
MOST_NEW = 12


@functools.lru_cache
def oracle(name: str) -> PreTrainedModel:
    """A twin of :func:`target` that this package never sees."""
    family, config = TARGETS[name]
    model = tiny(family, **{**SMALL, **config})
    model.generation_config.eos_token_id = None
    return model


@functools.lru_cache
def target(name: str) -> PreTrainedModel:
    family, config = TARGETS[name]
    model = tiny(family, **{**SMALL, **config})
    model.generation_config.eos_token_id = None
    return model


@functools.lru_cache
def given(name: str, source: str) -> dict[str, Any]:
    """Arguments of ``generate`` that bring a source."""
    model = target(name)
    if source == "model":
        draft = noised(model, 0.04)
        return {"assistant_model": draft if name == "llama" else draft.to(model.dtype)}  # modules too
    if source == "layer_skip":
        return {"assistant_model": LayerSkip(model, attention=[1], mlp=[2])}
    if source == "heads":
        heads = DraftHeads.for_model(model, 2)
        torch.nn.init.normal_(heads.weight, std=0.05, generator=torch.Generator().manual_seed(0))
        return {"draft_heads": heads.requires_grad_(False)}
    return {}


class Shifted(LogitsProcessor):
    """Prefers another token after every text: depends on the whole history of a sequence."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        at = input_ids.sum(1, keepdim=True) % scores.shape[1]
        return scores.scatter_add_(1, at, torch.full_like(at, 1.5, dtype=scores.dtype))


class StopAfter(StoppingCriteria):
    """Stops a sequence where its last two tokens add up to a multiple of ``n``."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -2:].sum(1) % self.n == 0


class Ears(BaseStreamer):
    def __init__(self) -> None:
        self.heard: list[int] = []
        self.ended = False

    def put(self, value):
        self.heard += value.flatten().tolist()

    def end(self):
        self.ended = True


def maybe(rng: random.Random, probability: float, **options: Any) -> dict[str, Any]:
    return options if rng.random() < probability else {}


def random_shape(rng: random.Random, sources: tuple[str, ...]) -> GraphConfig | str:
    if rng.random() < 0.3 and set(sources) & {"model", "layer_skip"}:
        return rng.choice(["chain", "tree", "graph"])
    forwards = bool(set(sources) & {"model", "layer_skip"})
    free = bool(set(sources) & {"heads", "history"})
    reuse = rng.randint(1, 4) if free and (not forwards or rng.random() < 0.7) else 0
    return GraphConfig(
        depth=rng.randint(0 if reuse and not forwards else 1, 4),
        width=rng.randint(1, 5),
        branch=rng.randint(1, 6),
        max_rows=rng.randint(2, 40),
        merge_context=rng.randint(-1, 3),
        sibling_ratio=rng.choice([0.0, 0.0, 0.2]),
        min_prob=rng.choice([0.0, 0.0, 0.05]),
        history_depth=reuse,
        history_width=rng.randint(1, 5),
    )


def random_prompt(rng: random.Random, vocab: int, batch: int) -> dict[str, torch.Tensor]:
    length = rng.randint(1, 14)
    ids = torch.tensor([[rng.randrange(3, vocab) for _ in range(length)] for _ in range(batch)])
    if rng.random() < 0.3:
        ids = ids[:, : max(1, length // 3)].repeat(1, 6)[:, :length]  # repeats itself
    mask = torch.ones_like(ids)
    for row in range(batch):
        if rng.random() < 0.5:
            pad = rng.randrange(length)
            ids[row, :pad] = mask[row, :pad] = 0
    return {"input_ids": ids, **maybe(rng, 0.8 if mask.all() else 1.0, attention_mask=mask)}


def random_processing(rng: random.Random, vocab: int) -> dict[str, Any]:
    """Options that become logits processors."""

    def some() -> list[int]:
        return rng.sample(range(3, vocab), 3)

    suppressed = some()
    return {
        **maybe(rng, 0.2, repetition_penalty=rng.choice([0.8, 1.3])),
        **maybe(rng, 0.2, no_repeat_ngram_size=rng.randint(2, 3)),
        **maybe(rng, 0.15, bad_words_ids=[[t] for t in some()] + [some()[:2]]),
        **maybe(rng, 0.15, suppress_tokens=suppressed),
        **maybe(rng, 0.15, begin_suppress_tokens=some()),
        **maybe(rng, 0.1, sequence_bias=[[[some()[0]], 2.0], [some()[:2], -3.0]]),
        **maybe(rng, 0.1, forced_eos_token_id=rng.choice([t for t in range(3, vocab) if t not in suppressed])),
        **maybe(rng, 0.1, encoder_repetition_penalty=1.2),
        **maybe(rng, 0.1, encoder_no_repeat_ngram_size=3),
        **maybe(rng, 0.1, renormalize_logits=True),
        **maybe(rng, 0.1, remove_invalid_values=True),
        **maybe(rng, 0.2, logits_processor=[Shifted()]),
    }


def random_end(rng: random.Random, vocab: int, prompt: int) -> dict[str, Any]:
    """Where texts end."""
    eos = rng.choice([None, None, 2, rng.randrange(3, vocab), rng.sample(range(3, vocab), 3)])
    room = rng.randint(1, MOST_NEW)
    end: dict[str, Any] = {"eos_token_id": eos, "pad_token_id": 0}
    end |= {"max_new_tokens": room} if rng.random() < 0.8 else {"max_length": prompt + room, "max_new_tokens": None}
    if eos is not None:
        end |= maybe(rng, 0.3, min_new_tokens=rng.randint(1, room)) or maybe(rng, 0.2, min_length=prompt + 1)
        decay = maybe(rng, 0.15, exponential_decay_length_penalty=(2, 1.4))
        # Behind a least length, which sets −∞, transformers 5.17 adds ∞ and takes the NaN.
        end |= {} if {"min_new_tokens", "min_length"} & set(end) else decay
    end |= maybe(rng, 0.15, stopping_criteria=[StopAfter(rng.randint(5, 9))])
    end |= maybe(rng, 0.1, stop_strings=[chr(ord("a") + rng.randrange(8))], tokenizer=tokenizer(vocab))
    return end


def random_sampling(rng: random.Random) -> dict[str, Any]:
    return {
        "seed": rng.getrandbits(rng.choice([3, 63])),
        **maybe(rng, 0.8, temperature=rng.choice([0.3, 0.7, 1.0, 1.6])),
        **maybe(rng, 0.9, top_k=rng.choice([0, 1, 5, 50])),
        **maybe(rng, 0.4, top_p=rng.choice([0.3, 0.9, 1.0])),
        **maybe(rng, 0.3, min_p=0.05),
        **maybe(rng, 0.1, typical_p=0.9),
        **maybe(rng, 0.1, epsilon_cutoff=0.02),
        **maybe(rng, 0.1, eta_cutoff=0.02),
        **maybe(rng, 0.2, num_return_sequences=2),
    }


def random_call(seed: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The target's name, what transformers' ``generate`` knows too, and what only ours does."""
    rng = random.Random(seed)
    name, sources = rng.choice(list(TARGETS)), rng.choice(SOURCES)
    vocab, batch, sampled = TARGETS[name][1]["vocab_size"], rng.choice([1, 1, 2, 3]), rng.random() < 0.5
    prompt = random_prompt(rng, vocab, batch)
    length = prompt["input_ids"].shape[1]
    shared = {**prompt, **random_end(rng, vocab, length), "do_sample": sampled}
    shared |= random_processing(rng, vocab) if rng.random() < 0.5 else {}
    if rng.random() < 0.25:
        shared |= {"return_dict_in_generate": True, "output_scores": rng.random() < 0.5}
        shared |= {"output_logits": rng.random() < 0.5}
    shared |= maybe(rng, 0.2, prefill_chunk_size=rng.randint(1, 5))
    own: dict[str, Any] = random_sampling(rng) if sampled else {}
    if sources:
        own |= {"draft_sources": sources, "graph_config": random_shape(rng, sources)}
        for source in sources:
            own |= given(name, source)
        if batch == 1 and "num_return_sequences" not in own and rng.random() < 0.06:
            own["graph_config"] = "auto"
    if "history" in sources:
        reference = torch.randint(3, vocab, (9,), generator=torch.Generator().manual_seed(seed % 97))
        own |= maybe(rng, 0.15, reference_ids=reference)
    if not sampled and "history" not in sources and "heads" not in sources:
        own |= maybe(rng, 0.1, criterion="typical")
    if batch == 1 and "num_return_sequences" not in own:
        own |= maybe(rng, 0.25, streamer=Ears())
    return name, shared, own


def state_of(models: list[Any]) -> list[Any]:
    """What a call must leave as it was: hooks, attributes, attention, training mode."""
    found: list[Any] = []
    for model in models:
        found.append((sorted(vars(model)), model.config._attn_implementation, model.training))
        found += [
            (name, len(module._forward_hooks), len(module._forward_pre_hooks), "forward" in vars(module))
            for name, module in model.named_modules()
        ]
    return found


def weights_of(models: list[Any]) -> list[torch.Tensor]:
    return [value.clone() for model in models for value in model.state_dict().values()]


def models_of(name: str, own: dict[str, Any]) -> list[Any]:
    draft = own.get("assistant_model")
    return [target(name), *([draft] if isinstance(draft, transformers.PreTrainedModel) else [])]
