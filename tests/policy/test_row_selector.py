"""Which rows of a step are forwarded: what is learned of them, and that the text stays the same."""

from __future__ import annotations

import models
import pytest
import torch
from ops.contracts.select_rows import CONFIG, problem

import gsd_kernels as gsd
from gsd_kernels_hf.engine.session import Session
from gsd_kernels_hf.policy.learning import LearningPolicy
from gsd_kernels_hf.policy.row_selector import EdgeModel, RowSelector


@pytest.mark.parametrize(("remaining", "depth"), [(1, 0), (2, 1), (3, 2), (99, 4)])
def test_no_row_is_deeper_than_the_text_will_be(remaining, depth):
    rows = RowSelector(EdgeModel())(problem(0)[0], CONFIG, remaining)
    assert int(rows.depths.max()) == depth


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampled", [False, True])
def test_fewer_rows_and_the_same_text(monkeypatch, tmp_path, batch, sampled):
    """Whatever the selector chooses: rows of these models are nearly free, so it is made to choose."""
    # Nothing is known of the pair: earlier steps, by what they took on a busy machine, may have turned it off.
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    target = models.tiny()
    call, learn, asked, learned = RowSelector.__call__, RowSelector.observe, [], []

    def fewer(self, *arguments):
        self.seconds = torch.ones(1 + len(asked) % 7, dtype=torch.float64)
        rows = call(self, *arguments)
        assert all(parent < place for tree in rows.parent_rows.tolist() for place, parent in enumerate(tree))
        asked.append(rows.token_ids.shape[1])
        return rows

    def observe(self, step):
        learned.append(step.accepted.num_accepted.tolist())
        learn(self, step)

    monkeypatch.setattr(RowSelector, "__call__", fewer)
    monkeypatch.setattr(RowSelector, "observe", observe)
    monkeypatch.setattr(LearningPolicy, "_choose", lambda self, **_: None)  # it would turn speculation off
    inputs = models.prompts(batch, 20, seed=1)
    options = {"max_new_tokens": 60, "eos_token_id": None}
    options |= {"do_sample": True, "seed": 3, "temperature": 0.5, "top_k": 20} if sampled else {}
    plain = gsd.generate(target, **inputs, **options, graph_config="plain")
    out = gsd.generate(target, **inputs, **options, draft_sources=("history",), return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain)
    # Every step tells what of each sequence was accepted.
    assert len(learned) == len(asked) == out.stats.steps and any(count > 1 for step in learned for count in step)
    assert sum(map(sum, learned)) == 60 * batch and max(asked) <= 7
    assert out.stats.target_rows == batch * sum(asked)


def test_tokens_that_were_drawn_are_all_verified(monkeypatch):
    """Which of them are verified must not depend on what was drawn: the sample would not be exact."""
    asked, call = [], RowSelector.__call__
    selector = RowSelector(EdgeModel())
    monkeypatch.setattr(RowSelector, "__call__", lambda self, *arguments: asked.append(1) or call(self, *arguments))
    target = models.tiny()
    options = {"assistant_model": models.noised(target, 0.1), "do_sample": True, "max_new_tokens": 24}
    use = Session.use
    monkeypatch.setattr(Session, "use", lambda self, plan: use(self, plan._replace(rows=selector)))
    gsd.generate(target, **models.prompts(1, 8), **options, criterion="speculative")
    assert not asked
    gsd.generate(target, **models.prompts(1, 8), **options)
    assert asked
