"""The contract of sources: the text is the target's own, and drafts depend on the text alone. A source is a row."""

from __future__ import annotations

import copy

import pytest
import torch
from engine.greedy import Switching
from engine.host_data import NoHostData, Placed
from engine.test_step_trace import Enough, HostReads
from models import prompts, tiny
from sources.drafters import check_own_text, eagle3_config, generate, random_eagle3
from sources.rows import ROWS, eagle3, llama

import gsd_kernels as gsd
from gsd_kernels import GraphConfig
from gsd_kernels_hf.engine import decoder, warming
from gsd_kernels_hf.engine.engine import engines_of
from gsd_kernels_hf.model.fused import why_not
from gsd_kernels_hf.policy.base import Plan

LEVELS = {"depth": 3, "width": 3, "branch": 3, "max_rows": 24}
TREE = GraphConfig(**LEVELS, merge_context=-1)
SHAPES = {
    "chain": GraphConfig.preset("chain", depth=4),
    "graph": GraphConfig(**LEVELS, merge_context=2, history_depth=2, history_width=4),
    "tree": TREE,
    "lattice": GraphConfig(**LEVELS | {"depth": 4, "max_rows": 32}, merge_context=0, history_depth=1, history_width=4),
    "auto": "auto",
}
ALONE = ("chain", "tree")
"""Shapes that a source drafts for alone; for others it does beside the history."""
PROCESSORS = (
    {},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 3},
    {"min_new_tokens": 6, "bad_words_ids": [[7]]},
)
SAMPLED = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "seed": 5}
TEXT = {"max_new_tokens": 20, "eos_token_id": [2, 5], "pad_token_id": 0}
CAPTURED = TREE.replace(merge_context=0)
READERS = ("eagle3 norms", "p-eagle norms", "dflash window", "mtp deepseek", "assistant")
"""Sources that read the target's states, one of each kind."""
MANY = (
    *("a model", "models", "eagle3 plain", "eagle3 before", "eagle3 layers", "p-eagle norms", "dflash reduced"),
    *("DSpark gated", "DSpark confident", "mtp mimo", "mtp mellum", "mtp exaone", "assistant ordered"),
    *("text, sentencepiece to byte-level", "falcon-h1, a model", "kimi, a model", "qwen3.5, dflash", "lfm2, heads"),
)
"""Sources that are like others."""
FAST = ("every", "history", "eagle3 reduced", "DSpark", "mtp glm", "assistant", "text, of another text")


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [] if name in FAST else [pytest.mark.slow, *([pytest.mark.many] if name in MANY else [])]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in ROWS])
def test_text_is_the_targets_own(name, tmp_path):
    """Batches with padding that end early, greedy and by seed, alone and beside the history; processors in turn."""
    row, number, accepted, rejected, tokens = ROWS[name], list(ROWS).index(name), 0, 0, set()
    target, given = row.target(), row.options(tmp_path)
    alone = given.pop("draft_sources")
    beside = alone if "history" in alone else (*alone, "history")
    for sampled in (False, True):
        inputs, processors = row.inputs(number), PROCESSORS[(number + sampled) % len(PROCESSORS)]
        options = {**TEXT, **inputs, **processors, **(SAMPLED if sampled else {"do_sample": False})}
        plain = gsd.generate(target, **options, graph_config="plain") if sampled else target.generate(**options)
        tokens |= set(plain[:, inputs["input_ids"].shape[1] :].unique().tolist())
        for shape, graph in [*SHAPES.items()][(number + sampled) % 2 :: 2]:
            sources = {"draft_sources": alone if shape in ALONE else beside}
            out = generate(target, **options, **given, **sources, graph_config=graph)
            assert torch.equal(out.sequences, plain), (shape, sampled, processors)
            if shape == "auto":  # what it drafts is by measured times, which are the machine's
                continue
            assert (out.stats.draft_rows > 0) == row.forwards
            accepted += sum(out.stats.accepted[2:])
            rejected += sum(n for emitted, n in enumerate(out.stats.accepted) if 0 < emitted <= graph.max_path)
    assert accepted > 0 and rejected > 0 and len(tokens) >= 15, "nothing could have failed"


def test_all_of_them_proposed(tmp_path):
    """In one graph of all sources each has weights of its own, which it learned from what the target picked."""
    target, given = llama(), ROWS["every"].options(tmp_path)
    given["draft_sources"] += ("history",)
    for shape in ("graph", "lattice"):
        engines_of(target).clear()
        generate(target, **ROWS["every"].inputs(0), **given, do_sample=False, graph_config=SHAPES[shape])
        (engine,) = engines_of(target)
        learned = engine.statistics(sampled=False).weights
        assert {name: weights.learned()[0] > 0 for name, weights in learned.items() if name != "model"} == {
            name: True for name in ("model 2", "heads", "eagle3", "p-eagle", "dflash", "history")
        }


@pytest.mark.parametrize("name", ["eagle3 plain", "dflash shared"])
def test_a_text_in_half_precision_is_plain_decodings(name, tmp_path):
    """The state behind the target's last norm is read as the operator leaves it."""
    target = tiny(num_hidden_layers=3, vocab_size=41, dtype=torch.float16)  # the same weights
    module = copy.deepcopy(ROWS[name].options(tmp_path)["drafter"])
    assert why_not(target, "auto") is None
    check_own_text(target, module, [(("drafter",), TREE), (("drafter", "history"), SHAPES["graph"])], seed=2)


@pytest.mark.parametrize("name", READERS)
def test_prompts_of_any_length(name, tmp_path):
    """One token has no state behind it yet; a long prompt is read in pieces."""
    row = ROWS[name]
    target, vocab = row.target(), int(row.inputs(0)["input_ids"].max()) + 1
    for length in (1, 2, 3, 150):
        options = {"do_sample": False, **prompts(3, length, vocab=vocab)}
        plain = generate(target, **options).sequences
        out = generate(target, **options, **row.options(tmp_path), graph_config=TREE, prefill_chunk_size=40)
        assert torch.equal(out.sequences, plain) and out.stats.draft_rows > 0


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


@pytest.mark.parametrize(
    "name",
    ["mtp mimo", "JetSpec", "DSpark reduced", "DSpark recurrent", "DFlash 2", "p-eagle reduced", "assistant ordered"],
)
def test_a_step_reads_nothing_back(name, monkeypatch, tmp_path):
    """Steps of drafters of newer kinds are capturable: no host reads, no data of the host, the same work every time."""
    row = ROWS[name]
    target, module = row.target(), row.options(tmp_path)["drafter"]
    target, module = (copy.deepcopy(each).float() for each in (target, module))
    operations, accepted = [], []

    def loop(session, policy, *_):
        session.trims = False  # what a CPU does in place of static shapes, with a host read
        session.use(Plan(CAPTURED))
        before = [tensor.clone() for tensor in (session.state.tokens, session.kv_len, session.state.out_len)]
        warming._warm_graph(session, CAPTURED)
        after = session.state.tokens, session.kv_len, session.state.out_len
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "nothing was written"
        session.step()
        for _ in range(4):
            with HostReads() as reads, NoHostData(), Placed():
                record = session.step()
            assert not reads.seen, reads.seen
            operations.append(reads.count)
            accepted.extend(record.accepted.num_accepted.tolist())
        raise Enough

    monkeypatch.setattr(decoder, "decode", loop)
    options = {"drafter": module, "draft_sources": ("drafter",), "graph_config": CAPTURED, "backend": "reference"}
    with pytest.raises(Enough):
        gsd.generate(target, **prompts(3, 11, vocab=40), do_sample=False, max_new_tokens=40, **options)
    assert len(set(operations)) == 1 and len(set(accepted)) > 1, "the steps must differ"


def test_steps_without_the_drafter_are_made_up_for():
    """Shapes that change from step to step, plain steps among them: later drafts are as if there had been none."""
    target, drafter = llama(), eagle3("plain")
    options = {"do_sample": False, **prompts(2, 14, vocab=41)}
    plain = generate(target, new=60, **options).sequences
    with Switching(SHAPES["graph"], seed=3):
        out = generate(target, new=60, **options, drafter=drafter, graph_config="auto")
    assert torch.equal(out.sequences, plain)
    assert out.stats.plain_steps > 0 and out.stats.draft_rows > 0


def test_a_drafter_that_is_cast_between_calls_gets_another_session():
    target, drafter = copy.deepcopy(llama()), random_eagle3(eagle3_config(llama()))
    options = {"max_new_tokens": 8, "eos_token_id": None, "do_sample": False}
    plain = target.generate(prompts(1, 9, vocab=41)["input_ids"], **options)
    with gsd.patch(target, drafter=drafter, graph_config=TREE):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            drafter.to(dtype)
            assert torch.equal(target.generate(plain[:, :9], **options), plain)
