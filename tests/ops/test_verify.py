"""verify on every backend: the walk along the picks, and what the reference accepts."""

from __future__ import annotations

import pytest
import torch
from ops.contracts.backends import backends
from ops.contracts.graph import rows_case

import gsd_kernels as gsd

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("seed", range(24))
@backends("reference", "cpu", "interpreter", "triton", "cuda")
def test_verify_equals_the_walk(on, seed):
    rows, config, picked, limits = rows_case(seed)
    done, (eos, remaining) = torch.arange(4) == 3, limits.values()
    limits["done"] = done
    got = gsd.verify(on.to(rows), on.to(picked), **on.to(limits), max_path=config.max_path, backend=on.name)
    lengths = []
    for b in range(4):
        path = []
        if not done[b]:
            path = [0]
            while len(path) < remaining[b]:
                token = int(picked[b, path[-1]])
                children = [
                    r
                    for r in range(1, int(rows.num_rows[b]))
                    if rows.parent_rows[b, r] == path[-1] and rows.token_ids[b, r] == token
                ]
                if token in eos.tolist() or not children:
                    break
                path += children
            assert int(got.next_token[b]) == int(picked[b, path[-1]])
        assert got.accepted_rows[b].tolist() == path + [-1] * (config.max_path + 1 - len(path))
        assert int(got.num_accepted[b]) == len(path)
        lengths.append(len(path))
    assert got.accepted_rows.dtype == got.num_accepted.dtype == got.next_token.dtype == torch.int32
    assert lengths[3] == 0 and min(lengths[:3]) >= 1


def test_verify_cases_are_not_trivial():
    paths = []
    for seed in range(24):
        rows, config, picked, _ = rows_case(seed)
        accepted = gsd.verify(
            rows,
            picked,
            eos_ids=torch.zeros(0, dtype=torch.int32),
            remaining=torch.full((4,), 99, dtype=torch.int32),
            done=torch.zeros(4, dtype=torch.bool),
            max_path=config.max_path,
            backend="reference",
        )
        paths += accepted.num_accepted.tolist()
    assert {1, 2, 3, 4} <= set(paths), set(paths)
