"""Drafts whose tokenizer shares few tokens with the target's: the text is the target's own, their text is accepted."""

from __future__ import annotations

import functools

import models
import pytest
import two_tokenizers as two

import gsd_kernels as gsd

SHAPES = two.shapes(4)
TEXT = {"max_new_tokens": 28, "pad_token_id": 0}
PROMPTS = (two.TEXT[:60], two.TEXT[29:56], two.TEXT[100:152])

# Target and draft: words of several tokens on either side, ▁ for a space, bytes of a character apart.
PAIRS = {
    "byte-level to sentencepiece": (two.byte_level, two.sentencepiece),
    "sentencepiece to byte-level": (two.sentencepiece, two.byte_level),
    "of another text": (two.byte_level, lambda: two.byte_level(300, two.OTHER)),
}


@functools.cache
def models_of(pair: str, noise: float = 0.0):
    ours, theirs = (make() for make in PAIRS[pair])
    draft = models.noised(two.learned(theirs), noise)
    return two.learned(ours), draft, {"tokenizer": ours, "assistant_tokenizer": theirs}


def encoded(tokenizer, texts=PROMPTS):
    found = tokenizer(list(texts), return_tensors="pt", padding=True)
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def test_most_of_a_draft_that_knows_the_text_is_accepted():
    """Both know the text by heart; in other tokens, of which mapping ids leaves little."""
    target, draft, both = models_of("byte-level to sentencepiece")
    options = {**encoded(both["tokenizer"], PROMPTS[:1]), **both, **TEXT, "do_sample": False, "graph_config": "chain"}
    out = gsd.generate(target, **options, assistant_model=draft, draft_sources=("model",), return_dict_in_generate=True)
    assert 28 / out.stats.steps > 2.5 and out.stats.lossless


def test_speculative_sampling_is_refused():
    target, draft, both = models_of("of another text")
    with pytest.raises(ValueError, match='criterion: "speculative" needs the draft\'s probability of every token'):
        gsd.generate(
            target,
            **encoded(both["tokenizer"]),
            **TEXT,
            **both,
            assistant_model=draft,
            criterion="speculative",
            graph_config="chain",
            do_sample=True,
        )
