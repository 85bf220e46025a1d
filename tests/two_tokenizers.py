"""Tiny tokenizers that cut the same text differently, and models behind them."""

from __future__ import annotations

import copy
import functools
import json
import random

import models
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from gsd_kernels_hf.model.vocabulary import Vocabulary

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
TEXT = (
    "The quick brown fox jumps over the lazy dog, and the dog looks up at the quick fox. "
    "In the evening the café près de la forêt closes; a sign says 你好 and 再见 to every guest. "
    "Numbers follow: 12, 144, 1728 and 20736. The fox counts them twice 🦊, then the dog counts them 🐕 again.\n"
)
OTHER = "def count(numbers):\n    return sum(n for n in numbers if n > 12)\n\nprint(count([12, 144, 1728]))\n"


NAMES = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))


def wrapped(backend: Tokenizer, names: dict[str, str] = NAMES) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **names)


@functools.cache
def byte_level(size: int = 320, text: str = TEXT) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as of GPT-2 and LLaMA 3."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([text], trainer)
    return wrapped(backend)


def renumbered(
    tokenizer: PreTrainedTokenizerFast, *, without: float = 0.0, names: dict[str, str] = NAMES
) -> PreTrainedTokenizerFast:
    """The same byte-level tokens by other ids, ``without`` some that are merged from others."""
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    rng, vocab, merges = random.Random(0), document["model"]["vocab"], document["model"]["merges"]
    # The last merges go: no other token is made of these.
    merges = merges[: len(merges) - int(without * len(merges))]
    kept = [piece for piece in vocab if len(piece) == 1 or piece in names.values()] + ["".join(pair) for pair in merges]
    kept = [*dict.fromkeys(kept)]
    rng.shuffle(kept)
    document["model"] |= {"vocab": {piece: place for place, piece in enumerate(kept)}, "merges": merges}
    for token in document["added_tokens"]:
        token["id"] = document["model"]["vocab"][token["content"]]
    document["added_tokens"].sort(key=lambda token: token["id"])
    return wrapped(Tokenizer.from_str(json.dumps(document)), names)


def behind(target: PreTrainedModel, theirs: Vocabulary, own: Vocabulary) -> PreTrainedModel:
    """A copy of the target that reads and gives the tokens of another vocabulary, those that both have alike."""
    draft = copy.deepcopy(target)
    size = own.size + 5  # padded, as many models are
    rows = [theirs.counterpart(token, own) for token in range(own.size)]
    found = torch.tensor([-1 if row is None else row for row in rows] + [-1] * 5)
    gen = torch.Generator().manual_seed(3)
    for module, name in ((draft.model, "embed_tokens"), (draft, "lm_head")):
        weight = getattr(module, name).weight.data
        fresh = 0.2 * torch.randn(size, weight.shape[1], generator=gen).to(weight)
        getattr(module, name).weight = torch.nn.Parameter(torch.where(found[:, None] >= 0, weight[found], fresh))
    draft.config.vocab_size = size
    for role, token in own.roles.items():
        setattr(draft.config, f"{role}_token_id", token)
        setattr(draft.generation_config, f"{role}_token_id", token)
    return draft


def target_of(tokenizer: PreTrainedTokenizerFast):
    """A random target whose tokens are the tokenizer's, and three that are none."""
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("pad", "bos", "eos")}
    return models.tiny(seed=0, dtype=torch.float64, vocab_size=len(tokenizer) + 3, **ids)


@functools.cache
def sentencepiece() -> PreTrainedTokenizerFast:
    """Pieces with ▁ for a space, and single bytes for what they lack, as of LLaMA 2."""
    backend = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    single = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=460, special_tokens=[*SPECIAL, *single], show_progress=False)
    backend.train_from_iterator([TEXT.encode("ascii", "ignore").decode()], trainer)
    document = json.loads(backend.to_str())
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] in SPECIAL]
    return wrapped(Tokenizer.from_str(json.dumps(document)))


@functools.cache
@torch.enable_grad()  # whoever asks first
def learned(tokenizer: PreTrainedTokenizerFast):
    """A small model that has learned a text by heart, but for what it was too small or too short for; float64."""
    torch.manual_seed(0)
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("pad", "bos", "eos")}
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 3, num_hidden_layers=2, max_position_embeddings=512, **sizes, **ids
    )
    model = LlamaForCausalLM(config)
    tokens = torch.tensor(tokenizer(3 * TEXT, add_special_tokens=False)["input_ids"])
    windows = tokens.unfold(0, min(48, len(tokens) // 2), 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    gen = torch.Generator().manual_seed(0)
    for _ in range(120):
        batch = windows[torch.randint(len(windows), (8,), generator=gen)]
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model.eval().double()
