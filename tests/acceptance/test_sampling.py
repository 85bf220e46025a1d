"""Samples: the same text whatever is drafted, of the target's distribution; criteria and what each of them promises."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import random

import models
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

import gsd_kernels as gsd
from gsd_kernels.ops.sampling import philox
from gsd_kernels.ops.sampling.reference import warp
from gsd_kernels_hf.acceptance import criteria
from gsd_kernels_hf.acceptance.sampling import SamplingPlan
from gsd_kernels_hf.records import Sampler

P_VALUE = 1e-3
DRAWS = 20_000
VOCAB = 16
CHAIN = gsd.GraphConfig.preset("chain", depth=3)
THEIRS = {
    "temperature": transformers.TemperatureLogitsWarper,
    "top_k": transformers.TopKLogitsWarper,
    "top_p": transformers.TopPLogitsWarper,
    "min_p": transformers.MinPLogitsWarper,
}
UNUSED = [("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)]
SAMPLINGS = [
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.15},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.95, "min_p": 0.05},
]


@functools.lru_cache
def pair(noise: float = 0.05):
    """A target without end-of-text token, and itself with noise."""
    target = models.endless(vocab_size=VOCAB, dtype=torch.float32)
    return target, models.noised(target, noise)


def generate(target, draft, criterion, prompt, **options):
    arguments = {"graph_config": CHAIN, "do_sample": True, "seed": 0, "max_new_tokens": 12, "top_k": 0}
    arguments |= {"return_dict_in_generate": True, "pad_token_id": 0, **prompt, **options}
    return gsd.generate(target, assistant_model=draft, criterion=criterion, **arguments)


def warped(logits: torch.Tensor, options: dict[str, float]) -> torch.Tensor:
    """Logits [..., V] by transformers' own warpers."""
    flat = logits.reshape(-1, logits.shape[-1])
    warpers = LogitsProcessorList(THEIRS[name](value) for name, value in options.items())
    return warpers(torch.zeros(len(flat), 1, dtype=torch.long), flat.clone()).view_as(logits)


def fit(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value of a chi-square test; cells that expect fewer than 5 draws are taken together."""
    from scipy import stats  # here: GPU tests beside those that draw run where it is missing

    assert counts[probabilities == 0].sum() == 0, "a token of probability 0 was drawn"
    expected = probabilities * counts.sum()
    small = expected < 5
    observed = [*counts[~small], counts[small].sum()]
    wanted = [*expected[~small], expected[small].sum()]
    if wanted[-1] < 1e-9:
        observed, wanted = observed[:-1], wanted[:-1]
    return float(stats.chisquare(observed, np.array(wanted) * sum(observed) / sum(wanted)).pvalue)


def moved(probabilities: np.ndarray, mass: float = 0.02) -> list[np.ndarray]:
    """``mass`` moved between two tokens of p ≥ 0.05, every way."""
    tokens = np.eye(len(probabilities))
    likely = itertools.permutations(np.flatnonzero(probabilities >= 0.05), 2)
    return [probabilities + mass * (tokens[b] - tokens[a]) for a, b in likely]


def test_philox_known_answer():
    """Random123's kat_vectors, philox4x32 with 10 rounds: counter, key and output of the digits of pi."""
    counter, key, output = (
        tuple(torch.tensor(int(word, 16)) for word in text.split())
        for text in ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1")
    )
    assert philox.philox4x32(key, counter) == output


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


@pytest.mark.parametrize("options", SAMPLINGS, ids=str)
def test_one_step_distribution(options):
    logits = 1.5 * torch.randn(24, generator=torch.Generator().manual_seed(3))
    probabilities = warped(logits.double(), options).softmax(-1).numpy()
    counts = one_step(logits, options, seed=2024)
    assert counts.sum() == DRAWS
    assert fit(counts, probabilities) > P_VALUE
    # This statistic sees 0.02 of the mass moved between two likely tokens: by a false expectation and a false sampler.
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
        used = {name: value for name, value in options.items() if (name, value) not in UNUSED}
        theirs = warped(logits, used)
        torch.testing.assert_close(warp(logits, **options), theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("config", "cut"), [(None, 0.0), ("graph", 0.0), ("graph", 0.8)])
def test_every_token_is_the_argmax_of_its_own_noise(config, cut):
    """Recomputed one token at a time: position counts real tokens only, sequence is the row of the batch.

    ``cut``: a top-p of the caller's own, which comes before the temperature.
    """
    target, draft = pair()
    prompt = models.prompts(3, 9, seed=3, vocab=VOCAB)
    options = {"temperature": 2.5, "top_k": 9} if cut else {"temperature": 0.8, "top_k": 9, "top_p": 0.9}
    first = {"top_p": cut} if cut else {}
    call = {**options, "do_sample": True, "max_new_tokens": 12, "seed": 2**63 + 12345}
    call["logits_processor"] = [THEIRS[name](value) for name, value in first.items()]
    source = {} if config is None else {"assistant_model": draft, "graph_config": config}
    out = gsd.generate(target, **prompt, **source, **call)
    for row in range(3):
        text = out[row, int((prompt["attention_mask"][row] == 0).sum()) :]
        with torch.no_grad():
            logits = target(text[None]).logits[0].float()
        for position in range(len(text) - 12, len(text)):
            scores = warped(warped(logits[position - 1], first), options).log_softmax(-1)
            key = (torch.tensor(call["seed"] - 2**64), torch.tensor([position]), torch.tensor([row]))
            assert int(text[position]) == int((scores + philox.gumbel_noise(*key, VOCAB)).argmax()), (row, position)


UNFUSED = [
    {"typical_p": 0.7},
    {"eta_cutoff": 0.02},
    {"epsilon_cutoff": 0.03},
    {"renormalize_logits": True, "top_k": 9},
    {"top_h": 0.5},
    {"top_p": 0.9, "typical_p": 0.9, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
]


@pytest.mark.parametrize("options", UNFUSED, ids=lambda o: next(iter(o)))
def test_other_processors_go_through_the_walk(options):
    """They equal plain decoding, and what was picked is what transformers' own processors leave."""
    target, draft = pair()
    prompt = models.prompts(2, 7, seed=4, vocab=VOCAB)
    options = {"do_sample": True, "top_k": 0, "temperature": 1.1, **options}
    outputs = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": 12}
    processors = target._get_logits_processor(
        generation_config=transformers.GenerationConfig(**options),
        input_ids_seq_length=7,
        encoder_input_ids=prompt["input_ids"],
        model_kwargs={"attention_mask": prompt["attention_mask"]},
    )
    for seed in range(2):
        call = {**prompt, **options, **outputs, "seed": seed}
        plain = gsd.generate(target, **call)
        out = gsd.generate(target, assistant_model=draft, graph_config="tree", **call)
        assert out.sequences.tolist() == plain.sequences.tolist()
        for step, (scores, logits) in enumerate(zip(out.scores, out.logits, strict=True)):
            theirs = processors(out.sequences[:, : 7 + step], logits.clone())
            torch.testing.assert_close(scores, theirs, rtol=1e-5, atol=1e-4)
            assert theirs.gather(1, out.sequences[:, 7 + step, None]).isfinite().all()
    assert out.stats.tokens_per_step > 1.0


# Criteria.


@pytest.mark.parametrize("criterion", ["speculative", "block", "typical"])
def test_greedy_output_is_exact(criterion):
    """All rules are the exact one where p is one token, and the statistics say so."""
    target, draft = pair(0.02)
    prompt = models.prompts(2, 9, seed=2, vocab=VOCAB)
    plain = target.generate(**prompt, do_sample=False, max_new_tokens=20, pad_token_id=0)
    out = generate(target, draft, criterion, prompt, do_sample=False, max_new_tokens=20)
    assert out.sequences.tolist() == plain.tolist() and sum(out.stats.accepted[2:]) and out.stats.accepted[1]
    assert (out.stats.criterion, out.stats.lossless) == ("exact", True)


@pytest.mark.parametrize("criterion", ["exact", "speculative", "block", "typical"])
def test_a_batch_is_its_sequences(criterion):
    """Padding, end-of-text tokens, and rows that finish early: every row as if it were alone, up to its key."""
    target = models.tiny(vocab_size=VOCAB, seed=3)
    draft, lengths = models.noised(target, 0.04), []
    for seed in range(2):
        prompt = models.prompts(4, 8, seed=seed, vocab=VOCAB)
        options = {"eos_token_id": [2, 5], "max_new_tokens": 14, "seed": seed}
        together = generate(target, draft, criterion, prompt, **options).sequences
        wider = {name: torch.nn.functional.pad(value, (4, 0)) for name, value in prompt.items()}
        assert torch.equal(generate(target, draft, criterion, wider, **options).sequences[:, 4:], together)
        for row in range(4):
            # The same prompt in every row, so that this row's sequence number is its own.
            pad = int((prompt["attention_mask"][row] == 0).sum())
            alone = {name: x[row : row + 1, pad:].expand(4, -1) for name, x in prompt.items()}
            text = generate(target, draft, criterion, alone, **options).sequences[row, 8 - pad :].tolist()
            mine = together[row, 8:].tolist()
            length = next((i + 1 for i, token in enumerate(mine) if token in (2, 5)), len(mine))
            assert mine[:length] == text[:length], (seed, row)
            assert not any(mine[length:])
            lengths.append(length)
    assert sum(length < 14 for length in lengths) >= 3 and len(set(lengths)) >= 3


@pytest.mark.parametrize("criterion", ["speculative", "block", "typical"])
def test_the_host_walk_agrees_with_the_device(criterion):
    """A processor that changes nothing takes the walk.

    One of transformers' own, so that a sequence walks as far as on the device: its text depends on where steps begin.
    It sees a token's text before the next is known, so no block can be judged, and the ratio decides.
    """
    target, draft = pair()
    prompt = models.prompts(3, 8, seed=6, vocab=VOCAB)
    options = {"max_new_tokens": 20, "eos_token_id": 2, "temperature": 0.9, "top_k": 9}
    by_token = "speculative" if criterion == "block" else criterion
    device = generate(target, draft, by_token, prompt, **options)
    nothing = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.0)])
    walked = generate(target, draft, criterion, prompt, **options, logits_processor=nothing, output_scores=True)
    assert walked.sequences.tolist() == device.sequences.tolist()
    assert walked.stats.accepted == device.stats.accepted and walked.stats.tokens_per_step > 1.2
    assert (walked.stats.criterion, walked.stats.lossless) == (by_token, criterion != "typical")


REFUSED = [
    ({"graph_config": "tree"}, "graph_config: .* width is 4 instead of 1; pass .*chain"),
    ({"graph_config": CHAIN.replace(history_depth=1)}, "history_depth is 1"),
    ({"draft_sources": ("model", "history")}, "draft_sources: .*leave it out"),
    ({"draft_heads": "none"}, "draft_heads: .*leave them out"),
    ({"reference_ids": torch.tensor([3, 4])}, "reference_ids: .*leave them out"),
]


@pytest.mark.parametrize("criterion", ["speculative", "block"])
def test_refusals_name_the_argument_and_the_cure(criterion):
    target, draft = pair()
    for wrong, message in REFUSED:
        call = {"graph_config": CHAIN, "max_new_tokens": 2, "criterion": criterion, **wrong}
        with pytest.raises(ValueError, match=message):
            gsd.generate(target, torch.tensor([[3, 4]]), assistant_model=draft, **call)


# Block verification, by enumeration.


TOKENS, DEPTH = 3, 3


def tables(seed: int, sharpness: float = 1.0) -> tuple[dict, dict]:
    """p and q, float64 [TOKENS], after every text of fewer than DEPTH + 1 tokens; some of their tokens impossible."""
    draw = np.random.default_rng(seed)
    texts = [text for size in range(DEPTH + 1) for text in itertools.product(range(TOKENS), repeat=size)]
    found = []
    for zero in (0, 1):
        weights = draw.dirichlet(np.full(TOKENS, sharpness), len(texts))
        weights[:: 5 + zero, zero] = 0
        found.append(dict(zip(texts, weights / weights.sum(1, keepdims=True), strict=True)))
    return found[0], found[1]


def as_rows(table: dict, text: tuple[int, ...]) -> torch.Tensor:
    """What a table says after every beginning of a text, float64 [1, len + 1, TOKENS]."""
    return torch.from_numpy(np.stack([table[text[:size]] for size in range(len(text) + 1)]))[None]


def stops(keep: list[float]) -> np.ndarray:
    """The probability that so many drafted tokens are accepted: the deepest test that succeeds, and none above it."""
    beyond, found = 1.0, []
    for h in reversed(keep):
        found.append(beyond * h)
        beyond *= 1 - h
    return np.array(found[::-1])


def add(joint: np.ndarray, p: dict, text: tuple[int, ...], probability: float) -> None:
    """Add a text's probability, continued by the target's own."""
    if len(text) == DEPTH + 1:
        joint[text] += probability
        return
    for token in range(TOKENS):
        add(joint, p, (*text, token), probability * p[text][token])


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 4.0])
def test_the_joint_distribution_is_the_targets_and_no_step_is_shorter(sharpness):
    """By enumeration in float64: DEPTH + 1 tokens, those of a step and plain samples; the ratio rule's mean length."""
    gains = []
    for seed in range(8):
        p, q = tables(seed, sharpness)
        target, block = np.zeros((2, *(TOKENS,) * (DEPTH + 1)))
        add(target, p, (), 1.0)
        block_length = ratio_length = 0.0
        for text in itertools.product(range(TOKENS), repeat=DEPTH):
            drawn = np.prod([q[text[:i]][token] for i, token in enumerate(text)])
            if drawn == 0:
                continue
            child = torch.tensor([[*text, -1]], dtype=torch.int32)
            keep, rest = criteria.block_verification(as_rows(p, text), as_rows(q, text), child)
            ends, after = stops([1.0, *keep[0, 1:].tolist()]), rest[0].numpy()
            block_length += drawn * (ends * np.arange(1, DEPTH + 2)).sum()
            ratios = [min(1, p[text[:i]][token] / q[text[:i]][token]) for i, token in enumerate(text)]
            ratio_length += drawn * (1 + np.cumprod(ratios).sum())
            for accepted in np.flatnonzero(ends):
                follows = drawn * ends[accepted] * after[accepted] / after[accepted].sum()
                for token in range(TOKENS):
                    add(block, p, (*text[:accepted], token), follows[token])
        np.testing.assert_allclose(block, target, rtol=0, atol=1e-14)
        assert block_length >= ratio_length - 1e-12
        gains.append(block_length / ratio_length)
    assert max(gains) > 1.005


# Speculative sampling, by counting.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("criterion", "options", "backend"),
    [
        ("speculative", {"temperature": 1.0}, "auto"),
        ("block", {"temperature": 1.0}, "auto"),
        ("speculative", {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.02}, "reference"),
    ],
)
def test_speculative_samples_the_target(criterion, options, backend):
    """The joint distribution of two tokens, emitted by steps that accept and reject."""
    target, draft = pair()
    own = Sampler(torch.tensor(1), torch.zeros(1, dtype=torch.int32), {}, backend)
    proposal = criteria.ChainProposal(own)
    streams = own.seed, proposal.own.seed, proposal.accept_seed
    assert len({int(seed) for seed in streams}) == 3, "target, draft and test draw from streams of their own"
    prompt, draws = models.prompts(1, 5, seed=1, vocab=VOCAB), 3_000
    call = {"max_new_tokens": 2, "num_return_sequences": draws, "graph_config": CHAIN.replace(depth=2), **options}
    counts, accepted = np.zeros((VOCAB, VOCAB)), np.zeros(4, dtype=int)
    for seed in range(2):
        out = generate(target, draft, criterion, prompt, seed=seed, backend=backend, **call)
        assert out.stats.criterion == criterion and out.stats.lossless
        np.add.at(counts, tuple(out.sequences[:, 5:].T.numpy()), 1)
        accepted[: len(out.stats.accepted)] += out.stats.accepted
    assert min(accepted[1:3]) > 0.2 * draws, "too few drafted tokens were accepted, or too few rejected"
    texts = torch.cat([prompt["input_ids"].repeat(VOCAB, 1), torch.arange(VOCAB)[:, None]], 1)
    logits = target(texts).logits[:, -2:].double()
    first, second = (warped(logits[:, at], options).softmax(-1).detach().numpy() for at in (0, 1))
    exact = first[0, :, None] * second  # [V, V]
    assert fit(counts.flatten(), exact.flatten()) > P_VALUE and fit(counts.sum(0), exact.sum(0)) > P_VALUE
    for wrong in moved(first[0], 0.05):  # the statistic sees mass that was moved
        assert fit(counts.sum(1), wrong) < P_VALUE < fit(counts.sum(1), first[0])


# Typical acceptance.


def typical_of(p: np.ndarray, children: list[int], thresholds: gsd.Typical) -> tuple[int, int]:
    """(the target's own pick, what the criterion picks) after a root with the given children."""
    count = len(children)
    rows = gsd.Rows(
        token_ids=torch.tensor([[0, *children]], dtype=torch.int32),
        parent_rows=torch.tensor([[-1] + [0] * count], dtype=torch.int32),
        **dict.fromkeys(("depths", "ancestor_mask", "node_ids", "scores", "num_rows")),  # none of its business
    )
    logits = torch.from_numpy(p).log().expand(1, count + 1, -1)
    positions = torch.full((1, count + 1), 9, dtype=torch.int32)
    warpers = SamplingPlan(temperature=1.0).warper_arguments
    draws = Sampler(torch.tensor(1), torch.zeros(1, dtype=torch.int32), warpers, "reference")
    own = criteria.ExactMatch(draws).picks(rows, logits, positions)
    picked = criteria.TypicalAcceptance(draws, thresholds).picks(rows, logits, positions)
    assert torch.equal(own[:, 1:], picked[:, 1:]), "leaves have no child to pick"
    return int(own[0, 0]), int(picked[0, 0])


@settings(max_examples=100, deadline=None)
@given(data=st.data(), vocab=st.integers(2, 9), sharp=st.floats(0.1, 3.0))
def test_the_rule_of_typical_acceptance(data, vocab, sharp):
    """Against the formula, number by number."""
    p = np.random.default_rng(data.draw(st.integers(0, 2**20))).dirichlet(np.full(vocab, 1 / sharp))
    p = p.astype(np.float32).astype(np.float64)
    p /= p.sum()
    children = data.draw(st.lists(st.integers(0, vocab - 1), unique=True, min_size=1, max_size=vocab))
    thresholds = gsd.Typical(data.draw(st.floats(0.001, 1.0)), data.draw(st.none() | st.floats(0.01, 4.0)))
    delta = math.sqrt(thresholds.epsilon) if thresholds.delta is None else thresholds.delta
    entropy = -sum(x * math.log(x) for x in p if x > 0)
    threshold = min(thresholds.epsilon, delta * math.exp(-entropy))
    if min(abs(p[c] - threshold) for c in children) < 1e-5 or len({round(x, 6) for x in p}) < vocab:
        return  # a tie that float32 decides
    own, said = typical_of(p, children, thresholds)
    likely = [c for c in children if p[c] > threshold]
    assert said == (own if own in children or not likely else max(likely, key=lambda c: p[c]))


def test_typical_is_said_once_to_be_lossy(caplog):
    target, draft = pair()
    prompt = models.prompts(1, 6, vocab=VOCAB)
    logging.Logger.warning_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="gsd_kernels"):
        for criterion in ("exact", "speculative", "typical", gsd.Typical(0.2)):
            lossless = criterion in ("exact", "speculative")
            assert generate(target, draft, criterion, prompt, max_new_tokens=4).stats.lossless == lossless
    assert [r.message for r in caplog.records if "lossy" in r.message] == [
        "criterion 'typical' is lossy: the output is not the target's own (stats.lossless is False)"
    ]
