"""Where two texts differ, and whether the target could tell the tokens apart."""

from __future__ import annotations

import pytest
import torch
from models import noised, prompts, tiny

import gsd_kernels as gsd
from gsd_kernels_cli import comparison
from gsd_kernels_cli.comparison import first_divergence

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_gap_of_a_runner_up_is_the_samplers(temperature):
    target, inputs, seed, place = tiny(dtype=torch.float32), prompts(1, 9), 5, 3
    options = {"do_sample": temperature > 0, "max_new_tokens": 8, "eos_token_id": None}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0, "seed": seed}
    sequence = gsd.generate(target, **inputs, **options)
    text, length = sequence[0, 9:].tolist(), 9 + place
    with torch.no_grad():
        logits = target(sequence[:, :length]).logits[:, -1:]
    tokens, log_probs = gsd.draft_candidates(
        logits,
        torch.tensor([[length]], dtype=torch.int32),
        branch=2,
        seed=torch.tensor(seed),
        sequence_ids=torch.zeros(1, dtype=torch.int32),
        temperature=temperature,
    )
    best, runner_up = tokens[0, 0].tolist()
    assert best == text[place]
    other = [*text[:place], runner_up, *text[place + 1 :]]
    found = first_divergence(target, inputs["input_ids"], text, other, temperature=temperature, seed=seed)
    assert (found.index, found.plain, found.other) == (place, best, runner_up)
    assert found.gap == pytest.approx(float(log_probs[0, 0, 0] - log_probs[0, 0, 1]) * (temperature or 1.0), abs=1e-4)
    assert not found.within_rounding
    assert first_divergence(target, inputs["input_ids"], text, text, temperature=temperature, seed=seed) is None


@pytest.mark.parametrize("tokens", [3, None])
def test_assisted_generation_by_a_constant_number_of_tokens(tokens, monkeypatch):
    """The draft's generation config is changed for the call alone; options reach transformers."""
    target = tiny(dtype=torch.float32)
    draft, seen = noised(target), []
    names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
    before = {name: getattr(draft.generation_config, name) for name in names}

    def generate(**options):
        seen.append(({name: getattr(draft.generation_config, name) for name in names}, options))
        raise KeyboardInterrupt

    monkeypatch.setattr(target, "generate", generate)
    with pytest.raises(KeyboardInterrupt):
        comparison.assisted(target, draft, tokens, do_sample=True, top_k=0)(prompts(1, 4), 8)
    ((config, options),) = seen
    assert list(config.values()) == ([tokens, "constant", 0.0] if tokens else list(before.values()))
    assert options["assistant_model"] is draft and options["do_sample"] and options["max_new_tokens"] == 8
    assert {name: getattr(draft.generation_config, name) for name in names} == before
