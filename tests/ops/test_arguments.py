"""Bad arguments of the ops: the error names the argument, whatever runs afterwards."""

from __future__ import annotations

import math

import pytest
import torch
from ops.contracts.arguments import (
    attention_arguments,
    commit_arguments,
    flatten_arguments,
    merge_arguments,
    sampling_arguments,
    verify_arguments,
    write_arguments,
)

import gsd_kernels as gsd

pytestmark = pytest.mark.quick


def int64(name):
    return lambda a: a[name].long()


BAD_ARGUMENTS = [
    (gsd.dag_attention, attention_arguments, "q", lambda a: a["q"][0], ValueError),
    (gsd.dag_attention, attention_arguments, "q", lambda a: a["q"].int(), TypeError),
    (gsd.dag_attention, attention_arguments, "q", lambda a: a["q"][:, :1].expand(-1, 3, -1, -1), ValueError),
    (gsd.dag_attention, attention_arguments, "k", lambda a: a["k"].float(), TypeError),
    (gsd.dag_attention, attention_arguments, "k", lambda a: a["k"][..., :8], ValueError),
    (gsd.dag_attention, attention_arguments, "v", lambda a: a["v"][:, :, :5], ValueError),
    (gsd.dag_attention, attention_arguments, "ancestor_mask", int64("ancestor_mask"), TypeError),
    (gsd.dag_attention, attention_arguments, "ancestor_mask", lambda a: a["ancestor_mask"][:, :3], ValueError),
    (gsd.dag_attention, attention_arguments, "kv_len", int64("kv_len"), TypeError),
    (gsd.dag_attention, attention_arguments, "kv_len", lambda a: 5, TypeError),
    (gsd.dag_attention, attention_arguments, "kv_start", lambda a: a["kv_start"][:1], ValueError),
    (gsd.dag_attention, attention_arguments, "sliding_window", lambda a: 0, ValueError),
    (gsd.dag_attention, attention_arguments, "chunk", lambda a: 0, ValueError),
    (gsd.dag_attention, lambda: attention_arguments() | {"sliding_window": 3}, "chunk", lambda a: 4, ValueError),
    (gsd.dag_attention, attention_arguments, "sinks", lambda a: torch.zeros(3), ValueError),
    (gsd.dag_attention, attention_arguments, "sinks", lambda a: torch.zeros(2, dtype=torch.int32), TypeError),
    (gsd.dag_attention, attention_arguments, "backend", lambda a: "gpu", ValueError),
    (gsd.sample_rows, sampling_arguments, "logits", lambda a: a["logits"][0], ValueError),
    (gsd.sample_rows, sampling_arguments, "logits", lambda a: a["logits"].int(), TypeError),
    (gsd.sample_rows, sampling_arguments, "positions", int64("positions"), TypeError),
    (gsd.sample_rows, sampling_arguments, "positions", lambda a: a["positions"][:, :1], ValueError),
    (gsd.sample_rows, sampling_arguments, "seed", lambda a: 3, TypeError),
    (gsd.sample_rows, sampling_arguments, "sequence_ids", int64("sequence_ids"), TypeError),
    (gsd.sample_rows, sampling_arguments, "temperature", lambda a: -0.1, ValueError),
    (gsd.sample_rows, sampling_arguments, "temperature", lambda a: math.inf, ValueError),
    (gsd.sample_rows, sampling_arguments, "temperature", lambda a: "1", TypeError),
    (gsd.sample_rows, sampling_arguments, "top_k", lambda a: -1, ValueError),
    (gsd.sample_rows, sampling_arguments, "top_p", lambda a: 1.5, ValueError),
    (gsd.sample_rows, sampling_arguments, "min_p", lambda a: math.nan, ValueError),
    (gsd.verify, verify_arguments, "sampled", int64("sampled"), TypeError),
    (gsd.verify, verify_arguments, "sampled", lambda a: a["sampled"][:, :4], ValueError),
    (gsd.verify, verify_arguments, "eos_ids", lambda a: torch.tensor([1]), TypeError),
    (gsd.verify, verify_arguments, "remaining", lambda a: a["remaining"][:2], ValueError),
    (gsd.verify, verify_arguments, "done", lambda a: a["done"].int(), TypeError),
    (gsd.commit_kv, commit_arguments, "v_caches", lambda a: [], ValueError),
    (gsd.commit_kv, commit_arguments, "accepted_rows", int64("accepted_rows"), TypeError),
    (gsd.commit_kv, commit_arguments, "num_accepted", lambda a: a["num_accepted"][:1], ValueError),
    (gsd.commit_kv, commit_arguments, "kv_len", int64("kv_len"), TypeError),
    (gsd.write_kv, write_arguments, "k_cache", lambda a: a["k_cache"][0], ValueError),
    (gsd.write_kv, write_arguments, "k_cache", lambda a: a["k_cache"].int(), TypeError),
    (gsd.write_kv, write_arguments, "v_cache", lambda a: a["v_cache"][:, :, :5], ValueError),
    (gsd.write_kv, write_arguments, "v_cache", lambda a: a["v_cache"].half(), TypeError),
    (gsd.write_kv, write_arguments, "positions", lambda a: a["positions"].int(), TypeError),
    (gsd.write_kv, write_arguments, "positions", lambda a: a["positions"][:1], ValueError),
    (gsd.write_kv, write_arguments, "k", lambda a: a["k"].half(), TypeError),
    (gsd.write_kv, write_arguments, "k", lambda a: a["k"][..., :3], ValueError),
    (gsd.write_kv, write_arguments, "v", lambda a: a["v"][:, :, :2], ValueError),
    (gsd.write_kv, write_arguments, "backend", lambda a: "cuda", ValueError),
    (gsd.merge, merge_arguments, "frontier", int64("frontier"), TypeError),
    (gsd.merge, merge_arguments, "cand_tokens", lambda a: a["cand_tokens"][:, :, :2], ValueError),
    (gsd.merge, merge_arguments, "cand_log_probs", lambda a: a["cand_log_probs"].double(), TypeError),
    (gsd.merge, merge_arguments, "merge_context", lambda a: 9, ValueError),
    (gsd.merge, merge_arguments, "width", lambda a: 0, ValueError),
    (gsd.flatten, flatten_arguments, "max_rows", lambda a: 129, ValueError),
    (gsd.flatten, flatten_arguments, "max_path", lambda a: 8, ValueError),
]


@pytest.mark.parametrize(
    ("op", "arguments", "name", "bad", "error"), BAD_ARGUMENTS, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_bad_arguments_are_named(op, arguments, name, bad, error):
    good = arguments()
    op(**arguments())
    with pytest.raises(error, match=name):
        op(**{**good, name: bad(good)})


@pytest.mark.parametrize("name", ["sliding_window", "chunk"])
def test_what_goes_by_position_needs_depths(name):
    arguments = attention_arguments()
    for missing in ("row_depths", "node_depths"):
        with pytest.raises(ValueError, match=rf"^{name}: needs row_depths and node_depths"):
            gsd.dag_attention(**{**arguments, missing: None}, **{name: 3})
