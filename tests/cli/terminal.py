"""The command line in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from gsd_kernels_cli.app import app


def run(*arguments, stdin=None):
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)


def one_line_error(result, code):
    assert result.exit_code == code
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("gsd-kernels: error: ")]
    assert len(lines) == 1 and "Traceback" not in result.stderr
    return lines[0]
