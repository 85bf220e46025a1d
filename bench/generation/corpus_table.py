"""The history alone, across calls, and with a corpus: tokens per forward and per second on four tasks.

Tasks, settings and shapes below were fixed before the run. A cell is a task: its prompts in order, every competitor on
each in turn. A run that is stopped goes on where it was: finished cells are kept beside the result.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gsd_kernels import Corpus, GraphConfig, Level, Proposal
from gsd_kernels_cli import comparison, demo
from gsd_kernels_hf.corpus.build import build_corpus, tokenized
from gsd_kernels_hf.engine.decoder import GraphDecoder
from gsd_kernels_hf.engine.engine import Engines
from gsd_kernels_hf.files import write_json
from gsd_kernels_hf.model.properties import vocabulary
from gsd_kernels_hf.sources.memory import HistoryMemory

from ..lib.environment import environment
from ..lib.intervals import Ratio, paired_ratio
from ..lib.report import SCHEMA, markdown
from . import suffix_peer
from .competitors import PROMPT_LOOKUP_TOKENS
from .corpus_tasks import LABELS as TASK_LABELS
from .corpus_tasks import TASKS, demo_sources, texts_of
from .pairs import load_pair

NAME = "corpus"
SHAPE = GraphConfig(depth=0, branch=3, max_rows=16, merge_context=2, history_depth=10, history_width=3)
LABELS = {
    "plain": "this, plain",
    "lookup": "transformers, prompt lookup",
    "suffix": "arctic-inference's suffix decoding, verified here",
    "history": "history alone",
    "calls": "+ history across calls",
    "corpus": "+ corpus",
    "auto": "history across calls, corpus, automatic shapes",
}
QUESTIONS = (("calls", "history"), ("corpus", "calls"), ("corpus", "lookup"), ("corpus", "suffix"), ("auto", "lookup"))
QUICK_FILES = 40
Decode = Callable[[Tensor, int], comparison.Decoded]


@dataclass(frozen=True)
class Settings:
    """One run: kind of models, prompts of a task, turns of the loop, tokens of each text."""

    target_shape: str
    dtype: torch.dtype
    prompts: int
    turns: int
    new_tokens: int
    quick: bool


class Timed(Corpus):
    """A corpus that notes what its look-ups take."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seconds: list[float] = []

    def propose(self, level: Level) -> Proposal:
        begin = time.perf_counter()
        found = super().propose(level)
        self.seconds.append(time.perf_counter() - begin)
        return found


def run(settings: Settings, *, corpus: Path, folder: Path, name: str = NAME) -> str:
    """Build the index where it is not there, fill the cells, write ``name``.json and .md, and return the table."""
    journal = folder / f"{name}.partial.json"
    head = {**asdict(settings), "dtype": str(settings.dtype).removeprefix("torch."), "shape": asdict(SHAPE)}
    head = json.loads(json.dumps(head))
    result: dict[str, Any] = {"schema": SCHEMA, "case": NAME, "settings": head, "cells": []}
    if journal.exists() and (earlier := json.loads(journal.read_text(encoding="utf-8")))["settings"] == head:
        result = earlier
    pair = load_pair("demo", device=torch.device("cpu"), dtype=settings.dtype, target_shape=settings.target_shape)
    _, _, tokenizer = demo.load()
    if "index" not in result:
        print(f"{name}: indexing", file=sys.stderr, flush=True)
        result["index"] = _index(corpus, tokenizer, quick=settings.quick)
        write_json(journal, result, indent=None)
    result["parameters"] = pair.target.num_parameters()
    for task in TASKS:
        if any(cell["task"] == task for cell in result["cells"]):
            continue
        result["cells"].append(_cell(task, settings, pair.target, tokenizer, corpus))
        write_json(journal, result, indent=None)
    result["environment"] = environment(torch.device("cpu"))
    written = table(result)
    write_json(folder / f"{name}.json", result, indent=None)
    (folder / f"{name}.md").write_text(written + "\n", encoding="utf-8")
    journal.unlink(missing_ok=True)
    return written


def _index(corpus: Path, tokenizer: PreTrainedTokenizerBase, *, quick: bool) -> dict[str, Any]:
    """Seconds, bytes and memory of the index of the standard library but for the held-out files."""
    found: dict[str, Any] = {"build_seconds": None, "tokenize_seconds": None}
    if not corpus.exists():
        files = demo_sources(held_out=False)[: QUICK_FILES if quick else None]
        begin = time.perf_counter()
        documents = list(tokenized((file.text for file in files), tokenizer))
        found["tokenize_seconds"] = time.perf_counter() - begin
        build_corpus(corpus, documents, tokenizer=tokenizer)
        found["build_seconds"] = time.perf_counter() - begin - found["tokenize_seconds"]
    opening = []
    for _ in range(5):
        begin = time.perf_counter()
        opened = Corpus(corpus)
        opening.append(time.perf_counter() - begin)
    for array in (opened.index.text, opened.index.order, opened.index.following):
        array.sum()  # all of its pages are in this process
    code = (
        "import sys; from gsd_kernels_bench.generation.corpus_table import second_process; second_process(sys.argv[1])"
    )
    answer = subprocess.run([sys.executable, "-c", code, str(corpus)], capture_output=True, text=True, check=True)
    return {
        **found,
        "tokens": opened.header.tokens,
        "documents": opened.header.documents,
        "bytes": sum(file.stat().st_size for file in corpus.iterdir()),
        "open_seconds": statistics.median(opening),
        "second_process": json.loads(answer.stdout),
    }


def second_process(corpus: str) -> None:
    """Open an index, look up, and print what of its files is in memory, and how much of that is this process's own."""
    opened = Corpus(corpus)
    generator = torch.Generator().manual_seed(0)
    for array in (opened.index.text, opened.index.order, opened.index.following):
        array[torch.randint(len(array), (10_000,), generator=generator)].sum()
    totals = dict.fromkeys(("Rss", "Private_Clean", "Private_Dirty"), 0)
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if "-" in key.split(" ")[0]:
            inside = ".npy" in line and str(Path(corpus).resolve()) in line
        elif inside and key in totals:
            totals[key] += 1024 * int(value.split()[0])
    print(json.dumps({"mapped_resident": totals.pop("Rss"), "own": sum(totals.values())}))


def _cell(
    task: str, settings: Settings, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, corpus: Path
) -> dict[str, Any]:
    """All competitors on all prompts of a task, in order; each begins with nothing remembered."""
    timed = Timed(corpus, tokenizer=tokenizer)
    racing, missing = _competitors(target, timed)
    prompts = [
        (each, tokenizer(text, return_tensors="pt")["input_ids"])
        for each, text in texts_of(task, settings.prompts, settings.turns)
    ]
    warm = torch.flip(prompts[0][1], [1])  # of the same length, and no text
    for name, decode in racing.items():
        print(f"{NAME}: {task}: warming up {name}", file=sys.stderr, flush=True)
        decode(warm, 8)
    # Nothing is remembered of the warm-up, but what the automatic policy learned of this machine.
    racing = {**_competitors(target, timed)[0], "auto": racing["auto"]}
    runs: list[dict[str, Any]] = []
    for number, (prompt, ids) in enumerate(prompts):
        print(f"{NAME}: {task}: {number + 1} of {len(prompts)}", file=sys.stderr, flush=True)
        names = list(racing)
        turn, texts = number % len(names), {}
        for name in names[turn:] + names[:turn]:
            begin, looked_up = time.perf_counter(), len(timed.seconds)
            decoded = racing[name](ids, settings.new_tokens)
            seconds = time.perf_counter() - begin
            texts[name] = decoded.sequences[0, ids.shape[1] :].tolist()
            runs.append(
                {
                    "prompt": prompt,
                    "competitor": name,
                    "tokens": len(texts[name]),
                    "seconds": seconds,
                    "target_forwards": decoded.target_forwards,
                    "lookup_seconds": sum(timed.seconds[looked_up:]),
                }
            )
        for entry in runs[-len(names) :]:
            entry["same"] = texts[entry["competitor"]] == texts["plain"]
    return {"task": task, "missing": missing, "prompt_tokens": [ids.shape[1] for _, ids in prompts], "runs": runs}


def _competitors(target: PreTrainedModel, corpus: Corpus) -> tuple[dict[str, Decode], dict[str, str]]:
    """Ways of decoding, each with an engine of its own, and why one is missing."""
    both = ("history", corpus)
    found = {
        "plain": _ours(target, graph_config="plain"),
        "lookup": _lookup(target),
        "history": _ours(target, draft_sources=("history",), graph_config=SHAPE, reuse_history=False),
        "calls": _ours(target, draft_sources=("history",), graph_config=SHAPE),
        "corpus": _ours(target, draft_sources=both, graph_config=SHAPE),
        "auto": _ours(target, draft_sources=both, graph_config="auto"),
    }
    why = suffix_peer.missing()
    if why is not None:
        return found, {"suffix": why}
    return {
        **found,
        "suffix": _ours(target, draft_sources=(suffix_peer.Suffix(),), graph_config=suffix_peer.CONFIG),
    }, {}


def _ours(target: PreTrainedModel, **options: Any) -> Decode:
    """What a patched model's calls do, with a memory of its own.

    Everyone reads all of a prompt: where prompts begin alike, a session keeps its history without the switch as well.
    """
    engines = Engines(keeps_sessions=True, memory=HistoryMemory(vocabulary(target)))

    def decode(ids: Tensor, new_tokens: int) -> comparison.Decoded:
        decoder = GraphDecoder(**options, reuse_prefix=False)
        decoder.engines = engines
        output = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            return_dict_in_generate=True,
            custom_generate=decoder,
        )
        return comparison.Decoded(output.sequences, output.stats.steps, output.stats)

    return decode


def _lookup(target: PreTrainedModel) -> Decode:
    contender = comparison.plain(target, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS)
    return lambda ids, count: contender({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, count)


def table(result: dict[str, Any]) -> str:
    """Tokens per second and per forward of every task, ratios, and what the index takes, in Markdown."""
    cells = result["cells"]
    heads = ["", *(f"{TASK_LABELS[cell['task']]} ({len(cell['prompt_tokens'])})" for cell in cells)]
    rows, answers = [], []
    for name, label in LABELS.items():
        entries = []
        for cell in cells:
            totals = [[sum(run[k] for run in _of(cell, name)) for k in ("tokens", "seconds", "target_forwards")]]
            tokens, seconds, forwards = totals[0]
            entries.append(f"{tokens / seconds:.1f} ({tokens / forwards:.2f})" if tokens else "–")
        rows.append([label, *entries])
    for ours, theirs in QUESTIONS:
        for cost, unit in (("seconds", "tokens/s"), ("target_forwards", "tokens/forward")):
            entries = []
            for cell in cells:
                pairs = [[(run["tokens"], run[cost]) for run in _of(cell, name)] for name in (ours, theirs)]
                entries.append(str(Ratio(**asdict(paired_ratio(*pairs)))) if all(pairs) else "–")
            answers.append([f"{LABELS[ours]} against {LABELS[theirs]}, {unit}", *entries])
    settings, runs = result["settings"], [run for cell in cells for run in cell["runs"]]
    ours = [run for run in runs if run["competitor"] not in ("plain", "lookup")]
    looked_up = [run for run in runs if run["competitor"] == "corpus"]
    share = sum(run["lookup_seconds"] for run in looked_up) / sum(run["seconds"] for run in looked_up)
    steps = sum(run["target_forwards"] for run in looked_up)
    return "\n".join(
        [
            f"Tokens per second (and per target forward), greedy; {result['parameters'] / 1e6:.0f}M target, "
            f"{settings['dtype']}, {settings['new_tokens']} new tokens, at most {SHAPE.max_rows} rows a step:",
            "",
            markdown(heads, rows),
            "",
            "Ratios with paired bootstrap 95% intervals:",
            "",
            markdown(heads, answers),
            "",
            f"Texts of this package equal to its plain decoding: {sum(run['same'] for run in ours)} of {len(ours)}. "
            f"Look-ups in the corpus: {1e6 * sum(r['lookup_seconds'] for r in looked_up) / steps:.0f} µs a step, "
            f"{100 * share:.1f}% of the time.",
            _about_index(result["index"]),
            *(f"Missing: {LABELS[name]}: {why}." for name, why in cells[0]["missing"].items()),
        ]
    )


def _of(cell: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [run for run in cell["runs"] if run["competitor"] == name]


def _about_index(index: dict[str, Any]) -> str:
    built = "kept from before"
    if index["build_seconds"] is not None:
        built = f"tokenized in {index['tokenize_seconds']:.1f} s and indexed in {index['build_seconds']:.1f} s"
    second = index["second_process"]
    return (
        f"Corpus: {index['tokens']:,} tokens of {index['documents']:,} files, {index['bytes'] / 1e6:.1f} MB, {built}; "
        f"opened in {1e3 * index['open_seconds']:.1f} ms; a second process that has read at 30,000 places of it holds "
        f"{second['own'] / 1e6:.2f} MB of its own."
    )
