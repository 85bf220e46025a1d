"""Statistics of a call: shapes and sources add up, and they can be read."""

from __future__ import annotations

import json

import models
import pytest
import torch

import gsd_kernels as gsd
from gsd_kernels_hf.engine.output import ENOUGH_PLAIN_STEPS
from gsd_kernels_hf.engine.stats import GenerationStats

TOKENS = {"max_new_tokens": 32, "do_sample": False, "return_dict_in_generate": True}


class Guess(gsd.DraftSource):
    """Proposes one token that is right seldom, and one that nobody asked for."""

    name = "guess"

    def attach(self, text) -> None:
        self.device = text.state.tokens.device

    def propose(self, level):
        shape = (*level.frontier.token_ids.shape, 2)
        tokens = torch.tensor([5, 6], dtype=torch.int32, device=self.device).expand(shape)
        return gsd.Proposal(tokens, torch.full(shape, -0.7, device=self.device))


def run(batch: int = 1, backend: str = "auto", **options) -> GenerationStats:
    target = models.tiny(seed=3)
    draft = models.noised(target, 0.05)
    if options.pop("draft", True):
        options["assistant_model"] = draft
    return gsd.generate(target, **models.prompts(batch, 9), backend=backend, **TOKENS, **options).stats


def add_up(stats: GenerationStats, batch: int) -> None:
    """The sums are the totals."""
    assert sum(stats.shapes.values()) == stats.steps
    assert stats.shapes.get("plain", 0) == stats.plain_steps
    accepted = sum(source.accepted for source in stats.sources.values())
    assert accepted == stats.new_tokens - stats.sequence_steps
    proposed = sum(source.proposed for source in stats.sources.values())
    rows = stats.target_rows - batch * stats.steps
    assert proposed == rows if batch == 1 else proposed <= rows
    assert all(0 <= source.accepted <= source.proposed for source in stats.sources.values())
    assert sum(source.seconds for source in stats.sources.values()) <= stats.seconds["draft"]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("batch", [1, 3])
def test_shapes_and_sources_add_up_to_the_totals(batch, backend):
    sources = ("model", Guess(), "history")
    stats = run(batch, backend, draft_sources=sources, graph_config=gsd.GraphConfig(history_depth=2))
    add_up(stats, batch)
    assert list(stats.sources) == ["model", "guess", "history"]
    assert stats.sources["model"].accepted and all(source.seconds > 0 for source in stats.sources.values())
    assert stats.sources["guess"].proposed, "it adds tokens that the draft did not have"


def test_the_gain_says_what_it_is_estimated_from():
    """A fixed shape times no plain step and learns no costs; auto learns them."""
    fixed = run(graph_config="tree")
    assert fixed.gain is None and fixed.plain_from is None and "not known" in str(fixed)
    auto = run(graph_config="auto")
    assert auto.plain_seconds > 0 and auto.gain > 0
    few = auto.plain_steps < ENOUGH_PLAIN_STEPS
    assert ("the costs learned from" if few else "plain steps of this call") in auto.plain_from
    assert auto.plain_from in str(auto)


def test_statistics_are_a_table_a_line_and_json():
    stats = run(graph_config="graph")
    stats.left_out = ["<b>mine</b>"]
    lines = str(stats).splitlines()
    assert lines[0].startswith(f"new tokens       {stats.new_tokens} in 1 sequence, ")
    assert any(line.startswith("tokens per step  ") for line in lines)
    assert any(line.startswith("source model ") for line in lines)
    assert len({line.index(text) for line, (_, text) in zip(lines, stats.table(), strict=True)}) == 1, "aligned"
    assert "\n" not in repr(stats) and f"{stats.new_tokens} tokens in {stats.steps} steps" in repr(stats)
    page = stats._repr_html_()
    assert page.startswith("<table>") and "&lt;b&gt;mine&lt;/b&gt;" in page and "<b>" not in page
    found = json.loads(json.dumps(stats.as_dict()))
    assert found["sources"]["model"] == vars(stats.sources["model"]) and found["shapes"] == stats.shapes
    assert found["gain"] is None and found["tokens_per_step"] == stats.tokens_per_step
