"""Prompts for the target to answer: templates, and texts that Python and the installed packages carry."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import random
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..stdlib import split_sources, stdlib_sources

__all__ = ["MEASURED_ON", "Chat", "overlapping", "prompts"]

Chat = list[dict[str, str]]

ROOT = Path(__file__).resolve().parents[4]
MEASURED_ON = (ROOT / "bench/generation/real/prompts.json", ROOT / "python/gsd_kernels_cli/demo/prompts.json")
"""Prompts of the benchmark and of the demo: nothing here may overlap with them."""

SHARED_WORDS = 8
"""So many words in a row, the same in two texts, are an overlap."""

WORDS = json.loads((Path(__file__).resolve().parent / "words.json").read_text(encoding="utf-8"))
PASSAGE_WORDS = (35, 170)
FUNCTION_LINES = (4, 26)


def passages() -> list[str]:
    """Paragraphs of prose out of docstrings of the standard library and descriptions of installed packages."""
    found: dict[str, None] = {}
    texts = [
        str(package.metadata.get_payload() or package.metadata.get("Description") or "")
        for package in sorted(importlib.metadata.distributions(), key=lambda one: one.metadata["Name"].lower())
        if not package.metadata["Name"].startswith("gsd")
    ]
    for source in split_sources(stdlib_sources())[0]:
        if not source.is_test:
            texts.extend(_docstrings(source.text))
    for text in texts:
        for paragraph in re.split(r"\n\s*\n", text):
            plain = " ".join(paragraph.split())
            words = plain.split()
            letters = sum(char.isalpha() or char.isspace() for char in plain)
            if PASSAGE_WORDS[0] <= len(words) <= PASSAGE_WORDS[1] and letters > 0.9 * len(plain):
                found[plain] = None
    return sorted(found)


def _docstrings(text: str) -> Iterable[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


def functions() -> list[str]:
    """Short functions of the standard library, those of the demo's held-out files left out."""
    texts: dict[str, None] = {}
    for source in split_sources(stdlib_sources())[0]:
        lines = source.text.splitlines()
        if source.is_test:
            continue
        for node in ast.walk(ast.parse(source.text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                own = lines[node.lineno - 1 : node.end_lineno]
                if FUNCTION_LINES[0] <= len(own) <= FUNCTION_LINES[1] and max(map(len, own)) < 100:
                    texts[textwrap.dedent("\n".join(own))] = None
    return sorted(texts)


class Writer:
    """Writes prompts, as a seed says.

    Args:
        seed: of the choices.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.passages, self.functions = passages(), functions()

    def pick(self, name: str) -> Any:
        """One of the words of a name."""
        return self.random.choice(WORDS[name])

    def filled(self, template: str) -> str:
        """A template with its names filled in."""
        number = self.random.randint
        return template.format(
            city=self.pick("cities"),
            hour=f"{number(6, 21)}:{self.random.choice(('00', '15', '30', '45'))}",
            p=number(2, 12),
            d=number(1, 28),
            n=number(100, 9999),
            month=self.pick("months"),
            goods=self.pick("goods"),
            person=self.pick("people"),
            surname=self.pick("surnames"),
            job=self.pick("jobs"),
        )

    def question(self) -> str:
        """About a topic."""
        return str(self.pick("questions")).format(self.pick("topics"))

    def passage(self) -> str:
        """Something to be done with a passage."""
        return f"{self.pick('on_passages')}\n\n{self.random.choice(self.passages)}"

    def correction(self) -> str:
        """A passage with errors."""
        text = self.random.choice(self.passages)
        for right, wrong in WORDS["errors"]:
            text = re.sub(rf"\b{right}\b", wrong, text)
        return f"Fix all mistakes in the following text and give me the corrected text only.\n\n{text}"

    def code(self) -> str:
        """Something to be done with a function."""
        return f"{self.pick('on_code')}\n\n```python\n{self.random.choice(self.functions)}\n```"

    def programming(self) -> str:
        """Code to be written."""
        language = self.pick("languages")
        return self.random.choice(
            (
                f"Write a {language} function that {self.pick('tasks')}.",
                f"Write a function in {language} that {self.pick('tasks')}, and show how it is used.",
                f"How do I write code in {language} that {self.pick('tasks')}? Explain the steps.",
                f"Write {self.pick('small_models')} in {language}.",
                f"Write an SQL query that finds {self.pick('queries')}. The schema is {self.pick('tables')}.",
            )
        )

    def letter(self) -> str:
        """An e-mail to be written or a plan to be made."""
        return self.random.choice(
            (
                f"Write an e-mail that {self.pick('occasions')}. Sign it with {self.pick('people')}.",
                f"Write a short message from {self.pick('people')} to {self.pick('people')} that "
                f"{self.pick('occasions')}.",
                f"Help me to plan {self.filled(self.pick('plans'))}.",
                f"Make a checklist for {self.filled(self.pick('plans'))}.",
                f"Give me a recipe for {self.pick('dishes')} for {self.random.randint(2, 8)} people.",
                f"What can I cook with {self.pick('dishes')} that is left over?",
            )
        )

    def story(self) -> str:
        """A story to be written."""
        return self.random.choice(
            (
                f"Write a story about a {self.pick('jobs')} who {self.pick('events')}.",
                f"Write the first paragraph of a novel in which a {self.pick('jobs')} {self.pick('events')}.",
                f"Tell a fairy tale in which a {self.pick('jobs')} from {self.pick('cities')} {self.pick('events')}.",
                f"Write a dialogue between a {self.pick('jobs')} and a {self.pick('jobs')} on {self.pick('topics')}.",
            )
        )

    def translation(self) -> str:
        """Sentences to be translated."""
        if self.random.random() < 0.5:
            language, text = self.pick("foreign")
            return f"Translate this {language} sentence into English: {self.filled(text)}"
        text = " ".join(self.filled(part) for part in self.random.sample(WORDS["sentences"], self.random.randint(1, 4)))
        return f"Translate into {self.random.choice(('French', 'German', 'Spanish', 'Italian'))}: {text}"

    def person(self) -> str:
        """First and last name."""
        return f"{self.pick('people')} {self.pick('surnames')}"

    def order(self) -> list[tuple[str, int, str]]:
        """Goods, how many, and at which price."""
        goods = self.random.sample(WORDS["goods"], self.random.randint(2, 5))
        return [(one, self.random.randint(1, 40), f"{self.random.uniform(1, 200):.2f}") for one in goods]

    def extraction(self) -> str:
        """Records in, JSON out."""
        kind = self.random.randrange(4)
        if kind == 0:
            lines = []
            hour, minute = self.random.randint(0, 23), 0
            for _ in range(self.random.randint(4, 8)):
                minute += self.random.randint(0, 7)
                message = self.pick("log_messages").format(
                    n=self.random.randint(10, 9999), p=self.random.randint(1, 99)
                )
                level = self.random.choice(("DEBUG", "INFO", "INFO", "WARN", "ERROR"))
                lines.append(f"{hour:02d}:{minute:02d} [{level}] {self.pick('services')} - {message}")
            asked = self.random.choice(
                (
                    "Convert this log to JSON: a list of objects with the keys time, level, component and text.",
                    "Write all errors and warnings of this log as a numbered list.",
                    "Show the following log as a Markdown table.",
                )
            )
            return asked + "\n\n" + "\n".join(lines)
        if kind == 1:
            parts = ", ".join(f"{count} {goods} for {price} each" for goods, count, price in self.order())
            return (
                "Read this message and write it as a JSON object with buyer, city, positions (product, count, "
                f"unit_price).\n\nHello, my name is {self.person()}. I want to buy {parts}. Send everything to "
                f"{self.random.randint(1, 99)} {self.pick('streets')} in {self.pick('cities')}. Thanks!"
            )
        if kind == 2:
            rows = [
                f"{self.person()} is a {self.pick('jobs')} from {self.pick('cities')} and "
                f"{self.random.randint(18, 80)} years old."
                for _ in range(self.random.randint(3, 7))
            ]
            asked = self.random.choice(
                (
                    "Make a JSON list of the people in this text with name, profession, city and age.",
                    "Make a table of the people in this text: name, profession, city, age.",
                    "Write the people of this text as CSV with a header line.",
                    "Sort the people of this text by age, the oldest first, and list them.",
                )
            )
            return asked + "\n\n" + " ".join(rows)
        rows = [
            f"On {self.pick('months')} {self.random.randint(1, 28)}, {self.person()} talks about "
            f"{self.pick('topics')} in {self.pick('cities')}."
            for _ in range(self.random.randint(3, 6))
        ]
        asked = self.random.choice(
            (
                "Return the talks as a JSON array with the keys day, speaker, subject and city.",
                "List the talks by city.",
            )
        )
        return asked + "\n\n" + " ".join(rows)

    def table(self) -> str:
        """Numbers in, a table out."""
        rows = [f"{goods}: {count} pieces at {price}" for goods, count, price in self.order()]
        asked = self.random.choice(
            (
                "Write this stock list as a Markdown table with the columns Product, Pieces, Price and Total.",
                "Turn this list into an HTML table.",
                "Compute the total value of each line and of all of them, and show a table.",
            )
        )
        return asked + "\n\n" + "\n".join(rows)

    def sums(self) -> str:
        """A word problem."""
        number = self.random.randint
        a, b, c = number(3, 60), number(2, 12), number(2, 9)
        who, what, job = self.pick("people"), self.pick("goods"), self.pick("jobs")
        return self.random.choice(
            (
                f"{who} has {a} {what} and buys {b} boxes of {c}. How many are there now?",
                f"A {job} earns {a} dollars an hour and works {b} hours a day for {c} days. How much is that?",
                f"What is {a} times {b} minus {c}? Show your steps.",
                f"A train goes {10 * a} kilometres in {b} hours. How far does it go in {c} hours?",
                f"{who} reads {b} pages a day. How long does a book of {10 * a} pages take?",
                f"Solve for x: {c}x + {b} = {c * a + b}. Explain every step.",
                f"What is {5 * c} percent of {10 * a}?",
                f"The sides of a rectangle are {a} cm and {b} cm long. Find its area and its perimeter.",
            )
        )

    def reading(self) -> str:
        """A question on a passage."""
        text = self.random.choice(self.passages)
        asked = self.random.choice(
            (
                "Use only the text to answer: what is the most important statement?",
                "Copy the longest sentence of this text.",
                "What does the text say about its subject? Quote one sentence.",
                "Which words in this text are technical terms? List and explain them.",
            )
        )
        return f"{asked}\n\nText: {text}"

    def tools(self) -> Chat:
        """A chat with a file that a tool returned."""
        name = f"{self.pick('services')}.py"
        code = self.random.choice(self.functions)
        called = json.dumps({"name": "open_file", "parameters": {"file": name}})
        asked = self.random.choice(
            (
                f"Add a comment to every line of {name} and save it.",
                f"What does {name} do? Answer in two sentences.",
                f"Write an improved version of {name} with save_file.",
            )
        )
        return [
            {"role": "system", "content": WORDS["systems"][-1]},
            {"role": "user", "content": asked},
            {"role": "assistant", "content": called},
            {"role": "tool", "content": code},
            {"role": "user", "content": "Go on."},
        ]

    def chat(self) -> Chat:
        """One of all kinds."""
        kinds: list[tuple[int, Callable[[], str | Chat]]] = [
            (22, self.question),
            (14, self.passage),
            (5, self.correction),
            (11, self.code),
            (10, self.programming),
            (7, self.letter),
            (6, self.story),
            (4, self.translation),
            (8, self.extraction),
            (4, self.table),
            (4, self.sums),
            (3, self.reading),
            (2, self.tools),
        ]
        (write,) = self.random.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])
        text = write()
        if not isinstance(text, str):
            return text
        turns = [{"role": "user", "content": text}]
        if self.random.random() < 0.1:
            turns.insert(0, {"role": "system", "content": self.random.choice(WORDS["systems"][:-1])})
        return turns

    def follow_up(self) -> str:
        """Make what a user says to an answer."""
        return str(self.pick("follow_ups"))


def _shingles(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return set(zip(*(words[start:] for start in range(SHARED_WORDS)), strict=False))


def overlapping(texts: list[str], measured_on: Iterable[Path] = MEASURED_ON) -> list[int]:
    """Numbers of the texts that have eight words in a row in common with one of those files' prompts."""
    taken: set[tuple[str, ...]] = set()

    def read(value: Any) -> None:
        if isinstance(value, str):
            taken.update(_shingles(value))
        elif isinstance(value, dict | list):
            for part in value.values() if isinstance(value, dict) else value:
                read(part)

    for file in measured_on:
        read(json.loads(file.read_text(encoding="utf-8")))
    return [number for number, text in enumerate(texts) if taken & _shingles(text)]


def prompts(count: int, seed: int) -> tuple[list[Chat], Writer]:
    """``count`` different chats that overlap with nothing that is measured on, and who wrote them."""
    writer = Writer(seed)
    chosen: dict[str, Chat] = {}
    while len(chosen) < count:
        chats = [writer.chat() for _ in range(count - len(chosen))]
        texts = ["\n".join(turn["content"] for turn in chat) for chat in chats]
        out = set(overlapping(texts))
        chosen |= {
            text: chat for number, (text, chat) in enumerate(zip(texts, chats, strict=True)) if number not in out
        }
    return list(chosen.values())[:count], writer
