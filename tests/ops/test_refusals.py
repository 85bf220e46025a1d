"""What an op and its operator refuse: one wrong argument, named, before anything is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields
from functools import cache, partial
from typing import Any

import pytest
import torch
from ops.contracts.backends import assert_bit_equal, needs_cpu
from ops.contracts.inputs import (
    attention_arguments,
    flatten_arguments,
    merge_arguments,
    named_inputs,
    op_inputs,
    verify_arguments,
)
from ops.contracts.ngram import KNOWN
from torch import Tensor

import gsd_kernels as gsd
from gsd_kernels.ops.table import all_ops

pytestmark = [pytest.mark.quick, needs_cpu]
TABLE, CPU = all_ops(), torch.device("cpu")


def filled(value: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.full(shape, value, dtype=dtype)


def last(value: int) -> Callable[[Tensor], Tensor]:
    """The last row's numbers replaced."""

    def change(t: Tensor) -> Tensor:
        t = t.clone()
        t[-1] = value
        return t

    return change


def graph_of_one() -> list[Tensor]:
    config = gsd.GraphConfig(depth=1, width=2, branch=2, max_rows=4)
    return [*gsd.TokenGraph.empty(1, config, "cpu").tensors()]


long, double, half = Tensor.long, Tensor.double, Tensor.bfloat16
none: list[Tensor] = []
ALL_OR_NONE = "expected all or none"
#: By operator: arguments, what is in their place (or what they become), and the words of the error.
REFUSED: dict[str, list[tuple[str, Any, str]]] = {
    "merge": [
        ("graph", none, "graph: expected 11 tensors, got 0"),
        ("cand_tokens", filled(0, 2, 2, 2), "cand_tokens: expected size"),
        ("merge_context", 9, "merge_context"),
    ],
    "flatten": [("max_rows", 129, "max_rows"), ("max_path", 8, "max_path")],
    "select_rows": [
        ("weights", torch.zeros(3, dtype=torch.float64), "weights: expected size"),
        ("seconds", torch.ones(0, dtype=torch.float64), "seconds: expected those of one row"),
        ("max_path", 24, r"max_path: expected 0 \.\.\. 23, got 24"),
        ("max_rows", 0, r"max_rows: expected 1 \.\.\. 128, got 0"),
        ("max_rows", 129, "max_rows"),
    ],
    "update_edge_model": [
        ("picked", lambda t: t[:, :2], "picked: expected size"),
        ("process_noise", math.nan, "process_noise: expected a finite number"),
    ],
    "verify": [("remaining", filled(0, 3), "remaining: expected size")],
    "commit_kv": [("num_accepted", last(4), "num_accepted: 4 of 3"), ("kv_len", last(16), "position 16 is outside")],
    "sample_rows": [("seed", Tensor.int, "seed: wrong dtype"), ("logits", Tensor.int, "logits: expected float")],
    "draft_candidates": [("branch", 0, "branch")],
    "ngram_insert": [
        ("ways", 3, "ways: expected a power of two"),
        ("valid", filled(1, 2, 3, dtype=torch.bool), "valid: expected size"),
    ],
    "ngram_lookup": [
        ("max_context", 9, "contexts: expected at least 9"),
        ("keys table_tokens table_log_probs", lambda t: t[:, :31].contiguous(), "keys: expected a power of two"),
    ],
    "perturb_candidates": [("positions", filled(0, 2, 4), "positions: expected size")],
    "start_graph": [
        ("out_len", lambda t: t[:1], "out_len"),
        ("out_len", filled(99, 3), "out_len: expected 1 ... 40, got 99"),
    ],
    "feed_rows": [
        ("slots", {"slots": filled(0, 3, 2), "node_depths": None}, "slots"),
        ("kv_len", filled(0, 2), "kv_len"),
        ("node_depths", filled(0, 3, 4), "node_depths: expected at least 6 nodes, got 4"),
    ],
    "feed_chain": [
        ("width", 0, "width"),
        ("cached", filled(30, 3), "end: expected 30 ... 40"),
    ],
    "accepted_path": [
        ("accepted_rows", lambda t: t[:1], "num_accepted: expected size"),
        ("node_ids", filled(0, 3, 3), "node_ids: expected size"),
    ],
    "commit_text": [
        ("num_accepted", filled(8, 3), "num_accepted: 8 of 7 rows"),
        ("out_len", filled(39, 3), "tokens: position .* outside the text's 40"),
        ("emitted", lambda t: t[:, :5].contiguous(), "emitted: expected at least 7 places, got 5"),
        ("parents", None, f"nodes, parents, .*: {ALL_OR_NONE}"),
    ],
    "learn_source": [
        ("picked", long, "picked: wrong dtype"),
        ("tokens", [filled(0, 3, 1, 4)], "node_ids: expected 1 ... 64 levels"),
        ("log_probs", lambda levels: [levels[0][:1], *levels[1:]], "log_probs"),
        ("first_tokens", lambda levels: [filled(0, 1), *levels[1:]], "first_tokens"),
    ],
    "history_recall": [
        ("history", KNOWN["usual"].build()[0].tensors()[:10], "history: expected 14 or 11 tensors, got 10"),
        ("parents", filled(0, 2, 1), "parents: expected size"),
        ("nodes", filled(0, 3, 1), "nodes: expected size 2"),
        ("branch", 9, "branch: expected at most 8, got 9"),
        ("sizes", [4, 8, 3], "sizes: expected 4, got 3"),
        ("first_pick", None, ALL_OR_NONE),
    ],
    "history_append": [
        ("history", KNOWN["usual"].build()[0].tensors(), "history: expected 10 tensors, got 11"),
        ("counts", filled(0, 3), "counts: expected size"),
        ("seen", [torch.zeros(2)], "seen: expected 8 or 0 tensors, got 1"),
    ],
    "recall_levels": [
        ("graph", graph_of_one(), "token_ids: expected size 2"),
        ("frontier", filled(99, 2, 1), "frontier: node 99 of"),
        ("frontier", filled(0, 2, 5), "width: expected at least the frontier's 5"),
        ("level", -1, "levels: .* from -1"),
        ("levels", 0, "levels: expected at least 1"),
        ("width", 0, "width: expected at least the frontier's 1"),
        ("merge_context", 9, "merge_context"),
        ("seed", None, ALL_OR_NONE),
        ("sequence_ids", filled(0, 3), "sequence_ids"),
    ],
    "corpus_recall": [
        ("following", filled(0, 2), "following: expected size"),
        ("branch", 193, "branch: expected 0 ... 192, got 193"),
        ("vocab", 0, "vocab: expected a vocabulary size"),
    ],
    "row_linear": [
        ("x weight", double, "x: expected"),
        ("weight", half, "weight"),
        ("weight", lambda t: t[:, :16].contiguous(), "weight"),
    ],
    "state_rows": [
        ("value", double, "value"),
        ("decay", lambda t: t.repeat(1, 1, 1, 2), "decay"),
        ("beta", lambda t: t[:, :2], "beta"),
        ("parents", long, "parents"),
        ("parents", lambda t: t[:, :2], "parents: of 2 rows, where 3 are given"),
        ("keys updates sums", lambda t: t[:, :-3], "window: no room for 3 rows"),
    ],
    "decoder_rows": [
        ("token_ids", long, "token_ids"),
        ("token_ids", last(61), "token_ids: 61 is outside the vocabulary of 61"),
        ("slots", last(40), "slots: 40 is outside the cache's 40"),
        ("node_depths", lambda t: t[:1].expand(3, -1), "node_depths"),
        ("kv_len", last(41), "kv_len: the prefix"),
        ("head", half, "head: expected the dtype of the embedding"),
        ("k_caches", lambda caches: caches[:1], "layers: expected"),
        ("states", [3], r"states: expected layers 0 \.\.\. 2"),
        ("keep", 6, r"keep: expected 0 \.\.\. 5"),
    ],
    "feature_rows": [
        ("features", torch.zeros(2, 5, 31), "features: expected"),
        ("features", double, "features: "),
        ("token_ids", last(61), "token_ids: 61 is outside"),
        ("slots", last(40), "slots: 40 is outside"),
        ("k_caches", none, "layers: expected .* two caches and a window for each"),
        ("keep", 6, r"keep: expected 0 \.\.\. 5"),
    ],
}


def written(name: str, given: dict[str, Any]) -> list[Tensor]:
    """What the operator writes in place."""
    marked = [a.name for a in TABLE[name].operator._schema.arguments if a.alias_info and a.alias_info.is_write]
    lists = [value if isinstance(value, list) else [value] for value in map(given.get, marked)]
    return [tensor for tensors in lists for tensor in tensors if tensor is not None]


def refused(name: str, given: dict[str, Any], match: str) -> None:
    tensors = written(name, given)
    before = [t.clone() for t in tensors]
    with pytest.raises(RuntimeError, match=match):
        TABLE[name].operator(**given)
    assert_bit_equal(tensors, before)


INPUTS = cache(op_inputs)


def arguments_of(name: str) -> dict[str, Any]:
    given = deepcopy(INPUTS()[name])
    return dict(zip((a.name for a in TABLE[name].operator._schema.arguments), given, strict=False))


ROWS = [(name, *row) for name, rows in REFUSED.items() for row in rows]


@pytest.mark.parametrize(
    ("name", "argument", "wrong", "match"),
    ROWS,
    ids=["-".join((n, at, why)) for n, at, _, why in ROWS],
)
def test_a_wrong_argument_is_named_and_nothing_is_written(name, argument, wrong, match):
    given = arguments_of(name)
    if not isinstance(wrong, dict):
        wrong = {at: wrong(given[at]) if callable(wrong) else wrong for at in argument.split()}
    refused(name, given | wrong, match)


CHANGES = {"wrong dtype": Tensor.half, "must be contiguous": lambda t: torch.stack((t, t), -1)[..., 0]}
FIELDS = [field.name for field in fields(gsd.TokenGraph)]
#: Whose arguments are said by a line of csrc/torch_ops.
LINES = (
    *("merge", "flatten", "verify", "start_graph", "feed_rows", "feed_chain", "accepted_path", "commit_text"),
    *("history_recall", "history_append", "recall_levels", "corpus_recall", "select_rows", "update_edge_model"),
    *("ngram_insert", "ngram_lookup", "perturb_candidates", "mix_candidates"),
)


@pytest.mark.parametrize("match", CHANGES)
@pytest.mark.parametrize("name", LINES)
def test_every_tensor_is_held_against_the_line(name, match):
    """A graph is a list: its order is the fields'."""
    given, found = arguments_of(name), 0
    for argument, value in given.items():
        parts = value if isinstance(value, list) else [value]
        for place, tensor in enumerate(parts):
            wrong = CHANGES[match](tensor) if isinstance(tensor, Tensor) else tensor
            if wrong is tensor or (match == "must be contiguous" and wrong.is_contiguous()):
                continue
            said = FIELDS[place] if argument == "graph" else r"\w+" if isinstance(value, list) else argument
            changed = [*parts[:place], wrong, *parts[place + 1 :]] if isinstance(value, list) else wrong
            refused(name, given | {argument: changed}, f" {said}: {match}")
            found += 1
    assert found > 2


@pytest.mark.parametrize("name", ["merge", "start_graph", "recall_levels"])
def test_a_field_of_another_size_is_named(name):
    free = {"token_ids", "ancestor_mask", "edge_targets"}  # whose last size says that of others
    for place, field in enumerate(FIELDS):
        given = arguments_of(name)
        given["graph"][place] = torch.cat((given["graph"][place],) * 2, -1)
        if field not in free:
            refused(name, given, f" {field}: expected size")


@pytest.mark.parametrize("name", TABLE)
def test_an_unknown_backend_and_an_unknown_argument_are_refused(name):
    with pytest.raises(gsd.BackendUnavailableError, match="backend"):
        TABLE[name].chosen("gpu", CPU)
    for lacked in TABLE[name].lacks:
        assert TABLE[name].chosen(lacked, CPU) == TABLE[name].chosen("auto", CPU)
    with pytest.raises(TypeError, match=r"expected the arguments .*unknown: .'more'"):
        TABLE[name](more=1)


wide = Tensor.long, TypeError
whole = Tensor.int, TypeError
narrow = Tensor.half, TypeError


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
            ("ancestor_mask", *wide),
            ("ancestor_mask", *part(3, dim=1)),
            ("kv_len", *wide),
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
            ("positions", *wide),
            ("positions", *part(1)),
            ("seed", *value(3, TypeError)),
            ("sequence_ids", *wide),
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
            ("sampled", *wide),
            ("sampled", *part(4)),
            ("eos_ids", *wide),
            ("remaining", *part(2)),
            ("done", *whole),
        ],
    ),
    gsd.commit_kv: (
        partial(named_inputs, gsd.commit_kv, 5),
        [("v_caches", *value([])), ("accepted_rows", *wide), ("num_accepted", *part(1)), ("kv_len", *wide)],
    ),
    gsd.write_kv: (
        partial(named_inputs, gsd.write_kv, 5),
        [
            ("k_cache", *part()),
            ("k_cache", *whole),
            ("v_cache", *part(5, dim=2)),
            ("v_cache", *narrow),
            ("positions", *whole),
            ("positions", *part(1, dim=0)),
            ("k", *narrow),
            ("k", *part(3)),
            ("v", *part(2, dim=2)),
            ("backend", *value("cuda")),
        ],
    ),
    gsd.merge: (
        merge_arguments,
        [
            ("frontier", *wide),
            ("cand_tokens", *part(2)),
            ("cand_log_probs", Tensor.double, TypeError),
            ("merge_context", *value(9)),
            ("width", *value(0)),
        ],
    ),
    gsd.flatten: (flatten_arguments, [("max_rows", *value(129)), ("max_path", *value(8))]),
}
BAD_ROWS = [(op, arguments, *row) for op, (arguments, rows) in BAD.items() for row in rows]


@pytest.mark.parametrize(
    ("op", "good", "name", "bad", "error"),
    BAD_ROWS,
    ids=[f"{op.__name__}-{name}-{i}" for i, (op, _, name, *_) in enumerate(BAD_ROWS)],
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
