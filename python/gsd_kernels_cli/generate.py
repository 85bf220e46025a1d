"""``gsd-kernels generate``: text from a prompt."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Annotated

import typer

from . import options
from .demo import smollm2
from .output import err, progress, table

STATS = ("none", "table", "json")


def command(
    *,
    asked: options.Asked,
    models: options.Models,
    ranks: options.Ranks,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt before its continuation.")] = False,
    max_new_tokens: options.MaxNewTokens = 128,
    graph_config: options.GraphOption = None,
    criterion: options.CriterionOption = "exact",
    backend: options.Backend = "auto",
    sampling: options.Sampling,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Print text as it is accepted (a single prompt).")
    ] = True,
    stats: Annotated[str, options.choice(None, "Statistics on stderr; json is its last line.", STATS)] = "none",
) -> None:
    """Generate text by graph-structured speculative decoding.

    The prompt comes from the arguments, --prompt-file or stdin; the continuation goes to stdout. Sampling options that
    are not given keep the model's own generation config. Without MODEL: the model of chat answers, or the embedded pair
    continues where that is not installed, or heads, a drafter or a corpus of the pair are named.
    """
    model, texts = asked.read(models, ranks, stdin=True)
    config, chat = options.read_graph_config(graph_config), asked.chat
    if not texts:
        raise ValueError("prompt: give one as an argument, by --prompt-file or on stdin")
    answers = model is None and not (models.draft_heads or models.drafter or models.corpus or ranks.tp)
    if answers and smollm2.why_missing() is None:
        pair, chat = models.load_chat_model(), True
        told = f"{smollm2.NAME} answers"
    else:
        with progress("loading the models"):
            pair = models.load(model, tp_timeout=ranks.timeout)
        told = "the embedded pair continues Python source"
    if model is None:
        err.print(f"gsd-kernels: {told}; MODEL or --model names another model")
    inputs = pair.encode(texts, chat)
    if pair.tokenizer.chat_template and not chat:
        err.print("gsd-kernels: this model has a chat template: --chat answers, without it text is continued")
    streams = stream and len(texts) == 1
    if streams and echo:
        print(texts[0], end="", flush=True)
    from gsd_kernels_hf import generate

    from .streaming import StdoutStreamer

    with ExitStack() as waiting:
        waiting.enter_context(progress("reading the prompt" if streams else "generating"))
        result = generate(
            pair.target,
            **inputs,
            **pair.padding,
            **pair.speculation,
            **sampling.arguments(),
            graph_config=pair.shape(config),
            criterion=criterion,
            backend=backend,
            max_new_tokens=max_new_tokens,
            streamer=StdoutStreamer(pair.tokenizer, waiting) if streams else None,
            return_dict_in_generate=True,
        )
    if not streams:
        new = result.sequences[:, inputs["input_ids"].shape[1] :]
        continued = pair.tokenizer.batch_decode(new, skip_special_tokens=True)
        for number, (prompt, text) in enumerate(zip(texts, continued, strict=True), 1):
            if len(texts) > 1:
                print(f"==> {number} <==")
            print(prompt + text if echo else text)
    if stats == "json":
        err.print(json.dumps(result.stats.as_dict()))
    elif stats == "table":
        err.print(table(["", "<"], result.stats.table()))
