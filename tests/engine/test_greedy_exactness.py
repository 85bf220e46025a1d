"""Greedy decoding equals transformers' own ``generate``, token for token, whatever is drafted.

Every chunk of cases is one family and one kind of graph. A case is a pure function of its seed; a failure prints it.
"""

from __future__ import annotations

import itertools

import models
import pytest
import torch
from engine.greedy import (
    CASES,
    FAST,
    KINDS,
    VOCAB,
    Case,
    agreement,
    assert_close_outputs,
    draft_of,
    exact_logits,
    first_difference,
    target_of,
)

import gsd_kernels as gsd

pytestmark = pytest.mark.quick


def chunks():
    """Everywhere each family with three or four kinds, each kind with two families; all pairs in CI."""
    for (i, family), (j, kind) in itertools.product(enumerate(models.FAMILIES), enumerate(KINDS)):
        fast = i == 0 and kind in FAST
        marks = [pytest.mark.slow, *([pytest.mark.many] if (i + j) % 3 else [])]
        yield pytest.param(family, kind, id=f"{family}-{kind}", marks=() if fast else marks)


FAMILIES = [  # the others round as the first one does
    pytest.param(family, marks=() if family in ("llama-gqa", "qwen3") else pytest.mark.many)
    for family in ("llama-gqa", "qwen2", "qwen3", "mistral-window")
]


@pytest.mark.parametrize(("family", "kind"), chunks())
def test_float64_tokens_equal_transformers(family, kind):
    hits = total = rejected = merged = 0
    longest, distinct, contexts = 0, set(), set()
    for seed in range(CASES):
        case = Case(family, kind, seed)
        expected, actual = case.expected(), case.actual()
        tokens = expected.sequences if case.outputs else expected
        assert actual.sequences.tolist() == tokens.tolist(), f"tokens differ: {case}"
        if case.outputs:
            assert_close_outputs(case, expected, actual)
        stats = actual.stats
        length = tokens.shape[1] - case.prompt["input_ids"].shape[1]
        distinct |= set(tokens[:, -length:].flatten().tolist())
        if case.processor == "none":
            agree = agreement(case, tokens)
            hits, total = hits + agree[0], total + agree[1]
        # A step that could have emitted more but did not has rejected something.
        rejected += sum(n for emitted, n in enumerate(stats.accepted) if 0 < emitted <= case.config.max_path)
        longest = max(longest, len(stats.accepted) - 1)
        merged += stats.accepted_merges
        if stats.accepted_merges:
            contexts.add(case.config.merge_context)
    # The cases could have failed: drafts are right often and wrong often, and everything that can happen did.
    assert 0.3 <= hits / total <= 0.9, hits / total
    assert rejected > 0 and longest > 2 and len(distinct) >= 15, (rejected, longest, len(distinct))
    assert merged == 0 if KINDS[kind] == (-1,) else merged > 0
    print(f"{family} {kind}: agreement {hits / total:.2f}, {merged} accepted merge edges, contexts {contexts}")


@pytest.mark.parametrize("context", [0, 1, 2, 3])
def test_merge_edges_are_accepted_with_every_context(context):
    """Wide graphs over a batch: text after a merge edge is right, too."""
    target = target_of("qwen3")
    config = gsd.GraphConfig(depth=8, width=12, branch=3, max_rows=128, merge_context=context)
    prompt = models.prompts(4, 20, seed=3, vocab=VOCAB)
    expected = target.generate(**prompt, max_new_tokens=32, do_sample=False)
    actual = gsd.generate(
        target,
        **prompt,
        assistant_model=draft_of("qwen3", 0.01),
        graph_config=config,
        max_new_tokens=32,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert actual.sequences.tolist() == expected.tolist()
    assert actual.stats.accepted_merges > 0 and actual.stats.merges > actual.stats.accepted_merges


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_first_divergence_is_within_the_rounding_bound(family):
    """Two forwards that err by at most ``e`` in every logit can pick differently only where the exact gap is ≤ 2e.

    ``e`` is what transformers' own bfloat16 decoding errs by, against float64 on the same weights, over all cases
    and steps; the graph rows' logits may err by at most twice that.
    """
    flips, gaps, runs = 0, [], []
    theirs = ours = 0.0
    more = {"return_dict_in_generate": True, "output_logits": True}
    for kind in KINDS:
        for seed in range(200, 202):
            case = Case(family, kind, seed)
            case.stop, case.processor = "length", "none"
            expected, actual = (f(torch.bfloat16, **more) for f in (case.expected, case.actual))
            runs.append((case, expected, actual))
            length, mask = case.prompt["input_ids"].shape[1], case.prompt["attention_mask"]
            exact = exact_logits(family, torch.bfloat16, expected.sequences, mask, length)
            theirs = max(theirs, float((torch.stack(expected.logits, 1) - exact).abs().max()))
            graph_exact = exact_logits(family, torch.bfloat16, actual.sequences, mask, length)
            ours = max(ours, float((torch.stack(actual.logits, 1) - graph_exact).abs().max()))
            for row, step in first_difference(case, expected.sequences, actual.sequences):
                a, b = (int(x.sequences[row, length + step]) for x in (expected, actual))
                gaps.append((float((exact[row, step, a] - exact[row, step, b]).abs()), case, row, step))
                flips += 1
    assert 0 < ours <= 2 * theirs, f"graph rows err by {ours:.4f}, transformers by {theirs:.4f}"
    for gap, case, row, step in gaps:
        assert gap <= 2 * theirs, f"row {row}, step {step}: gap {gap:.4f} > 2 · {theirs:.4f}; {case}"
    spread = torch.cat([x.logits[0] for _, x, _ in runs]).std()
    assert 2 * theirs < 0.5 * spread, "the bound must be small beside the logits, or the test shows nothing"
    print(f"bfloat16 {family}: {flips} flipped rows in 16 cases, errors {theirs:.4f} / {ours:.4f}, {spread:.2f} spread")
