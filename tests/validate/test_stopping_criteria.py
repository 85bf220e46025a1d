"""Stopping criteria are called as transformers calls them."""

from __future__ import annotations

import models
import pytest
import torch
from rotated import rotated
from transformers import LogitsProcessor, StoppingCriteria
from validate.calls import LENGTH, VOCAB, pair, prompt, refused

import gsd_kernels as gsd


class Counts(StoppingCriteria):
    """Stops all sequences at its n-th call, and writes down what it was shown."""

    def __init__(self, calls: int):
        self.calls, self.seen = calls, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids.tolist(), None if scores is None else [s.shape for s in scores]))
        return torch.full((input_ids.shape[0],), len(self.seen) >= self.calls)


class AnyRow(StoppingCriteria):
    """Stops all sequences as soon as one has said a token."""

    def __init__(self, token: int):
        self.token, self.seen = token, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids.tolist(), None))
        return torch.as_tensor((input_ids[:, LENGTH:] == self.token).any())


class OwnRow(StoppingCriteria):
    """Stops each sequence after a token of its own."""

    def __init__(self, tokens: list[int]):
        self.tokens, self.seen = torch.tensor(tokens), []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids.tolist(), None))
        return (input_ids[:, -1] == self.tokens[: len(input_ids)]) & (input_ids.shape[1] > LENGTH + 1)


CRITERIA = {
    "counts": lambda tokens: Counts(6),
    "counts to the end": lambda tokens: Counts(100),
    "any row": lambda tokens: AnyRow(tokens[0][7]),
    "own row": lambda tokens: OwnRow([row[3 + 2 * b] for b, row in enumerate(tokens)]),
}


@pytest.mark.parametrize(("kind", "batch", "eos"), rotated(CRITERIA, (1, 2, 4), (False, True)))
def test_stopping_criteria_are_called_as_transformers_calls_them(kind, batch, eos):
    """The same calls with the same ids, in the same order; so counting, and looking at the whole batch, is right."""
    target, draft = pair()
    slower = 0
    for seed in range(2):
        call = prompt(batch, max_new_tokens=24) | models.prompts(batch, LENGTH, seed=seed, vocab=VOCAB)
        free = target.generate(**call)[:, LENGTH:].tolist()
        if eos:
            call |= {"eos_token_id": [free[-1][5]], "pad_token_id": 0}
        theirs, ours = CRITERIA[kind](free), CRITERIA[kind](free)
        expected = target.generate(stopping_criteria=[theirs], **call)
        for config in ("chain", "tree", gsd.GraphConfig(depth=4, width=3, branch=3, max_rows=24, history_depth=3)):
            ours.seen.clear()
            out = gsd.generate(
                target,
                assistant_model=draft,
                graph_config=config,
                stopping_criteria=[ours],
                return_dict_in_generate=True,
                **call,
            )
            assert out.sequences.tolist() == expected.tolist()
            assert ours.seen == theirs.seen
            slower += out.stats.steps < len(theirs.seen)
    assert slower, "nothing was speculated"


@pytest.mark.parametrize("eos", [False, True])
def test_stopping_criteria_see_scores_and_scores_end_with_the_text(eos):
    target, draft = pair()
    call = prompt(3, return_dict_in_generate=True, output_scores=True, output_logits=True)
    free = target.generate(**prompt(3))[:, LENGTH:]
    if eos:
        call |= {"eos_token_id": [int(free[1, 1])], "pad_token_id": 0}
    theirs, ours = Counts(7), Counts(7)
    expected = target.generate(stopping_criteria=[theirs], **call)
    out = gsd.generate(target, assistant_model=draft, graph_config="tree", stopping_criteria=[ours], **call)
    assert torch.equal(out.sequences, expected.sequences) and ours.seen == theirs.seen
    assert [len(scores) for _, scores in ours.seen] == list(range(1, 8))
    said = out.sequences[:, LENGTH:]
    ends = [row.index(int(free[1, 1])) + 1 if eos and int(free[1, 1]) in row else 7 for row in said.tolist()]
    assert ends == ([7, 2, 7] if eos else [7, 7, 7]) and out.stats.new_tokens == sum(ends)
    for name in ("scores", "logits"):
        ours, theirs = getattr(out, name), getattr(expected, name)
        assert len(ours) == len(theirs) == 7
        for row, end in enumerate(ends):
            for step in range(end):
                torch.testing.assert_close(ours[step][row], theirs[step][row], rtol=0, atol=1e-4)


def test_a_stopped_sequence_asks_its_processors_no_more_than_transformers_does():
    """Alone, so that the processor is the caller's own."""
    target, draft = pair()

    class Count(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            return scores

    theirs, ours = Count(), Count()
    call = prompt(1, max_new_tokens=24)
    expected = target.generate(logits_processor=[theirs], stopping_criteria=[Counts(6)], **call)
    out = gsd.generate(
        target,
        assistant_model=draft,
        graph_config="tree",
        logits_processor=[ours],
        stopping_criteria=[Counts(6)],
        **call,
    )
    assert torch.equal(out, expected) and ours.calls == theirs.calls == 6


def test_a_criterion_of_the_wrong_shape_is_named():
    target, draft = pair()

    class Wide(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.zeros(len(input_ids), 5, 1, dtype=torch.bool)

    with refused(target, ValueError, "stopping_criteria: Wide"):
        gsd.generate(target, assistant_model=draft, graph_config="tree", stopping_criteria=[Wide()], **prompt())
