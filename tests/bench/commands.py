"""The benchmarks' command line in this process, and what stages on a GPU leave."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from gsd_kernels_bench.cli import app


def bench(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def record(folder: Path, name: str) -> dict:
    """A stage's record."""
    return json.loads((folder / f"{name}.json").read_text())
