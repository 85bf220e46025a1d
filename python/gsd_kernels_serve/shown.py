"""A check of what a chat template leaves out of messages, refused by name: rendered once, however many messages."""

from __future__ import annotations

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
        for key in (("tool_calls",) if message["role"] == "tool" else ("tool_calls", "name"))
        if message.get(key)
    ]
    if not places:
        return
    written = _rendered(tokenizer, _marked(messages))
    written = written if isinstance(written, str) else ""  # a template that takes no other names
    unseen = [(i, key) for i, key in places if _mark(i, key) not in written]
    whole = _rendered(tokenizer, messages) if unseen else None
    for i, key in unseen:  # in vain mostly: it takes one to refuse
        without = {name: value for name, value in messages[i].items() if name != key}
        if whole == _rendered(tokenizer, [*messages[:i], without, *messages[i + 1 :]]):
            raise Refused(f"{field}[{i}].{key}", "this model's chat template does not show it; leave it out")


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> Any:
    """The text that the template writes; the messages themselves where it does not take them."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False)
    except BAD_CHAT:
        return messages


def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a name of their own for every speaker, and for the first function that one calls."""
    marked = []
    for i, message in enumerate(messages):
        own = dict(message)
        if own.get("name"):
            own["name"] = _mark(i, "name")
        if own.get("tool_calls"):
            first, *others = own["tool_calls"]
            own["tool_calls"] = [
                {**first, "function": {**first["function"], "name": _mark(i, "tool_calls")}},
                *others,
            ]
        marked.append(own)
    return marked


def _mark(i: int, key: str) -> str:
    return f"x{i}x{key[0]}x"
