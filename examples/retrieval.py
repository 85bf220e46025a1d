"""Speculative retrieval (RaLMSpec, arXiv 2401.14021): the text of retrieving every few tokens, with fewer waits for it.

python examples/retrieval.py                                                  the embedded pair, passages of Python
python examples/retrieval.py --model DIR_OR_ID --draft DIR_OR_ID --documents FILE... "a question"

Text is generated in intervals; before each, the last words are a query, and the best passage stands before the text. A
cache of passages seen guesses it. After some intervals the retriever, BM25 over a store on disk, gets their queries at
once; text after a wrong guess is rolled back. Needs pip install -e '.[retrieval]' in this repository's folder.
"""

from __future__ import annotations

import argparse
import inspect
import math
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import gsd_kernels
from gsd_kernels_cli.options import Models

try:
    import bm25s
except ModuleNotFoundError:
    raise SystemExit("bm25s is missing: pip install -e '.[retrieval]', or bm25s alone") from None

WORD = r"(?u)[A-Za-z]\w+"
SOURCES = ("heapq", "json.decoder", "queue", "sched", "shlex", "textwrap")  # of the standard library
LINES = 12  # of a passage
QUERY_WORDS = 12  # of the text's end that are the query
SEVERAL = 4  # passages that a search gives for a query, best first
K1, B = 1.5, 0.75  # of BM25


def words(texts: Sequence[str]) -> list[list[str]]:
    return bm25s.tokenize(list(texts), token_pattern=WORD, stopwords=None, return_ids=False, show_progress=False)


class Retriever:
    """BM25 over a memory-mapped index on disk.

    Args:
        folder: to write the index to.
        passages: words of each.
        latency: seconds added to every search, as of a store that is far away.
    """

    def __init__(self, folder: str, passages: list[list[str]], latency: float) -> None:
        index = bm25s.BM25(method="lucene", k1=K1, b=B)
        index.index(passages, show_progress=False)
        index.save(folder, show_progress=False)
        self.index = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        self.latency, self.several, self.waits = latency, min(SEVERAL, len(passages)), 0

    def search(self, queries: list[str]) -> list[list[int]]:
        """Numbers of the best passages for each query; one wait, however many queries."""
        self.waits += 1
        time.sleep(self.latency)
        found, _ = self.index.retrieve(words(queries), k=self.several, show_progress=False)
        return found.tolist()


class Cache:
    """The passages that were found before, scored in memory as the store scores them.

    Args:
        passages: words of each; of those that were not found, the collection's statistics alone are used.
    """

    def __init__(self, passages: list[list[str]]) -> None:
        self.passages, self.length = passages, sum(map(len, passages)) / len(passages)
        documents = Counter(word for text in passages for word in set(text))
        self.rarity = {
            word: math.log(1 + (len(passages) - number + 0.5) / (number + 0.5)) for word, number in documents.items()
        }
        self.known: dict[int, dict[str, float]] = {}  # passage → word → score

    def add(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            text = self.passages[number]
            norm = K1 * (1 - B + B * len(text) / self.length)
            self.known[number] = {
                word: self.rarity[word] * times / (times + norm) for word, times in Counter(text).items()
            }

    def guess(self, query: str) -> int | None:
        """The best passage of the cache for a query; ``None`` while it is empty."""
        (asked,) = words([query])
        totals = {number: sum(scores.get(word, 0.0) for word in asked) for number, scores in self.known.items()}
        return max(totals, key=totals.__getitem__, default=None)


@dataclass
class Generation:
    """A text in the making, by a patched model whose prompt is a passage, then the text so far.

    Args:
        model, tokenizer: the patched model and its tokenizer.
        passages: token ids of each.
        prompt: token ids of the user's.
        length: new tokens in all.
        interval: tokens after which a passage is sought anew.
    """

    model: Any
    tokenizer: Any
    passages: list[list[int]]
    prompt: list[int]
    length: int
    interval: int = 8

    def __post_init__(self) -> None:
        ends = self.model.generation_config.eos_token_id
        self.ends = {ends} if isinstance(ends, int) else set(ends or ())
        self.forwards = self.tokens = 0

    def is_finished(self, new: list[int]) -> bool:
        return len(new) >= self.length or bool(new and new[-1] in self.ends)

    def query(self, new: list[int]) -> str:
        text = self.tokenizer.decode(self.prompt + new, skip_special_tokens=True)
        return " ".join(words([text])[0][-QUERY_WORDS:])

    def extend(self, new: list[int], passage: int) -> list[int]:
        """``new`` and the next interval after it; what was read of the same passage and text is not read again."""
        ids = torch.tensor([[*self.passages[passage], *self.prompt, *new]], device=self.model.device)
        count = min(self.interval, self.length - len(new))
        output = self.model.generate(ids, max_new_tokens=count, do_sample=False, return_dict_in_generate=True)
        self.forwards += output.stats.steps
        self.tokens += output.stats.new_tokens
        return new + output.sequences[0, ids.shape[1] :].tolist()


def retrieving_every_time(generation: Generation, retriever: Retriever) -> list[int]:
    """The reference: the retriever is asked before every interval."""
    new: list[int] = []
    while not generation.is_finished(new):
        new = generation.extend(new, retriever.search([generation.query(new)])[0][0])
    return new


def retrieving_speculatively(
    generation: Generation, retriever: Retriever, cache: Cache, *, stride: int = 3
) -> tuple[list[int], list[bool]]:
    """The same tokens, and which guesses were right.

    The retriever is asked once for ``stride`` intervals, or for as many as were right.
    """
    new: list[int] = []
    right: list[bool] = []
    while not generation.is_finished(new):
        asked: list[tuple[list[int], str, int | None]] = []  # text before the interval, its query, the guess
        while len(asked) < stride and not generation.is_finished(new):
            query = generation.query(new)
            guess = cache.guess(query)
            asked.append((new, query, guess))
            if guess is None:
                break
            new = generation.extend(new, guess)
        found = retriever.search([query for _, query, _ in asked])
        for (before, _, guess), numbers in zip(asked, found, strict=True):
            cache.add(numbers)
            right += [] if guess is None else [guess == numbers[0]]
            if guess != numbers[0]:  # the text from here on came from another passage
                new = generation.extend(before, numbers[0])
                break
    return new, right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--draft")
    parser.add_argument("--documents", type=Path, nargs="*", help="text files; default: some of the standard library")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--interval", type=int, default=8, help="tokens after which a passage is sought anew")
    parser.add_argument("--stride", type=int, default=3, help="intervals that one search checks")
    parser.add_argument("--passage-tokens", type=int, default=128, help="a passage is cut to as many")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds that a search takes longer than it does")
    parser.add_argument("prompt", nargs="?", default="class PriorityQueue(Queue):\n    def _put(self, item):\n")
    options = parser.parse_args()
    texts = [file.read_text(encoding="utf-8") for file in options.documents or ()]
    documents = [
        text.splitlines(keepends=True) for text in texts or map(inspect.getsource, map(import_module, SOURCES))
    ]
    passages = ["".join(lines[at : at + LINES]) for lines in documents for at in range(0, len(lines), LINES)]
    split = words(passages)
    pair = Models(options.draft).load(options.model)
    gsd_kernels.patch(pair.target, **pair.speculation)  # without a draft the history drafts

    def encode(text: str) -> list[int]:
        return pair.tokenizer(text, add_special_tokens=False)["input_ids"]

    ids = [encode(passage)[: options.passage_tokens] for passage in passages]
    found = []
    for name in ("every time", "speculatively"):
        generation = Generation(
            pair.target, pair.tokenizer, ids, encode(options.prompt), options.max_new_tokens, options.interval
        )
        guesses = ""
        with tempfile.TemporaryDirectory() as folder:
            retriever = Retriever(folder, split, options.latency)
            begun = time.perf_counter()
            if name == "every time":
                new = retrieving_every_time(generation, retriever)
                print(pair.tokenizer.decode(new, skip_special_tokens=True))
            else:
                new, right = retrieving_speculatively(generation, retriever, Cache(split), stride=options.stride)
                guesses = f", {sum(right)} of {len(right)} guesses right"
            seconds = time.perf_counter() - begun
        print(
            f"[{name}: {retriever.waits} waits for the retriever{guesses}, {generation.tokens} tokens generated by "
            f"{generation.forwards} forwards, {seconds:.2f} s]"
        )
        found.append(new)
    print("the same tokens:", found[0] == found[1])


if __name__ == "__main__":
    main()
