"""The history across calls of a patched model: faster, bounded, the same text, and whole on disk."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from models import prompts, tiny
from safetensors.torch import load_file, save_file

import gsd_kernels as gsd
from gsd_kernels import GraphConfig, NgramTable
from gsd_kernels_hf.sources.history import History
from gsd_kernels_hf.sources.memory import HistoryMemory

CONFIG = GraphConfig(depth=0, branch=3, max_rows=16, history_depth=4, history_width=3)
GREEDY = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.5, "seed": 3}


@contextmanager
def patched(model, **options):
    options = {"draft_sources": ("history",), "graph_config": CONFIG, "reuse_prefix": False, **options}
    with gsd.patch(model, **options) as handle:
        yield handle


@pytest.fixture(scope="module")
def target():
    return tiny()


def steps(handle, model, inputs, expected, **options) -> int:
    assert torch.equal(model.generate(**inputs, **options), expected)
    return handle.stats.steps


@pytest.mark.parametrize("decoding", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_later_call_knows_the_texts_of_earlier_ones(decoding, target):
    inputs, other = prompts(1, 12, seed=1), prompts(1, 12, seed=2)
    plain = [gsd.generate(target, **each, **decoding) for each in (inputs, other)]
    with patched(target) as handle:
        first = steps(handle, target, inputs, plain[0], **decoding)
        steps(handle, target, other, plain[1], **decoding)
        assert steps(handle, target, inputs, plain[0], **decoding) < 0.7 * first
        # Switched off it knows nothing; the sources' weights were learned all the same.
        off = steps(handle, target, inputs, plain[0], **decoding, reuse_history=False)
        assert off == pytest.approx(first, abs=2)
        assert len(handle.history) > 0
        handle.clear()
        assert len(handle.history) == 0
        assert steps(handle, target, inputs, plain[0], **decoding) == first
    with patched(target, reuse_history=False) as handle:
        for _ in range(2):
            assert steps(handle, target, inputs, plain[0], **decoding) == pytest.approx(first, abs=2)
        assert len(handle.history) == 0


def test_texts_that_share_a_beginning_come_from_no_history_but_the_calls(target, monkeypatch):
    """A session goes on from their first token; what it knows of another history than the call's, it forgets."""
    given = [prompts(1, 12, seed=seed)["input_ids"] for seed in range(4)]
    for ids in given:
        ids[:, 0] = 1
    texts = [target.generate(ids, **GREEDY) for ids in given]

    last, end = [], History.end
    monkeypatch.setattr(History, "end", lambda source: end(source) or last.append(source.table))

    def share(number, *calls, kept=True) -> float:
        """Of a text's contexts of four tokens, the share that is remembered after ``calls``, or known to the last."""
        with patched(target, reuse_prefix=True) as handle:
            for call, options in calls:
                handle.history.clear() if options is None else target.generate(given[call], **{**GREEDY, **options})
            table = NgramTable.empty(1, 3, "cpu")
            handle.history.restore(table)
        table = table if kept else last[-1]
        contexts = texts[number][:, 1:].unfold(1, 4, 1).flip(2).to(torch.int32)  # [1, n, 4], the last token first
        return (gsd.ngram_lookup(table, contexts)[2] == 4).float().mean().item()

    own, apart, pair = {}, {"reuse_history": False}, {"num_return_sequences": 2, "do_sample": True, "top_k": 1}
    assert share(1, (0, own), (1, own), (2, own)) > 0.8
    assert share(1, (0, own), (1, apart), (2, own)) < 0.2
    assert share(0, (0, own), (1, apart)) > 0.8
    assert share(1, (0, apart), (1, apart), kept=False) > 0.8
    assert share(0, (0, apart), (1, apart), kept=False) < 0.2
    assert share(0, (0, own), (0, None), (1, own)) < 0.2
    assert share(1, (0, own), (1, pair), (2, own), (3, own)) > 0.8, "of another session, whose table is another one"


def test_what_is_cleared_during_a_call_stays_so(target):
    class Clearing:
        def put(self, value):
            handle.history.clear()

        def end(self):
            pass

    with patched(target) as handle:
        target.generate(**prompts(1, 12, seed=1), **GREEDY)
        assert len(handle.history) > 0
        target.generate(**prompts(1, 12, seed=2), **GREEDY, streamer=Clearing())
        assert len(handle.history) == 0


def test_nothing_is_kept_without_a_patch(target):
    inputs = prompts(1, 12, seed=1)
    options = {**GREEDY, "draft_sources": ("history",), "graph_config": CONFIG, "return_dict_in_generate": True}
    first, second = (gsd.generate(target, **inputs, **options).stats.steps for _ in range(2))
    assert second > 0.8 * first, "weights of sources are learned, no contexts"


# ---- the table


def with_entries(table: NgramTable, inserted) -> NgramTable:
    batch, _, branch = table.tokens.shape
    for context, token in inserted:
        contexts = torch.full((batch, 1, 1), context, dtype=torch.int32)
        tokens = torch.full((batch, 1, branch), token, dtype=torch.int32)
        gsd.ngram_insert(table, contexts, tokens, torch.zeros(batch, 1, branch), torch.ones(batch, 1, dtype=torch.bool))
    return table


def table_of(inserted, *, batch: int = 1, branch: int = 2, ways: int = 4) -> NgramTable:
    """A table of 8 entries after insertions of (context, continuation)."""
    return with_entries(NgramTable.empty(batch, branch, "cpu", capacity=8, max_context=1, ways=ways), inserted)


def test_what_is_kept_is_no_table_that_goes_on_being_written():
    memory, table = HistoryMemory(50), table_of([(1, 7)])
    memory.add(table, None)
    table.clear()
    assert len(memory) == 1
    memory.restore(table)
    table.clear()
    assert len(memory) == 1


# ---- on disk


@pytest.fixture(scope="module")
def saved(target, tmp_path_factory):
    file = tmp_path_factory.mktemp("history") / "history.safetensors"
    inputs = prompts(1, 12, seed=1)
    with patched(target) as handle:
        target.generate(**inputs, **GREEDY)
        handle.history.save(file)
        return SimpleNamespace(file=file, inputs=inputs, steps=handle.stats.steps, known=len(handle.history))


def test_a_saved_history_serves_another_process(target, saved, tmp_path):
    plain = target.generate(**saved.inputs, **GREEDY)
    with patched(target) as handle:
        handle.history.load(saved.file)
        assert len(handle.history) == saved.known
        assert steps(handle, target, saved.inputs, plain, **GREEDY) < 0.7 * saved.steps
        handle.history.load(saved.file)
        handle.history.save(tmp_path / "again")
    for name, tensor in load_file(saved.file).items():
        assert torch.equal(tensor, load_file(tmp_path / "again")[name])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["again"]


def test_a_history_is_of_the_vocabulary_that_the_target_has(tmp_path):
    model = tiny()
    with patched(model) as handle:
        model.generate(**prompts(1, 12), **GREEDY)
        model.resize_token_embeddings(120, mean_resizing=False)
        model.lm_head.weight.data[97:] *= 9
        assert model.generate(**prompts(1, 12), **GREEDY).max() >= 97
        handle.history.save(tmp_path / "history")
        handle.history.load(tmp_path / "history")


ABOUT = {"format": "gsd_kernels history", "version": "1", "max_context": "4", "ways": "8", "vocab_size": "97"}


def altered(saved, file, about=None, **tensors):
    save_file({**load_file(saved.file), **tensors}, file, metadata=ABOUT if about is None else {**ABOUT, **about})


DAMAGES = {
    "something else": (lambda s, f: save_file({"a": torch.zeros(2)}, f), "is no saved history"),
    "newer": (lambda s, f: altered(s, f, {"version": "2"}), "has version 2, newer than 1; update"),
    "another vocabulary": (
        lambda s, f: altered(s, f, {"vocab_size": "96"}),
        "vocabulary of 96 tokens, the target has 97",
    ),
    "another table": (lambda s, f: altered(s, f, {"ways": "4"}), "is damaged"),
    "a token that is none": (
        lambda s, f: altered(s, f, tokens=load_file(s.file)["tokens"].fill_(97)),
        "is damaged",
    ),
    "no probability": (
        lambda s, f: altered(s, f, log_probs=load_file(s.file)["log_probs"].fill_(float("nan"))),
        "is damaged",
    ),
    "keys of no set": (lambda s, f: altered(s, f, keys=load_file(s.file)["keys"].flip(0)), "is damaged"),
    "twins": (
        lambda s, f: altered(s, f, keys=load_file(s.file)["keys"].view(-1, 8)[:, :1].repeat(1, 8).flatten()),
        "is damaged",
    ),
    **{
        f"a number as {name}": (lambda s, f, name=name: altered(s, f, **{name: torch.tensor(0)}), "is damaged")
        for name in ("keys", "tokens")
    },
    "sizes differ": (lambda s, f: altered(s, f, tokens=load_file(s.file)["tokens"][:-1].clone()), "is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_and_foreign_files_are_refused_by_name(damage, saved, tmp_path):
    spoil, match = DAMAGES[damage]
    file = tmp_path / "bad.safetensors"
    spoil(saved, file)
    memory = HistoryMemory(97)
    memory.load(saved.file)
    with pytest.raises(ValueError, match=match) as error:
        memory.load(file)
    assert str(file) in str(error.value) and "delete" not in str(error.value)
    assert len(memory) == saved.known, "what was remembered is kept"
