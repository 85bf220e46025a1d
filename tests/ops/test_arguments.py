"""Bad arguments of the ops: the error names the argument, whatever runs afterwards."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from ops.contracts.arguments import (
    attention_arguments,
    flatten_arguments,
    merge_arguments,
    named_inputs,
    verify_arguments,
)
from torch import Tensor

import gsd_kernels as gsd

pytestmark = pytest.mark.quick

long = Tensor.long, TypeError
whole = Tensor.int, TypeError
half = Tensor.half, TypeError


def part(*size: int, dim: int = -1):
    """Fewer of a dimension than are expected; of no size none of the first one."""
    return (lambda t: t.narrow(dim, 0, *size) if size else t[0]), ValueError


def value(wrong, error=ValueError):
    return (lambda _: wrong), error


#: By op: good arguments; of each that is bad, what becomes of it, and the error.
BAD = {
    gsd.dag_attention: (
        attention_arguments,
        [
            ("q", *part()),
            ("q", *whole),
            ("q", lambda q: q[:, :1].expand(-1, 3, -1, -1), ValueError),
            ("k", Tensor.float, TypeError),
            ("k", *part(8)),
            ("v", *part(5, dim=2)),
            ("ancestor_mask", *long),
            ("ancestor_mask", *part(3, dim=1)),
            ("kv_len", *long),
            ("kv_len", *value(5, TypeError)),
            ("kv_start", *part(1)),
            ("sliding_window", *value(0)),
            ("chunk", *value(0)),
            ("sinks", *value(torch.zeros(3))),
            ("sinks", *value(torch.zeros(2, dtype=torch.int32), TypeError)),
            ("backend", *value("gpu")),
        ],
    ),
    gsd.sample_rows: (
        partial(named_inputs, gsd.sample_rows, 4),
        [
            ("logits", *part()),
            ("logits", *whole),
            ("positions", *long),
            ("positions", *part(1)),
            ("seed", *value(3, TypeError)),
            ("sequence_ids", *long),
            ("temperature", *value(-0.1)),
            ("temperature", *value(math.inf)),
            ("temperature", *value("1", TypeError)),
            ("top_k", *value(-1)),
            ("top_p", *value(1.5)),
            ("min_p", *value(math.nan)),
        ],
    ),
    gsd.verify: (
        verify_arguments,
        [
            ("sampled", *long),
            ("sampled", *part(4)),
            ("eos_ids", *long),
            ("remaining", *part(2)),
            ("done", *whole),
        ],
    ),
    gsd.commit_kv: (
        partial(named_inputs, gsd.commit_kv, 5),
        [("v_caches", *value([])), ("accepted_rows", *long), ("num_accepted", *part(1)), ("kv_len", *long)],
    ),
    gsd.write_kv: (
        partial(named_inputs, gsd.write_kv, 5),
        [
            ("k_cache", *part()),
            ("k_cache", *whole),
            ("v_cache", *part(5, dim=2)),
            ("v_cache", *half),
            ("positions", *whole),
            ("positions", *part(1, dim=0)),
            ("k", *half),
            ("k", *part(3)),
            ("v", *part(2, dim=2)),
            ("backend", *value("cuda")),
        ],
    ),
    gsd.merge: (
        merge_arguments,
        [
            ("frontier", *long),
            ("cand_tokens", *part(2)),
            ("cand_log_probs", Tensor.double, TypeError),
            ("merge_context", *value(9)),
            ("width", *value(0)),
        ],
    ),
    gsd.flatten: (flatten_arguments, [("max_rows", *value(129)), ("max_path", *value(8))]),
}
ROWS = [(op, arguments, *row) for op, (arguments, rows) in BAD.items() for row in rows]


@pytest.mark.parametrize(
    ("op", "good", "name", "bad", "error"),
    ROWS,
    ids=[f"{op.__name__}-{name}-{i}" for i, (op, _, name, *_) in enumerate(ROWS)],
)
def test_bad_arguments_are_named(op, good, name, bad, error):
    given = good()
    op(**good())
    with pytest.raises(error, match=name):
        op(**{**given, name: bad(given.get(name))})


@pytest.mark.parametrize("name", ["sliding_window", "chunk"])
def test_what_goes_by_position_needs_depths_and_is_one(name):
    arguments = attention_arguments()
    for missing in ("row_depths", "node_depths"):
        with pytest.raises(ValueError, match=rf"^{name}: needs row_depths and node_depths"):
            gsd.dag_attention(**{**arguments, missing: None}, **{name: 3})
    with pytest.raises(ValueError, match="chunk"):
        gsd.dag_attention(**arguments, sliding_window=3, chunk=4)
