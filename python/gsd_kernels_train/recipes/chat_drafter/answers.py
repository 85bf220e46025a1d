"""The target answers the prompts, in large batches; every batch is a file, so that a run that was killed goes on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import gsd_kernels
from gsd_kernels_hf.files import write_file
from gsd_kernels_hf.progress import tracked

from .prompts import Chat, Writer, prompts

__all__ = ["write_chats"]

BATCH_PROMPTS = 64
NEW_TOKENS = 224
SORTED_BATCHES = 16  # batches among which prompts are sorted by length, so that little is padding
SAMPLED_EVERY = 4  # every fourth batch is sampled
TEMPERATURE = 0.7
MAX_PROMPT_TOKENS = 480


def write_chats(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    count: int,
    seed: int,
    *,
    batches: int,
) -> list[Path]:
    """Let ``model`` answer the first ``batches`` of ``count`` prompts, and some second questions: JSONL files."""
    chats, writer = prompts(count, seed)
    lengths = [len(_ids(tokenizer, chat)) for chat in chats]
    kept = [number for number, length in enumerate(lengths) if length <= MAX_PROMPT_TOKENS]
    together = SORTED_BATCHES * BATCH_PROMPTS
    groups = [kept[at : at + together] for at in range(0, len(kept), together)]
    rows: list[list[int]] = []
    for group in groups:
        ordered = sorted(group, key=lambda number: lengths[number])
        own = [ordered[at : at + BATCH_PROMPTS] for at in range(0, len(ordered), BATCH_PROMPTS)]
        random.Random(seed).shuffle(own)
        rows += own
    files = []
    with tracked("the target answers", batches, "batches") as update:
        for number in range(min(batches, len(rows))):
            update(number)
            file = folder / f"chats-{number:04d}.jsonl"
            files.append(file)
            if not file.exists():
                lines = _answered(model, tokenizer, [chats[at] for at in rows[number]], writer, number)
                write_file(file, lambda partial, lines=lines: partial.write_text("".join(lines), encoding="utf-8"))
    return files


def _ids(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> list[int]:
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _answered(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chats: list[Chat], writer: Writer, number: int
) -> list[str]:
    sampling: dict[str, Any] = {"do_sample": False}
    if number % SAMPLED_EVERY == SAMPLED_EVERY - 1:
        sampling = {"do_sample": True, "temperature": TEMPERATURE}
    first = _answers(model, tokenizer, chats, sampling, number)
    writer.random.seed(number)
    longer = [
        [*chat, {"role": "assistant", "content": answer}, {"role": "user", "content": writer.follow_up()}]
        for chat, (answer, ended) in zip(chats, first, strict=True)
        if ended
    ][: BATCH_PROMPTS // 2]
    second = _answers(model, tokenizer, longer, sampling, number) if longer else []
    followed = {id(chat[0]) for chat in longer}
    answered = [
        *((chat, answer) for chat, (answer, _) in zip(chats, first, strict=True) if id(chat[0]) not in followed),
        *((chat, answer) for chat, (answer, _) in zip(longer, second, strict=True)),
    ]
    whole = [[*chat, {"role": "assistant", "content": answer}] for chat, answer in answered]
    return [json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in whole]


def _answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chats: list[Chat], sampling: dict[str, Any], seed: int
) -> list[tuple[str, bool]]:
    """Let the model answer, and tell whether it came to an end."""
    rows = [_ids(tokenizer, chat) for chat in chats]
    longest = max(map(len, rows))
    pad = model.generation_config.pad_token_id
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], dtype=torch.int64, device="cpu")
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], dtype=torch.int64, device="cpu")
    torch.manual_seed(seed)
    out = gsd_kernels.generate(
        model, ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, graph_config="plain", **sampling
    )
    end, answers = tokenizer.eos_token_id, []
    for row in out[:, longest:].tolist():
        cut = row.index(end) if end in row else len(row)
        answers.append((tokenizer.decode(row[:cut]), end in row))
    return answers
