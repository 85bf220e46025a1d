"""Drafts whose tokenizer shares most of its tokens with the target's: text is the target's own, tokens are accepted."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import two_tokenizers as two
from models import noised, prompts

import gsd_kernels as gsd
from gsd_kernels_hf.model.runner import RowModel
from gsd_kernels_hf.model.vocabulary import Translation
from gsd_kernels_hf.sources.translated import TranslatedRows

OURS, THEIRS = two.byte_level(), two.renumbered(two.byte_level(), without=0.3)
VOCAB = len(OURS)
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "seed": 5}
ENDS = [OURS.eos_token_id, 40, 41]
TEXT = {"max_new_tokens": 20, "eos_token_id": ENDS, "pad_token_id": 0}


@functools.cache
def target_of():
    return two.target_of(OURS)


@functools.cache
def draft_of(noise: float = 0.015):
    between = Translation.between(OURS, THEIRS)
    return noised(two.behind(target_of(), between.target, between.draft), noise)


BOTH = {"tokenizer": OURS, "assistant_tokenizer": THEIRS}


def test_a_copy_of_the_target_is_right_but_where_it_lacks_a_token():
    """Greedy: of a draft with the target's own rows every token is accepted that it has."""
    between = Translation.between(OURS, THEIRS)
    draft = two.behind(target_of(), between.target, between.draft).float()
    ids = prompts(1, 12, vocab=VOCAB)["input_ids"]
    ids[between.shared.same[ids] < 0] = OURS.convert_tokens_to_ids("e")  # all of the prompt is read as it is
    options = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    out = gsd.generate(
        target_of(), ids, **options, **BOTH, assistant_model=draft, graph_config="chain", return_dict_in_generate=True
    )
    emitted = out.sequences[0, ids.shape[1] :]
    lacks = (torch.nn.functional.pad(between.shared.same, (0, 3), value=-1)[emitted] < 0).nonzero()
    first = int(lacks[0]) if len(lacks) else len(emitted)
    steps = [count for count, times in enumerate(out.stats.accepted) for _ in range(times)]
    assert first >= 6 and max(steps) == 6, "a chain of five, and the target's own"
    assert torch.equal(out.sequences, target_of().generate(ids, **options))


def test_logits_are_over_the_targets_tokens():
    """What the draft gives to tokens that the target lacks is left out; a token that the draft lacks has none."""
    between, draft = Translation.between(OURS, THEIRS), draft_of()
    rows = TranslatedRows(RowModel(draft, 64, torch.zeros(1, dtype=torch.int32), "auto"), between.shared, VOCAB + 3)
    inputs = torch.tensor([[5, 9, VOCAB + 2]], dtype=torch.int32)
    zeros, mask = torch.zeros_like(inputs), torch.tensor([[[1], [3], [7]]], dtype=torch.int32)
    depths = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    logits = rows.rows(inputs, zeros[:, 0], 0, mask, depths, depths, keep=3)
    alone = draft(between.shared.reads[inputs.long().clamp(max=VOCAB - 1)][:, :2]).logits
    assert logits.shape == (1, 3, VOCAB + 3)
    same = between.shared.same
    has = same >= 0
    torch.testing.assert_close(logits[:, :2, :VOCAB][..., has], alone[..., same[has]])
    assert bool((logits[..., :VOCAB][..., ~has] == -torch.inf).all()) and bool(
        (logits[..., VOCAB:] == -torch.inf).all()
    )
    assert 0 < int((~has).sum()) < VOCAB // 4


def test_speculative_sampling_draws_from_what_both_have():
    out = gsd.generate(
        target_of(),
        **prompts(4, 9, vocab=VOCAB),
        **TEXT,
        **SAMPLED,
        **BOTH,
        assistant_model=draft_of(0.005),
        graph_config="chain",
        criterion="speculative",
        return_dict_in_generate=True,
    )
    assert sum(out.stats.accepted[2:]) > 0 and out.stats.lossless


REFUSED = {
    "no tokenizers": (
        {"tokenizer": None, "assistant_tokenizer": None},
        "bos_token_id.*pass both, tokenizer= the target's",
    ),
    "the target's alone": (
        {"assistant_tokenizer": None},
        "pass both, tokenizer= the target's and assistant_tokenizer=",
    ),
    "the draft's alone": ({"tokenizer": None}, "assistant_tokenizer: needs the target's tokenizer"),
    "too few": ({"assistant_tokenizer": [THEIRS, None]}, "assistant_tokenizer: expected one, or a list of 1"),
    "no tokenizer": ({"assistant_tokenizer": "gpt2"}, "assistant_tokenizer: expected a tokenizer of transformers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    given, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=message):
        gsd.generate(target_of(), **prompts(1, 9, vocab=VOCAB), **TEXT, assistant_model=draft_of(), **{**BOTH, **given})


@pytest.mark.parametrize("name", ["tokenizer", "assistant_tokenizer"])
def test_a_tokenizer_larger_than_its_model_is_refused(name):
    larger = copy.deepcopy(BOTH[name])
    larger.add_tokens([f"<{i}>" for i in range(9)])
    with pytest.raises(ValueError, match=f"{name}: its largest id is .* pass the tokenizer that the model was trained"):
        gsd.generate(
            target_of(), **prompts(1, 9, vocab=VOCAB), **TEXT, assistant_model=draft_of(), **{**BOTH, name: larger}
        )
