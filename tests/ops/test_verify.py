"""verify on every backend: the walk along the picks, and what the reference accepts."""

from __future__ import annotations

import pytest
import torch
from graphs import STYLES
from ops.contracts.arguments import rows_case
from ops.contracts.backends import ALL, backends
from ops.contracts.graph import (
    check_verify,
)

import gsd_kernels as gsd

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("seed", range(24))
@backends("reference", "cpu", "interpreter", "triton", "cuda")
def test_verify_equals_the_walk(on, seed):
    rows, config, picked = rows_case(seed)
    gen = torch.Generator().manual_seed(seed)
    eos = torch.tensor([[], [3], [2, 5]][seed % 3], dtype=torch.int32)
    remaining = torch.randint(1, 8, (4,), generator=gen, dtype=torch.int32)
    done = torch.tensor([False, False, False, True])
    limits = {"eos_ids": eos, "remaining": remaining, "done": done}
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
    assert lengths[3] == 0 and max(lengths) >= 1


def test_verify_cases_are_not_trivial():
    paths = []
    for seed in range(24):
        rows, config, picked = rows_case(seed)
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


@pytest.mark.parametrize("max_rows", [2, 7, 31, 32, 33, 100])
@pytest.mark.parametrize("style", STYLES)
@backends("cpu", "interpreter", "triton", "cuda")
def test_verify_equals_the_reference(on, max_rows, style):
    config = gsd.GraphConfig(depth=5, width=4, branch=3, max_rows=max_rows)
    check_verify(config, style, STYLES.index(style), on)


@pytest.mark.parametrize("max_rows", [2, 7, 31, 32, 33, 100])
def test_verification_cases_accept_and_finish(max_rows):
    config = gsd.GraphConfig(depth=5, width=4, branch=3, max_rows=max_rows)
    accepted = [check_verify(config, style, STYLES.index(style), ALL["reference"]) for style in STYLES]
    assert torch.cat(accepted).max() > min(2, max_rows - 1) and torch.cat(accepted).min() == 0
