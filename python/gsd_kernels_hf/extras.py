"""Optional packages by the extra of pyproject.toml that names them, and what installs them."""

from __future__ import annotations

import re
from importlib import metadata

DISTRIBUTION = "gsd-kernels"


def packages(extra: str) -> list[str]:
    """The packages that an extra needs, as pip takes them: ``["accelerate>=1.1", "gguf>=0.17"]``."""
    try:
        needed = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # sources on the path, not installed
        return []
    named = re.compile(rf"extra == ['\"]{re.escape(extra)}['\"]")
    return sorted(one.partition(";")[0].strip() for one in needed if named.search(one.partition(";")[2]))


def cure(extra: str, *options: str) -> str:
    """The line that installs an extra's packages: by their names, since this package is on no index, or in a clone.

    Args:
        extra: of pyproject.toml.
        options: of pip, for both.
    """
    pip = " ".join(["pip install", *options])
    clone = f"{pip} -e '.[{extra}]'"
    names = " ".join(f"'{name}'" for name in packages(extra))
    return f"{pip} {names} (in a clone of this repository: {clone})" if names else f"in a clone: {clone}"
