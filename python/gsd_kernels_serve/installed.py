"""A check that this environment has the server that is built upon."""

from __future__ import annotations

from importlib import util

import transformers

from gsd_kernels_hf.extras import cure

FIRST = (5, 6)
"""transformers' first release whose server is assembled from parts, ``/v1/completions`` among them."""

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
            f"serve: needs transformers {FIRST[0]}.{FIRST[1]} or newer, whose server is made of parts; {version} is "
            f"installed: {cure('serving', '--upgrade')}"
        )
    if util.find_spec("transformers.cli.serving.completion") is None:
        raise ImportError(f"serve: transformers {version} has no transformers.cli.serving.completion; 5.6 to 5.23 have")
