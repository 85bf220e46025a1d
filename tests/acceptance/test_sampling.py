"""The same text whatever is drafted: it depends on the seed alone; what is drawn has the target's distribution."""

from __future__ import annotations

import random

import models
import numpy as np
import pytest
import torch
import transformers
from acceptance.distributions import P_VALUE, exact_probabilities, fit, moved, transformers_warpers
from validate.calls import VOCAB, pair

import gsd_kernels as gsd
from gsd_kernels.ops.sampling import philox
from gsd_kernels.ops.sampling.reference import warp

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, output (zeros, ones, digits of pi).
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, output):
    assert philox.philox4x32(words(key), words(counter)) == words(output)


def test_the_noise_is_that_generator():
    """Key: the 64-bit seed; counter: (token >> 2, position, sequence, 0); word: token & 3."""
    seed, position, sequence = -(2**63) + 12345, 77, 5
    noise = philox.gumbel_noise(torch.tensor(seed), torch.tensor([position]), torch.tensor([sequence]), 10)
    key = (torch.tensor(seed & 0xFFFFFFFF), torch.tensor((seed >> 32) & 0xFFFFFFFF))
    for token in range(10):
        counter = tuple(torch.tensor(c) for c in (token >> 2, position, sequence, 0))
        u = ((int(philox.philox4x32(key, counter)[token & 3]) >> 1) + 0.5) * 2.0**-31
        assert float(noise[0, token]) == pytest.approx(-np.log(-np.log1p(-u)), abs=1e-5)
        single = philox.gumbel_of(
            torch.tensor(seed), torch.tensor([position]), torch.tensor([sequence]), torch.tensor([[token]])
        )
        assert float(single) == float(noise[0, token])


DRAWS = 20_000

WARPERS = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.15},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.95, "min_p": 0.05},
]


def one_step(logits: torch.Tensor, options: dict[str, float], seed: int) -> np.ndarray:
    """Counts of DRAWS picks after one distribution: 100 positions of 200 sequences."""
    picked = gsd.sample_rows(
        logits.expand(200, 100, -1),
        torch.arange(100, dtype=torch.int32).expand(200, -1).contiguous(),
        seed=torch.tensor(seed),
        sequence_ids=torch.arange(200, dtype=torch.int32),
        backend="reference",
        **options,
    )
    return np.bincount(picked.flatten().numpy(), minlength=logits.shape[-1])


@pytest.mark.parametrize("options", WARPERS, ids=str)
def test_one_step_distribution(options):
    logits = 1.5 * torch.randn(24, generator=torch.Generator().manual_seed(3))
    probabilities = exact_probabilities(logits, options).numpy()
    counts = one_step(logits, options, seed=2024)
    assert counts.sum() == DRAWS
    assert fit(counts, probabilities) > P_VALUE
    # This statistic sees 0.02 of the mass moved between two likely tokens: by a false expectation and a false sampler.
    assert (probabilities >= 0.05).sum() >= 2
    for wrong in moved(probabilities):
        assert fit(counts, wrong) < P_VALUE
        drawn = one_step(torch.from_numpy(wrong).log().float(), {"temperature": 1.0}, seed=7)
        assert fit(drawn, probabilities) < P_VALUE


@pytest.mark.parametrize("vocabulary", [7, 97, 1000])
def test_warpers_keep_what_transformers_keeps(vocabulary):
    gen = torch.Generator().manual_seed(vocabulary)
    for case in range(60):
        rng = random.Random(case)
        options = {
            "temperature": rng.choice([0.3, 0.7, 1.0, 1.7]),
            "top_k": rng.choice([0, 1, 5, 50, vocabulary, 10 * vocabulary]),
            "top_p": rng.choice([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]),
            "min_p": rng.choice([0.0, 0.02, 0.2, 1.0]),
        }
        logits = rng.choice([0.5, 2.0, 8.0]) * torch.randn(4, 1, vocabulary, generator=gen)
        ours = warp(logits, **options)[:, 0]
        used = {k: v for k, v in options.items() if v and not (k == "top_p" and v == 1.0)}
        if options["top_p"] == 0.0:
            used["top_p"] = 0.0
        theirs = transformers_warpers(used)(torch.zeros(4, 1, dtype=torch.long), logits[:, 0].clone())
        assert torch.equal(ours > -torch.inf, theirs > -torch.inf), options
        kept = theirs > -torch.inf
        torch.testing.assert_close(ours[kept], theirs[kept], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("config", "cut"), [(None, 0.0), ("chain", 0.0), ("graph", 0.0), ("graph", 0.8)])
def test_every_token_is_the_argmax_of_its_own_noise(config, cut):
    """Recomputed one token at a time: position counts real tokens only, sequence is the row of the batch.

    ``cut``: a top-p of the caller's own, which comes before the temperature.
    """
    target, draft = pair()
    prompt = models.prompts(3, 9, seed=3, vocab=VOCAB)
    assert (prompt["attention_mask"] == 0).any()
    options = {"temperature": 2.5, "top_k": 9} if cut else {"temperature": 0.8, "top_k": 9, "top_p": 0.9}
    first = [transformers.TopPLogitsWarper(cut)] if cut else []
    source = {} if config is None else {"assistant_model": draft, "graph_config": config}
    seed = 2**63 + 12345
    out = gsd.generate(
        target, **prompt, **source, do_sample=True, seed=seed, max_new_tokens=12, logits_processor=first, **options
    )
    for row in range(3):
        text = out[row, int((prompt["attention_mask"][row] == 0).sum()) :]
        with torch.no_grad():
            logits = target(text[None]).logits[0].float()
        for position in range(len(text) - 12, len(text)):
            scores = transformers.LogitsProcessorList(first)(text[None], logits[None, position - 1])
            scores = transformers_warpers(options)(text[None], scores).log_softmax(-1)
            key = (torch.tensor(seed - 2**64), torch.tensor([position]), torch.tensor([row]))
            assert int(text[position]) == int((scores + philox.gumbel_noise(*key, VOCAB)).argmax()), (row, position)


def test_rows_of_a_batch_keep_their_noise():
    """Noise goes by row and real position: independent of padding, of other rows' lengths, of who has finished."""
    target, draft = pair()
    prompt = models.prompts(3, 9, seed=3, vocab=VOCAB)
    assert (prompt["attention_mask"] == 0).any()
    arguments = {"do_sample": True, "seed": 5, "top_k": 0, "max_new_tokens": 12}
    together = gsd.generate(target, **prompt, assistant_model=draft, graph_config="graph", **arguments)
    wider = {  # more padding changes nothing
        "input_ids": torch.nn.functional.pad(prompt["input_ids"], (4, 0)),
        "attention_mask": torch.nn.functional.pad(prompt["attention_mask"], (4, 0)),
    }
    shifted = gsd.generate(target, **wider, assistant_model=draft, graph_config="tree", **arguments)
    assert torch.equal(shifted[:, 4:], together)
    first = gsd.generate(target, prompt["input_ids"][:1], assistant_model=draft, graph_config="graph", **arguments)
    assert torch.equal(first, together[:1])
    stopped = int(together[1, 11])  # the others go on as they did
    eos = gsd.generate(target, **prompt, assistant_model=draft, graph_config="graph", eos_token_id=stopped, **arguments)
    for row in range(3):
        new = together[row, 9:].tolist()
        end = new.index(stopped) + 1 if stopped in new else len(new)
        assert eos[row, 9 : 9 + end].tolist() == new[:end]


UNFUSED = [
    {"typical_p": 0.7},
    {"eta_cutoff": 0.02},
    {"epsilon_cutoff": 0.03},
    {"renormalize_logits": True, "top_k": 9},
    {"top_h": 0.5},
    {"top_p": 0.9, "typical_p": 0.9, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    {"watermarking_config": {"bias": 2.0, "seeding_scheme": "lefthash", "context_width": 1}},
]


@pytest.mark.parametrize("options", UNFUSED, ids=lambda o: next(iter(o)))
def test_other_processors_go_through_the_walk(options):
    """They equal plain decoding, and what was picked is what transformers' own processors leave."""
    target, draft = pair()
    options = {"top_k": 0, **options}
    if "watermarking_config" in options:
        options["watermarking_config"] = transformers.WatermarkingConfig(**options["watermarking_config"])
    prompt = models.prompts(2, 7, seed=4, vocab=VOCAB)
    arguments = {**prompt, "do_sample": True, "max_new_tokens": 12, "temperature": 1.1, **options}
    config = transformers.GenerationConfig(
        **{**target.generation_config.to_dict(), **options, "do_sample": True, "temperature": 1.1}
    )
    for seed in range(4):
        outputs = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        plain = gsd.generate(target, **arguments, seed=seed, **outputs)
        out = gsd.generate(target, assistant_model=draft, graph_config="tree", seed=seed, **arguments, **outputs)
        assert out.sequences.tolist() == plain.sequences.tolist()
        processors = target._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=7,
            encoder_input_ids=prompt["input_ids"],
            device="cpu",
            model_kwargs={"attention_mask": prompt["attention_mask"]},
        )
        for step, (scores, logits) in enumerate(zip(out.scores, out.logits, strict=True)):
            theirs = processors(out.sequences[:, : 7 + step], logits.clone())
            torch.testing.assert_close(scores, theirs, rtol=1e-5, atol=1e-4)
            picked = theirs.gather(1, out.sequences[:, 7 + step, None])
            assert (picked > -torch.inf).all()
    assert out.stats.tokens_per_step > 1.0
