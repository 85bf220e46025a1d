"""Criteria beside the exact one: speculative sampling is an exact sample too, typical acceptance says what it is."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math

import models
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_captured_step import NoHostData
from test_sampling import P_VALUE, exact_probabilities, fit, moved
from transformers import LogitsProcessorList, StoppingCriteriaList

import gsd_kernels as gsd
from gsd_kernels.ops.dag_attention.api import IMPLEMENTATIONS
from gsd_kernels.ops.sampling import philox
from gsd_kernels_bench.generation import typical_deviation
from gsd_kernels_hf.acceptance import criteria
from gsd_kernels_hf.acceptance.sampling import SamplingPlan
from gsd_kernels_hf.engine import capture, session
from gsd_kernels_hf.engine import decoder as decoder_module
from gsd_kernels_hf.engine.capture import untimed
from gsd_kernels_hf.parallel import digest
from gsd_kernels_hf.records import Sampler

torch.set_num_threads(1)

VOCAB = 16
DRAWS = 6_000
CHAIN = gsd.GraphConfig.preset("chain", depth=3)
SAMPLING = [
    {"temperature": 1.0, "top_k": 0},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
]


@functools.lru_cache
def pair(noise: float = 0.05):
    """A target without end-of-text token, and itself with noise."""
    target = models.tiny(vocab_size=VOCAB, dtype=torch.float32)
    target.generation_config.eos_token_id = None
    return target, models.noised(target, noise)


def generate(target, draft, criterion, prompt, **options):
    arguments = {"graph_config": CHAIN, "do_sample": True, "seed": 0, "max_new_tokens": 12, "top_k": 0}
    arguments |= {"return_dict_in_generate": True, "pad_token_id": 0, **prompt, **options}
    return gsd.generate(target, assistant_model=draft, criterion=criterion, **arguments)


# Speculative sampling ------------------------------------------------------------------------------------------------


def joint_counts(options, tokens: int, backend: str = "auto"):
    """How often each text of so many tokens came, and how many steps said 0, 1, 2, … tokens."""
    target, draft = pair()
    prompt = models.prompts(1, 5, seed=1, vocab=VOCAB)
    counts, accepted = np.zeros((VOCAB,) * tokens), np.zeros(5, dtype=int)
    for seed in range(2):
        out = generate(
            target,
            draft,
            "speculative",
            prompt,
            seed=seed,
            backend=backend,
            graph_config=gsd.GraphConfig.preset("chain", depth=tokens),
            max_new_tokens=tokens,
            num_return_sequences=DRAWS // 2,
            **options,
        )
        assert out.stats.criterion == "speculative" and out.stats.lossless
        np.add.at(counts, tuple(out.sequences[:, 5:].T.numpy()), 1)
        accepted[: len(out.stats.accepted)] += out.stats.accepted
    assert counts.sum() == DRAWS
    return counts, accepted


@functools.lru_cache
def joint_probabilities(index: int, tokens: int) -> np.ndarray:
    """The target's own probability of every text, by plain forwards and transformers' warpers."""
    target, _ = pair()
    options = {name: value for name, value in SAMPLING[index].items() if value}
    texts = models.prompts(1, 5, seed=1, vocab=VOCAB)["input_ids"]
    probabilities = torch.ones(1, dtype=torch.float64)
    for _ in range(tokens):
        with torch.no_grad():
            after = exact_probabilities(target(texts).logits[:, -1].float(), options)
        probabilities = (probabilities[:, None] * after).flatten()
        following = torch.arange(VOCAB).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(VOCAB, 0), following], 1)
    return probabilities.view((VOCAB,) * tokens).numpy()


def p_values(counts: np.ndarray, probabilities: np.ndarray) -> list[float]:
    """Of the whole text, and of every token alone."""
    found = [fit(counts.flatten(), probabilities.flatten())]
    for axis in range(counts.ndim):
        others = tuple(a for a in range(counts.ndim) if a != axis)
        found.append(fit(counts.sum(others), probabilities.sum(others)))
    return found


@pytest.mark.parametrize(("index", "tokens", "backend"), [(0, 1, "auto"), (0, 2, "auto"), (1, 3, "reference")])
def test_speculative_samples_the_target(index, tokens, backend):
    """The joint distribution of one, two and three tokens, emitted by steps that accept and reject."""
    counts, accepted = joint_counts(SAMPLING[index], tokens, backend)
    exact = joint_probabilities(index, tokens)
    assert min(p_values(counts, exact)) > P_VALUE
    if tokens > 1:
        assert accepted[1] > 0.1 * DRAWS, "too few drafted tokens were rejected for the test to mean something"
        assert accepted[tokens] > 0.1 * DRAWS, "too few were accepted"
    first = exact.sum(tuple(range(1, tokens)))
    for wrong in moved(first, 0.05):  # the statistic sees mass that was moved
        assert fit(counts.sum(tuple(range(1, tokens))), wrong) < P_VALUE
    if index == 1:
        assert (exact == 0).mean() > 0.5, "most texts are impossible, and fit() saw that none of them came"


def always(self, rows, logits, positions, at=criteria.EVERY):
    """Accept whatever was drafted."""
    child = criteria.children_of(rows)[at].amax(-1)
    return torch.where(child >= 0, child, criteria.ExactMatch.picks(self, rows, logits, positions, at))


def without_residual(self, rows, logits, positions, at=criteria.EVERY):
    """Accept by the right test, but draw from p after a rejection."""
    right = criteria.SpeculativeSampling.right(self, rows, logits, positions, at)
    child = criteria.children_of(rows)[at].amax(-1)
    return torch.where(right == child, right, criteria.ExactMatch.picks(self, rows, logits, positions, at))


def shared_noise(self, level, logits, positions):
    """Draw the draft's token with the target's noise."""
    log_q = self.sampler.log_probs(logits)
    token = dataclasses.replace(self.sampler, warpers=criteria.UNWARPED).pick(log_q, positions)[..., None]
    self.distributions[level:] = [log_q.exp()]
    return token, log_q.gather(-1, token.long())


@pytest.mark.parametrize(
    ("owner", "method", "wrong"),
    [
        (criteria.SpeculativeSampling, "picks", always),
        (criteria.SpeculativeSampling, "picks", without_residual),
        (criteria.ChainProposal, "draw", shared_noise),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_the_statistic_sees_wrong_rules(owner, method, wrong, monkeypatch):
    monkeypatch.setattr(criteria.SpeculativeSampling, "right", criteria.SpeculativeSampling.picks, raising=False)
    monkeypatch.setattr(owner, method, wrong)
    counts, _ = joint_counts(SAMPLING[0], 2)
    assert min(p_values(counts, joint_probabilities(0, 2))) < P_VALUE


def chain_rows(tokens: torch.Tensor) -> gsd.Rows:
    """The rows of a drafted chain; tokens int32 [B, depth]."""
    batch, depth = tokens.shape
    rows = torch.arange(depth + 1, dtype=torch.int32)
    return gsd.Rows(
        token_ids=torch.nn.functional.pad(tokens, (1, 0)),
        parent_rows=(rows - 1).expand(batch, -1),
        depths=rows.expand(batch, -1),
        ancestor_mask=((2 << rows) - 1).to(torch.int32).expand(batch, -1)[..., None],
        node_ids=rows.expand(batch, -1),
        scores=torch.zeros(batch, depth + 1),
        num_rows=torch.full((batch,), depth + 1, dtype=torch.int32),
    )


def sampler(seed: int, sequences: torch.Tensor, **warpers: float) -> Sampler:
    plan = SamplingPlan(**{"temperature": 1.0, **warpers})
    return Sampler(torch.tensor(seed), sequences, plan.warper_arguments, "reference")


def one_draft(
    p: np.ndarray,
    q: np.ndarray,
    draws: int,
    seed: int = 0,
    claimed: np.ndarray | None = None,
    **warpers: float,
):
    """(drafted, picked), int [draws] each: one token is drafted from q and decided on under p, at every position.

    ``claimed`` is what the criterion takes for q.
    """
    own = sampler(seed, torch.arange(100, dtype=torch.int32), **warpers)
    proposal = criteria.ChainProposal(own)
    criterion = criteria.SpeculativeSampling(own, proposal)
    drafted, picked = [], []
    for position in range(draws // 100):
        positions = torch.full((100, 2), position, dtype=torch.int32) + torch.tensor([0, 1], dtype=torch.int32)
        q_logits, p_logits = (torch.from_numpy(x).log().expand(100, 1, -1) for x in (q, p))
        tokens, _ = proposal.draw(0, q_logits, positions[:, :1])
        if claimed is not None:
            proposal.distributions = [torch.from_numpy(claimed).float().expand(100, 1, -1)]
        picks = criterion.picks(chain_rows(tokens[..., 0]), p_logits.expand(-1, 2, -1), positions)
        drafted.append(tokens.flatten())
        picked.append(picks[:, 0])
    return torch.cat(drafted).numpy(), torch.cat(picked).numpy()


def test_the_acceptance_rule_by_hand():
    """Supports that overlap in part: p > 0 where q = 0, q > 0 where p = 0, and a draft's narrower vocabulary."""
    p = np.array([0.0, 0.1, 0.4, 0.2, 0.3, 0.0])
    q = np.array([0.2, 0.3, 0.4, 0.1, 0.0])  # one token fewer
    drafted, picked = one_draft(p, q, 10_000)
    wide = np.pad(q, (0, 1))
    assert fit(np.bincount(drafted, minlength=6), wide) > P_VALUE
    assert fit(np.bincount(picked, minlength=6), p) > P_VALUE
    # Acceptance with min(1, p/q), token by token; what is drawn instead has norm(max(0, p − q)).
    for token in np.flatnonzero(wide):
        tries = int((drafted == token).sum())
        hits = int(((drafted == token) & (picked == token)).sum())
        rate = min(1.0, p[token] / wide[token])
        assert abs(hits - rate * tries) <= 4 * math.sqrt(tries * rate * (1 - rate)), token
    rejected = picked[picked != drafted]
    residual = np.maximum(0, p - wide)
    assert fit(np.bincount(rejected, minlength=6), residual / residual.sum()) > P_VALUE
    assert len(rejected) == pytest.approx(residual.sum() * 10_000, rel=0.1)


def test_the_warpers_apply_to_both():
    """top-k cuts both distributions before they are compared."""
    p, q = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])
    drafted, picked = one_draft(p, q, 5_000, top_k=3)
    assert fit(np.bincount(drafted, minlength=4), np.array([0, 2, 3, 4]) / 9) > P_VALUE
    assert fit(np.bincount(picked, minlength=4), np.array([4, 3, 2, 0]) / 9) > P_VALUE


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(-(2**63), 2**63 - 1), tokens=st.integers(2, 9))
def test_equal_distributions_accept_everything(seed, tokens):
    p = np.random.default_rng(abs(seed) % 2**32).dirichlet(np.ones(tokens))
    drafted, picked = one_draft(p, p, 100, seed=seed)
    assert (drafted == picked).all()


def test_a_rejection_without_residual_draws_from_the_target():
    """Rounding may leave p below q wherever it is above 0; here by half, so that it shows."""
    p = np.array([0.0, 0.5, 0.3, 0.2])
    drafted, picked = one_draft(p, p, 4_000, claimed=1.5 * p)
    assert fit(np.bincount(picked, minlength=4), p) > P_VALUE
    assert 0.1 < (drafted != picked).mean() < 0.3


def test_streams_are_independent():
    """The draft's sample, the test and the target's sample share no word of noise."""
    seed = torch.tensor(-(2**63) + 12345)
    seeds = [seed, philox.derived_seed(seed, 1), philox.derived_seed(seed, 2)]
    assert len({int(s) for s in seeds}) == 3
    assert int(philox.derived_seed(seed + 1, 1)) != int(seeds[1])
    at, sequences = torch.arange(200).expand(50, -1), torch.arange(50)[:, None]
    noise = [philox.gumbel_noise(s, at, sequences, 4).double().numpy() for s in seeds]
    uniform = philox.uniform_of(seeds[2], at, sequences).double().numpy()
    assert uniform.shape == (50, 200) and 0 < uniform.min() < 0.01 and 0.99 < uniform.max() < 1
    for a, b in [(noise[0], noise[1]), (noise[0], noise[2]), (noise[1], noise[2])]:
        assert abs(np.corrcoef(a.flatten(), b.flatten())[0, 1]) < 4 / math.sqrt(a.size)
    for other in (noise[0][..., 0], noise[1][..., 0], np.roll(uniform, 1, 1), np.roll(uniform, 1, 0)):
        assert abs(np.corrcoef(uniform.flatten(), other.flatten())[0, 1]) < 4 / math.sqrt(uniform.size)


def test_speculative_is_reproducible_and_depends_on_the_draft():
    target, draft = pair()
    prompt = models.prompts(2, 7, seed=3, vocab=VOCAB)
    texts = [
        generate(target, d, "speculative", prompt, seed=seed).sequences.tolist()
        for d, seed in [(draft, 5), (draft, 5), (draft, 6), (models.noised(target, 0.05, seed=8), 5)]
    ]
    assert texts[0] == texts[1] and texts[0] != texts[2] and texts[0] != texts[3]


@pytest.mark.parametrize("criterion", ["speculative", "typical"])
def test_greedy_and_undrafted_output_is_exact(criterion):
    """Both rules are the exact one where p is one token or nothing is drafted, and the statistics say so."""
    target, draft = pair(0.02)
    prompt = models.prompts(2, 9, seed=2, vocab=VOCAB)
    plain = target.generate(**prompt, do_sample=False, max_new_tokens=20, pad_token_id=0)
    out = generate(target, draft, criterion, prompt, do_sample=False, max_new_tokens=20)
    assert out.sequences.tolist() == plain.tolist()
    assert len(out.stats.accepted) > 2 and out.stats.accepted[1] > 0
    assert (out.stats.criterion, out.stats.lossless) == ("exact", True)
    alone = {"assistant_model": None, "do_sample": True, "seed": 4, **prompt, "max_new_tokens": 8, "pad_token_id": 0}
    assert torch.equal(gsd.generate(target, criterion=criterion, **alone), gsd.generate(target, **alone))


@pytest.mark.parametrize("criterion", ["speculative", "typical"])
def test_a_batch_is_its_sequences(criterion):
    """Padding, end-of-text tokens, and rows that finish early: every row as if it were alone, up to its key."""
    target, draft = models.tiny(vocab_size=VOCAB, seed=3), None
    draft = models.noised(target, 0.04)
    ended, lengths = 0, set()
    for seed in range(2):
        prompt = models.prompts(4, 8, seed=seed, vocab=VOCAB)
        options = {"eos_token_id": [2, 5], "max_new_tokens": 14, "seed": seed}
        together = generate(target, draft, criterion, prompt, **options).sequences
        for row in range(4):
            # The same prompt in every row, so that this row's sequence number is its own.
            pad = int((prompt["attention_mask"][row] == 0).sum())
            alone = {name: x[row : row + 1, pad:].expand(4, -1) for name, x in prompt.items()}
            text = generate(target, draft, criterion, alone, **options).sequences[row, 8 - pad :].tolist()
            mine = together[row, 8:].tolist()
            ends = [i for i, token in enumerate(mine) if token in (2, 5)]
            length = ends[0] + 1 if ends else len(mine)
            assert mine[:length] == text[:length], (seed, row)
            assert all(token == 0 for token in mine[length:])
            ended += bool(ends)
            lengths.add(length)
    assert ended >= 3 and len(lengths) >= 3


@pytest.mark.parametrize("criterion", ["speculative", "typical"])
@pytest.mark.parametrize("sizes", [(VOCAB, VOCAB - 3), (VOCAB - 3, VOCAB)], ids=["narrower", "wider"])
def test_a_draft_with_other_vocabulary_padding(criterion, sizes):
    """The draft is the target without its last tokens, or with more of them."""
    wide = models.tiny(vocab_size=VOCAB)
    narrow = models.tiny(vocab_size=VOCAB - 3)
    narrow.load_state_dict(
        {name: x[: VOCAB - 3] if x.shape[0] == VOCAB else x for name, x in wide.state_dict().items()}
    )
    by_size = {VOCAB: wide, VOCAB - 3: narrow}
    target, draft = (by_size[size] for size in sizes)
    target.generation_config.eos_token_id = None
    out = generate(target, draft, criterion, models.prompts(2, 8, seed=4, vocab=VOCAB - 3), max_new_tokens=80)
    tokens = out.sequences[:, 8:]
    assert tokens.max() < target.config.vocab_size
    assert out.stats.tokens_per_step > 1.5
    if sizes[0] > sizes[1] and criterion == "speculative":
        assert (tokens >= VOCAB - 3).any(), "tokens that only the target knows are still drawn"


@pytest.mark.parametrize("criterion", ["speculative", "typical"])
def test_the_host_walk_agrees_with_the_device(criterion):
    """A processor that changes nothing takes the walk, one that is called per token changes what p is."""
    target, draft = pair()
    prompt = models.prompts(3, 8, seed=6, vocab=VOCAB)
    options = {"max_new_tokens": 20, "eos_token_id": 2, "temperature": 0.9, "top_k": 9}
    device = generate(target, draft, criterion, prompt, **options)

    def nothing(ids, scores, **_):
        return scores

    def never(ids, scores, **_):
        return torch.zeros(len(ids), dtype=torch.bool)

    processed = {"logits_processor": LogitsProcessorList([nothing]), "stopping_criteria": StoppingCriteriaList([never])}
    walked = generate(target, draft, criterion, prompt, **options, **processed, output_scores=True)
    assert walked.sequences.tolist() == device.sequences.tolist()
    assert walked.stats.accepted == device.stats.accepted and walked.stats.tokens_per_step > 1.2
    assert (walked.stats.criterion, walked.stats.lossless) == (criterion, criterion == "speculative")
    said = device.sequences[:, 8:]
    banned = int(said[said > 2].mode().values)  # no padding
    barred = generate(target, draft, criterion, prompt, **options, bad_words_ids=[[banned]])
    assert not (barred.sequences[:, 8:] == banned).any() and len(barred.stats.accepted) > 2


def test_speculative_through_processors_samples_the_processed_distribution():
    target, draft = pair()
    prompt = models.prompts(1, 5, seed=1, vocab=VOCAB)
    with torch.no_grad():
        logits = target(**prompt).logits[0, -1].double()
    likeliest = int(logits.argmax())
    biased = logits.clone()
    biased[likeliest] -= 1.0
    options = {"sequence_bias": {(likeliest,): -1.0}, "graph_config": gsd.GraphConfig.preset("chain", depth=1)}
    out = generate(target, draft, "speculative", prompt, max_new_tokens=1, num_return_sequences=600, **options)
    counts = np.bincount(out.sequences[:, 5].numpy(), minlength=VOCAB)
    assert fit(counts, biased.softmax(-1).numpy()) > P_VALUE
    assert fit(counts, logits.softmax(-1).numpy()) < P_VALUE, "the bias must matter"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("criterion", ["speculative", "typical"])
def test_half_precision(criterion, dtype):
    target = models.tiny(vocab_size=VOCAB, dtype=dtype)
    target.generation_config.eos_token_id = None
    prompt = models.prompts(2, 8, seed=2, vocab=VOCAB)
    out = generate(target, models.noised(target, 0.03), criterion, prompt, max_new_tokens=24)
    assert out.sequences.shape == (2, 32) and out.stats.tokens_per_step > 1.2


def test_the_target_without_some_layers_drafts_too():
    target = models.tiny(vocab_size=VOCAB, num_hidden_layers=3)
    target.generation_config.eos_token_id = None
    skip = gsd.LayerSkip(target, mlp=[1])
    for sources in (None, ("layer_skip",)):
        prompt = models.prompts(2, 8, vocab=VOCAB)
        out = generate(target, skip, "speculative", prompt, draft_sources=sources, max_new_tokens=24)
        assert out.stats.criterion == "speculative" and len(out.stats.accepted) > 2 and out.stats.accepted[1] > 0


def test_a_streamer_gets_what_is_returned():
    target, draft = pair()
    said: list[int] = []

    class Listener(transformers.generation.streamers.BaseStreamer):
        def put(self, value):
            said.extend(value.flatten().tolist())

        def end(self):
            said.append(-1)

    prompt = models.prompts(1, 6, vocab=VOCAB)
    out = generate(target, draft, "speculative", prompt, streamer=Listener())
    assert said == [*out.sequences[0].tolist(), -1]


@pytest.mark.parametrize("criterion", ["speculative", "typical"])
def test_a_step_copies_nothing_from_the_host(criterion, monkeypatch):
    """So that it can be captured, see test_captured_step; that it reads nothing back, test_step_trace says."""
    step, watched = session.Session.step, []

    def watching(self):
        watched.append(self.rule.criterion.name)
        if len(watched) < 3:  # storage is made in the first steps
            return step(self)
        with NoHostData(), untimed(self):
            return step(self)

    monkeypatch.setattr(session.Session, "step", watching)
    monkeypatch.delitem(IMPLEMENTATIONS, "cpu")  # PyTorch's attention on a CPU is no part of a step on a GPU
    generate(*pair(), criterion, models.prompts(2, 9, vocab=VOCAB), max_new_tokens=24)
    assert len(watched) > 5 and set(watched) == {criterion}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("criterion", ["speculative", "typical"])
def test_captured_on_a_gpu(criterion, monkeypatch, caplog):
    target, draft = (m.cuda() for m in (models.tiny(dtype=torch.float32), models.noised(models.tiny()).float()))
    inputs = {key: value.cuda() for key, value in models.prompts(2, 9).items()}
    criteria._warn("typical")  # said before, so that the log stays empty
    with caplog.at_level(logging.WARNING, logger="gsd_kernels"):
        captured = generate(target, draft, criterion, inputs, max_new_tokens=64).sequences
    assert not caplog.records
    monkeypatch.setattr(capture, "can_capture", lambda session: False)
    assert torch.equal(generate(target, draft, criterion, inputs, max_new_tokens=64).sequences, captured)


def test_nan_is_said():
    target, draft = models.tiny(vocab_size=VOCAB), pair()[1]
    target.lm_head.weight.data[3] = math.nan
    for criterion in ("speculative", "typical"):
        with pytest.raises(ValueError, match="NaN"):
            generate(target, draft, criterion, models.prompts(1, 6, vocab=VOCAB))
    target, broken = pair()[0], models.tiny(vocab_size=VOCAB)
    broken.lm_head.weight.data[3] = math.nan
    out = generate(target, broken, "speculative", models.prompts(1, 6, vocab=VOCAB))
    assert out.stats.tokens_per_step == 1.0, "a broken draft costs speed only"


# Typical acceptance --------------------------------------------------------------------------------------------------


def typical_of(p: np.ndarray, children: list[int], thresholds: gsd.Typical) -> tuple[int, int]:
    """(the target's own pick, what the criterion picks) after a root with the given children."""
    draws, count = sampler(1, torch.zeros(1, dtype=torch.int32)), len(children)
    rows = dataclasses.replace(
        chain_rows(torch.tensor([children], dtype=torch.int32)),
        parent_rows=torch.tensor([[-1] + [0] * count], dtype=torch.int32),
    )
    logits = torch.from_numpy(p).log().expand(1, count + 1, -1)
    positions = torch.full((1, count + 1), 9, dtype=torch.int32)
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


def test_typical_goes_from_exact_to_anything():
    """A threshold that nothing passes is the exact criterion; the lower it is, the further from that."""
    target, draft = pair()
    prompt = models.prompts(4, 8, seed=1, vocab=VOCAB)
    config = gsd.GraphConfig(depth=3, width=2, branch=3, max_rows=16, reuse_depth=2)
    options = {"graph_config": config, "max_new_tokens": 32}
    exact = generate(target, draft, "exact", prompt, **options)
    runs = [
        generate(target, draft, gsd.Typical(epsilon, delta), prompt, **options)
        for epsilon, delta in [(1.0, 1e9), (0.3, None), (0.001, None)]
    ]
    assert runs[0].sequences.tolist() == exact.sequences.tolist() and not runs[0].stats.lossless
    differing = [(run.sequences != exact.sequences).float().mean() for run in runs]
    assert differing[1] > 0 and differing[2] > 0
    gained = [run.stats.tokens_per_step for run in runs]
    assert gained[0] == exact.stats.tokens_per_step < gained[1] < gained[2]


def test_typical_is_said_once_to_be_lossy(caplog):
    target, draft = pair()
    prompt = models.prompts(1, 6, vocab=VOCAB)
    criteria._warn.cache_clear()
    with caplog.at_level(logging.WARNING, logger="gsd_kernels"):
        for criterion in ("exact", "speculative", "typical", gsd.Typical(0.2)):
            assert generate(target, draft, criterion, prompt, max_new_tokens=4).stats.lossless == isinstance(
                criteria.resolve_criterion(criterion), str
            )
    assert [r.message for r in caplog.records if "lossy" in r.message] == [
        "criterion 'typical' is lossy: the output is not the target's own (stats.lossless is False)"
    ]


def test_typical_with_the_automatic_shape_learns_apart():
    """What was accepted by another rule says nothing of the exact one."""
    from gsd_kernels_hf.engine.engine import engines_of

    target, draft = models.tiny(vocab_size=VOCAB), None
    target.generation_config.eos_token_id = None
    draft = models.noised(target, 0.05)
    prompt = models.prompts(1, 6, vocab=VOCAB)
    for criterion in ("exact", "typical"):
        generate(target, draft, criterion, prompt, graph_config="auto", max_new_tokens=8)
    assert {engine.criterion for engine in engines_of(target)} == {"exact", gsd.Typical()}


def test_the_deviation_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(typical_deviation, "TEMPERATURES", (0.0, 0.7))
    monkeypatch.setattr(typical_deviation, "EPSILONS", (0.03,))
    text = typical_deviation.run(pair="tiny", prompts=2, samples=2, new_tokens=8, folder=tmp_path)
    data = json.loads((tmp_path / "typical.json").read_text())
    assert (tmp_path / "typical.md").read_text() == text + "\n"
    rows = {(row["temperature"], row["shape"], row["criterion"]): row for row in data["summary"]}
    assert len(rows) == len(data["records"]) == 2 * 2 * 2 + 1 and len(text.splitlines()) == len(rows) + 6
    for (temperature, _, criterion), row in rows.items():
        if criterion == "exact" or not temperature:
            assert row["not_own_share"] == row["differing_share"] == 0 and row["lossless"]
        else:
            assert row["lossless"] == (criterion == "speculative") and row["texts"] == 4
    lossy = [row for row in rows.values() if not row["lossless"]]
    assert any(row["not_own_share"] > 0 for row in lossy) and any(row["gain"]["value"] > 1 for row in lossy)


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"criterion": "greedy"}, "criterion: expected 'exact', 'speculative', 'typical' or a gsd_kernels.Typical"),
        (
            {"criterion": "speculative", "graph_config": "tree"},
            "graph_config: .* width is 4 instead of 1; pass .*chain",
        ),
        (
            {"criterion": "speculative", "graph_config": gsd.GraphConfig(width=1, branch=2, merge_context=-1)},
            "branch is 2",
        ),
        ({"criterion": "speculative", "graph_config": gsd.GraphConfig(width=1, branch=1)}, "merge_context is 1"),
        ({"criterion": "speculative", "graph_config": CHAIN.replace(reuse_depth=1)}, "reuse_depth is 1"),
        ({"criterion": "speculative", "draft_sources": ("model", "history")}, "draft_sources: .*leave it out"),
        ({"criterion": "speculative", "draft_heads": None}, "draft_heads: .*leave them out"),
        ({"criterion": "speculative", "reference_ids": torch.tensor([3, 4])}, "reference_ids: .*leave them out"),
    ],
)
def test_refusals_name_the_argument_and_the_cure(arguments, message):
    target, draft = pair()
    if "draft_heads" in arguments:
        arguments = {**arguments, "draft_heads": gsd.DraftHeads.for_model(target, 1)}
    with pytest.raises(ValueError, match=message):
        gsd.generate(target, torch.tensor([[3, 4]]), assistant_model=draft, max_new_tokens=2, **arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"epsilon": 0.0}, ValueError, "epsilon: expected a number above 0, at most 1, got 0.0"),
        ({"epsilon": 1.5}, ValueError, "epsilon: .* got 1.5"),
        ({"delta": -1}, ValueError, "delta: expected a number above 0, got -1"),
        ({"delta": math.nan}, ValueError, "delta"),
        ({"epsilon": "much"}, TypeError, "epsilon: expected a number, got 'much'"),
        ({"epsilon": True}, TypeError, "epsilon"),
    ],
)
def test_thresholds_are_checked(arguments, error, message):
    with pytest.raises(error, match=message):
        gsd.Typical(**arguments)


def test_no_shape_given_is_a_chain():
    draft = pair()[1]
    with pytest.raises(TypeError, match=r"criterion: expected .* got NoneType"):
        gsd.GraphDecoder(draft, criterion=None)
    for shape in (None, "auto"):
        decoder = gsd.GraphDecoder(draft, shape, criterion="speculative")
        assert decoder.graph_config == gsd.GraphConfig.preset("chain") and not decoder.automatic
    assert gsd.GraphDecoder(draft).automatic and gsd.GraphDecoder(draft, criterion="typical").automatic
    assert gsd.Typical() == gsd.Typical(0.09, math.sqrt(0.09)) == criteria.resolve_criterion("typical")


def test_ranks_must_have_the_same_criterion(monkeypatch):
    seen = {}

    class Alone:
        """Tensor parallelism as a single rank sees it."""

        alone = False

        def start(self, own_seed, given):
            seen.update(given)
            return own_seed

        def check(self, verified, finished, *, timed):
            return finished

        explained = contextlib.nullcontext

    monkeypatch.setattr(decoder_module, "ranks_of", lambda *_: Alone())
    said = set()
    for criterion in ("exact", "speculative", "typical", gsd.Typical(0.2), gsd.Typical(0.2, 0.3)):
        out = generate(*pair(), criterion, models.prompts(1, 6, vocab=VOCAB), max_new_tokens=4)
        assert out.stats.criterion == (criterion if isinstance(criterion, str) else "typical")
        said.add(digest(seen["criterion"]))
    assert len(said) == 5


def test_patch_takes_a_criterion():
    target = models.tiny(vocab_size=VOCAB)
    target.generation_config.eos_token_id = None
    draft = models.noised(target, 0.05)
    prompt = models.prompts(1, 6, vocab=VOCAB)
    with pytest.raises(ValueError, match="needs a chain"):
        gsd.patch(target, assistant_model=draft, graph_config="tree", criterion="speculative")
    handle = gsd.patch(target, assistant_model=draft, criterion="speculative")
    try:
        target.generate(**prompt, do_sample=True, max_new_tokens=4)
        assert handle.stats.criterion == "speculative"
        target.generate(**prompt, do_sample=True, max_new_tokens=4, criterion="typical", graph_config="tree")
        assert (handle.stats.criterion, handle.stats.lossless) == ("typical", False)
    finally:
        gsd.unpatch(target)
