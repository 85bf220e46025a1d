"""Statistics of a call: shapes and sources add up, and they can be read."""

from __future__ import annotations

import json

import models
import pytest
import torch

import gsd_kernels as gsd
from gsd_kernels_hf.engine.output import ENOUGH_PLAIN_STEPS
from gsd_kernels_hf.engine.stats import GenerationStats, SourceStats

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


@pytest.mark.parametrize("graph_config", ["auto", "graph", "chain"])
def test_one_source_has_it_all(graph_config):
    stats = run(draft=graph_config != "auto", graph_config=graph_config)
    add_up(stats, 1)
    (source,) = stats.sources.values()
    assert source.accepted == stats.new_tokens - stats.sequence_steps


def test_a_token_of_two_sources_counts_for_the_first():
    """A twin of the draft adds nothing to it, wherever it stands."""
    target = models.tiny(seed=3)
    twins = [models.noised(target, 0.05), models.noised(target, 0.05)]
    stats = gsd.generate(target, **models.prompts(1, 9), assistant_model=twins, graph_config="graph", **TOKENS).stats
    assert stats.sources["model"].proposed == stats.target_rows - stats.steps
    assert (stats.sources["model 2"].proposed, stats.sources["model 2"].accepted) == (0, 0)


def test_a_second_text_counts_anew():
    target = models.tiny(seed=3)
    with gsd.patch(target, graph_config=gsd.GraphConfig(depth=0, history_depth=4)) as handle:
        for _ in range(2):
            target.generate(**models.prompts(1, 9), max_new_tokens=32, do_sample=False)
            add_up(handle.stats, 1)


def test_a_plain_call_has_one_shape_and_no_gain():
    stats = run(graph_config="plain", draft=False)
    assert stats.shapes == {"plain": stats.steps} and stats.sources == {}
    assert stats.gain == 1.0 and "1.00 times plain decoding" in str(stats)


def test_the_gain_says_what_it_is_estimated_from():
    """A fixed shape times no plain step and learns no costs; auto learns them."""
    fixed = run(graph_config="tree")
    assert fixed.gain is None and fixed.plain_from is None and "not known" in str(fixed)
    auto = run(graph_config="auto")
    assert auto.plain_seconds > 0 and auto.gain > 0
    few = auto.plain_steps < ENOUGH_PLAIN_STEPS
    assert ("the costs learned from" if few else "plain steps of this call") in auto.plain_from
    assert auto.plain_from in str(auto)


def test_the_gain_is_tokens_a_step_over_what_a_step_costs():
    stats = GenerationStats(steps=10, new_tokens=30, sequence_steps=10, plain_seconds=0.2)
    stats.seconds = {"prefill": 1.0, "draft": 1.0, "target": 2.5, "other": 0.5, "total": 5.0}
    assert stats.gain == pytest.approx(3 * 0.2 / 0.4)
    stats.plain_seconds = None
    assert stats.gain is None


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


def test_a_call_that_transformers_served_says_so():
    stats = GenerationStats(why="beams", seconds={"prefill": 0.0, "draft": 0.0, "target": 0.0, "total": 2.0})
    assert stats.gain is None and "transformers' own generate: beams" in str(stats)
    assert repr(stats) == "GenerationStats(served by transformers)"


def test_a_source_in_words():
    assert str(SourceStats(8, 2, 0.25)) == "2 of 8 tokens accepted (25%), 0.250 s"
    assert str(SourceStats(0, 0, 0.0)) == "0 of 0 tokens accepted, 0.000 s"
    assert str(SourceStats()) == "not counted on a GPU"
