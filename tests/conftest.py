"""Tests leave nothing behind: measured step costs go to a directory of their own. One thread for each process."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)  # the models are tiny, and several test processes share the cores


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GSD_KERNELS_CACHE", str(tmp_path_factory.mktemp("gsd-cache")))
        yield
