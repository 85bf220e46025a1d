"""The build backend: setuptools', which asks for torch where there is none to compile the operators against.

The libraries use LibTorch's stable ABI, so the torch of an isolated build need not be the one that runs them later.
"""

from __future__ import annotations

import runpy

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 (hooks of PEP 517 and PEP 660)


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    """Return what ``pip install .`` puts into its isolated build."""
    return build_meta.get_requires_for_build_wheel(config_settings) + runpy.run_path("setup.py")["missing_torch"]()


get_requires_for_build_editable = get_requires_for_build_wheel
