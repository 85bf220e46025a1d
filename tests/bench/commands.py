"""The benchmarks' command line in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from gsd_kernels_bench.cli import app


def bench(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output
