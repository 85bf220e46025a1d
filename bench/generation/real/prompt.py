"""The cost of a prompt by its length, and what comes behind it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import typer

from gsd_kernels_cli.busy import Others

from ...lib.environment import environment
from ...lib.report import Columns
from ...lib.report import table as markdown
from ..names import LABELS
from ..options import OfPrompt
from ..pairs import Pair, Prompt, endless
from ..peers.race import peers
from .models import load_real
from .prompts import LONG, read_chats
from .run import cold_cache
from .ways import engines_for, names_of, own_ways

NAME = "prompt"
STRIDE = 7  # tokens between the beginnings of two prompts of a length: what was read of one serves no other


def run(given: OfPrompt, lengths: list[int], wanted: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Decode one token, then all, behind every prompt, by everyone in turn: seconds of both.

    Returns: the name of the file of results, and what is in it.
    """
    real = load_real(given.model, None, None, getattr(torch, given.dtype))
    endless(real.model, real.packed)
    engines, own = engines_for(real, given.llama_cpp), own_ways(real)
    names = [name for name in names_of(real, own, engines) if name in wanted]
    text = long_text(real.tokenizer, max(lengths) + 2 * STRIDE * given.rounds)  # [tokens]
    prompts = [Prompt(str(n), NAME, text[None, :n]) for n in lengths]
    pair = Pair(real.name, real.model, None, prompts)
    runs: list[dict[str, Any]] = []
    others = Others()
    with cold_cache(), peers(pair, names, prompts[:2], new_tokens=given.new_tokens, engines=engines) as (theirs, notes):
        racing = [way for name, way in {**own, **theirs}.items() if name in names and way.decode is not None]
        for way in racing:
            way.decode(text[None, : lengths[0]], given.new_tokens, 0)
        for turn, (round_, n) in enumerate((r, n) for r in range(given.rounds) for n in lengths):
            typer.echo(f"{NAME}: {n} tokens", err=True)
            first = turn % len(racing)
            for way in racing[first:] + racing[:first]:
                seconds = []
                for place, count in enumerate((1, given.new_tokens)):
                    begin = STRIDE * (2 * round_ + place)
                    seconds.append(way.timed(text[None, begin : begin + n], count, round_)[1])
                runs.append({"way": way.name, "length": n, "round": round_, "first": seconds[0], "all": seconds[1]})
        share = others.share()  # while the peers' processes, which are no others, are there
    settings = {key: getattr(given, key) for key in ("new_tokens", "rounds")}
    return f"{NAME}-{given.dtype}", {
        "case": NAME,
        "settings": {"model": real.name, "dtype": given.dtype, **settings, "lengths": lengths},
        "environment": environment(torch.device("cpu")),
        "peers": notes,
        "missing": {way.name: way.missing for way in theirs.values() if way.decode is None},
        "others_share": share,
        "runs": runs,
    }


def long_text(tokenizer: Any, length: int) -> Any:
    """The first tokens of the long texts, int64 [length], from their beginning again where they end."""
    texts = [chat.messages[0]["content"] for chat in read_chats()[0] if chat.kind == LONG]
    ids = tokenizer("\n\n".join(texts), return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    return ids.repeat(-(-length // len(ids)))[:length]


def table(data: dict[str, Any]) -> str:
    """By way and length: milliseconds to the first token, and tokens a second behind it; medians of the rounds."""
    lengths, more = data["settings"]["lengths"], data["settings"]["new_tokens"] - 1

    def cell(way: str, length: int) -> str:
        runs = [run for run in data["runs"] if (run["way"], run["length"]) == (way, length)]
        first = median(run["first"] for run in runs)
        behind = median(run["all"] for run in runs) - first
        return f"{1000 * first:.0f} ms" + (f", {more / behind:.0f}" if behind > 0 else "")

    columns: Columns = {"first token, tokens/s behind it": lambda way: str(LABELS[way])}
    columns |= {str(length): lambda way, length=length: cell(way, length) for length in lengths}
    return markdown(dict.fromkeys(run["way"] for run in data["runs"]), columns)
