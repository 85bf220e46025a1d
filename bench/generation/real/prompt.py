"""``gsd-kernels bench prompt``: what a prompt costs by its length, and what comes behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gsd_kernels_cli import options, values

from ...lib.options import RESULTS, Dtype, Name, Out, listed, quiet, show
from ..names import HF, HISTORY, PACKED_HISTORY, check_ways
from .options import LlamaCpp, Model

NAME = "prompt"
LENGTHS = (16, 64, 256, 1024, 4096)
WAYS = (
    *(HF, "openvino-int8", "openvino-int8-lookup", "llama-cpp-q8_0", "llama-cpp-q8_0-lookup"),
    *(HISTORY, PACKED_HISTORY),
)
STRIDE = 7  # tokens between the beginnings of two prompts of a length: what was read of one serves no other


def command(
    place: options.ModelPlace = None,
    model: Model = None,
    lengths: Annotated[
        list[str] | None,
        typer.Option(
            "--lengths", metavar="N,…", help=f"Tokens of the prompts. Default: {', '.join(map(str, LENGTHS))}."
        ),
    ] = None,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Of the weights here.")] = Dtype.bfloat16,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=2, help="Of every text.")] = 128,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Each with other texts.")] = 3,
    ways: Annotated[
        list[str] | None,
        typer.Option("--ways", metavar="NAME,…", help=f"Default: {', '.join(WAYS)}, where they are there."),
    ] = None,
    llama_cpp: LlamaCpp = None,
    out: Out = RESULTS,
    name: Name = None,
) -> None:
    """Milliseconds to the first token by a prompt's length, and tokens a second behind it, everyone in turn.

    Prompts are pieces of the long texts among the chats of real; all texts have the same length.
    """
    model = values.named_once(place, model)
    check_ways(listed(ways))
    sizes = [_size(each) for each in listed(lengths) or map(str, LENGTHS)]
    import torch

    from ...lib.environment import environment
    from ...lib.report import write
    from .models import load_real

    quiet()
    real = load_real(model, None, None, getattr(torch, dtype.value))
    settings = {"model": real.name, "dtype": dtype.value, "new_tokens": new_tokens, "rounds": rounds, "lengths": sizes}
    found = measure(real, sizes, new_tokens, rounds, listed(ways) or WAYS, llama_cpp)
    data = {"case": NAME, "settings": settings, "environment": environment(torch.device("cpu")), **found}
    show([write(out, name or f"{NAME}-{dtype.value}", data)], table(data), data["missing"])


def _size(given: str) -> int:
    if not given.isdecimal() or int(given) < 2:
        raise ValueError(f"--lengths: expected numbers of tokens, at least 2, got {given!r}")
    return int(given)


def measure(
    real: Any, lengths: list[int], new_tokens: int, rounds: int, wanted: tuple[str, ...], llama_cpp: Path | None
) -> dict[str, Any]:
    """Decode one token, then all, behind every prompt, by everyone in turn: seconds of both."""
    from gsd_kernels_cli.busy import Others

    from ..pairs import Pair, Prompt
    from ..peers.race import Peers
    from .run import cold_cache
    from .ways import engines_for, names_of, own_ways

    for one in filter(None, (real.model, real.packed)):  # all texts have the same length
        one.generation_config.eos_token_id, one.generation_config.pad_token_id = None, 0
    engines = engines_for(real, llama_cpp)
    names = [name for name in names_of(real, engines) if name in wanted]
    text = long_text(real.tokenizer, max(lengths) + 2 * STRIDE * rounds)  # [tokens]
    prompts = [Prompt(str(n), NAME, text[None, :n]) for n in lengths]
    pair = Pair(real.name, real.model, None, prompts)
    runs: list[dict[str, Any]] = []
    others = Others()
    with cold_cache(), Peers(pair, names, prompts[:2], new_tokens=new_tokens, engines=engines) as peers:
        racing = [way for way in [*own_ways(real, names), *peers.competitors] if way.decode is not None]
        for way in racing:
            way.decode(text[None, : lengths[0]], new_tokens, 0)
        for turn, (round_, n) in enumerate((r, n) for r in range(rounds) for n in lengths):
            typer.echo(f"{NAME}: {n} tokens", err=True)
            first = turn % len(racing)
            for way in racing[first:] + racing[:first]:
                seconds = []
                for place, count in enumerate((1, new_tokens)):
                    begin = STRIDE * (2 * round_ + place)
                    seconds.append(way.timed(text[None, begin : begin + n], count, round_)[1])
                runs.append({"way": way.name, "length": n, "round": round_, "first": seconds[0], "all": seconds[1]})
        share = others.share()  # while the peers' processes, which are no others, are there
    missing = {way.name: way.missing for way in peers.competitors if way.decode is None}
    return {"peers": peers.notes, "missing": missing, "others_share": share, "runs": runs}


def long_text(tokenizer: Any, length: int) -> Any:
    """The first tokens of the long texts, int64 [length], from their beginning again where they end."""

    from .prompts import LONG, read_chats

    texts = [chat.messages[0]["content"] for chat in read_chats()[0] if chat.kind == LONG]
    ids = tokenizer("\n\n".join(texts), return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    return ids.repeat(-(-length // len(ids)))[:length]


def table(data: dict[str, Any]) -> str:
    """By way and length: milliseconds to the first token, and tokens a second behind it; medians of the rounds."""
    from statistics import median

    from ...lib.report import markdown
    from ..names import label

    lengths, more = data["settings"]["lengths"], data["settings"]["new_tokens"] - 1
    lines = []
    for way in dict.fromkeys(run["way"] for run in data["runs"]):
        cells = []
        for length in lengths:
            runs = [run for run in data["runs"] if (run["way"], run["length"]) == (way, length)]
            first = median(run["first"] for run in runs)
            behind = median(run["all"] for run in runs) - first
            cells.append(f"{1000 * first:.0f} ms" + (f", {more / behind:.0f}" if behind > 0 else ""))
        lines.append([str(label(way)), *cells])
    return markdown(["first token, tokens/s behind it", *map(str, lengths)], lines)
