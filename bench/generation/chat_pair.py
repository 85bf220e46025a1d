"""SmolLM2 and the drafter that is shipped for it, with this benchmark's chats by kind of text.

A text ends where the model ends it, as a user has it: past that it would be drafting what nobody asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest

import torch

from gsd_kernels_cli.demo import smollm2
from gsd_kernels_hf.files import SHIPPED
from gsd_kernels_hf.sources.load import load_drafter

from .pairs import Pair
from .real.prompts import Chat, encoded, read_chats

NAME = "smollm2"
DRAFTER = "smollm2-135m-instruct"
DRAFTERS = {"eagle3": SHIPPED / DRAFTER}
"""Folders of its drafters, by kind."""
TEXTS = {
    "chat": ("chat", "questions", "agent"),
    "code": ("code", "code edit"),
    "copy": ("rewriting", "extraction", "table"),
    "prose": ("story", "summary", "translation"),
}
"""Kinds of the chats by text; every kind belongs to one."""


def chats_of(text: str, count: int) -> list[Chat]:
    """At most ``count`` chats of a text, of its kinds in turn.

    Raises:
        ValueError: no such text.
    """
    if text not in TEXTS:
        raise ValueError(f"--texts: {text!r} is none of {', '.join(TEXTS)}, which this target is asked for")
    reported, _ = read_chats()
    by_kind = [[chat for chat in reported if chat.kind == kind] for kind in TEXTS[text]]
    return [chat for chat in chain.from_iterable(zip_longest(*by_kind)) if chat is not None][:count]


def chat_pair(*, device: torch.device, dtype: torch.dtype, texts: Sequence[str], prompts: int) -> Pair:
    """The model, without a draft model, and its drafter, with the first chats of every text.

    Args:
        device, dtype: of both.
        texts: of :data:`TEXTS`.
        prompts: at most so many of each.

    Raises:
        MissingModelError: the model's package is not installed.
        ValueError: an unknown text.
    """
    chats = [(text, chat) for text in texts for chat in chats_of(text, prompts)]
    target, tokenizer = smollm2.load(dtype, device)
    asked = encoded([Chat(chat.name, text, chat.messages) for text, chat in chats], tokenizer)
    found = [type(prompt)(prompt.name, prompt.kind, prompt.input_ids.to(device)) for prompt in asked]
    return Pair(smollm2.NAME, target, None, found, drafters={"eagle3": load_drafter(DRAFTER, target)})
