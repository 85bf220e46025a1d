"""What tokens mean in bytes, which ones two tokenizers share, and bytes as tokens behind other text."""

from __future__ import annotations

import copy

import pytest
import two_tokenizers as two
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers
from tokenizers.models import BPE, WordLevel

from gsd_kernels_hf.model.vocabulary import SharedTokens, Speller, Translation, Vocabulary, readable

KINDS = {"byte-level": two.byte_level, "sentencepiece": two.sentencepiece}


@settings(deadline=None, max_examples=15)
@given(st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=40))
def test_bytes_of_tokens_are_the_texts(text):
    for tokenizer in (two.byte_level(), two.renumbered(two.byte_level(), without=0.3), two.sentencepiece()):
        vocabulary = Vocabulary.of(tokenizer, "tokenizer")
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if set(ids) & vocabulary.contents.keys():
            continue  # the text spells a special token
        found = b"".join(vocabulary.spelled[token] for token in ids)
        assert found in (text.encode(), b" " + text.encode()), "SentencePiece puts a space before a text"


def test_tokens_that_begin_alike():
    """A single byte is not taken for the piece of that byte."""
    vocabulary = Vocabulary.of(two.sentencepiece(), "tokenizer")
    assert vocabulary.ids[b"e"] == two.sentencepiece().convert_tokens_to_ids("e")
    for begun in (b" t", b"\xc3", "é".encode(), b"qqq"):
        expected = {token for spelled, token in vocabulary.ids.items() if spelled.startswith(begun)}
        assert set(vocabulary.beginning(begun).tolist()) == expected


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


def test_a_tokenizer_that_grew_is_read_anew():
    """The same tokens are not translated."""
    first, second = two.byte_level(), copy.deepcopy(two.byte_level())
    assert Translation.between(first, second) is None
    second.add_tokens(["<think>"])
    assert len(Translation.between(first, second).draft.marks) == len(two.SPECIAL) + 1


WORDS = two.wrapped(Tokenizer(WordLevel({**{t: i for i, t in enumerate(two.SPECIAL)}, "Wörter": 4, "日": 5})))
REFUSED = {
    "a name": ("gpt2", TypeError, "assistant_tokenizer: expected a tokenizer of transformers, got "),
    "a class": (type(WORDS), TypeError, "assistant_tokenizer: expected a tokenizer of transformers, got "),
    "unknown bytes": (WORDS, ValueError, "assistant_tokenizer: the tokens of .* are neither byte-level"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_tokenizer_of_bytes_is_refused(what):
    tokenizer, error, says = REFUSED[what]
    with pytest.raises(error, match=says):
        Translation.between(two.byte_level(), tokenizer)


def speller(tokenizer, **options):
    return Speller(tokenizer, Vocabulary.of(tokenizer, "tokenizer"), **options)


SPELT = st.text(st.sampled_from("abe the,.\n12é你🦊 "), max_size=24).map(str.encode) | st.binary(max_size=12)


@settings(deadline=None, max_examples=30)
@given(SPELT, SPELT)
def test_tokens_spell_the_text(before, text):
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


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_cut_as_the_tokenizer_cuts_both_together(kind):
    own, checked = speller(KINDS[kind]()), 0
    whole = own.tokenizer(two.TEXT, add_special_tokens=False)["input_ids"]
    for border in range(1, len(whole)):
        before, text = (b"".join(map(own.vocabulary.spelled.get, part)) for part in (whole[:border], whole[border:]))
        if readable(before, b"") == (before, len(before)):
            (found,) = own.spell([(before, text)])
            assert found.tokens == whole[border:]
            checked += 1
    assert checked > 40


def lowercase():
    backend = Tokenizer.from_str(two.byte_level().backend_tokenizer.to_str())
    backend.normalizer = normalizers.Lowercase()
    return two.wrapped(backend)


def of_letters():
    letters = {piece: i for i, piece in enumerate([*two.SPECIAL, "a", "b", "ab"])}
    return two.wrapped(Tokenizer(BPE(vocab=letters, merges=[("a", "b")], unk_token="<unk>")))


SPELLED = {  # the tokenizer, options, what comes before, the text, its pieces, and how much was read
    "a border between tokens": (two.byte_level, {}, b"and", b" the quick", [b" the", b" quick"], 10),
    "half a character": (two.byte_level, {}, b"", b"a " + "你".encode()[:2], None, 2),
    "a byte without a token": (of_letters, {}, b"", b"abzba", [b"ab"], 2),
    "a byte left out": (of_letters, {"skips": True}, b"", b"abzba", [b"ab", b"b", b"a"], 5),
    "what the tokenizer changes": (lowercase, {}, b"x", b"The the", None, 7),
}


@pytest.mark.parametrize("what", SPELLED)
def test_how_a_text_is_cut(what):
    make, options, before, text, pieces, covered = SPELLED[what]
    own = speller(make(), **options)
    (found,) = own.spell([(before, text)])
    spelled = [own.vocabulary.spelled[token] for token in found.tokens]
    assert found.covered == covered and (spelled == pieces if pieces else b"".join(spelled) == text[:covered])
