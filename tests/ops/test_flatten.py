"""flatten of any graph, on every backend."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.contracts.backends import ALL, backend_param, cases
from ops.contracts.graph import (
    check_flatten_of_any_graph,
)

pytestmark = pytest.mark.quick

COMPILED = backend_param("cpu").marks[0]


@COMPILED
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 12))
def test_any_graph_is_flattened(seed, max_rows, max_path):
    check_flatten_of_any_graph(seed, max_rows, min(max_path, max_rows - 1), ALL["cpu"])


SEEDS = {"cpu": range(20), "interpreter": range(3), "triton": range(20), "cuda": range(20)}


@cases("seed", {name: [(str(seed), seed) for seed in seeds] for name, seeds in SEEDS.items()})
def test_any_graph_is_flattened_by_kernels(on, seed):
    check_flatten_of_any_graph(seed, 24, 6, on)
