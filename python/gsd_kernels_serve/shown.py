"""A check of what a chat template leaves out of messages, refused by name."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from gsd_kernels_cli.pair import BAD_CHAT

from .checks import Refused


def check_shown(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], field: str) -> None:
    """Refuse what the chat template leaves out of a role's messages: names of speakers, calls.

    Raises:
        Refused: of ``field``, with the first place.
    """
    places: dict[tuple[str, str], int] = {}
    for i, message in enumerate(messages):
        for key in ("tool_calls",) if message["role"] == "tool" else ("tool_calls", "name"):
            if message.get(key):
                places.setdefault((message["role"], key), i)
    whole = _rendered(tokenizer, messages) if places else None
    for (role, key), i in places.items():
        without = [{k: v for k, v in m.items() if (m["role"], k) != (role, key)} for m in messages]
        if _rendered(tokenizer, without) == whole:
            raise Refused(f"{field}[{i}].{key}", "this model's chat template does not show it; leave it out")


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> Any:
    """The text that the template writes; the messages themselves where it does not take them."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False)
    except BAD_CHAT:
        return messages
