"""Strings that end a text: transformers' own decision at every token, of what the text has alone."""

from __future__ import annotations

import functools
import random

import models
import pytest
import torch
import two_tokenizers as two
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import Unigram, WordPiece
from transformers.generation import stopping_criteria
from transformers.generation.stopping_criteria import StopStringCriteria

import gsd_kernels as gsd
from gsd_kernels_hf.engine.stop_strings import StopStrings


@functools.cache
def word_pieces():
    vocab = {token: i for i, token in enumerate([*two.SPECIAL, *"abcd", "##a", "##b", "##ab", "cab", "abcdef", "##ca"])}
    backend = Tokenizer(WordPiece(vocab, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    return two.wrapped(backend)


@functools.cache
def unigram():
    pieces = [*two.SPECIAL, "▁", *"abcdef", "▁a", "ab", "bc", "▁abc", "é", "cé▁a", "aaaa"]
    backend = Tokenizer(Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=3))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return two.wrapped(backend)


KINDS = {
    "byte-level": two.byte_level,
    "bytes that are tokens": two.sentencepiece,
    "metaspace": unigram,
    "word pieces": word_pieces,
    "single characters": models.tokenizer,
}


def strings_of(rng: random.Random, tokenizer, ids: list[int]) -> list[str]:
    """Parts of a text, from within its tokens and characters, ones that repeat themselves, and others."""
    text = tokenizer.decode(ids) or "a"
    cuts = [sorted(rng.choices(range(len(text) + 1), k=2)) for _ in range(3)]
    parts = [text[a : min(b, a + 12)] for a, b in cuts]
    found = [*parts, "aaa", "ab" * 3, " ", "é", "zq", text[-1] * 2, rng.choice(two.SPECIAL)]
    return rng.sample([string for string in found if string], rng.randint(1, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_the_decision_is_transformers_own_at_every_token(kind):
    tokenizer, rng, stops = KINDS[kind](), random.Random(7), 0
    size = len(tokenizer) + 3  # rows of the logits that are no tokens
    for _ in range(12):
        told = tokenizer("ab abc the café aaaa aaab", add_special_tokens=False)["input_ids"]
        ids = [[rng.choice(told) if rng.random() < 0.7 else rng.randrange(size) for _ in range(24)] for _ in range(3)]
        given = strings_of(rng, tokenizer, ids[0])
        try:
            theirs = StopStringCriteria(tokenizer, given)
        except ValueError:
            with pytest.raises(ValueError, match="stop_strings: no token of this tokenizer ends"):
                StopStrings(tokenizer, given)
            continue
        ours = StopStrings(tokenizer, given)
        for length in range(1, 25):
            text = torch.tensor(ids)[:, :length]
            expected = theirs(text, None)
            assert torch.equal(ours(text, None), expected), (given, text)
            stops += int(expected.sum())
    assert stops > 20


def test_a_string_may_end_within_a_character_and_begin_in_the_prompt():
    tokenizer = two.byte_level()
    ids = torch.tensor([tokenizer("🐕 café 你好")["input_ids"]])
    for given in ("🐕", "é 你", "好", "f", ""):
        theirs, ours = StopStringCriteria(tokenizer, given), StopStrings(tokenizer, given)
        found = [(bool(theirs(ids[:, :n], None)), bool(ours(ids[:, :n], None))) for n in range(1, ids.shape[1] + 1)]
        assert any(a for a, _ in found) and all(a == b for a, b in found), given


@pytest.mark.parametrize(
    ("given", "error"), [([], ValueError), (5, TypeError), ([5], TypeError), ([["x"]], TypeError), (["☃"], ValueError)]
)
def test_what_cannot_be_found_is_refused_by_name(given, error):
    with pytest.raises(error, match="stop_strings"):
        StopStrings(models.tokenizer(), given)


def test_nothing_of_the_vocabulary_is_read_or_kept(monkeypatch):
    """A table of 16 strings takes gigabytes at 150,000 tokens, and transformers keeps eight."""
    target, tokenizer = models.tiny(), models.tokenizer()
    prompt = models.prompts(1, 8)["input_ids"]
    arguments = {"max_new_tokens": 12, "do_sample": False, "tokenizer": tokenizer, "stop_strings": ["q", "zx", "Ab"]}
    expected = target.generate(prompt, **arguments)
    stopping_criteria.STOP_STRING_EMBEDDING_CACHE.clear()
    monkeypatch.setattr(type(tokenizer), "get_vocab", lambda *_: pytest.fail("the vocabulary is read"))
    assert torch.equal(gsd.generate(target, prompt, graph_config="chain", **arguments), expected)
    assert not stopping_criteria.STOP_STRING_EMBEDDING_CACHE
