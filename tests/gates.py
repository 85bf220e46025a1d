"""What every refused and every served model of the gate's tests must show."""

from __future__ import annotations

import contextlib
import functools

import model_sweep
import models
import pytest
import torch
import transformers

import gsd_kernels as gsd

torch.set_num_threads(1)
VOCAB = 48
TOKENS = {"max_new_tokens": 12, "do_sample": False}


def llama(**config):
    model = models.tiny(**{"vocab_size": VOCAB, **config})
    model.generation_config.eos_token_id = None
    return model


@functools.lru_cache
def prompt() -> dict[str, torch.Tensor]:
    return models.prompts(2, 8, seed=3, vocab=VOCAB)


@contextlib.contextmanager
def unchanged(model):
    """The model is bit for bit as it was, a forward of it too."""

    def logits():
        with torch.no_grad():
            return model(input_ids=prompt()["input_ids"]).logits

    state, before = model_sweep.state_of(model), logits()
    yield
    assert model_sweep.same(state, model_sweep.state_of(model))
    assert torch.equal(before.nan_to_num(7.0), logits().nan_to_num(7.0))


class Streamer(transformers.generation.streamers.BaseStreamer):
    def put(self, value):
        raise AssertionError("nothing is streamed")

    end = put


def refused(model, match: str) -> None:
    """Each way to a model is closed, before anything happens."""
    name = type(model).__name__
    ids = prompt()["input_ids"][:1]
    call = {"graph_config": "tree", "draft_sources": ("history",), "streamer": Streamer()}
    with unchanged(model):
        for attempt in (
            lambda: gsd.generate(model, ids, **call, **TOKENS),
            lambda: gsd.patch(model),
            lambda: model.generate(ids, custom_generate=gsd.GraphDecoder(**call), **TOKENS),
        ):
            with pytest.raises(ValueError, match=rf"^model: {name}.*{match}"):
                attempt()
        with pytest.raises(ValueError, match=rf"^assistant_model: {name}.*{match}"):
            gsd.generate(llama(), ids, assistant_model=model, **TOKENS)


def exact(model, expected: torch.Tensor | None = None, **options) -> None:
    """Greedy text with a noised draft is the model's own."""
    tokens = {**TOKENS, **options}
    expected = model.generate(**prompt(), **tokens) if expected is None else expected
    out = gsd.generate(
        model,
        **prompt(),
        assistant_model=models.noised(model, 0.01),
        graph_config="tree",
        return_dict_in_generate=True,
        **tokens,
    )
    assert torch.equal(out.sequences, expected)
    assert out.stats.tokens_per_step > 1


def unpadded() -> torch.Tensor:
    return prompt()["input_ids"][:1]  # eager attention makes NaN of padding in float64
