"""Tests leave nothing behind: measured step costs go to a directory of their own."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GSD_KERNELS_CACHE", str(tmp_path_factory.mktemp("gsd-cache")))
        yield
