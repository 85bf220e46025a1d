"""What tokens mean in bytes, and which ones two tokenizers share."""

from __future__ import annotations

import copy

import pytest
import torch
import two_tokenizers as two
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gsd_kernels_hf.model.vocabulary import LETTERS, SharedTokens, Translation, Vocabulary

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
