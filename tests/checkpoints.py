"""On disk, and tiny: a target, a draft that is its noised copy, a tokenizer of bytes; corpora."""

from __future__ import annotations

from pathlib import Path

import torch
from models import noised, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from gsd_kernels_cli.corpus import build_corpus

SPECIAL = ["<pad>", "<bos>", "<eos>"]


def byte_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a byte, after three special ones: 259 in all."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )
    fast.chat_template = chat_template
    return fast


def save_pair(folder: Path, *, dtype: torch.dtype = torch.float32, chat_template: str | None = None) -> tuple[str, str]:
    """Save ``target`` and ``draft`` below ``folder``; their paths."""
    tokenizer = byte_tokenizer(chat_template)
    target = tiny(vocab_size=len(tokenizer), dtype=dtype)
    target.lm_head.weight.data[: len(SPECIAL)] = 0  # texts do not end by chance
    for name, model in (("target", target), ("draft", noised(target))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return str(folder / "target"), str(folder / "draft")


def corpus_of(folder: Path, *texts: Tensor | list[int]) -> Path:
    """An index of token sequences, at ``folder``."""
    build_corpus(folder, [text.flatten().numpy() if isinstance(text, Tensor) else text for text in texts])
    return folder


def random_text(length: int, vocab: int = 97, seed: int = 0) -> Tensor:
    return torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(seed))
