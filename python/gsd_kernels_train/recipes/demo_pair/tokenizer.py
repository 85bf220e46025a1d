"""The tokenizer of both models, and text as tokens."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerFast

from ..stdlib import SourceFile

VOCAB_SIZE = 2048
MAX_POSITIONS = 2048
PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE tokenizer; like Llama's it puts the begin-of-text token first, and no end."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    pattern = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B:1",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=MAX_POSITIONS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def encode_files(tokenizer: PreTrainedTokenizerFast, sources: list[SourceFile]) -> np.ndarray:
    """Encode files into one stream, each between begin-of-text and end-of-text."""
    rows = tokenizer([source.text for source in sources])["input_ids"]
    return np.concatenate([np.asarray([*row, tokenizer.eos_token_id], dtype=np.uint16) for row in rows])
