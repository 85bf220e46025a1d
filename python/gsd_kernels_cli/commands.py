"""A group of commands whose errors are one line."""

from __future__ import annotations

import math
import os
import subprocess
from typing import Any

import typer
from typer.core import TyperGroup

from .output import FAILURE, INTERRUPTED, USAGE, err, show_replacements


class Commands(TyperGroup):
    """Commands whose errors are one line on stderr, unless ``--debug`` asks for the traceback.

    The library refuses arguments by ``ValueError`` and ``TypeError``, which therefore mean bad usage.
    """

    def main(self, *args: Any, **extra: Any) -> Any:
        show_replacements()
        return super().main(*args, **extra)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        for param in getattr(command, "params", ()):
            param.callback = param.callback or finite
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            err.print("gsd-kernels: interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except (ValueError, TypeError, OSError, RuntimeError, ImportError, subprocess.SubprocessError) as error:
            if ctx.params.get("debug"):
                raise
            message = self._as_typed(ctx, " ".join(str(error).split()) or type(error).__name__)
            whose = f"rank {os.environ['RANK']}: " if err.quiet else ""
            err.quiet = False  # errors are said by every rank
            err.print(f"gsd-kernels: error: {whose}{message}")
            raise typer.Exit(USAGE if isinstance(error, (ValueError, TypeError)) else FAILURE) from None

    def _as_typed(self, ctx: Any, message: str) -> str:
        """An error's text with the option in place of the library's argument that it begins with."""
        argument, colon, rest = message.partition(":")
        command = self.get_command(ctx, ctx.invoked_subcommand or "")
        for param in getattr(command, "params", ()):
            if param.name == argument.replace("_tokenizer", "_model") and param.opts[0].startswith("-"):
                return f"{param.opts[0]}{colon}{rest}"
        return message


def finite(_: Any, param: Any, value: Any) -> Any:
    """The number of an option. ``nan`` passes all bounds, and ``inf`` those that have no other end.

    Raises:
        ValueError: it is neither finite nor the default.
    """
    if isinstance(value, float) and not math.isfinite(value) and value != param.default:
        raise ValueError(f"{param.opts[0]}: expected a finite number, got {value}")
    return value
