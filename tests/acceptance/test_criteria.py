"""Criteria beside the exact one, through the whole of generate: batches, processors, precision, refusals."""

from __future__ import annotations

import models
import pytest
import torch
from acceptance.chains import CHAIN, VOCAB, generate, pair
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, StoppingCriteriaList

import gsd_kernels as gsd
from gsd_kernels_hf.acceptance import criteria


@pytest.mark.parametrize("criterion", ["speculative", "block", "typical"])
def test_greedy_and_undrafted_output_is_exact(criterion):
    """Both rules are the exact one where p is one token or nothing is drafted, and the statistics say so."""
    target, draft = pair(0.02)
    prompt = models.prompts(2, 9, seed=2, vocab=VOCAB)
    plain = target.generate(**prompt, do_sample=False, max_new_tokens=20, pad_token_id=0)
    out = generate(target, draft, criterion, prompt, do_sample=False, max_new_tokens=20)
    assert out.sequences.tolist() == plain.tolist()
    assert len(out.stats.accepted) > 2 and out.stats.accepted[1] > 0
    assert (out.stats.criterion, out.stats.lossless) == ("exact", True)
    alone = {"do_sample": True, "seed": 4, **prompt, "max_new_tokens": 8, "pad_token_id": 0}
    expected = gsd.generate(target, graph_config="plain", **alone)
    plain = {} if criterion in criteria.DRAWN else {"graph_config": "plain"}
    assert torch.equal(gsd.generate(target, criterion=criterion, **plain, **alone), expected)


@pytest.mark.parametrize("criterion", ["speculative", "block", "typical"])
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
def test_the_host_walk_agrees_with_the_device(criterion):
    """A processor that changes nothing takes the walk, one that is called per token changes what p is.

    One of transformers' own, so that a sequence walks as far as on the device: its text depends on where steps begin.
    """
    target, draft = pair()
    prompt = models.prompts(3, 8, seed=6, vocab=VOCAB)
    options = {"max_new_tokens": 20, "eos_token_id": 2, "temperature": 0.9, "top_k": 9}
    device = generate(target, draft, criterion, prompt, **options)

    nothing = RepetitionPenaltyLogitsProcessor(1.0)

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"criterion": "greedy"},
            "criterion: expected 'exact', 'speculative', 'block', 'typical' or a gsd_kernels.Typical",
        ),
        (
            {"criterion": "speculative", "graph_config": "tree"},
            "graph_config: .* width is 4 instead of 1; pass .*chain",
        ),
        (
            {"criterion": "speculative", "graph_config": gsd.GraphConfig(width=1, branch=2, merge_context=-1)},
            "branch is 2",
        ),
        ({"criterion": "speculative", "graph_config": gsd.GraphConfig(width=1, branch=1)}, "merge_context is 1"),
        ({"criterion": "speculative", "graph_config": CHAIN.replace(history_depth=1)}, "history_depth is 1"),
        ({"criterion": "speculative", "draft_sources": ("model", "history")}, "draft_sources: .*leave it out"),
        ({"criterion": "block", "draft_sources": ("model", "history")}, 'draft_sources: criterion="block" drafts'),
        ({"criterion": "block", "graph_config": "graph"}, 'graph_config: criterion="block" needs a chain'),
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
