"""The prompts: this benchmark's own chats, or a user's file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..pairs import Prompt

FILE = Path(__file__).resolve().parent / "prompts.json"
PARQUET = ".parquet"
LONG = "long text"  # kind of questions about one of some thousand tokens
OWN = "own"  # kind of a user's prompts that name none
TUNED_ON = 2  # of a user's prompts, where the file sets none aside

MT_BENCH = frozenset("writing roleplay reasoning math coding extraction stem humanities".split())
"""Categories of Spec-Bench that it reports as one."""
NOT_FETCHED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""How a turn of SPEED-Bench begins whose text its publisher may not give away."""


@dataclass(frozen=True)
class Chat:
    """A chat up to where the model answers.

    Attributes:
        turns: what the user says next, each behind an answer of the model.
        question: the chat that it goes on with; of a first turn its own name.
    """

    name: str
    kind: str
    messages: list[dict[str, str]]
    turns: tuple[str, ...] = ()
    question: str = ""

    def answered(self, answer: str) -> Chat | None:
        """The chat up to the next answer; ``None`` where nothing more is asked."""
        if not self.turns:
            return None
        said = [{"role": "assistant", "content": answer}, {"role": "user", "content": self.turns[0]}]
        question = self.question or self.name
        number = sum(message["role"] == "user" for message in self.messages) + 1
        return Chat(f"{question}/{number}", self.kind, [*self.messages, *said], self.turns[1:], question)


def read_chats(file: Path | None = None, limit: int | None = None) -> tuple[list[Chat], list[Chat]]:
    """The chats that are reported, and those on which other engines' settings are chosen.

    Args:
        file: ``.json`` as ``prompts.json`` beside this file, or a list; ``.jsonl``, a chat a line; ``.parquet``, as
            SPEED-Bench has it; otherwise text, of which every line that is not empty is a user's message. A chat is an
            object with ``messages`` (role, content) or ``prompt``, and may have ``name`` and ``kind``; or a question of
            Spec-Bench or SPEED-Bench with ``question_id``, ``category`` and ``turns``, what the user says.
        limit: at most as many of every kind are reported.

    Raises:
        ValueError: no chat is there, or one is not as said above.
        ImportError: a parquet file, and nothing here that reads it.
        OSError: the file cannot be read.
    """
    place = FILE if file is None else file
    text = "" if place.suffix == PARQUET else place.read_text(encoding="utf-8")
    tuning: list[Any] = []
    try:
        if place.suffix == PARQUET:
            from pyarrow import parquet

            rows = parquet.read_table(place).to_pylist()
        elif place.suffix == ".json":
            rows = json.loads(text)
            if isinstance(rows, dict):
                rows, tuning = rows.get("prompts"), rows.get("tuning", [])
        elif place.suffix == ".jsonl":
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            rows = [line for line in text.splitlines() if line.strip()]
    except ImportError as error:
        raise ImportError("--prompts: a parquet file is read by pyarrow: pip install pyarrow") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"--prompts: {place} is not JSON: {error}") from error
    if not isinstance(rows, list) or not rows:
        raise ValueError(f'--prompts: {place} has no prompts; expected a list, or an object with a list "prompts"')
    chats, others = ([_chat(place, *numbered) for numbered in enumerate(part, 1)] for part in (rows, tuning))
    names = [chat.name for chat in chats]
    if len(set(names)) < len(names):
        raise ValueError(f"--prompts: {place}: two prompts have the name {max(names, key=names.count)!r}")
    kinds = [chat.kind for chat in chats]
    reported = [chat for n, chat in enumerate(chats) if limit is None or kinds[:n].count(chat.kind) < limit]
    return reported, others or chats[:TUNED_ON]


def _chat(place: Path, number: int, given: Any) -> Chat:
    fault = f"--prompts: {place}, prompt {number}"
    if isinstance(given, str):
        given = {"prompt": given}
    match given:
        case {"turns": _}:
            return _question(fault, number, given)
        case {"messages": [_, *_] as messages} if all(map(_is_message, messages)):
            pass
        case {"prompt": str(text)} if given.get("messages") is None:
            messages = [{"role": "user", "content": text}]
        case dict():
            raise ValueError(f'{fault}: expected "messages", a list of objects with "role" and "content", or "prompt"')
        case _:
            raise ValueError(f"{fault}: expected a text or an object, got {type(given).__name__}")
    return Chat(str(given.get("name", f"prompt-{number}")), str(given.get("kind", OWN)), list(messages))


def _is_message(given: Any) -> bool:
    match given:
        case {"role": str(), "content": str()}:
            return True
    return False


def _question(fault: str, number: int, given: dict[str, Any]) -> Chat:
    """A question of Spec-Bench or SPEED-Bench."""
    turns = given["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f'{fault}: expected "turns", a list of texts, got {type(turns).__name__}')
    if any(turn.startswith(NOT_FETCHED) for turn in turns):
        raise ValueError(
            f"{fault}: its text is not in the file; SPEED-Bench's prepare_data.py (examples/specdec_bench of NVIDIA's "
            "Model-Optimizer) fetches it from its source and writes a test.parquet, which is read here"
        )
    kind = str(given.get("category", OWN))
    if kind in MT_BENCH and "source" not in given:  # which SPEED-Bench names, whose categories are called the same
        kind = "mt_bench"
    name = str(given.get("question_id", f"prompt-{number}"))
    return Chat(name, kind, [{"role": "user", "content": turns[0]}], tuple(turns[1:]), name)


def encoded(chats: list[Chat], tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The chats by the tokenizer's chat template; without one, the messages' texts, an empty line between them."""
    prompts = []
    for chat in chats:
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template(chat.messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer("\n\n".join(turn["content"] for turn in chat.messages), return_tensors="pt")["input_ids"]
        prompts.append(Prompt(chat.name, chat.kind, ids, chat.question))
    return prompts
