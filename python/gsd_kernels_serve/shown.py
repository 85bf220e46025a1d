"""A check of what a chat template leaves out of messages, refused by name: rendered once, however many messages."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from transformers import PreTrainedTokenizerBase

from gsd_kernels_cli.pair import BAD_CHAT

from .checks import Refused


def check_shown(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], field: str) -> None:
    """Refuse what the chat template leaves out: names of speakers, calls.

    Raises:
        Refused: of ``field``, with the place.
    """
    places = [
        (i, key)
        for i, message in enumerate(messages)
        for key in ("tool_calls", "name")
        if message.get(key) and (message["role"], key) != ("tool", "name")
    ]
    if not places:
        return
    marked = deepcopy(messages)
    for i, key in places:
        named = marked[i] if key == "name" else marked[i][key][0]["function"]
        named["name"] = f"x{i}x{key}x"
    written, whole = _rendered(tokenizer, marked), _rendered(tokenizer, messages)
    for i, key in places:
        if f"x{i}x{key}x" in written:
            continue
        without = {name: value for name, value in messages[i].items() if name != key}
        if _rendered(tokenizer, [*messages[:i], without, *messages[i + 1 :]]) == whole:
            raise Refused(f"{field}[{i}].{key}", "this model's chat template does not show it; leave it out")


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> Any:
    """The text that the template writes; the messages themselves where it does not take them."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False)
    except BAD_CHAT:
        return messages
