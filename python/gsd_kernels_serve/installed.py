"""A check that this environment has the server that is built upon."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

from transformers.utils.versions import require_version

from gsd_kernels_hf.extras import cure, packages


def check_installed() -> None:
    """Check the extra's packages and versions before a model is loaded.

    Raises:
        ImportError: something is missing or too old; the message names it and the cure.
    """
    for needed in packages("serving"):
        try:
            require_version(needed)
        except (ImportError, PackageNotFoundError) as error:
            raise ImportError(f"serve: {' '.join(str(error).split())}: {cure('serving', '--upgrade')}") from error
