"""Logits processors are called as transformers calls them: with the whole batch, once a position."""

from __future__ import annotations

import functools
import itertools
import threading

import models
import pytest
import torch
from models import rotated
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList, WatermarkingConfig
from validate.calls import LENGTH, VOCAB, pair

import gsd_kernels as gsd

pytestmark = pytest.mark.quick

SHIFT = 3.0


class Recorded(LogitsProcessor):
    """Keeps what it was shown: the very tensors, and copies of that moment."""

    def __init__(self):
        self.kept, self.seen = [], []

    def __call__(self, input_ids, scores):
        self.kept.append((input_ids, scores))
        self.seen.append((input_ids.clone(), scores.clone()))
        return self.process(input_ids, scores)

    def process(self, input_ids, scores):
        return scores


class Guidance(Recorded):
    """Classifier-free guidance by hand: every sequence is pushed away from the one before it."""

    def process(self, input_ids, scores):
        return scores + 0.6 * (scores - scores.roll(1, 0))


class Mean(Recorded):
    """All sequences say the same, and the scores behind finished ones count too."""

    def process(self, input_ids, scores):
        return scores.mean(0, keepdim=True).expand_as(scores)


class Apart(Recorded):
    """No sequence says what another one said last."""

    def process(self, input_ids, scores):
        scores = scores.clone()
        scores[:, input_ids[:, -1]] -= SHIFT
        return scores


class Native(Recorded):
    """Holds what cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def process(self, input_ids, scores):
        with self.lock:
            scores = scores.clone()
            scores[:, 5 * len(self.seen) % scores.shape[1]] += SHIFT
        return scores


class Drawn(Recorded):
    """Its own random numbers, one lot a call."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(4)

    def process(self, input_ids, scores):
        return scores + torch.randn(scores.shape, generator=self.generator)


class InPlace(Recorded):
    def process(self, input_ids, scores):
        self.kept[-1] = (input_ids, input_ids)  # its scores do change
        scores[:, input_ids.shape[1] % scores.shape[1]] += SHIFT
        return scores


class ByLength(Recorded):
    """Forces a token at every third length."""

    def process(self, input_ids, scores):
        if input_ids.shape[1] % 3:
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[torch.arange(len(scores)), (input_ids.shape[1] + torch.arange(len(scores))) % scores.shape[1]] = 0.0
        return forced


class Doubled(Recorded):
    def process(self, input_ids, scores):
        return scores.double() * 1.5 + torch.arange(len(scores))[:, None]


class Near(Recorded):
    """In float64 the best token is ahead of two others by less than float32 tells apart."""

    def process(self, input_ids, scores):
        scores = scores.double()
        tokens = (input_ids[:, -1:] * 7 + torch.tensor([1, 2, 3])) % scores.shape[1]
        ahead = scores.amax(-1, keepdim=True) + 9 + 1e-9 * torch.arange(3)
        return scores.scatter(1, tokens.sort(-1).values, ahead)


def closure():
    """A plain function that counts in its closure."""
    calls, seen = [0], []

    def biased(input_ids, scores):
        calls[0] += 1
        seen.append((input_ids.clone(), scores.clone()))
        scores = scores.clone()
        scores[calls[0] % len(scores), 7 * calls[0] % scores.shape[1]] += 2 * SHIFT
        return scores

    biased.seen = seen
    return biased


KINDS = {
    "guidance": Guidance,
    "mean": Mean,
    "apart": Apart,
    "native": Native,
    "drawn": Drawn,
    "in place": InPlace,
    "by length": ByLength,
    "doubled": Doubled,
    "near": Near,
    "closure": closure,
}


NEW = 14
PAD = VOCAB - 1  # not 0, which other places hold too
GRAPH = gsd.GraphConfig(depth=5, width=4, branch=3, max_rows=24, history_depth=2)


def target():
    return pair()[0]


def draft():
    return pair()[1]


@functools.lru_cache
def skip():
    return gsd.LayerSkip(target(), mlp=[0])  # so that what it writes to the shared cache is not the target's


SOURCES = {
    "plain": dict,
    "history": lambda: {"draft_sources": ("history",), "graph_config": GRAPH},
    "chain": lambda: {"assistant_model": draft(), "graph_config": "chain"},
    "graph": lambda: {"assistant_model": draft(), "graph_config": GRAPH},
    "layer_skip": lambda: {"assistant_model": skip(), "graph_config": "tree"},
}


@functools.lru_cache
def early(kind: str | None = None) -> int:
    """A token that ends some of three sequences early, with a processor of this kind."""
    own = {} if kind is None else {"logits_processor": [KINDS[kind]()]}
    free = target().generate(**own, **call(3))[:, LENGTH:]
    at = [[(row == token).nonzero().flatten().tolist()[:1] for row in free] for token in range(VOCAB)]
    return next(
        token
        for token, firsts in enumerate(at)
        if token and [] in firsts and any(2 < f < 7 for [f] in filter(None, firsts))
    )


def call(batch: int, *, eos: bool = False, kind: str | None = None, **more):
    ends = {"eos_token_id": [early(kind), 1], "pad_token_id": PAD} if eos else {}
    prompt = models.prompts(batch, LENGTH, seed=3, vocab=VOCAB)
    return {**prompt, "max_new_tokens": NEW, "do_sample": False, **ends, **more}


def ours(source: str, **given):
    return gsd.generate(target(), return_dict_in_generate=True, **SOURCES[source](), **given)


def same_calls(seen, expected):
    assert len(seen) == len(expected)
    for (ids, scores), (their_ids, their_scores) in zip(seen, expected, strict=True):
        assert torch.equal(ids, their_ids) and scores.dtype == their_scores.dtype
        torch.testing.assert_close(scores, their_scores, rtol=0, atol=1e-4)


def slow_but(chosen, *cases):
    """Parameters of which only some cases are not slow."""
    return [pytest.param(*case, marks=() if chosen(*case) else pytest.mark.slow) for case in itertools.product(*cases)]


@pytest.mark.parametrize(
    ("kind", "source"),
    [("guidance", "graph"), *((kind, "graph") for kind in KINDS if kind != "guidance")]
    + [pytest.param("guidance", source, marks=pytest.mark.slow) for source in SOURCES if source != "graph"]
    + [pytest.param(kind, list(SOURCES)[i % 3], marks=pytest.mark.slow) for i, kind in enumerate(KINDS) if i],
)
def test_greedy_is_transformers_own(kind, source):
    """Ids, the calls' ids, and the calls' scores, of finished sequences too."""
    for batch, eos in ((1, False), (3, False), (3, True)):
        processor, theirs = KINDS[kind](), KINDS[kind]()
        given = call(batch, eos=eos and kind != "mean", kind=kind)  # whose sequences end together
        expected = target().generate(logits_processor=[theirs], **given)
        out = ours(source, logits_processor=[processor], **given)
        assert out.sequences.tolist() == expected.tolist()
        same_calls(processor.seen, theirs.seen)
        assert len(set((expected == 0).sum(1).tolist())) > 1 or not eos or kind == "mean", "none ends before others"
        for (ids, scores), (then, scores_then) in zip(getattr(processor, "kept", []), processor.seen, strict=False):
            assert torch.equal(ids, then) and (scores is ids or torch.equal(scores, scores_then))


@pytest.mark.parametrize(
    ("source", "eos"), slow_but(lambda source, eos: source == "graph", ["plain", "graph", "history"], [False, True])
)
def test_scores_and_logits_are_transformers_own(source, eos):
    """Also behind the end of a sequence, and also where a processor writes to the logits it is given."""
    more = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    given = call(3, eos=eos, repetition_penalty=1.1)
    for kind in ("guidance", "in place"):
        expected = target().generate(logits_processor=[KINDS[kind]()], **given, **more)
        out = gsd.generate(target(), logits_processor=[KINDS[kind]()], **SOURCES[source](), **given, **more)
        assert out.sequences.tolist() == expected.sequences.tolist()
        for name in ("scores", "logits"):
            torch.testing.assert_close(getattr(out, name), getattr(expected, name), rtol=0, atol=1e-4)


def test_scores_of_a_sample_are_warped():
    """All that top-k leaves, and nothing else."""
    given = call(3, do_sample=True, top_k=12, seed=5, logits_processor=[Guidance()])
    assert all((scores.isfinite().sum(-1) == 12).all() for scores in ours("graph", output_scores=True, **given).scores)


class Stops(StoppingCriteria):
    """Stops a sequence after a token; writes down who was called when."""

    def __init__(self, log, token):
        self.log, self.token = log, token

    def __call__(self, input_ids, scores, **kwargs):
        self.log.append(("criterion", input_ids.tolist(), None if scores is None else len(scores)))
        return (input_ids[:, -1] == self.token) & (input_ids.shape[1] > LENGTH + 2)


class Logs(Guidance):
    def __init__(self, log):
        super().__init__()
        self.log = log

    def process(self, input_ids, scores):
        self.log.append(("processor", input_ids.tolist()))
        return super().process(input_ids, scores)


@pytest.mark.parametrize(
    ("source", "eos", "batch"),
    [
        pytest.param(*case, marks=() if case == ("graph", False, 3) else pytest.mark.slow)
        for case in rotated(("graph", "plain", "layer_skip"), (False, True), (3, 1))
    ],
)
def test_processors_and_criteria_are_called_in_transformers_order(batch, eos, source):
    """Without an end-of-text id a stopped sequence runs on until all have; and scores are handed on."""
    free = target().generate(logits_processor=[Guidance()], **call(batch))[:, LENGTH:]
    for scored in (False, True):
        logs = [], []
        more = {"output_scores": True, "return_dict_in_generate": True} if scored else {}
        given = [
            {
                "logits_processor": [Logs(log)],
                "stopping_criteria": StoppingCriteriaList([Stops(log, int(free[0, 5]))]),
                **call(batch, eos=eos),
                **more,
            }
            for log in logs
        ]
        expected = target().generate(**given[0])
        out = gsd.generate(target(), **SOURCES[source](), **given[1])
        ids = [x.sequences if scored else x for x in (out, expected)]
        assert ids[0].tolist() == ids[1].tolist() and logs[0] == logs[1]


PLACED = {
    "encoder_repetition_penalty": 1.5,
    "encoder_no_repeat_ngram_size": 2,
    "repetition_penalty": 1.5,
    "watermarking_config": WatermarkingConfig(bias=4.0, context_width=2),
}


@pytest.mark.parametrize("name", PLACED)
def test_built_in_processors_that_know_their_row(name):
    """They hold the prompts, or the lengths of their padding, one a row; alone and beside one of another kind."""
    given = call(3, eos=True, **{name: PLACED[name]})
    expected = target().generate(**given)
    assert not torch.equal(expected, target().generate(**call(3, eos=True)))
    for own in ([], [Recorded()]):
        assert ours("graph", logits_processor=own, **given).sequences.tolist() == expected.tolist()


class Fails(Recorded):
    """Goes wrong at its third call."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def process(self, input_ids, scores):
        return self.how(scores) if len(self.seen) == 3 else scores


def raises(scores):
    raise RuntimeError("out of guidance")


def nan_in_the_second(scores):
    return scores.index_fill(0, torch.tensor([1]), torch.nan)


WRONG = {
    "raises": (raises, RuntimeError, "^out of guidance$"),
    "nothing": (
        lambda s: None,
        TypeError,
        r"logits_processor: Fails must return float scores .*\[2, 32\], got NoneType",
    ),
    "array": (lambda s: s.numpy(), TypeError, r"logits_processor: Fails .* got ndarray"),
    "integers": (lambda s: s.argsort(-1), TypeError, r"logits_processor: Fails .* got torch.int64"),
    "one row": (lambda s: s[:1], ValueError, r"logits_processor: Fails .* got \[1, 32\]"),
    "no batch": (lambda s: s[0], ValueError, r"logits_processor: Fails .* got \[32\]"),
    "fewer tokens": (lambda s: s[:, :-1], ValueError, r"logits_processor: Fails .* got \[2, 31\]"),
    "NaN": (nan_in_the_second, ValueError, "logits: NaN, .* in sequence 1 after the logits_processor Fails"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_processor_does_wrong_is_named_and_the_next_call_is_exact(wrong):
    how, error, message = WRONG[wrong]
    model = models.tiny(vocab_size=VOCAB)
    expected = model.generate(logits_processor=[closure()], **call(2))
    with gsd.patch(model, assistant_model=draft(), graph_config=GRAPH):
        for _ in range(2):
            with pytest.raises(error, match=message):
                model.generate(logits_processor=[Native(), Fails(how)], **call(2))
            assert torch.equal(model.generate(logits_processor=[closure()], **call(2)), expected)
