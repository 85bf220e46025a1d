"""Drafts without a forward: the history of a text and of earlier calls, what a model learned, and a corpus."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from checkpoints import corpus_of, random_text
from gguf_files import tiny as packed_tiny
from gguf_files import write_gguf
from models import prompts, tiny
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import gsd_kernels as gsd
from gsd_kernels import Corpus, GraphConfig, NgramTable
from gsd_kernels_hf.costs.pair import fingerprint
from gsd_kernels_hf.packed.gguf import from_gguf
from gsd_kernels_hf.sources import memory
from gsd_kernels_hf.sources.history import History
from gsd_kernels_hf.sources.memory import FOLDER, SHIPPED, HistoryMemory, print_of_vectors, read_learned

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
    for kept in (True, False):
        assert share(0, (0, own), (0, None), (1, own), kept=kept) < 0.2
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


def test_what_is_kept_is_no_table_that_goes_on_being_written():
    memory, table = HistoryMemory(50), NgramTable.empty(1, 2, "cpu", capacity=8, max_context=1, ways=4)
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    gsd.ngram_insert(table, one, one.expand(1, 1, 2), torch.zeros(1, 1, 2), one[..., 0].bool())
    memory.add(table, None)
    table.clear()
    assert len(memory) == 1
    memory.restore(table)
    table.clear()
    assert len(memory) == 1


# Its file.


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


def test_another_vocabularys_file_is_refused(saved):
    memory = HistoryMemory(96)
    with pytest.raises(ValueError, match="vocabulary of 97 tokens, the target has 96"):
        memory.load(saved.file)
    with pytest.raises(ValueError, match="nothing is remembered yet"):
        memory.save(saved.file)


# Its text.


def test_a_reference_that_the_output_repeats_makes_it_faster():
    options = {**prompts(2, 12, seed=3), "do_sample": True, "seed": 1, "max_new_tokens": 40, "eos_token_id": None}
    options |= {"draft_sources": ("history",), "graph_config": GraphConfig(history_depth=4)}
    options |= {"return_dict_in_generate": True}
    alone = gsd.generate(tiny(), **options)
    for reference, gain in ((alone.sequences, 1.5), (alone.sequences[0], 1.0)):
        told = gsd.generate(tiny(), **options, reference_ids=reference)
        assert torch.equal(told.sequences, alone.sequences)
        assert told.stats.tokens_per_step > gain * alone.stats.tokens_per_step


# A corpus.


MIXED = GraphConfig(depth=2, width=3, branch=3, max_rows=24, merge_context=0, history_depth=4, history_width=3)


def test_a_corpus_serves_a_patched_model_with_one_mapping_for_all_sessions(target, tmp_path):
    """Two of them by two names."""
    inputs = prompts(1, 14, seed=1)
    plain = target.generate(**inputs, **GREEDY)
    corpus, other = Corpus(corpus_of(tmp_path / "own", plain)), corpus_of(tmp_path / "other", random_text(4000))
    with pytest.raises(ValueError, match="corpus, corpus have a name twice"):
        gsd.generate(target, **inputs, draft_sources=(corpus, Corpus(other)))
    sources = "history", corpus, Corpus(other, name="other")
    with gsd.patch(target, draft_sources=sources, graph_config=MIXED) as handle:
        for _ in range(2):
            assert torch.equal(target.generate(**inputs, **GREEDY), plain)
        copied = [s for session in handle.engines.sessions for s in session.mixer.sources if s.name == "corpus"]
        assert copied and all(s is not corpus and s.index is corpus.index for s in copied)
    assert not hasattr(corpus, "state"), "sessions work on copies"


def test_a_corpus_of_tokens_that_the_target_lacks_is_refused(target, tmp_path):
    corpus = Corpus(corpus_of(tmp_path / "large", [1, 2, 200]))
    with pytest.raises(ValueError, match="made with a tokenizer of 201 tokens, the target has 97"):
        gsd.generate(target, **prompts(1, 5), draft_sources=(corpus,), max_new_tokens=4)


# What comes with this package of a model.


NAME = "tiny-instruct"
ASKED = prompts(1, 9, vocab=61)["input_ids"]
DEEP = GraphConfig(depth=0, branch=3, max_rows=16, history_depth=6, history_width=4)
DRAFTS = {"draft_sources": ("history",), "graph_config": DEEP, "reuse_history": False}
BYTES_A_TOKEN = 10  # 1 MB for 100,000 tokens
FORMS = {
    "float32": lambda model, folder: model,
    "bfloat16": lambda model, folder: LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
    "q8_0": lambda model, folder: from_gguf(write_gguf(folder / "m.gguf", model, "llama", "q8_0"), dtype=torch.float32),
}


@pytest.fixture
def learned_of(tmp_path, monkeypatch):
    """A model in float32 whose norms a checkpoint had in bfloat16, and a file of it in the package."""
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "cache"))
    model = packed_tiny("llama")
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(tmp_path)
    place, own = tmp_path / f"{NAME}.safetensors", print_of_vectors(model)
    gsd.learn(model, prompts=ASKED, new_tokens=32, file=place, progress=False)
    found = read_learned(place, fingerprint=fingerprint(model), vocab_size=96)
    replace(found, fingerprint=own).save(place)
    monkeypatch.setattr(memory, "FOLDER", tmp_path)
    monkeypatch.setattr(memory, "SHIPPED", {NAME: own})
    return model


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_model_drafts_with_it_unless_told_not_to(form, learned_of, tmp_path, caplog):
    model = FORMS[form](learned_of, tmp_path)
    plain, steps = gsd.generate(model, ASKED, **GREEDY, graph_config="plain"), []
    for asked in ({}, {"learned": False}):
        with caplog.at_level(logging.INFO, "gsd_kernels"), gsd.patch(model, **DRAFTS, **asked) as handle:
            assert torch.equal(model.generate(ASKED, **GREEDY), plain)
            steps.append(handle.stats.steps)
    (line,) = (message for message in caplog.messages if "drafting with what was learned" in message)
    assert f"{NAME}.safetensors" in line and "which comes with this package" in line
    assert steps[0] < steps[1]


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_shipped_is_whole_and_small(name):
    """Where this fails because the mixture has other weights, run ``python -m gsd_kernels_train.recipes.learned``."""
    file = FOLDER / f"{name}.safetensors"
    found = read_learned(file, fingerprint=SHIPPED[name], vocab_size=49152)
    assert found.seen > 15_000 and file.stat().st_size <= BYTES_A_TOKEN * found.seen
    assert {file.stem for file in FOLDER.iterdir()} == SHIPPED.keys()
