"""The contract of sources beside their texts (tests/texts): drafts depend on the text alone. A source is a row."""

from __future__ import annotations

import copy
import shutil
from functools import partial

import pytest
import torch
from models import prompts, tiny
from sources.drafters import eagle3_config, generate, random_eagle3
from sources.rows import ROWS, llama

import gsd_kernels as gsd
from gsd_kernels import DraftHeads, GraphConfig
from gsd_kernels_hf.engine.engine import engines_of

LEVELS = {"depth": 3, "width": 3, "branch": 3, "max_rows": 24}
TREE = GraphConfig(**LEVELS, merge_context=-1)
SHAPES = (
    GraphConfig(**LEVELS, merge_context=2, history_depth=2, history_width=4),
    GraphConfig(**LEVELS | {"depth": 4, "max_rows": 32}, merge_context=0, history_depth=1, history_width=4),
)
READERS = ("eagle3 norms", "p-eagle norms", "dflash window", "mtp deepseek", "assistant")
"""Sources that read the target's states, one of each kind."""


def test_all_of_them_proposed(tmp_path):
    """In one graph of all sources each has weights of its own, which it learned from what the target picked."""
    target, given = llama(), ROWS["every"].options(tmp_path)
    given["draft_sources"] += ("history",)
    for shape in SHAPES:
        engines_of(target).clear()
        generate(target, **ROWS["every"].inputs(0), **given, do_sample=False, graph_config=shape)
        (engine,) = engines_of(target)
        learned = engine.statistics(sampled=False).weights
        assert {name: weights.learned()[0] > 0 for name, weights in learned.items() if name != "model"} == {
            name: True for name in ("model 2", "heads", "eagle3", "p-eagle", "dflash", "history")
        }


@pytest.mark.parametrize("name", READERS)
def test_drafts_do_not_depend_on_padding_or_pieces(name, tmp_path):
    """The same prompt alone, behind padding, beside another one and read in pieces: the same drafts, to rounding."""
    row = ROWS[name]
    ids, other = row.inputs(0)["input_ids"][:1], row.inputs(3)["input_ids"][:1]
    padded = torch.nn.functional.pad(ids, (5, 0))
    mask = (torch.arange(padded.shape[1]) >= 5).long()[None]
    both = {"input_ids": torch.cat([padded, other.repeat(1, 2)[:, : padded.shape[1]]])}
    both["attention_mask"] = torch.cat([mask, torch.ones_like(mask)])
    seen = []
    options = {"do_sample": False, "graph_config": TREE, **row.options(tmp_path)}
    for changed in (
        {"input_ids": ids},
        {"input_ids": padded, "attention_mask": mask},
        both,
        {"input_ids": ids, "prefill_chunk_size": 3},
    ):
        seen.append([])
        keep = lambda v, first=seen[-1]: first.append((v.rows.token_ids + 0, v.rows.scores + 0))  # noqa: E731
        generate(row.target(), **options, **changed, observer=keep)
    count = seen[0][0][0].shape[1]
    for found in seen[1:]:
        assert torch.equal(found[0][0][:1, :count], seen[0][0][0])
        torch.testing.assert_close(found[0][1][:1, :count], seen[0][0][1])


@pytest.mark.parametrize("name", READERS)
def test_a_chats_next_turn_drafts_as_a_new_call_does(name, tmp_path):
    """What was reused of the prompt has its entries and states; plain steps in between are made up for."""
    row, drafts = ROWS[name], []
    target, first, more = row.target(), row.inputs(0)["input_ids"][:1], row.inputs(8)["input_ids"][:1, -6:]
    options = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    keep = lambda v: drafts.append((v.rows.token_ids + 0, v.rows.scores + 0))  # noqa: E731
    with gsd.patch(target, **row.options(tmp_path), graph_config=TREE, observer=keep) as handle:
        first = target.generate(first, attention_mask=torch.ones_like(first), **options)
        turn, found = torch.cat([first, more], 1), []
        for reuse in (True, False):
            drafts.clear()
            text = target.generate(turn, attention_mask=torch.ones_like(turn), reuse_prefix=reuse, **options)
            (session,) = handle.engines.idle.sessions
            assert (session.target.reused > 0) == reuse
            found.append((text, list(drafts)))
    assert torch.equal(found[0][0], found[1][0])
    for reused, anew in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(reused[0], anew[0])
        torch.testing.assert_close(reused[1], anew[1])


def test_a_drafter_that_is_cast_between_calls_gets_another_session():
    target, drafter = copy.deepcopy(llama()), random_eagle3(eagle3_config(llama()))
    options = {"max_new_tokens": 8, "eos_token_id": None, "do_sample": False}
    plain = target.generate(prompts(1, 9, vocab=41)["input_ids"], **options)
    with gsd.patch(target, drafter=drafter, graph_config=TREE):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            drafter.to(dtype)
            assert torch.equal(target.generate(plain[:, :9], **options), plain)


@pytest.mark.parametrize("option", ["draft_heads", "drafter"])
def test_files_that_go_bad_leave_what_was_loaded(tmp_path, caplog, option):
    """A draft never decides whether there is a text."""
    target, inputs = tiny(num_hidden_layers=2), {**prompts(1, 9), "max_new_tokens": 6, "do_sample": False}
    want, place = target.generate(**inputs), tmp_path / "heads"
    DraftHeads.for_model(target, 2).save_pretrained(place)
    with gsd.patch(target, **{option: place}) as handle:

        def now() -> DraftHeads:
            (*_, engine) = handle.engines
            return engine.parts[0]()

        assert torch.equal(target.generate(**inputs), want)
        first = now()
        (place / ".partial-1-draft_heads.safetensors").write_bytes(b"is being written")
        assert torch.equal(target.generate(**inputs), want) and now() is first and not caplog.records
        for bad in (partial((place / "draft_heads.safetensors").write_bytes, b"half"), partial(shutil.rmtree, place)):
            bad()
            for _ in range(2):
                assert torch.equal(target.generate(**inputs), want) and now() is first
        said = [record.getMessage() for record in caplog.records if "goes on drafting" in record.getMessage()]
        assert len(said) == 2 and all(message.startswith(f"{option}: what was loaded") for message in said)
        DraftHeads.for_model(target, 3).save_pretrained(place)
        assert torch.equal(target.generate(**inputs), want) and now().num_heads == 3
