"""What is known of a model: its facts, and its tokens as bytes."""

from __future__ import annotations

import copy
import itertools
import logging
import types

import models
import pytest
import torch
import two_tokenizers as two
from hypothesis import given, settings
from hypothesis import strategies as st
from models import noised, prompts, tiny
from ops.contracts.backends import needs_cpu
from tokenizers import Tokenizer, normalizers
from tokenizers.models import BPE, WordLevel
from torch import nn
from transformers import DynamicCache, LlamaForCausalLM, StoppingCriteria

import gsd_kernels as gsd
from gsd_kernels_hf.model import fused
from gsd_kernels_hf.model.facts import Facts, fact, looked, looking
from gsd_kernels_hf.model.fused import why_not
from gsd_kernels_hf.model.properties import cache_argument
from gsd_kernels_hf.model.spelling import Speller, readable
from gsd_kernels_hf.model.vocabulary import LETTERS, SharedTokens, Translation, Vocabulary

# The facts of a model: found once a call, and until when they count; what a class, a setting, a container changes.


@pytest.fixture
def function():
    """Answers how often it ran."""
    runs = itertools.count(1)
    return fact(lambda facts, *rest, **options: next(runs))


def test_a_call_makes_the_facts_of_a_model_once(function):
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert [function(one), function(one)] == [1, 2]  # outside of a call a model is looked at anew
    with looking():
        assert [function(one), function(one), function(other)] == [3, 3, 4]
        handed_on = Facts.of(one)
        with looking():  # another call, from a callback
            assert [function(one), function(one)] == [5, 5]
        assert function(one) == 3
        looked()
        assert [function(one), function(one)] == [6, 7]
        assert function(handed_on) == 3  # a record is what it was
        with looking():
            assert [function(one), function(one)] == [8, 8]
        assert function(one) == 9
    assert [function(one), function(one)] == [10, 11]


def test_an_error_is_no_answer():
    model, errors = Facts(nn.Linear(2, 2)), [ValueError("once")]

    @fact
    def function(facts):
        if errors:
            raise errors.pop()
        return 5

    with pytest.raises(ValueError, match="once"):
        function(model)
    assert function(model) == 5
    with pytest.raises(ZeroDivisionError), looking():
        _ = 1 / 0


def test_a_call_looks_at_each_model_once(monkeypatch):
    target = tiny()
    draft, looks = noised(target), []
    inner = Facts.structure.func
    monkeypatch.setattr(Facts.structure, "func", lambda facts: looks.append(facts.model) or inner(facts))
    prompt = torch.arange(3, 9)[None]
    gsd.generate(target, prompt, assistant_model=draft, max_new_tokens=8)
    assert [looks.count(model) for model in (target, draft)] == [1, 1]
    gsd.patch(target, assistant_model=draft)
    looks.clear()
    target.generate(prompt, max_new_tokens=8)
    assert [looks.count(model) for model in (target, draft)] == [1, 1]
    gsd.unpatch(target)


def test_what_a_callback_changes_counts_for_the_calls_that_it_makes():
    """A call from a stopping criterion sees the model as the criterion has left it."""
    target, other = tiny(), tiny()
    draft = noised(target)
    prompt, found = torch.arange(3, 9)[None], []

    class Nested(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if not found:
                hook = target.model.layers[0].mlp.register_forward_hook(lambda _, __, output: 3.0 * output)
                for kwargs in ({"assistant_model": draft}, {}):
                    found.append(gsd.generate(target, prompt, max_new_tokens=12, eos_token_id=None, **kwargs))
                hook.remove()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    options = {"max_new_tokens": 12, "eos_token_id": None}
    text = gsd.generate(target, prompt, assistant_model=draft, stopping_criteria=[Nested()], **options)
    assert torch.equal(text, other.generate(prompt, do_sample=False, **options))
    other.model.layers[0].mlp.register_forward_hook(lambda _, __, output: 3.0 * output)
    changed = other.generate(prompt, do_sample=False, **options)
    assert not torch.equal(changed, text)
    assert all(torch.equal(nested, changed) for nested in found) and len(found) == 2


@needs_cpu
def test_a_callback_asks_anew():
    target, found = tiny(dtype=torch.float32), []

    def observe(_):
        hook = target.model.layers[0].register_forward_hook(lambda *_: None)
        found.append(why_not(target, "auto"))
        hook.remove()

    gsd.generate(target, torch.arange(3, 9)[None], max_new_tokens=4, observer=observe)
    assert found and all("has a hook" in reason for reason in found)


def why(target, **options) -> str | None:
    inputs = prompts(1, 6)
    return gsd.generate(target, **inputs, max_new_tokens=3, return_dict_in_generate=True, **options).stats.why_modules


@needs_cpu
def test_the_statistics_and_the_log_say_why(caplog, monkeypatch):
    fused._log_once.cache_clear()
    target, changed = tiny(dtype=torch.float32), tiny(dtype=torch.float32)
    changed.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.INFO, "gsd_kernels"):
        assert why(target, assistant_model=noised(target)) is None
        assert not any("its modules" in record.getMessage() for record in caplog.records)
        for _ in range(2):
            assert why(changed) == "model.layers.1.mlp has a hook"
        assert "torch.float64, which is none of float32" in why(tiny())
        monkeypatch.setenv(fused.SWITCH, "0")
        assert why(target) == "GSD_KERNELS_FUSED_ROWS=0"
    said = [record.getMessage() for record in caplog.records if "through its modules" in record.getMessage()]
    assert len(said) == len(set(said)) == 3
    assert "rows of LlamaForCausalLM go through its modules: model.layers.1.mlp has a hook" in said


class Older(LlamaForCausalLM):
    """Foreign code, written when a cache was called ``past_key_values``."""

    def forward(self, input_ids=None, past_key_values=None, logits_to_keep=0, **kwargs):
        kwargs |= {"logits_to_keep": logits_to_keep}
        return super().forward(input_ids, **{cache_argument(models.tiny()): past_key_values}, **kwargs)


class Newer(LlamaForCausalLM):
    def forward(self, input_ids=None, cache=None, logits_to_keep=0, **kwargs):
        kwargs |= {"logits_to_keep": logits_to_keep}
        return super().forward(input_ids, **{cache_argument(models.tiny()): cache}, **kwargs)


class Anything(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_a_cache_goes_by_the_models_own_name_or_by_transformers():
    target = models.tiny()
    name = cache_argument(target)
    cache = DynamicCache()
    target(torch.tensor([[3, 4]]), **{name: cache}, use_cache=True)
    assert cache.get_seq_length() == 2
    for kind, its in ((Older, "past_key_values"), (Newer, "cache"), (Anything, name)):
        assert cache_argument(kind(target.config)) == its


def test_a_model_of_either_name_is_decoded():
    target = models.tiny()
    draft = models.noised(target)
    prompt = {"input_ids": torch.tensor([[5, 9, 5, 9, 5]]), "max_new_tokens": 12, "eos_token_id": None}
    plain = gsd.generate(target, **prompt)
    for kind in (Older, Newer):
        model = kind(target.config).eval()
        model.load_state_dict(target.state_dict())
        assert torch.equal(gsd.generate(model, **prompt, assistant_model=draft, graph_config="tree"), plain)


CALL = {**prompts(1, 12), "max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


class Scaled(nn.Module):
    """A module whose output is scaled by what lies in a container beside it."""

    def __init__(self, inner, held):
        super().__init__()
        self.inner, self.held = inner, held

    def forward(self, x):
        held = self.held
        return self.inner(x) * (held["by"] if isinstance(held, dict) else held[0] if len(held) < 9 else sum(held))


def put(held, value):
    held["by" if isinstance(held, dict) else 0] = value


HELD = {
    "a list of 300 numbers": (lambda: [1.0] + 299 * [0.0], lambda held: put(held, 9.0)),
    "a dict of a number": (lambda: {"by": 1.0}, lambda held: put(held, -9.0)),
    "a tensor of a list, written": (lambda: [torch.ones(())], lambda held: held[0].mul_(9.0)),
    "a tensor of a list, replaced": (lambda: [torch.ones(())], lambda held: put(held, torch.tensor(9.0))),
    "a tensor of a dict, written": (lambda: {"by": torch.ones(())}, lambda held: held["by"].mul_(-9.0)),
    "a tensor of a tuple, written": (lambda: (torch.ones(()),), lambda held: held[0].mul_(-9.0)),
}


@pytest.mark.parametrize("name", HELD)
def test_what_a_container_holds_is_a_setting(name):
    made, change = HELD[name]
    model = tiny()
    held = made()
    model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp, held)
    with gsd.patch(model, draft_sources=("history",), graph_config="tree"), torch.no_grad():
        before = model.generate(**CALL)
        change(held)
        after = model.generate(**CALL)
        assert torch.equal(after, type(model).generate(model, **CALL)) and not torch.equal(after, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_inside_a_forward_goes_to_transformers(dtype):
    """As Trainer(bf16=True) and accelerate leave it: keys are turned in float32, values are not."""
    model = tiny(dtype=dtype)
    with gsd.patch(model, draft_sources=("history",), graph_config="tree") as handle:
        model.forward = types.MethodType(torch.autocast("cpu", torch.bfloat16)(type(model).forward), model)
        assert torch.equal(model.generate(**CALL), type(model).generate(model, **CALL))
        assert (handle.stats.why is None) == (dtype == torch.bfloat16), handle.stats.why


@pytest.mark.parametrize("size", [40, 97, 120])
def test_the_weights_say_how_many_tokens_there_are(size):
    """Whatever the config says."""
    model = tiny()
    model.config.vocab_size = size
    ids = torch.tensor([[90, 41, 96, 60, 90, 41]])
    options = {name: value for name, value in CALL.items() if name not in ("input_ids", "attention_mask")}
    plain = type(model).generate(model, ids, **options)
    assert torch.equal(gsd.generate(model, ids, draft_sources=("history",), graph_config="tree", **options), plain)


# What tokens mean in bytes, and which ones two tokenizers share.


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=40)


def test_letters_are_those_of_gpt2():
    assert sorted(LETTERS.values()) == list(range(256))
    assert LETTERS["Ġ"] == ord(" ") and LETTERS["Ċ"] == ord("\n") and LETTERS["a"] == ord("a")


@settings(deadline=None, max_examples=25)
@given(TEXTS)
def test_bytes_of_tokens_are_the_texts(text):
    for tokenizer in (two.byte_level(), two.renumbered(two.byte_level(), without=0.3), two.sentencepiece()):
        vocabulary = Vocabulary.of(tokenizer, "tokenizer")
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if set(ids) & vocabulary.contents.keys():
            continue  # the text spells a special token
        found = b"".join(vocabulary.spelled[token] for token in ids)
        assert found in (text.encode(), b" " + text.encode()), "SentencePiece puts a space before a text"


def test_a_single_byte_is_not_taken_for_the_piece_of_that_byte():
    vocabulary = Vocabulary.of(two.sentencepiece(), "tokenizer")
    letter = two.sentencepiece().convert_tokens_to_ids("e")
    single = two.sentencepiece().convert_tokens_to_ids("<0x65>")
    assert vocabulary.spelled[letter] == vocabulary.spelled[single] == b"e" and vocabulary.ids[b"e"] == letter


def test_special_tokens_go_by_content_then_by_role():
    first, second = two.byte_level(), copy.deepcopy(two.renumbered(two.byte_level()))
    second.add_special_tokens({"eos_token": "<|end|>", "pad_token": "<|end|>"})
    ours, theirs = Vocabulary.of(first, "tokenizer"), Vocabulary.of(second, "assistant_tokenizer")
    shared = SharedTokens.of(ours, theirs)
    assert int(shared.same[first.bos_token_id]) == second.bos_token_id
    assert int(shared.same[first.eos_token_id]) == second.convert_tokens_to_ids("</s>"), "the same content comes first"
    # With no token of that content its role decides, and what ends a text comes before what pads it.
    del theirs.marks["</s>"], theirs.marks["<pad>"]
    vars(theirs).pop("contents", None)
    shared = SharedTokens.of(ours, theirs)
    assert int(shared.same[first.eos_token_id]) == second.eos_token_id
    assert int(shared.same[first.pad_token_id]) == -1 and int(shared.reads[first.pad_token_id]) == second.eos_token_id


def test_what_is_shared_is_the_same_bytes_and_what_is_read_ends_alike():
    for second in (two.renumbered(two.byte_level(), without=0.3), two.sentencepiece(), two.byte_level(300, two.OTHER)):
        found = Translation.between(two.byte_level(), second)
        pairs = list(zip(found.shared.same.tolist(), found.shared.reads.tolist(), strict=True))
        used = [same for same, _ in pairs if same >= 0]
        assert len(used) == len(set(used)), "a token of the draft is one of the target's"
        for token, spelled in found.target.spelled.items():
            same, reads = pairs[token]
            if same >= 0:
                assert found.draft.spelled[same] == spelled and reads == same
            elif spelled[-1:] in found.draft.ids:
                assert spelled.endswith(found.draft.spelled[reads])
        assert 0 < found.shared.part < 1


def test_the_same_tokens_are_not_translated():
    assert Translation.between(two.byte_level(), copy.deepcopy(two.byte_level())) is None


def test_a_tokenizer_that_grew_is_read_anew():
    first, second = two.byte_level(), copy.deepcopy(two.byte_level())
    assert Translation.between(first, second) is None
    second.add_tokens(["<think>"])
    assert len(Translation.between(first, second).draft.marks) == len(two.SPECIAL) + 1


@pytest.mark.parametrize("given", [7, "gpt2", torch.nn.Linear(1, 1), type(two.byte_level())])
def test_what_is_no_tokenizer_is_refused(given):
    with pytest.raises(TypeError, match="assistant_tokenizer: expected a tokenizer of transformers, got "):
        Translation.between(two.byte_level(), given)


def test_tokens_of_unknown_bytes_are_refused():
    words = two.wrapped(Tokenizer(WordLevel({**{t: i for i, t in enumerate(two.SPECIAL)}, "Wörter": 4, "日": 5})))
    with pytest.raises(ValueError, match=r"tokenizer: the tokens of .* are neither byte-level"):
        Translation.between(two.byte_level(), words)


# Bytes as tokens behind other text: what is cut spells the text, as the tokenizer cuts both together.


SPELT = st.text(st.sampled_from("abe the,.\n12é你🦊 "), max_size=24) | st.binary(max_size=12)


def speller(tokenizer, **options):
    return Speller(tokenizer, Vocabulary.of(tokenizer, "tokenizer"), **options)


def as_bytes(text):
    return text if isinstance(text, bytes) else text.encode()


@settings(deadline=None, max_examples=60)
@given(SPELT, SPELT)
def test_tokens_spell_the_text(before, text):
    before, text = as_bytes(before), as_bytes(text)
    for tokenizer in (two.byte_level(), two.sentencepiece()):
        own = speller(tokenizer)
        (found,) = own.spell([(before, text)])
        pieces = [own.vocabulary.spelled[token] for token in found.tokens]
        read = b"".join(pieces)
        extra = len(read) - found.covered  # SentencePiece's space before a text
        behind = before.lstrip(bytes(range(0x80, 0xC0)))  # half a character is left out
        assert read[extra:] == text[: found.covered] and (not extra or (not behind and read[:1] == b" "))
        assert found.ends == [sum(map(len, pieces[: i + 1])) - extra for i in range(len(pieces))]
        left = text[found.covered :]
        assert len(left) <= 3 and (not left or readable(b"", left) == (b"", 0)), "all but a character that is not whole"


@pytest.mark.parametrize("tokenizer", [two.byte_level(), two.sentencepiece()], ids=["byte-level", "sentencepiece"])
def test_it_is_cut_as_the_tokenizer_cuts_both_together(tokenizer):
    own, spelled = speller(tokenizer), Vocabulary.of(tokenizer, "tokenizer").spelled
    whole = tokenizer(two.TEXT, add_special_tokens=False)["input_ids"]
    checked = 0
    for border in range(1, len(whole)):
        before, text = (b"".join(spelled[token] for token in part) for part in (whole[:border], whole[border:]))
        if readable(before, b"") == (before, len(before)):
            (found,) = own.spell([(before, text)])
            assert found.tokens == whole[border:]
            checked += 1
    assert checked > 40


def test_across_the_border_the_longest_tokens_are_taken():
    own = speller(two.byte_level())
    names = two.byte_level().convert_ids_to_tokens
    (alone,) = own.spell([(b"and", b" the quick")])
    assert names(alone.tokens) == ["Ġthe", "Ġquick"]
    (cut,) = own.spell([(b"and th", b"e quick")])  # "Ġthe" lies across
    assert names(cut.tokens) == ["e", "Ġquick"] and cut.ends == [1, 7] and cut.covered == 7


def test_a_character_that_is_not_whole_waits_and_half_a_one_before_is_left_out():
    own = speller(two.byte_level())
    (found,) = own.spell([(b"", b"a " + "你".encode()[:2])])
    assert found.covered == 2
    (found,) = own.spell([("好你".encode()[1:], b"a")])
    assert found.covered == 1 and found.tokens == [own.vocabulary.ids[b"a"]]


def test_bytes_without_a_token():
    letters = {piece: i for i, piece in enumerate([*two.SPECIAL, "a", "b", "ab"])}
    tokenizer = two.wrapped(Tokenizer(BPE(vocab=letters, merges=[("a", "b")], unk_token="<unk>")))
    (ends,), (skips,) = (speller(tokenizer, skips=skip).spell([(b"", b"abzba")]) for skip in (False, True))
    assert (ends.tokens, ends.ends, ends.covered) == ([letters["ab"]], [2], 2)
    assert (skips.tokens, skips.ends, skips.covered) == ([letters["ab"], letters["b"], letters["a"]], [2, 4, 5], 5)


def test_a_text_that_the_tokenizer_would_change_is_cut_into_the_longest_tokens():
    backend = Tokenizer.from_str(two.byte_level().backend_tokenizer.to_str())
    backend.normalizer = normalizers.Lowercase()
    own = speller(two.wrapped(backend))
    (found,) = own.spell([(b"x", b"The the")])
    assert b"".join(own.vocabulary.spelled[token] for token in found.tokens) == b"The the" and found.covered == 7


def test_a_text_that_spells_a_special_token_is_text():
    own = speller(two.byte_level())
    (found,) = own.spell([(b"a", b"</s> the")])
    assert b"".join(own.vocabulary.spelled[token] for token in found.tokens) == b"</s> the"


def test_tokens_that_begin_alike():
    vocabulary = Vocabulary.of(two.sentencepiece(), "tokenizer")
    for begun in (b" t", b"\xc3", "é".encode(), b"qqq"):
        expected = {token for spelled, token in vocabulary.ids.items() if spelled.startswith(begun)}
        assert set(vocabulary.beginning(begun).tolist()) == expected
        assert set(vocabulary.beginning(begun, longer=True).tolist()) == expected - {vocabulary.ids.get(begun)}
