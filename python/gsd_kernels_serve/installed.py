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
    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < FIRST:
        raise ImportError(
            f"serve: needs transformers {FIRST[0]}.{FIRST[1]} or newer, whose server reads answers as they come; "
            f"{version} is installed: {cure('serving', '--upgrade')}"
        )
    if util.find_spec("transformers.cli.serving.completion") is None:
        part = "transformers.cli.serving.completion"
        raise ImportError(f"serve: transformers {version} has no {part}; 5.15 to 5.23 have")
