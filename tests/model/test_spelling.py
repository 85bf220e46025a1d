"""Bytes as tokens behind other text: what is cut spells the text, as the tokenizer cuts both together."""

from __future__ import annotations

import pytest
import two_tokenizers as two
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers
from tokenizers.models import BPE

from gsd_kernels_hf.model.spelling import Speller, readable
from gsd_kernels_hf.model.vocabulary import Vocabulary

TEXTS = st.text(st.sampled_from("abe the,.\n12é你🦊 "), max_size=24) | st.binary(max_size=12)


def speller(tokenizer, **options):
    return Speller(tokenizer, Vocabulary.of(tokenizer, "tokenizer"), **options)


def as_bytes(text):
    return text if isinstance(text, bytes) else text.encode()


@settings(deadline=None, max_examples=60)
@given(TEXTS, TEXTS)
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
