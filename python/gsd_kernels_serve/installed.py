"""A check that this environment has the server that is built upon."""

from __future__ import annotations

from importlib import util

import transformers

from gsd_kernels_hf.extras import cure

FIRST = (5, 15)
"""transformers' first release whose server is assembled from parts and reads answers as they come."""

PACKAGES = ("accelerate", "fastapi", "openai", "pydantic", "uvicorn")


def check_installed() -> None:
    """Check packages and versions before a model is loaded.

    Raises:
        ImportError: something is missing or too old; the message names it and the cure.
    """
    missing = [name for name in PACKAGES if util.find_spec(name) is None]
    if missing:
        raise ImportError(f"serve: {', '.join(missing)} missing: {cure('serving')}")
    version, part = transformers.__version__, "transformers.cli.serving.completion"
    if tuple(int(number) for number in version.split(".")[:2]) < FIRST or util.find_spec(part) is None:
        raise ImportError(
            f"serve: needs transformers {FIRST[0]}.{FIRST[1]} or newer, whose server reads answers as they come, and "
            f"has {part}; {version} is installed: {cure('serving', '--upgrade')}"
        )
