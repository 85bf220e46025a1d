"""The items of a streamed response, each told once and in its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Item:
    """An item that is being told: its place, its name, its text and the log-probabilities of that."""

    index: int
    name: str
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class Items:
    """transformers' events, renumbered.

    Its handler begins a message behind every call, be there a text or not, with the number of the call and the name of
    an earlier message, and ends it with all texts since the beginning.

    Attributes:
        output: the items so far, as they ended.
    """

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self.known: dict[str, _Item] = {}  # the last one of every name that transformers has
        self.held: list[dict[str, Any]] = []  # events of a message that has no text yet
        self.sent = 0

    def events(self, data: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events in place of one; ``logprobs`` of a part of a text are those of the part."""
        for event in self._in_turn(data):
            if (name := _name_of(event)) is not None:
                self._place(event, name)
            event["sequence_number"] = self.sent
            self.sent += 1
            yield event

    def _in_turn(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        """A message waits for its text, and comes without one where there is nothing else."""
        kind = data["type"]
        if kind == "response.output_item.added" and data["item"]["type"] == "message":
            self.held = [data]
            return []
        if not self.held or _name_of(data) != _name_of(self.held[0]):
            return [data]
        ends = kind.endswith(".done")
        if ends and self.output:
            if kind == "response.output_item.done":
                self.held = []
            return []
        self.held.append(data)
        if not ends and not data.get("delta"):
            return []
        events, self.held = self.held, []
        return events

    def _place(self, data: dict[str, Any], name: str) -> None:
        kind, inner = data["type"], data.get("item")
        if kind == "response.output_item.added":
            again = sum(item["id"] == name or item["id"].startswith(f"{name}_") for item in self.output)
            self.known[name] = _Item(len(self.output), f"{name}_{again}" if again else name)
            self.output.append({})
        item = self.known[name]
        data["output_index"] = item.index
        data |= {"item_id": item.name} if inner is None else {"item": {**inner, "id": item.name}}
        if kind.endswith("_text.delta"):
            item.text += data["delta"]
            item.logprobs += data.get("logprobs") or ()
        elif kind.endswith("_text.done"):
            _tell(data, item)
        elif kind == "response.content_part.done":
            _tell(data["part"], item)
        elif kind == "response.output_item.done":
            for part in data["item"].get("content") or ():
                _tell(part, item)
        if inner is not None:
            self.output[item.index] = data["item"]


def _name_of(data: dict[str, Any]) -> str | None:
    """The item that an event is of."""
    return data.get("item_id") or data.get("item", {}).get("id")


def _tell(part: dict[str, Any], item: _Item) -> None:
    part["text"] = item.text
    if item.logprobs:
        part["logprobs"] = item.logprobs
