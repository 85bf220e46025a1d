"""``gsd_kernels.learn``: what a model's own answers teach its history, in one small file."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gsd_kernels import GraphConfig
from gsd_kernels.ops.history.records import LEARNED_ORDERS, REMEMBERED
from gsd_kernels.ops.history.reference import Evidence, evidence, hear_learned
from gsd_kernels.ops.ngram.reference import context_keys

from . import validate
from .api import generate
from .costs.pair import fingerprint
from .engine.known import learned_file
from .files import check_writable, path_of
from .model import properties
from .progress import tracked
from .records import Verified
from .sources.history import History
from .sources.memory import MOST_CONTEXTS, Learned, prior

logger = logging.getLogger("gsd_kernels")

Prompt = str | Sequence[dict[str, str]] | Tensor

SHAPE = GraphConfig(depth=0, branch=4, max_rows=12, merge_context=2, history_depth=12, history_width=6)
LEAST = (1, 2, 3)  # times that a context of 1, 2, 3 tokens was seen, to be kept
NODES = 12_000  # that the mixture is fitted to, at most
FEWEST_NODES = 2_000  # below, the weights stay those that ship
DECAY = 1e-4  # of the weights' squares
ITERATIONS = 80

Counts = tuple[dict[tuple[int, ...], Counter[int]], ...]
"""By length of a context: what followed it, how often."""


@dataclass
class Lesson:
    """An accepted node as it was known, and the token that the model picked there."""

    found: Evidence
    recent: list[int]  # the last tokens, the nearest first
    picked: int
    text: int  # number of the answer


class Student(History):
    """The history, which notes what it knew of every accepted node.

    Args:
        answers: tokens of those that ended.
        lessons: the notes, filled here.
    """

    name = "student"
    on_host = True  # it notes

    def __init__(self, answers: list[list[int]], lessons: list[Lesson]) -> None:
        self.answers, self.lessons = answers, lessons  # of all sessions: copies share them

    def observe(self, verified: Verified) -> None:
        if self.known is not None and verified.graph is not None:
            count = int(verified.accepted.num_accepted[0])
            nodes, picked = (t[0, :count].tolist() for t in (verified.nodes, verified.tokens))
            for node, token in zip(nodes, picked, strict=True):
                graph = verified.graph
                recent = [int(graph.token_ids[0, node]), *graph.contexts[0, node, : LEARNED_ORDERS - 1].tolist()]
                found = evidence(self.known, graph, 0, node)
                self.lessons.append(Lesson(found, recent, token, len(self.answers)))
        super().observe(verified)


def everyday_prompts() -> list[str]:
    """The prompts that ship with the package: everyday requests of many kinds."""
    parts = json.loads((Path(__file__).parent / "everyday.json").read_text(encoding="utf-8"))
    topics = parts["topics"]
    asked = [
        ask.format(topics[(7 * i + 3 * j) % len(topics)]) for j in range(10) for i, ask in enumerate(parts["asks"])
    ]
    return [*asked, *(f"{ask}\n\n{text}" for ask in parts["on_texts"] for text in parts["texts"]), *parts["others"]]


def learn(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    prompts: Iterable[Prompt] | None = None,
    texts: Iterable[str | Tensor] = (),
    new_tokens: int = 288,
    file: str | Path | None = None,
    progress: bool = True,
) -> Path:
    """Have a model answer prompts, and keep how its answers go on, for the history of later calls.

    The file holds a table of contexts of 1 … 3 tokens of the answers with what followed them, and weights of the
    history's mixture fitted to them: less than 1 MB for 100,000 tokens. It lies in the cache folder under the model's
    fingerprint, where :func:`~gsd_kernels.generate` and :func:`~gsd_kernels.patch` find it, before the one
    that comes with this package for some models. It changes how fast a text comes, never the text. Interrupted
    (Ctrl-C), what was answered so far is kept.

    Args:
        model: as of :func:`~gsd_kernels.generate`.
        tokenizer: of the model; needed unless all prompts and texts are ids.
        prompts: texts, chats (lists of ``role`` and ``content``) or ids int64 [length] or [prompts, length]; ``None``:
            those that ship with the package.
        texts: to be read beside the answers, as texts or ids: what the model will write may repeat them. Whoever has
            the file can find their short phrases in it.
        new_tokens: of every answer, at most.
        file: to write instead of that in the cache folder, which alone is found by itself.
        progress: whether to show it.

    Returns:
        Where the file is.

    Raises:
        TypeError, ValueError: the model cannot be served, nothing was answered, or an argument makes no sense.
        OSError: the file cannot be written there.
    """
    model = properties.unwrap(model)
    validate.check_model("model", model)
    if not isinstance(new_tokens, int) or isinstance(new_tokens, bool) or new_tokens < 1:
        raise ValueError(f"new_tokens: expected an int of at least 1, got {new_tokens!r}")
    asked = _encoded("prompts", everyday_prompts() if prompts is None else prompts, model, tokenizer)
    read = _encoded("texts", texts, model, tokenizer)
    if not asked and not read:
        raise ValueError("prompts: expected at least one, or texts; leave prompts out to take those of the package")
    place = learned_file(model) if file is None else path_of(file)
    if place.is_dir():
        raise ValueError(f"file: expected the name of a file to write, got the folder {place}")
    check_writable("GSD_KERNELS_CACHE" if file is None else "file", place)
    place.parent.mkdir(parents=True, exist_ok=True)
    answers, lessons = _answered(model, asked, new_tokens, progress)
    known = [*answers, *(ids[0].tolist() for ids in read)]
    if not (seen := sum(map(len, known))):
        raise ValueError("prompts: the model answered none of them")
    about = properties.vocabulary(model), fingerprint(model), seen
    found = Learned(*tabled(counted(known)), _weights_for(answers, lessons), *about)
    found.save(place)
    logger.info("learned %s contexts of %s tokens: %s", f"{len(found.keys):,}", f"{seen:,}", place)
    return place


def _encoded(name: str, given: Iterable[Prompt], model: PreTrainedModel, tokenizer: Any) -> list[Tensor]:
    """The ids of all prompts, or texts, int64 [1, P] each."""
    if isinstance(given, str) or (isinstance(given, Tensor) and given.dim() < 2):
        raise TypeError(f"{name}: expected several, got one {type(given).__name__}; put it into a list")
    found, vocabulary = [], properties.vocabulary(model)
    for number, one in enumerate(given, 1):
        ids = _ids(one, tokenizer, properties.device_of(model), chat=name == "prompts")
        if ids.is_floating_point() or not ids.numel() or not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise ValueError(
                f"{name}: number {number}: expected ids from 0 to {vocabulary - 1}, at least one, got {ids}"
            )
        found += ids.long().split(1)
    return found


def _ids(given: Prompt, tokenizer: Any, device: torch.device, *, chat: bool) -> Tensor:
    """A prompt's ids int [1, P]; of a tensor with several rows, of that many prompts."""
    if isinstance(given, Tensor):
        return torch.atleast_2d(given).flatten(0, -2).to(device)
    if tokenizer is None:
        raise ValueError("tokenizer: prompts and texts that are no ids need the model's; pass it")
    if chat and getattr(tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        found = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    else:
        text = given if isinstance(given, str) else "\n".join(turn["content"] for turn in given)
        found = tokenizer(text, return_tensors="pt")
    return found["input_ids"].to(device)


def _answered(
    model: PreTrainedModel, asked: list[Tensor], new_tokens: int, progress: bool
) -> tuple[list[list[int]], list[Lesson]]:
    """Have the model answer greedily: the answers' tokens, and their lessons. Ctrl-C ends it with what is there."""
    student = Student([], [])
    shown = tracked("learning", len(asked), "prompts") if progress else nullcontext(lambda done, note="": None)
    # A patched model's history would be evidence of an answer that others gave.
    apart = dict.fromkeys(("learned", "reuse_history", "reuse_prefix", "do_sample"), False)
    options: dict[str, Any] = {"draft_sources": (student,), "graph_config": SHAPE, **apart}
    answers, lessons = student.answers, student.lessons
    try:
        with shown as update:
            for ids in asked:
                whole = generate(model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **options)
                answers.append(whole[0, ids.shape[1] :].tolist())
                update(len(answers), f"{sum(map(len, answers)):,} tokens")
    except KeyboardInterrupt:
        if not answers:
            raise
        logger.warning("learning: interrupted after %d of %d prompts; what is there is kept", len(answers), len(asked))
    return answers, [lesson for lesson in lessons if lesson.text < len(answers)]


def _weights_for(answers: Sequence[list[int]], lessons: Sequence[Lesson]) -> Tensor:
    """Weights of the mixture, fitted to the answers with tables of the others."""
    if len(lessons) >= FEWEST_NODES:
        # What an answer teaches of the table's worth must come from a table that has not seen it.
        halves = [counted(answers[1 - half :: 2]) for half in (0, 1)]
        try:
            return fitted(lessons, halves, prior())
        except KeyboardInterrupt:
            logger.warning("learning: interrupted; the table is kept, with the weights that ship")
    return prior()


def counted(texts: Sequence[Sequence[int]]) -> Counts:
    """Count what followed every context of 1 … 3 tokens, the nearest first."""
    found: Counts = tuple(defaultdict(Counter) for _ in range(LEARNED_ORDERS))
    for text in texts:
        for place in range(1, len(text)):
            for order in range(1, min(LEARNED_ORDERS, place) + 1):
                context = tuple(text[place - order : place][::-1])
                found[order - 1][context][text[place]] += 1
    return tuple(
        {context: after for context, after in contexts.items() if after.total() >= least}
        for contexts, least in zip(found, LEAST, strict=True)
    )


def continuations(after: Counter[int]) -> list[tuple[int, float]]:
    """The likeliest tokens after a context and their probabilities; some is left for those never seen (Witten-Bell)."""
    total = after.total() + len(after)
    return [(token, count / total) for token, count in after.most_common(REMEMBERED)]


def tabled(counts: Counts) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, counts, tokens and log-probabilities as the file has them, the contexts seen most first."""
    entries: dict[int, Counter[int]] = {}
    for order, contexts in enumerate(counts, 1):
        if contexts:
            ids = torch.tensor(list(contexts), dtype=torch.int32, device="cpu")[None]
            entries.update(zip(context_keys(ids, order)[0, :, -1].tolist(), contexts.values(), strict=True))
    best = sorted(entries.items(), key=lambda entry: -entry[1].total())[:MOST_CONTEXTS]
    lists = [continuations(after) for _, after in best]
    pairs = [pair for listed in lists for pair in listed]
    return (
        torch.tensor([key for key, _ in best], dtype=torch.int64, device="cpu"),
        torch.tensor([len(listed) for listed in lists], dtype=torch.uint8, device="cpu"),
        torch.tensor([token for token, _ in pairs], dtype=torch.int32, device="cpu"),
        torch.tensor([chance for _, chance in pairs], dtype=torch.float64, device="cpu").log().to(torch.float16),
    )


def fitted(lessons: Sequence[Lesson], halves: Sequence[Counts], start: Tensor) -> Tensor:
    """The weights under which the picks are likeliest, near those that ship where little says otherwise.

    What would have been known with a table of other answers is added to the lessons.
    """
    heard: list[tuple[int, int, int, float]] = []  # nodes, candidates (0: none), weights, values
    picks: list[int] = []  # of every node: the candidate that was picked
    step = max(1, len(lessons) // NODES)
    for node, lesson in enumerate(lessons[::step]):
        found, lists = lesson.found, []
        for order, contexts in enumerate(halves[lesson.text % 2], 1):
            after = contexts.get(tuple(lesson.recent[:order]), Counter())
            lists.append([(token, math.log(chance)) for token, chance in continuations(after)])
        hear_learned(found, lists)
        for candidate, votes in enumerate([[found.none], *found.votes.values()]):
            for weight, value in chain(*votes):
                heard.append((node, candidate, weight, value))
        picks.append([-1, *found.votes].index(lesson.picked) if lesson.picked in found.votes else 0)
    table, picked = torch.tensor(heard, dtype=torch.float64, device="cpu").T, torch.tensor(picks, device="cpu")
    (at_node, at_candidate, at_weight), said = table[:3].long(), table[3]  # [values] each
    nothing = start.new_full((len(picks), int(at_candidate.max()) + 1), -torch.inf)  # [nodes, candidates]
    nothing[at_node, at_candidate] = 0.0
    weights = start.clone().requires_grad_()
    search = torch.optim.LBFGS([weights], max_iter=ITERATIONS, history_size=20, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        scores = nothing.index_put((at_node, at_candidate), said * weights[at_weight], accumulate=True)
        lost = cross_entropy(scores, picked) + DECAY * (weights - start).square().sum()
        lost.backward()
        return lost

    search.step(loss)
    return weights.detach()
