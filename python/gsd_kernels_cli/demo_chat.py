"""The demo of the chat model, or of one's own: answers as they stream, a race, texts compared, one step drawn."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gsd_kernels_hf.progress import tracked

from .busy import Others
from .demo_parts import draw, warned
from .options import read_graph_config
from .output import err, out, progress, table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gsd_kernels_cli.comparison import Contender, Run
    from gsd_kernels_cli.drawing import StepPicture

    from .pair import LoadedPair

    Pairs = dict[str, LoadedPair]

QUESTIONS = (
    "Write a short Python function that returns the square of a number.",
    "Now write one that returns the cube of a number.",
)
"""A chat of two turns, answered on the screen: a model of 135M parameters gets them right."""

RACED = (
    "Correct the mistakes and write the text again: Last summer me and my sister goes to the lake evry day, and the "
    "water were so cold that nobody wanted to swimm, but we swimmed anyway.",
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that counts the words of a text, and show how to call it.",
    "Turn into a JSON list with the keys name, age and city: Anna is 31 and lives in Oslo; Ben is 45 and lives in "
    "Ghent; Carla is 28 and lives in Porto.",
)
"""Answered by every way of the race."""

RACE_TOKENS = 64  # at most
DRAWN = "depth=0,width=4,branch=3,max_rows=12,max_path=8,merge_context=2,history_depth=8,history_width=3"
"""Shape of the step that is drawn: one that `auto` chose may hold a single row."""

LOOKUP = 10  # tokens that transformers' prompt lookup drafts at a time
HF, HF_LOOKUP = "transformers", "transformers' prompt lookup"
PLAIN, OURS, DRAFTED = "gsd_kernels, plain", "gsd_kernels, history", "gsd_kernels, draft model"


@dataclass(frozen=True)
class Settings:
    """The options of the command.

    Attributes:
        dtype: ``auto``: as stored; of the chat model float32 and bfloat16.
        graph_config: ``None`` is ``auto``.
        model, draft: one's own, in place of the chat model; see :func:`~gsd_kernels_cli.pair.load_pair`.
        prompts: in place of the demo's: the first two are answered on the screen, all are raced.
    """

    max_new_tokens: int
    dtype: str
    device: str | None
    graph_config: str | None
    backend: str
    quick: bool
    seconds: float
    directory: Path
    model: str | None = None
    draft: str | None = None
    prompts: tuple[str, ...] = ()


def show(settings: Settings) -> tuple[bool, dict[str, Any]]:
    """Show it all; whether a text differs beyond rounding, and the numbers."""
    config = read_graph_config(settings.graph_config or "auto")
    name, pairs = _load(settings)
    first = pairs["bfloat16" if "bfloat16" in pairs else next(iter(pairs))]
    from .versions import versions

    threads = _threads()
    out.print(f"{name}, {first.described}; {threads} threads", style="dim", soft_wrap=True)
    if settings.model is None:
        out.print(f"This model as a folder, for --model and from_pretrained: {_place()}", style="dim", soft_wrap=True)
    report: dict[str, Any] = {
        **{"versions": versions(), "model": name, "device": str(first.device), "threads": threads},
        **{"backend": settings.backend, "dtypes": list(pairs), "graph_config": str(settings.graph_config or "auto")},
    }
    report["answers"] = _talk(first, config, settings)
    report["race"] = None
    if not settings.quick:
        report["race"] = _race(pairs, config, settings)
        _print_race(report["race"])
    report["drawing"] = draw(first.tokenizer, _pictures(first, settings), settings.directory)
    ways = report["race"]["ways"] if report["race"] else []
    return any(way["beyond_rounding"] for way in ways), report


def _load(settings: Settings) -> tuple[str, Pairs]:
    """The model's name, and the model with what drafts for it, by dtype."""
    with progress("loading PyTorch and transformers"):
        import torch

        from gsd_kernels_cli.demo import smollm2

        from .pair import LoadedPair, load_pair, pick_device, quiet_transformers

        quiet_transformers()
        device = pick_device(settings.device)
    if settings.model is not None:
        with progress("loading the model"):
            pair = load_pair(settings.model, settings.draft, dtype=settings.dtype, device=settings.device)
        return Path(settings.model).name, {str(pair.target.dtype).removeprefix("torch."): pair}
    smollm2.folder()  # has a bar of its own
    names = ("float32", "bfloat16") if settings.dtype == "auto" else (settings.dtype,)
    pairs = {}
    with tracked("loading the model", len(names), "dtypes") as update:
        for number, name in enumerate(names):
            update(number, name)
            model, tokenizer = smollm2.load(getattr(torch, name), device)
            pairs[name] = LoadedPair(model, None, tokenizer, ("history",))
    return smollm2.NAME, pairs


def _place() -> Path:
    from gsd_kernels_cli.demo import smollm2

    return smollm2.folder_path()


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _chat(pair: LoadedPair, messages: str | list[dict[str, str]]) -> dict[str, Any]:
    """A chat by the tokenizer's template; without one, its texts, an empty line between them."""
    from gsd_kernels_cli.demo import smollm2

    if pair.tokenizer.chat_template:
        return {name: value.to(pair.device) for name, value in smollm2.chat(pair.tokenizer, messages).items()}
    texts = [messages] if isinstance(messages, str) else [turn["content"] for turn in messages]
    return pair.encode(["\n\n".join(texts)])


def _speculation(pair: LoadedPair, config: Any, settings: Settings) -> dict[str, Any]:
    return {**pair.speculation, "graph_config": pair.shape(config), "backend": settings.backend}


def _talk(pair: LoadedPair, config: Any, settings: Settings) -> list[dict[str, Any]]:
    """Stream the answers of one chat."""
    turns: list[dict[str, str]] = []
    answers = []
    for question in settings.prompts[:2] or QUESTIONS:
        turns.append({"role": "user", "content": question})
        answers.append({"question": question, **_answer(pair, turns, config, settings)})
        turns.append({"role": "assistant", "content": answers[-1]["text"]})
    return answers


def _answer(pair: LoadedPair, turns: list[dict[str, str]], config: Any, settings: Settings) -> dict[str, Any]:
    """Stream one answer."""
    from gsd_kernels_cli import comparison

    from .streaming import StdoutStreamer, is_cut

    inputs, tokenizer = _chat(pair, turns), pair.tokenizer
    out.print(f"\n> {turns[-1]['content']}\n", style="bold", markup=False, soft_wrap=True)
    with ExitStack() as waiting:
        waiting.enter_context(progress("reading the question"))
        streamer = StdoutStreamer(tokenizer, waiting)
        decode = comparison.graph(pair.target, **_speculation(pair, config, settings), streamer=streamer)
        run = comparison.measure(pair.target, decode, inputs, settings.max_new_tokens)
    assert run.stats is not None
    answer = {
        **{"text": tokenizer.decode(run.tokens, skip_special_tokens=True)},
        **{"tokens": len(run.tokens), "seconds": run.seconds, "tokens_per_step": run.stats.tokens_per_step},
    }
    most = settings.max_new_tokens
    cut = f" (cut at {most} tokens)" if is_cut(pair.target, run.tokens, most) else ""
    out.print(
        f"{len(run.tokens)} tokens{cut}, {run.tokens_per_second:.0f} a second with the question read, "
        f"{run.stats.tokens_per_step:.1f} a step",
        style="dim",
        soft_wrap=True,
    )
    return answer


def _race(pairs: Pairs, config: Any, settings: Settings) -> dict[str, Any]:
    """All ways in both dtypes on the same prompts, one after the other."""
    from gsd_kernels_cli import comparison

    contenders: dict[tuple[str, str], Contender] = {}
    for dtype, pair in pairs.items():
        model = pair.target
        contenders[dtype, HF] = comparison.plain(model)
        contenders[dtype, HF_LOOKUP] = comparison.plain(model, prompt_lookup_num_tokens=LOOKUP)
        if dtype != "float32":  # whose text is held against transformers' own
            contenders[dtype, PLAIN] = comparison.undrafted(model, backend=settings.backend)
        ours = OURS if pair.draft is None else DRAFTED
        contenders[dtype, ours] = comparison.graph(model, **_speculation(pair, config, settings))
    first = next(iter(pairs.values()))
    prompts = [_chat(first, question) for question in settings.prompts or RACED]
    names = {_named(dtype, way): (dtype, way) for dtype, way in contenders}
    length, total = min(RACE_TOKENS, settings.max_new_tokens), len(contenders) * (len(prompts) + 1)
    done = 0
    with tracked("race", total, "answers") as update:

        def started(name: str, prompt: int) -> None:
            nonlocal done
            update(done, name)
            done += 1

        others = Others()
        rounds = comparison.race(
            first.target,
            {name: contenders[key] for name, key in names.items()},
            prompts,
            length,
            seconds=settings.seconds,
            started=started,
        )
        share = others.share()
    ways = []
    with tracked("comparing the texts", len(names), "ways") as update:
        for dtype, way in names.values():
            update(len(ways))
            ways.append(_way(pairs[dtype].target, dtype, way, rounds, prompts))
    return {
        "prompts": len(rounds),
        "asked": len(prompts),
        "seconds": settings.seconds,
        "max_new_tokens": length,
        "threads": _threads(),
        "others_share": share,
        "ways": ways,
    }


def _named(dtype: str, way: str) -> str:
    return f"{way}, in {dtype}"


def _way(
    model: PreTrainedModel, dtype: str, way: str, rounds: list[dict[str, Run]], prompts: list[Any]
) -> dict[str, Any]:
    from gsd_kernels_cli.comparison import first_divergence, tally

    runs = [runs[_named(dtype, way)] for runs in rounds]
    ours = way in (OURS, DRAFTED)
    against = PLAIN if ours and dtype != "float32" else HF
    divergences = []
    if way != against:
        for inputs, runs_, run in zip(prompts, rounds, runs, strict=False):
            divergences.append(
                first_divergence(model, inputs["input_ids"], runs_[_named(dtype, against)].tokens, run.tokens)
            )
    tokens, seconds = sum(len(run.tokens) for run in runs), sum(run.seconds for run in runs)
    return {
        "dtype": dtype,
        "way": way,
        "tokens_per_second": tokens / seconds,
        "tokens_per_forward": tokens / sum(run.target_forwards or 0 for run in runs),
        "compared_with": against if divergences else None,
        **tally(divergences),
        **({} if ours or way == PLAIN else {"beyond_rounding": 0}),  # transformers' own ways are no promise of ours
    }


def _print_race(report: dict[str, Any]) -> None:
    from gsd_kernels_cli.comparison import sameness

    out.print(f"\n{_title(report)}", style="bold", soft_wrap=True)
    busy = warned(report["others_share"])
    rows = table("", "<", "tokens/s", "×", "tokens/step", "<same texts")
    base = {way["dtype"]: way["tokens_per_second"] for way in report["ways"] if way["way"] == HF}
    for way in report["ways"]:
        ratio = way["tokens_per_second"] / base[way["dtype"]]
        rows.add_row(
            way["dtype"],
            way["way"],
            f"{way['tokens_per_second']:.1f}",
            "" if way["way"] == HF else "–" if busy else f"{ratio:.2f}",
            f"{way['tokens_per_forward']:.2f}",
            sameness(way, report["prompts"]) if way["compared_with"] else "",
        )
    out.print(rows)
    wrong = sum(way["beyond_rounding"] for way in report["ways"])
    if wrong:
        err.print(f"{wrong} texts differ beyond rounding: a bug", style="bold red")
    out.print(
        "(×: against transformers' plain decoding in the same dtype. Texts are held against its texts too; in bfloat16 "
        "those that were drafted against this package's plain ones, since its operator rounds otherwise.)",
        style="dim",
        soft_wrap=True,
    )


def _title(report: dict[str, Any]) -> str:
    """Say what was raced, and why not all that was asked."""
    done, asked, most = report["prompts"], report["asked"], report["max_new_tokens"]
    prompts = f"The same {done} prompts" if done > 1 else "The same prompt"
    late = "" if done == asked else f" (time is up after {done} of {asked} prompts: --seconds {report['seconds']:.0f})"
    return f"{prompts}, {most} tokens at most, every way in turn{late}:"


def _pictures(pair: LoadedPair, settings: Settings) -> list[StepPicture]:
    """The graphs of an answer's steps, by one shape."""
    from gsd_kernels_cli import comparison
    from gsd_kernels_cli.drawing import StepPicture

    config = read_graph_config(settings.graph_config or DRAWN)
    steps: list[StepPicture] = []

    def observe(record: Any) -> None:
        if record.graph is not None:
            steps.append(StepPicture.of(record))

    options = {"draft_sources": ("history",), "graph_config": config, "backend": settings.backend}
    decode = comparison.graph(pair.target, **options, observer=observe)
    prompt = (settings.prompts or RACED)[0]
    with progress("decoding once more, to draw a step"):
        decode(_chat(pair, prompt), min(RACE_TOKENS, settings.max_new_tokens))
    return steps
