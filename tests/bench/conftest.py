"""Stages of a GPU, rehearsed on a CPU."""

from __future__ import annotations

import pytest

from gsd_kernels_bench.gpu.stages import Call, stage_named
from gsd_kernels_bench.gpu.work import Work


@pytest.fixture
def work(tmp_path):
    def make(name: str, seconds: float = 600.0, **options) -> Work:
        return Work(stage_named(name), Call(tmp_path, tmp_path, rehearse=True, **options), seconds)

    return make
