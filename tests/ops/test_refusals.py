"""What an op and its operator refuse: one wrong argument, named, before anything is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from ops.contracts.backends import assert_bit_equal, needs_cpu
from ops.contracts.inputs import good, op_inputs
from torch import Tensor

import gsd_kernels as gsd
from gsd_kernels.ops.line import ANY
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


long, half = Tensor.long, Tensor.bfloat16
none: list[Tensor] = []
ALL_OR_NONE = "expected all or none"
#: By operator: arguments, what is in their place (or what they become), and the words of the error.
REFUSED: dict[str, list[tuple[str, Any, str]]] = {
    "merge": [
        ("graph", none, "graph: expected 11 tensors, got 0"),
    ],
    "flatten": [("max_rows", 129, "max_rows"), ("max_path", 8, "max_path")],
    "select_rows": [
        ("seconds", torch.ones(0, dtype=torch.float64), "seconds: expected those of one row"),
        ("max_path", 24, r"max_path: expected 0 \.\.\. 23, got 24"),
    ],
    "update_edge_model": [
        ("process_noise", math.nan, "process_noise: expected a finite number"),
    ],
    "commit_kv": [("num_accepted", last(4), "num_accepted: 4 of 3"), ("kv_len", last(16), "position 16 is outside")],
    "sample_rows": [("seed", Tensor.int, "seed: wrong dtype"), ("logits", Tensor.int, "logits: expected float")],
    "draft_candidates": [("branch", 0, "branch")],
    "ngram_insert": [
        ("ways", 3, "ways: expected a power of two"),
    ],
    "ngram_lookup": [
        ("max_context", 9, "contexts: expected at least 9"),
        ("keys table_tokens table_log_probs", lambda t: t[:, :31].contiguous(), "keys: expected a power of two"),
    ],
    "start_graph": [
        ("out_len", filled(99, 3), "out_len: expected 1 ... 40, got 99"),
    ],
    "feed_rows": [
        ("slots", {"slots": filled(0, 3, 2), "node_depths": None}, "slots"),
        ("node_depths", filled(0, 3, 4), "node_depths: expected at least 6 nodes, got 4"),
    ],
    "feed_chain": [
        ("width", 0, "width"),
    ],
    "commit_text": [
        ("num_accepted", filled(8, 3), "num_accepted: 8 of 7 rows"),
        ("out_len", filled(39, 3), "tokens: position .* outside the text's 40"),
        ("emitted", lambda t: t[:, :5].contiguous(), "emitted: expected at least 7 places, got 5"),
        ("parents", None, f"nodes, parents, .*: {ALL_OR_NONE}"),
    ],
    "learn_source": [
        ("asked", lambda tensors: tensors[1:], "asked: expected 6 tensors of each of 1 ... 64 levels"),
        ("asked", lambda tensors: [*tensors[:5], tensors[5][:1], *tensors[6:]], " tokens: expected size"),
        ("asked", lambda tensors: [*tensors[:-1], tensors[-1].double()], " first_log_probs: wrong dtype"),
    ],
    "history_recall": [
        ("branch", 9, "branch: expected at most 8, got 9"),
        ("first_pick", None, ALL_OR_NONE),
    ],
    "history_append": [
        ("seen", [torch.zeros(2)], "seen: expected 8 or 0 tensors, got 1"),
    ],
    "recall_levels": [
        ("frontier", filled(99, 2, 1), "frontier: node 99 of"),
        ("frontier", filled(0, 2, 5), "width: expected at least the frontier's 5"),
        ("level", -1, "levels: .* from -1"),
    ],
    "corpus_recall": [
        ("branch", 193, "branch: expected 0 ... 192, got 193"),
        ("vocab", 0, "vocab: expected a vocabulary size"),
    ],
    "row_linear": [
        ("weight", half, "weight"),
        ("weight", lambda t: t[:, :16].contiguous(), "weight"),
    ],
    "state_rows": [
        ("decay sums", lambda t: t.repeat(1, 1, 1, 2), "sums: expected one decay, or one a channel"),
        ("parents depths", lambda t: t[:, :2].contiguous(), "parents: of 2 rows, where 3 are given"),
        ("keys updates sums", lambda t: t[:, :-3], "window: no room for 3 rows"),
    ],
    "decoder_rows": [
        ("token_ids", long, "token_ids"),
        ("token_ids", last(61), "token_ids: 61 is outside the vocabulary of 61"),
        ("slots", last(40), "slots: 40 is outside the cache's 40"),
        ("kv_len", last(41), "kv_len: the prefix"),
        ("k_caches", lambda caches: caches[:1], "layers: expected"),
        ("states", [3], r"states: expected layers 0 \.\.\. 2"),
        ("keep", 6, r"keep: expected 0 \.\.\. 5"),
    ],
    "feature_rows": [
        ("features", torch.zeros(2, 5, 31), r"\w+: expected size 31"),
        ("token_ids", last(61), "token_ids: 61 is outside"),
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


TYPED = (  # whose tensors C++ looks at one by one, since they may have gaps, or are of several dtypes
    *("commit_kv", "dag_attention", "decoder_rows", "feature_rows", "row_linear"),
    *("unpack_rows", "write_kv"),
)
LINES = sorted(name for name in TABLE if name not in TYPED)


def mutated(name: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Arguments of which one tensor has another dtype, gaps, a dimension more, or a size twice as large; the words."""
    given, line = arguments_of(name), TABLE[name].line
    known = set("".join(part.letters for part in line.arguments))
    tensors = [
        (argument.name, place, part)
        for argument in line.arguments
        for place, part in ([(None, argument)] if argument.tensors is None else enumerate(argument.tensors))
        if part.sizes is not None
    ]
    for number, (argument, place, part) in enumerate(tensors):
        called, sizes, values = part.name, part.sizes, given.get(argument)
        tensor = values if place is None else values[place] if place < len(values) else None
        if tensor is None:
            continue

        def instead(wrong: Tensor, name: str = argument, place: int | None = place) -> dict[str, Any]:
            values = given[name]
            return given | {name: wrong if place is None else [*values[:place], wrong, *values[place + 1 :]]}

        if part.dtype != "float":
            yield instead(tensor.half()), f" {called}: wrong dtype"
        if tensor.numel() > 1:
            yield instead(torch.stack((tensor, tensor), -1)[..., 0]), f" {called}: must be contiguous"
        if sizes == ANY:
            continue
        yield instead(tensor[None]), f" {called}: expected {len(sizes)} dimensions, got {len(sizes) + 1}"
        for dim, size in enumerate(sizes):
            if size in known or not size.isalpha():
                yield instead(torch.cat((tensor, tensor), dim)), f" {called}: expected size"
            elif any(size in later.sizes for *_, later in tensors[number + 1 :]):
                yield instead(torch.cat((tensor, tensor), dim)), r" \w+: expected size"
            known.add(size)


@pytest.mark.parametrize("name", LINES)
def test_every_tensor_is_held_against_the_line(name):
    found = [refused(name, given, words) for given, words in mutated(name)]
    assert len(found) >= 3  # of one tensor: its dtype, its number of dimensions either way


@pytest.mark.parametrize("name", TABLE)
def test_an_unknown_backend_and_an_unknown_argument_are_refused(name):
    with pytest.raises(gsd.BackendUnavailableError, match="backend"):
        TABLE[name].chosen("gpu", CPU)
    for lacked in TABLE[name].lacks:
        assert TABLE[name].chosen(lacked, CPU) == TABLE[name].chosen("auto", CPU)
    with pytest.raises(TypeError, match=r"expected the arguments .*unknown: .'more'"):
        TABLE[name](more=1)


PUBLIC = (gsd.dag_attention, gsd.sample_rows, gsd.verify, gsd.commit_kv, gsd.write_kv, gsd.merge)


@pytest.mark.parametrize("op", PUBLIC, ids=lambda op: op.__name__)
def test_a_tensor_of_another_dtype_or_shape_is_named(op):
    """In Python, before the reference is asked, or after C++ has refused it."""
    given = good(op) | ({"sliding_window": 5} if op is gsd.dag_attention else {})
    for name, tensor in given.items():
        if isinstance(tensor, Tensor):
            for wrong, backend in product((tensor.to(torch.int16), tensor[None, None], 3), ("reference", "auto")):
                with pytest.raises((TypeError, ValueError), match=name):
                    op(**given | {name: wrong, "backend": backend})


BAD: dict[Any, list[tuple[str, Any, type[Exception]]]] = {
    gsd.dag_attention: [
        ("q", lambda q: q[:, :1].expand(-1, 3, -1, -1), ValueError),
        ("k", lambda k: k[..., :8], ValueError),
        ("ancestor_mask", lambda mask: mask[:, :3], ValueError),
        ("kv_start", lambda start: start[:1], ValueError),
        ("sliding_window", 0, ValueError),
        ("chunk", 0, ValueError),
        ("sinks", torch.zeros(3), ValueError),
        ("backend", "gpu", ValueError),
    ],
    gsd.sample_rows: [
        ("positions", lambda positions: positions[:, :1], ValueError),
        ("positions", lambda positions: positions.to("meta"), ValueError),
        ("temperature", -0.1, ValueError),
        ("temperature", "1", TypeError),
        ("top_k", -1, ValueError),
        ("top_p", 1.5, ValueError),
        ("min_p", math.nan, ValueError),
    ],
    gsd.verify: [
        ("sampled", lambda sampled: sampled[:, :1], ValueError),
        ("remaining", lambda remaining: remaining[:2], ValueError),
    ],
    gsd.commit_kv: [("v_caches", [], ValueError), ("num_accepted", lambda count: count[:1], ValueError)],
    gsd.write_kv: [
        ("v_cache", lambda cache: cache[:, :, :5], ValueError),
        ("k", lambda k: k[..., :3], ValueError),
        ("v", lambda v: v[:, :, :2], ValueError),
        ("backend", "cuda", ValueError),
    ],
    gsd.merge: [
        ("cand_tokens", lambda tokens: tokens[..., :2], ValueError),
        ("cand_tokens", lambda tokens: tokens.to("meta"), ValueError),
        ("merge_context", 9, ValueError),
        ("merge_context", None, TypeError),
        ("width", 0, ValueError),
    ],
    gsd.flatten: [("max_rows", 129, ValueError), ("max_path", 99, ValueError)],
}
BAD_ROWS = [(op, *row) for op, rows in BAD.items() for row in rows]


@pytest.mark.parametrize(
    ("op", "name", "bad", "error"), BAD_ROWS, ids=[f"{op.__name__}-{n}-{i}" for i, (op, n, *_) in enumerate(BAD_ROWS)]
)
def test_bad_arguments_are_named(op, name, bad, error):
    given = good(op)
    op(**good(op))
    for backend in ("reference", "auto"):
        with pytest.raises(error, match=name):
            op(**given | {"backend": backend} | {name: bad(given[name]) if callable(bad) else bad})


@pytest.mark.parametrize("name", ["sliding_window", "chunk"])
def test_what_goes_by_position_needs_depths_and_is_one(name):
    arguments = good(gsd.dag_attention)
    for missing in ("row_depths", "node_depths"):
        with pytest.raises(ValueError, match=rf"^{name}: needs row_depths and node_depths"):
            gsd.dag_attention(**{**arguments, missing: None}, **{name: 3})
    with pytest.raises(ValueError, match="chunk"):
        gsd.dag_attention(**arguments, sliding_window=3, chunk=4)
