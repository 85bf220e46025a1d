"""Sampling: the generator's known answers, exact distributions, and the same text whatever is drafted."""

from __future__ import annotations

import functools
import random

import models
import numpy as np
import pytest
import torch
import transformers
from scipy import stats as scipy_stats
from transformers.generation import logits_process

import gsd_kernels as gsd
from gsd_kernels.ops.sampling import philox
from gsd_kernels.ops.sampling.reference import warp

torch.set_num_threads(1)

VOCAB = 32
DRAWS = 20_000
P_VALUE = 1e-3

# The generator -----------------------------------------------------------------------------------------------------

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


def noise_of_words(word: torch.Tensor, monkeypatch) -> np.ndarray:
    """The noise that the code makes of given 32-bit words."""
    with monkeypatch.context() as patch:
        patch.setattr(philox, "philox4x32", lambda key, counter, rounds=10: tuple(word[i::4] for i in range(4)))
        noise = philox.gumbel_noise(torch.tensor(0), torch.zeros(1, dtype=torch.int64), torch.zeros(1), len(word))
    return noise.flatten().double().numpy()


def test_tail_mass(monkeypatch):
    """256k tokens of p = 1e-8 keep their mass of 0.0026 together; a 24-bit uniform leaves them 1% of it."""
    tokens, p = 2**18, 1e-8
    # The noise decreases in the word; every exceedance of 15 or more lies in the first 2¹² of 2³¹ values.
    upper = noise_of_words(torch.arange(2**12) << 1, monkeypatch)
    assert (np.diff(upper) < 0).all() and upper[-1] < 15 and upper[0] > 22
    assert np.array_equal(upper, noise_of_words((torch.arange(2**12) << 1) + 1, monkeypatch)), "31 bits are used"
    rest = np.log1p(-tokens * p)
    quantiles = (np.arange(4000) + 0.5) / 4000
    threshold = -np.log(-np.log(quantiles)) + rest - np.log(p)  # what a tail token's noise must exceed
    exceed = np.searchsorted(-upper, -threshold) / 2.0**31  # P(noise > threshold), as the code makes it
    mass = (1 - (1 - exceed) ** tokens).mean()
    assert mass == pytest.approx(tokens * p, rel=0.03)
    coarse = np.floor(exceed * 2**24) / 2**24
    assert (1 - (1 - coarse) ** tokens).mean() < 0.1 * tokens * p, "the test cannot tell a coarse uniform"
    lowest = noise_of_words(torch.tensor([0xFFFFFFFF] * 4), monkeypatch)
    assert np.isfinite(lowest).all()


def test_uniform_over_many_draws():
    """The noise is Gumbel distributed, and independent of neighbours: token, position, sequence and seed."""
    at = torch.arange(64)
    noise = torch.stack(
        [philox.gumbel_noise(torch.tensor(seed), at.expand(8, -1), at[:8, None], 64) for seed in range(4)]
    ).double()
    assert scipy_stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue > P_VALUE
    for dim in range(4):
        a, b = noise.narrow(dim, 0, noise.shape[dim] - 1), noise.narrow(dim, 1, noise.shape[dim] - 1)
        assert abs(np.corrcoef(a.flatten(), b.flatten())[0, 1]) < 4 / np.sqrt(a.numel())


# Distributions -----------------------------------------------------------------------------------------------------

WARPERS = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.15},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.95, "min_p": 0.05},
]


def transformers_warpers(options: dict[str, float]) -> transformers.LogitsProcessorList:
    made = transformers.LogitsProcessorList()
    if options.get("temperature", 1.0) != 1.0:
        made.append(logits_process.TemperatureLogitsWarper(options["temperature"]))
    if "top_k" in options:
        made.append(logits_process.TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        made.append(logits_process.TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        made.append(logits_process.MinPLogitsWarper(options["min_p"]))
    return made


def exact_probabilities(logits: torch.Tensor, options: dict[str, float]) -> torch.Tensor:
    """[..., V] float64, by transformers' own warpers."""
    flat = logits.reshape(-1, logits.shape[-1]).double()
    return transformers_warpers(options)(torch.zeros(len(flat), 1, dtype=torch.long), flat).softmax(-1).view_as(logits)


def fit(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value of a chi-square test; cells that expect fewer than 5 draws are taken together."""
    assert counts[probabilities == 0].sum() == 0, "a token of probability 0 was drawn"
    expected = probabilities * counts.sum()
    small = expected < 5
    observed = [*counts[~small], counts[small].sum()]
    wanted = [*expected[~small], expected[small].sum()]
    if wanted[-1] < 1e-9:
        observed, wanted = observed[:-1], wanted[:-1]
    return float(scipy_stats.chisquare(observed, np.array(wanted) * sum(observed) / sum(wanted)).pvalue)


def moved(probabilities: np.ndarray, mass: float = 0.02) -> list[np.ndarray]:
    """``mass`` moved between two tokens of p ≥ 0.05, every way."""
    likely = np.flatnonzero(probabilities >= 0.05)
    out = []
    for a in likely:
        for b in likely:
            if a != b:
                shifted = probabilities.copy()
                shifted[a] -= mass
                shifted[b] += mass
                out.append(shifted)
    return out


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


@functools.lru_cache
def pair():
    target = models.tiny(vocab_size=VOCAB)
    target.generation_config.eos_token_id = None
    return target, models.noised(target, 0.01)


@pytest.mark.parametrize("options", [WARPERS[3], WARPERS[5]], ids=str)
def test_two_step_distribution_through_accepted_paths(options):
    """Joint distribution of two tokens of 20,000 texts, both mostly emitted by one speculative step."""
    target, draft = pair()
    prompt = models.prompts(1, 5, seed=1, vocab=VOCAB)["input_ids"]
    options = {"top_k": 0, **options}
    joint, drawn, together = np.zeros((VOCAB, VOCAB)), 0, 0
    config = gsd.GraphConfig(depth=2, width=2, branch=3, max_rows=6, merge_context=0)
    for seed in range(5):
        out = gsd.generate(
            target,
            prompt,
            assistant_model=draft,
            graph_config=config,
            backend="reference",
            seed=seed,
            do_sample=True,
            max_new_tokens=2,
            num_return_sequences=DRAWS // 5,
            return_dict_in_generate=True,
            **options,
        )
        np.add.at(joint, tuple(out.sequences[:, 5:].T.numpy()), 1)
        drawn += len(out.sequences)
        together += out.stats.accepted[2]
    assert drawn == DRAWS and together > 0.3 * DRAWS
    with torch.no_grad():
        first = exact_probabilities(target(prompt).logits[0, -1].float(), {k: v for k, v in options.items() if v})
        longer = torch.cat([prompt.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]], 1)
        second = exact_probabilities(target(longer).logits[:, -1].float(), {k: v for k, v in options.items() if v})
    exact = (first[:, None] * second).numpy()
    assert fit(joint.sum(1), first.numpy()) > P_VALUE
    assert fit(joint.flatten(), exact.flatten()) > P_VALUE
    for wrong in moved(first.numpy()):
        assert fit(joint.sum(1), wrong) < P_VALUE
    for wrong in moved(exact.flatten()):
        assert fit(joint.flatten(), wrong) < P_VALUE


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


def test_ties_at_a_threshold_are_all_kept():
    logits = torch.tensor([[[3.0, 2.0, 2.0, 2.0, 1.0, -torch.inf]]])
    for options in ({"top_k": 2}, {"top_p": 0.5}, {"top_p": 0.6}):
        kept = warp(logits, 1.0, options.get("top_k", 0), options.get("top_p", 1.0), 0.0)[0, 0] > -torch.inf
        assert kept.tolist() == [True, True, True, True, False, False], options


def test_parameters_may_differ_by_sequence():
    logits = torch.randn(4, 3, VOCAB, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(3, dtype=torch.int32).expand(4, -1).contiguous()
    arguments = {"seed": torch.tensor(3), "backend": "reference"}
    mixed = {
        "temperature": torch.tensor([0.0, 0.5, 1.0, 2.0]),
        "top_k": torch.tensor([3, 0, 5, 2]),
        "top_p": torch.tensor([1.0, 0.5, 1.0, 0.9]),
        "min_p": torch.tensor([0.0, 0.1, 0.0, 0.3]),
    }
    ids = torch.arange(4, dtype=torch.int32)
    together = gsd.sample_rows(logits, positions, sequence_ids=ids, **arguments, **mixed)
    for b in range(4):
        alone = gsd.sample_rows(
            logits[b : b + 1],
            positions[:1],
            sequence_ids=ids[b : b + 1],
            **arguments,
            **{name: value[b].item() for name, value in mixed.items()},
        )
        assert torch.equal(together[b : b + 1], alone)
    assert torch.equal(together[0], logits[0].argmax(-1).int())


# The same text whatever is drafted ----------------------------------------------------------------------------------

CONFIGS = {
    "chain": gsd.GraphConfig.preset("chain", depth=4),
    "tree": gsd.GraphConfig(depth=4, width=4, branch=3, max_rows=24, merge_context=-1),
    "graph-0": gsd.GraphConfig(depth=6, width=6, branch=3, max_rows=64, merge_context=0),
    "graph-1": gsd.GraphConfig(depth=3, width=8, branch=2, max_rows=17, merge_context=1),
    "reuse": gsd.GraphConfig(depth=2, width=2, branch=2, max_rows=32, reuse_depth=3, reuse_width=4, merge_context=1),
}
SAMPLING = [
    {"temperature": 1.0, "top_k": 0},
    {"temperature": 0.7, "top_k": 12},
    {"temperature": 1.2, "top_p": 0.8, "top_k": 0},
    {"temperature": 0.9, "min_p": 0.1, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.9, "typical_p": 0.8, "repetition_penalty": 1.2},
]


@functools.lru_cache
def draft_named(name: str):
    target, noised = pair()
    return {
        "noised": noised,
        "target": target,
        "random": models.tiny("llama-mha", vocab_size=VOCAB, seed=9),
        "layer_skip": gsd.LayerSkip(target, mlp=[1]),
        "history": None,
    }[name]


@pytest.mark.parametrize("chunk", range(10))
def test_text_depends_on_the_seed_only(chunk):
    """50 seeds, each with every draft and two configurations of five: equal to plain decoding with that seed."""
    target, _ = pair()
    texts, emitted, steps, long = set(), 0, 0, 0
    for seed in range(5 * chunk, 5 * chunk + 5):
        prompt = models.prompts(2, 6 + seed % 5, seed=seed, vocab=VOCAB)
        arguments = {**prompt, "do_sample": True, "seed": seed * 7919 + 2**40 * seed, "max_new_tokens": 16}
        arguments |= {**SAMPLING[seed % len(SAMPLING)], "backend": "reference", "return_dict_in_generate": True}
        plain = gsd.generate(target, **arguments)
        assert plain.stats.tokens_per_step == 1.0
        texts.add(tuple(plain.sequences.flatten().tolist()))
        for turn, name in enumerate(["noised", "target", "random", "history", "layer_skip"]):
            config = CONFIGS[list(CONFIGS)[(seed // 5 + turn) % len(CONFIGS)]]
            draft = draft_named(name)
            source = {"draft_sources": ("history",)} if draft is None else {"assistant_model": draft}
            out = gsd.generate(target, graph_config=config, **source, **arguments)
            assert out.sequences.tolist() == plain.sequences.tolist(), (seed, name, config)
            if name in ("noised", "target"):
                emitted, steps = emitted + out.stats.new_tokens, steps + out.stats.sequence_steps
                long = max(long, len(out.stats.accepted) - 1)
    assert len(texts) == 5
    assert emitted > 1.2 * steps and long >= 3, "nothing was accepted"


@pytest.mark.parametrize("config", [None, "chain", "graph"])
def test_every_token_is_the_argmax_of_its_own_noise(config):
    """Recomputed one token at a time: position counts real tokens only, sequence is the row of the batch."""
    target, draft = pair()
    prompt = models.prompts(3, 9, seed=3, vocab=VOCAB)
    assert (prompt["attention_mask"] == 0).any()
    options = {"temperature": 0.8, "top_k": 9, "top_p": 0.9}
    source = {} if config is None else {"assistant_model": draft, "graph_config": config}
    seed = 2**63 + 12345
    out = gsd.generate(target, **prompt, **source, do_sample=True, seed=seed, max_new_tokens=12, **options)
    for row in range(3):
        text = out[row, int((prompt["attention_mask"][row] == 0).sum()) :]
        with torch.no_grad():
            logits = target(text[None]).logits[0].float()
        for position in range(len(text) - 12, len(text)):
            scores = transformers_warpers(options)(text[None], logits[None, position - 1]).log_softmax(-1)
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


def test_return_sequences_differ_and_equal_plain_decoding():
    target, draft = pair()
    prompt = models.prompts(2, 5, vocab=VOCAB)
    arguments = {**prompt, "do_sample": True, "num_return_sequences": 3, "max_new_tokens": 10, "seed": 1, "top_k": 0}
    out = gsd.generate(target, assistant_model=draft, graph_config="graph", **arguments)
    assert out.shape == (6, 15) and torch.equal(out, gsd.generate(target, **arguments))
    assert len({tuple(row) for row in out.tolist()}) == 6
    again = gsd.generate(target, assistant_model=draft, graph_config="chain", **arguments, return_dict_in_generate=True)
    assert torch.equal(again.sequences, out)


def test_set_seed_reproduces_and_the_seed_matters():
    target, draft = pair()
    arguments = {**models.prompts(1, 6, vocab=VOCAB), "do_sample": True, "max_new_tokens": 16, "top_k": 0}

    def run(**more):
        return gsd.generate(target, assistant_model=draft, graph_config="tree", **arguments, **more).tolist()

    transformers.set_seed(3)
    first, second = run(), run()
    transformers.set_seed(3)
    assert [run(), run()] == [first, second] and first != second
    assert run(seed=0) == run(seed=0) != run(seed=1)
    assert run(seed=2**64 - 1) == run(seed=-1) != run(seed=2**63 - 1)
    before = torch.get_rng_state()
    run(seed=4)
    assert torch.equal(torch.get_rng_state(), before), "a given seed leaves torch's generator alone"


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


def test_candidates_rank_by_the_target_noise():
    """What the draft proposes first is what the target picks wherever both distributions agree."""
    gen = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(3, 5, VOCAB, generator=gen)
    positions = torch.randint(0, 99, (3, 5), generator=gen, dtype=torch.int32)
    shared = {
        "seed": torch.tensor(11),
        "sequence_ids": torch.arange(3, dtype=torch.int32),
        "temperature": 0.8,
        "top_k": 10,
        "backend": "reference",
    }
    tokens, log_probs = gsd.draft_candidates(logits, positions, branch=12, **shared)
    assert torch.equal(tokens[:, :, 0], gsd.sample_rows(logits, positions, **shared))
    assert (log_probs[..., 10:] == -torch.inf).all() and (log_probs[..., :10] > -torch.inf).all()
    assert (log_probs.diff(dim=-1).nan_to_num(0.0) <= 0).all() and (log_probs <= 0).all()
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(3, 5))
    tokens, log_probs = gsd.draft_candidates(logits[..., :3], positions, branch=5, **shared)
    assert (tokens[..., 3:] == -1).all() and (log_probs[..., 3:] == -torch.inf).all()
