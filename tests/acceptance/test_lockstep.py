"""Logits processors are called as transformers calls them: with the whole batch, once a position."""

from __future__ import annotations

import functools
import threading

import models
import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList, WatermarkingConfig

import gsd_kernels as gsd

pytestmark = pytest.mark.quick

SHIFT = 3.0
VOCAB, LENGTH = 32, 9


@functools.lru_cache
def pair():
    target = models.endless(vocab_size=VOCAB)
    return target, models.noised(target, 0.01)


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


KINDS = {
    "guidance": Guidance,
    "apart": Apart,
    "native": Native,
    "drawn": Drawn,
    "in place": InPlace,
}
PAD = VOCAB - 1  # not 0, which other places hold too
GRAPH = gsd.GraphConfig(depth=5, width=4, branch=3, max_rows=24, history_depth=2)


def target():
    return pair()[0]


@functools.lru_cache
def skip():
    return gsd.LayerSkip(target(), mlp=[0])  # so that what it writes to the shared cache is not the target's


SOURCES = {
    "graph": lambda: {"assistant_model": pair()[1], "graph_config": GRAPH},
    "plain": dict,
    "history": lambda: {"draft_sources": ("history",), "graph_config": GRAPH},
    "layer_skip": lambda: {"assistant_model": skip(), "graph_config": "tree"},
}


def call(batch: int, **more):
    prompt = models.prompts(batch, LENGTH, seed=3, vocab=VOCAB)
    return {**prompt, "max_new_tokens": 14, "do_sample": False, "pad_token_id": PAD, **more}


def early(kind) -> int:
    """A token that ends some of three sequences early, with a processor of this kind."""
    free = target().generate(logits_processor=[kind()], **call(3))[:, LENGTH:].tolist()
    firsts = [[row.index(token) if token in row else 14 for row in free] for token in range(1, VOCAB)]
    return 1 + next(i for i, found in enumerate(firsts) if max(found) == 14 and any(2 < first < 9 for first in found))


def ours(source: str, **given):
    return gsd.generate(target(), return_dict_in_generate=True, **SOURCES[source](), **given)


def same(mine, theirs):
    for one, other in zip(mine, theirs, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "source"),
    [(kind, source) for source in SOURCES for kind in KINDS if source == "graph" or kind in ("guidance", "in place")],
)
def test_greedy_is_transformers_own(kind, source):
    """Ids, the calls' ids and scores, of finished sequences too, and what is returned of scores and logits."""
    more = {"output_scores": True, "output_logits": True, "repetition_penalty": 1.1}
    for batch, ends in ((1, {}), (3, {"eos_token_id": early(KINDS[kind])})):
        processor, theirs = KINDS[kind](), KINDS[kind]()
        given = call(batch, **ends, **more)
        expected = target().generate(logits_processor=[theirs], return_dict_in_generate=True, **given)
        out = ours(source, logits_processor=[processor], **given)
        assert out.sequences.tolist() == expected.sequences.tolist()
        for mine, known in zip(zip(*processor.seen, strict=True), zip(*theirs.seen, strict=True), strict=True):
            same(mine, known)
        same(out.scores or (), expected.scores or ())
        same(out.logits or (), expected.logits or ())
        assert not ends or len(set((expected.sequences == PAD).sum(1).tolist())) > 1, "none ends before others"
        for (ids, scores), (then, scores_then) in zip(processor.kept, processor.seen, strict=True):
            assert torch.equal(ids, then) and (scores is ids or torch.equal(scores, scores_then))


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


@pytest.mark.parametrize("ends", [{}, {"eos_token_id": 1}], ids=["criterion", "end of text"])
@pytest.mark.parametrize("source", ["graph", "plain"])
def test_processors_and_criteria_are_called_in_transformers_order(source, ends):
    """Without an end-of-text id a stopped sequence runs on until all have; and scores are handed on."""
    free = target().generate(logits_processor=[Guidance()], **call(3))[:, LENGTH:]
    for scored in ({}, {"output_scores": True}):
        logs, texts = ([], []), []
        for log, generate in zip(logs, (target().generate, functools.partial(ours, source)), strict=True):
            own = {"logits_processor": [Logs(log)], "stopping_criteria": StoppingCriteriaList([Stops(log, free[0, 5])])}
            returned = {"return_dict_in_generate": True} if not texts else {}
            texts.append(generate(**own, **call(3, **ends), **scored, **returned).sequences.tolist())
        assert texts[0] == texts[1] and logs[0] == logs[1]


PLACED = {
    "encoder_repetition_penalty": 1.5,
    "encoder_no_repeat_ngram_size": 2,
    "watermarking_config": WatermarkingConfig(bias=4.0, context_width=2),
}


@pytest.mark.parametrize("name", PLACED)
def test_built_in_processors_that_know_their_row(name):
    """They hold the prompts, or the lengths of their padding, one a row; alone and beside one of another kind."""
    given = call(3, eos_token_id=1, **{name: PLACED[name]})
    expected = target().generate(**given)
    assert not torch.equal(expected, target().generate(**call(3, eos_token_id=1)))
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


RETURNED = r"logits_processor: Fails must return float scores .*\[2, 32\], got "
WRONG = {
    "raises": (raises, "^out of guidance$"),
    "nothing": (lambda s: None, RETURNED + "NoneType"),
    "integers": (lambda s: s.argsort(-1), RETURNED + "torch.int64"),
    "one row": (lambda s: s[:1], RETURNED + r"\[1, 32\]"),
    "NaN": (
        lambda s: s.index_fill(0, torch.tensor([1]), torch.nan),
        "logits: NaN, .* in sequence 1 after the logits_processor Fails",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_processor_does_wrong_is_named_and_the_next_call_is_exact(wrong):
    how, message = WRONG[wrong]
    model = models.tiny(vocab_size=VOCAB)
    expected = model.generate(logits_processor=[Apart()], **call(2))
    with gsd.patch(model, **SOURCES["graph"]()):
        for _ in range(2):
            with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
                model.generate(logits_processor=[Native(), Fails(how)], **call(2))
            assert torch.equal(model.generate(logits_processor=[Apart()], **call(2)), expected)
