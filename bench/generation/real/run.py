"""Everyday work on one model, in this process and those of other engines, with a cache folder of its own.

``real``: one interleaved run of all ways. ``prompt``: the cost of a prompt by its length, and what comes behind it.
``sources``: tokens a step of the history alone, with what was learned of the model and without.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import typer

import gsd_kernels
from gsd_kernels import GraphConfig
from gsd_kernels_cli.busy import Others

from ...lib.environment import environment
from ...lib.report import Columns, table
from ..competitors import timed, warmed_up
from ..names import HF, HISTORY, LABELS, PACKED, plain_of
from ..options import OfPrompt, OfReal, OfSources
from ..pairs import Prompt, endless
from ..peers.race import peers
from ..race import Race, terminable
from ..report import Report, grouped
from .models import Real, bits_of, load_real
from .prompts import LONG, Chat, encoded, read_chats

NAME = "real"
SOURCES = "sources"
DEPTH = 16  # levels at most
NARROW, WIDE = 6, 12  # nodes of a level, up to 16 rows and beyond
Runs = list[dict[str, Any]]
PROMPT = "prompt"
STRIDE = 7  # tokens between the beginnings of two prompts of a length: what was read of one serves no other
WARM_UP_TOKENS = 8
TEMPLATE_TOKENS = 32  # that a chat template may write round an answer


def name_of(given: OfReal) -> str:
    """Of the file of results: README's table is made of the whole run of this benchmark's own model and prompts."""
    places = (given.model, given.draft, given.drafter, given.prompts)
    own = [re.sub(r"[^\w.]+", "-", Path(part).name or str(part)).lower() for part in places if part is not None]
    quick = [] if given.limit is None else ["quick" if given.limit == 1 else f"first-{given.limit}"]
    return "-".join([NAME, given.dtype, *own, *["part"] * bool(given.ways), *quick])


@terminable()
def real(given: OfReal, ways: Sequence[str]) -> tuple[str, Report]:
    """Race the ways, by default all that there are; after every prompt the results so far are written.

    Returns: the name of the file of results, and what is in it.

    Raises:
        KeyboardInterrupt: it was ended before the first prompt was decoded.
        ValueError: a way that there is not, or prompts or models that cannot be read.
    """
    name = given.name or name_of(given)
    chats, tuning = read_chats(given.prompts, given.limit)
    typer.echo(f"{NAME}: loading the model", err=True)
    real = load_real(given.model, given.draft, given.drafter, getattr(torch, given.dtype))
    engines, own = real.engines(given.llama_cpp), real.ways()
    names = _named(ways, real.names(own, engines))
    prompts, others = encoded(chats, real.tokenizer), encoded(tuning, real.tokenizer)
    lengths = [prompt.input_ids.shape[1] for prompt in prompts]
    lengths += [_at_the_end(real, chat, given.new_tokens) for chat in chats if chat.turns]
    report = Report(
        NAME,
        settings={
            "model": real.name,
            "dtype": given.dtype,
            "draft": given.draft,
            "drafter": given.drafter,
            "prompts": "own" if given.prompts else "bench/generation/real/prompts.json",
            "new_tokens": given.new_tokens,
            "rounds": given.rounds,
            "ways": names,
            "ours": HISTORY,
            "against": HF,
        },
        environment=environment(torch.device("cpu")),
        parameters=real.model.num_parameters(),
        prompts={prompt.name: prompt.about() for prompt in prompts},
    )
    asked = {chat.name: chat for chat in chats}

    def following(prompt: Prompt, answer: list[int]) -> Prompt | None:
        chat = asked[prompt.name].answered(real.tokenizer.decode(answer, skip_special_tokens=True))
        if chat is None:
            return None
        asked[chat.name] = chat
        return encoded([chat], real.tokenizer)[0]

    race = Race(
        real.model,
        report,
        given.new_tokens,
        references=lambda way: {"same": HF, "same_as_plain": plain_of(way)},
        following=following,
        ends=real.ends,
        rounds=given.rounds,
        folder=given.out,
        name=name,
    )
    with (
        cold_cache(),
        peers(
            real.model,
            real.shared_draft,
            names,
            others,
            longest=max(lengths),
            new_tokens=given.new_tokens,
            engines=engines,
            ends=real.ends,
        ) as (theirs, notes),
    ):
        report.peers = notes
        if real.packed is not None:
            report.peers |= {PACKED: {"bits": bits_of(real.packed)}}
        known = {**own, **theirs}
        racing, report.missing, report.setup_seconds = warmed_up(
            {name: known[name] for name in names}, others[0].input_ids, lambda _: WARM_UP_TOKENS
        )
        race.run(racing, prompts)
    return name, report


def _at_the_end(real: Real, chat: Chat, new_tokens: int) -> int:
    """Tokens that a chat's last turn can have, for engines that ask for the length before."""
    said = [*chat.messages, *({"role": "user", "content": turn} for turn in chat.turns)]
    (prompt,) = encoded([Chat(chat.name, chat.kind, said)], real.tokenizer)
    return prompt.input_ids.shape[1] + len(chat.turns) * (new_tokens + TEMPLATE_TOKENS)


def _named(wanted: Sequence[str], known: Sequence[str]) -> list[str]:
    for way in wanted:
        if way not in known:
            raise ValueError(f"--ways: {way!r} cannot take part with this model and these engines: {', '.join(known)}")
    return [way for way in known if not wanted or way in wanted]


@contextmanager
def cold_cache() -> Iterator[None]:
    """Nothing that was learned before helps: a folder of the run's own in place of the user's cache."""
    # What costs have been learned is written behind a race, also behind one that is stopped while the folder goes.
    with (
        tempfile.TemporaryDirectory(prefix="gsd-kernels-cold-", ignore_cleanup_errors=True) as cold,
        patch.dict(os.environ, GSD_KERNELS_CACHE=cold),
    ):
        yield


def prompt(given: OfPrompt, lengths: list[int], wanted: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Decode one token, then all, behind every prompt, by everyone in turn: seconds of both.

    Returns: the name of the file of results, and what is in it.
    """
    real = load_real(given.model, None, None, getattr(torch, given.dtype))
    endless(real.model, real.packed)
    engines, own = real.engines(given.llama_cpp), real.ways()
    names = [name for name in real.names(own, engines) if name in wanted]
    text = long_text(real.tokenizer, max(lengths) + 2 * STRIDE * given.rounds)  # [tokens]
    prompts = [Prompt(str(n), PROMPT, text[None, :n]) for n in lengths]
    runs: list[dict[str, Any]] = []
    others = Others()
    sizes = {"longest": max(lengths), "new_tokens": given.new_tokens}
    with cold_cache(), peers(real.model, None, names, prompts[:2], engines=engines, **sizes) as (theirs, notes):
        known = {name: way for name, way in {**own, **theirs}.items() if name in names}
        racing, missing, _ = warmed_up(known, prompts[0].input_ids, lambda _: given.new_tokens)
        order = [*racing]
        for turn, (round_, n) in enumerate((r, n) for r in range(given.rounds) for n in lengths):
            typer.echo(f"{PROMPT}: {n} tokens", err=True)
            first = turn % len(order)
            for way in order[first:] + order[:first]:
                seconds = []
                for place, count in enumerate((1, given.new_tokens)):
                    begin = STRIDE * (2 * round_ + place)
                    seconds.append(timed(racing[way], text[None, begin : begin + n], count, round_).seconds)
                runs.append({"way": way, "length": n, "round": round_, "first": seconds[0], "all": seconds[1]})
        share = others.share()  # while the peers' processes, which are no others, are there
    settings = {key: getattr(given, key) for key in ("new_tokens", "rounds")}
    return f"{PROMPT}-{given.dtype}", {
        "case": PROMPT,
        "settings": {"model": real.name, "dtype": given.dtype, **settings, "lengths": lengths},
        "environment": environment(torch.device("cpu")),
        "peers": notes,
        "missing": missing,
        "others_share": share,
        "runs": runs,
    }


def long_text(tokenizer: Any, length: int) -> Any:
    """The first tokens of the long texts, int64 [length], from their beginning again where they end."""
    texts = [chat.messages[0]["content"] for chat in read_chats()[0] if chat.kind == LONG]
    ids = tokenizer("\n\n".join(texts), return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    return ids.repeat(-(-length // len(ids)))[:length]


def prompt_table(data: dict[str, Any]) -> str:
    """By way and length: milliseconds to the first token, and tokens a second behind it; medians of the rounds."""
    lengths, more = data["settings"]["lengths"], data["settings"]["new_tokens"] - 1

    def cell(way: str, length: int) -> str:
        runs = [run for run in data["runs"] if (run["way"], run["length"]) == (way, length)]
        first = median(run["first"] for run in runs)
        behind = median(run["all"] for run in runs) - first
        return f"{1000 * first:.0f} ms" + (f", {more / behind:.0f}" if behind > 0 else "")

    columns: Columns = {"first token, tokens/s behind it": lambda way: str(LABELS[way])}
    columns |= {str(length): lambda way, length=length: cell(way, length) for length in lengths}
    return table(dict.fromkeys(run["way"] for run in data["runs"]), columns)


def sources(given: OfSources, rows: list[int | str]) -> tuple[str, dict[str, Any]]:
    """The name of the file of results, and what is in it.

    Raises:
        ValueError: packed weights of a model that has none.
    """
    chats, _ = read_chats(given.prompts, given.limit)
    real = load_real(given.model, None, None, getattr(torch, given.dtype))
    if given.packed and real.packed is None:
        raise ValueError("--packed: the model did not come from a GGUF file")
    model = real.packed if given.packed else real.model
    counts = count(model, encoded(chats, real.tokenizer), rows, given.new_tokens)
    own = "bench/generation/real/prompts.json"
    settings = {
        **{"model": real.name, "dtype": given.dtype, "packed": given.packed, "new_tokens": given.new_tokens},
        "prompts": own if given.prompts is None else given.prompts.name,
    }
    about = {"case": SOURCES, "settings": settings, "environment": environment(torch.device("cpu"))}
    parts = [SOURCES, given.dtype, *["packed"] * given.packed]
    return "-".join(parts if given.prompts is None else [*parts, given.prompts.stem]), {**about, "counts": counts}


def shape(rows: int) -> GraphConfig:
    """The shape that has as many rows in every step."""
    width, depth = NARROW if rows <= 16 else WIDE, min(DEPTH, rows - 1)
    return GraphConfig(depth=0, branch=4, max_rows=rows, merge_context=2, history_depth=depth, history_width=width)


def count(model: Any, prompts: list[Any], rows: list[int | str], new_tokens: int) -> Runs:
    """Decode every prompt in every way; of each what it took, and whether the text is plain decoding's."""
    plain: dict[str, list[int]] = {}
    found = []
    ways: dict[str, dict[str, Any]] = {"plain": {"graph_config": "plain"}}
    for each in rows:
        options = {"draft_sources": ("history",), "graph_config": shape(each) if isinstance(each, int) else each}
        what = each if isinstance(each, str) else f"{each} rows"
        ways |= {what: options, f"{what}, not learned": {**options, "learned": False}}
    for way, options in ways.items():
        typer.echo(f"{SOURCES}: {way}", err=True)
        with cold_cache(), gsd_kernels.patch(model, **options, reuse_prefix=False, reuse_history=False) as handle:
            for prompt in prompts:
                ids = prompt.input_ids
                text = model.generate(ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=new_tokens)
                new, stats = text[0, ids.shape[1] :].tolist(), handle.stats
                assert stats is not None
                same = plain.setdefault(prompt.name, new) == new
                about = {"way": way, "prompt": prompt.name, "kind": prompt.kind, "same": same}
                found.append({**about, "tokens": len(new), "steps": stats.steps, "rows": stats.target_rows})
    return found


def sources_table(counts: Runs) -> str:
    """Tokens a step by way and kind of work, and rows a step."""
    ways = grouped(counts, lambda run: run["way"])

    def a_step(what: str, runs: Runs, kind: str | None = None) -> float:
        of = [run for run in runs if kind in (None, run["kind"])]
        return sum(run[what] for run in of) / sum(run["steps"] for run in of)

    columns: Columns = {
        "tokens a step": lambda runs: runs[0]["way"],
        "all": lambda runs: f"{a_step('tokens', runs):.2f}",
        "rows": lambda runs: f"{a_step('rows', runs):.1f}",
        "texts as plain": lambda runs: f"{sum(run['same'] for run in runs)} of {len(runs)}",
    }
    kinds = dict.fromkeys(run["kind"] for run in counts)
    by_kind: Columns = {kind: lambda runs, kind=kind: f"{a_step('tokens', runs, kind):.2f}" for kind in kinds}
    return table(ways.values(), columns | by_kind)
