"""The cases: single ops at every point of a grid, beside their peers.

``attention``: one layer's attention of a verified tree over a cache, the prefix and the ancestors that each row's mask
names. ``merge``: the graph ops of one step, all levels of merging, unrolling, and walking the target's picks; no model
takes part. ``sample``: picking a token at every row, the target's picks and the draft's candidates. ``commit``: moving
the accepted rows' keys and values of all layers behind the prefix.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from gsd_kernels import (
    GraphConfig,
    Rows,
    TokenGraph,
    commit_kv,
    dag_attention,
    draft_candidates,
    flatten,
    merge,
    sample_rows,
    verify,
)
from gsd_kernels.config import MAX_CONTEXT
from gsd_kernels.graph import pack_bits
from gsd_kernels.ops.commit_kv.api import COMMIT
from gsd_kernels.ops.dag_attention import cuda as attention_cuda
from gsd_kernels.ops.dag_attention.api import ATTENTION
from gsd_kernels.ops.flatten.api import FLATTEN
from gsd_kernels.ops.merge.api import MERGE
from gsd_kernels.ops.sampling import warped_log_probs
from gsd_kernels.ops.sampling.api import DRAFT, LOG_PROBS, SAMPLE
from gsd_kernels.ops.verify.api import VERIFY

from ..lib.report import Missing, lacking
from ..lib.runner import Op, Peer, Settings, ready
from ..lib.shapes import SHAPES

TOKENS = 200  # candidates to merge come from this many tokens, so that some do
BRANCH = 4  # candidates that are drafted
COMMIT_ROWS, PREFIX = 64, 256  # of a step, and cached before them

#: rows → the drafted shape whose best rows they are
CONFIGS = {
    16: GraphConfig(depth=5, width=4, branch=3, max_rows=16),
    32: GraphConfig(depth=6, width=8, branch=4, max_rows=32),
    64: GraphConfig(depth=6, width=16, branch=4, max_rows=64),
    128: GraphConfig(depth=8, width=16, branch=8, max_rows=128),
}


MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T=0.7": {"temperature": 0.7},
    "T=0.7, top-k 50, top-p 0.9": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
}


def attention(settings: Settings) -> Iterator[Op]:
    """Every shape × prefix × rows."""
    rows = settings.pick(settings.rows, (1, 16), (1, 8, 16, 32, 64), (1, 8, 16, 32, 64, 128))
    prefixes = settings.pick(settings.prefixes, (256,), (1024, 4096), (1024, 4096, 8192, 32768))
    for point in itertools.product(settings.shape_names(), prefixes, rows):
        yield attention_op(settings, *point)


def attention_op(settings: Settings, name: str, prefix: int, rows: int) -> Op:
    """The attention of so many rows behind a prefix."""
    device, dtype, shape = settings.device, settings.dtype, SHAPES[name]
    gen = torch.Generator().manual_seed(0)

    def new(heads: int, length: int) -> Tensor:
        return torch.randn(1, heads, length, shape.head_dim, generator=gen).to(device, dtype)

    q = new(shape.num_attention_heads, rows)
    k, v = (new(shape.num_key_value_heads, prefix + rows) for _ in range(2))
    tree = torch.eye(rows, dtype=torch.bool)  # the rows that each row of a random tree sees: [R, R]
    for row in range(1, rows):
        tree[row] |= tree[int(torch.randint(max(0, row - 8), row, (), generator=gen))]
    tree = tree.to(device)
    visible = torch.cat([torch.ones(rows, prefix, dtype=torch.bool, device=device), tree], 1)
    mask, kv_len = pack_bits(tree)[None], torch.tensor([prefix], dtype=torch.int32, device=device)

    def refused(backend: str) -> str | None:
        """Why a backend does not run here, or not with these tensors."""
        if backend == "cuda":
            try:
                attention_cuda.check(q, k, v)
            except (TypeError, ValueError) as error:
                return str(error)
        return None

    return Op(
        ATTENTION,
        lambda backend: dag_attention(q, k, v, mask, kv_len, backend=backend),
        right=dag_attention(q.float(), k.float(), v.float(), mask, kv_len, backend="reference"),
        tolerance=8 * torch.finfo(dtype).eps if dtype != torch.float32 else ATTENTION.tolerance,
        refused=refused,
        peers=attention_peers(q, k, v, visible, quick=settings.quick),
        shape=name,
        parameters={"rows": rows, "prefix": prefix},
        bytes_moved=2 * q.nbytes + k.nbytes + v.nbytes + mask.nbytes,
    )


class Step:
    """One step's graph ops on fixed random candidates."""

    def __init__(self, config: GraphConfig, device: torch.device, batch: int = 1) -> None:
        gen = torch.Generator().manual_seed(0)
        self.config, self.graph = config, TokenGraph.empty(batch, config, device)
        self.max_path = int(config.max_path or 0)

        def ints(*size: int, fill: int = 0) -> Tensor:
            return torch.full(size, fill, dtype=torch.int32, device=device)

        self.begin = ints(batch), ints(batch, MAX_CONTEXT, fill=-1)  # root and the tokens before it
        self.levels = []
        for width in [1] + [config.width] * (config.depth - 1):
            scores = torch.randn(batch, width, TOKENS, generator=gen).mul(2).log_softmax(-1)
            log_probs, tokens = scores.topk(config.branch)
            self.levels.append((tokens.to(device, torch.int32), log_probs.to(device)))
        self.picks = torch.randint(0, TOKENS, (batch, config.max_rows), generator=gen).to(device, torch.int32)
        self.limits = {"eos_ids": ints(0), "remaining": ints(batch, fill=1000), "done": ints(batch).bool()}

    def merge(self, backend: str) -> tuple[Tensor, ...]:
        """All levels, from an empty graph."""
        self.graph.reset(*self.begin)
        frontier = self.graph.root_frontier()
        for level, (tokens, log_probs) in enumerate(self.levels):
            options = {"level": level, "width": self.config.width, "config": self.config, "backend": backend}
            frontier = merge(self.graph, frontier, tokens, log_probs, **options).node_ids
        return self.graph.token_ids, self.graph.parents, self.graph.edge_targets, self.graph.num_merges

    def flatten(self, backend: str) -> Rows:
        return flatten(self.graph, self.config.max_rows, self.max_path, backend=backend)

    def verify(self, rows: Rows, backend: str) -> tuple[Tensor, ...]:
        return verify(rows, self.picks, **self.limits, max_path=self.max_path, backend=backend).tensors()

    def ops(self) -> list[Op]:
        """The ops of a step after one another."""
        self.merge("reference")
        rows = self.flatten("reference")
        graph, row_bytes = self.graph, sum(t.nbytes for t in rows.tensors())
        merged = sum(t.nbytes for t in (*graph.tensors(), *(t for level in self.levels for t in level)))
        edges = graph.edge_targets.nbytes + graph.edge_log_probs.nbytes + graph.token_ids.nbytes
        about: dict[str, Any] = {
            "shape": "token graph",
            "parameters": {"rows": self.config.max_rows},
            "peers": {"others": lacking("no other library has this operation")},
        }
        return [
            Op(MERGE, self.merge, operation="merge, all levels", bytes_moved=merged, **about),
            Op(FLATTEN, lambda backend: self.flatten(backend).tensors(), bytes_moved=edges + row_bytes, **about),
            Op(VERIFY, lambda backend: self.verify(rows, backend), bytes_moved=row_bytes + self.picks.nbytes, **about),
        ]


def merging(settings: Settings) -> Iterator[Op]:
    """Merging of a whole draft, unrolling and verification, by the rows that are kept."""
    for rows_kept in settings.pick(settings.rows, (16, 64), tuple(CONFIGS), tuple(CONFIGS)):
        if rows_kept not in CONFIGS:
            raise ValueError(f"--rows: merge has graphs for {', '.join(map(str, CONFIGS))} rows, not {rows_kept}")
        yield from Step(CONFIGS[rows_kept], settings.device).ops()


def sampling(settings: Settings) -> Iterator[Op]:
    """Every vocabulary × rows × way of sampling, and drafting candidates."""
    grid = settings.pick(settings.rows, (1, 16), (1, 8, 16, 64), (1, 8, 32, 64, 128))
    vocabularies: dict[int, str] = {}
    for name in settings.shape_names():
        vocabularies.setdefault(SHAPES[name].vocab_size, name)
    for (vocabulary, name), rows in itertools.product(vocabularies.items(), grid):
        yield from sampling_ops(settings, name, vocabulary, rows)


def sampling_ops(settings: Settings, name: str, vocabulary: int, rows: int) -> Iterator[Op]:
    """The ops on so many rows of logits."""
    device, gen = settings.device, torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(1, rows, vocabulary, generator=gen)).to(device, settings.dtype)
    positions = torch.arange(rows, dtype=torch.int32, device=device)[None]
    options = {
        "seed": torch.tensor(7, dtype=torch.int64, device=device),
        "sequence_ids": torch.zeros(1, dtype=torch.int32, device=device),
    }
    about = {"shape": name, "parameters": {"rows": rows, "vocabulary": vocabulary}, "bytes_moved": logits.nbytes}
    for operation, warpers in MODES.items():
        yield Op(
            SAMPLE,
            lambda backend, warpers=warpers: sample_rows(logits, positions, backend=backend, **options, **warpers),
            peers=sampling_peers(logits[0], **warpers),
            alike=warpers["temperature"] == 0.0,  # random picks are the tests' matter
            operation=f"sample_rows {operation}",
            **about,
        )

    def log_probs(backend: str) -> Tensor:
        return warped_log_probs(logits, backend=backend, **MODES["T=0.7, top-k 50, top-p 0.9"])

    yield Op(
        LOG_PROBS,
        log_probs,
        checked=lambda backend: log_probs(backend).exp(),  # most are -inf
        tolerance=1e-4,
        operation="warped_log_probs",
        **about,
    )

    def draft(backend: str) -> tuple[Tensor, Tensor]:
        return draft_candidates(logits, positions, branch=BRANCH, backend=backend, **options)

    yield Op(
        DRAFT,
        draft,
        checked=lambda backend: draft(backend)[1],  # log-probabilities: of ties either
        tolerance=1e-3,
        peers={"torch_topk": ready(lambda: logits.float().log_softmax(-1).topk(BRANCH))},
        alike=False,
        operation=f"draft_candidates, branch {BRANCH}",
        **about,
    )


Caches = list[list[Tensor]]
"""Keys, then values, [B, Hkv, S, D] a layer."""


def random_caches(
    shape: LlamaConfig, device: torch.device, dtype: torch.dtype, gen: torch.Generator, rows: int, batch: int = 1
) -> Caches:
    """Of all layers, the prefix and ``rows`` rows of a step, the same in every layer."""
    size = (batch, shape.num_key_value_heads, PREFIX + rows, shape.head_dim)
    source = torch.randn(size, generator=gen).to(device, dtype)
    return [[source.clone() for _ in range(shape.num_hidden_layers)] for _ in range(2)]


def commit_op(caches: Caches, rows: Tensor, count: Tensor, **about: Any) -> Op:
    """The accepted rows [B, P] behind the prefix of every layer; what is compared are copies of the caches."""

    def commit(backend: str, caches: Caches = caches) -> tuple[Tensor, ...]:
        kv_len = torch.full_like(count, PREFIX)
        commit_kv(*caches, rows, count, kv_len, backend=backend)
        return (kv_len, *caches[0], *caches[1])

    before = copy.deepcopy(caches)
    return Op(COMMIT, commit, lambda backend: commit(backend, copy.deepcopy(before)), **about)


def committing(settings: Settings) -> Iterator[Op]:
    """Every shape × number of accepted rows; ``--rows`` names these numbers."""
    grid = settings.pick(settings.rows, (2, 8), (1, 4, 8, 16), (1, 4, 8, 16))
    for name in settings.shape_names():
        gen = torch.Generator().manual_seed(0)
        caches = random_caches(SHAPES[name], settings.device, settings.dtype, gen, COMMIT_ROWS)
        yield from (commit_entry(name, caches, accepted, gen) for accepted in grid)


def commit_entry(name: str, caches: Caches, accepted: int, gen: torch.Generator) -> Op:
    """The commit of so many rows of a shape's caches."""
    if not 1 <= accepted <= COMMIT_ROWS:
        raise ValueError(f"--rows: commit accepts 1 … {COMMIT_ROWS} rows, not {accepted}")
    first, layers = caches[0][0], len(caches[0])
    path = torch.cat([torch.zeros(1), 1 + torch.randperm(COMMIT_ROWS - 1, generator=gen)[: accepted - 1].sort()[0]])
    rows = path.to(first.device, torch.int32)[None]

    def layer_by_layer() -> None:
        source_rows = rows[0].long() + PREFIX
        for cache in (*caches[0], *caches[1]):
            cache[:, :, PREFIX : PREFIX + accepted] = cache.index_select(2, source_rows)

    return commit_op(
        caches,
        rows,
        torch.full((1,), accepted, dtype=torch.int32, device=first.device),
        peers={"torch_per_layer": ready(layer_by_layer)},
        alike=False,
        shape=name,
        parameters={"accepted": accepted, "layers": layers},
        bytes_moved=2 * 2 * layers * accepted * first[0, :, 0].nbytes,
    )


CASES: dict[str, Callable[[Settings], Iterator[Op]]] = {
    "attention": attention,
    "merge": merging,
    "sample": sampling,
    "commit": committing,
}


# Other people's kernels at the same work.

Call = Callable[[], Any]


def attention_peers(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, quick: bool) -> dict[str, Peer]:
    """Attention under an arbitrary mask.

    Their masks are made beforehand and not timed; ours is read as it comes from ``flatten``.

    Args:
        q: [1, Hq, R, D].
        k, v: [1, Hkv, S, D], exactly as long as there are visible positions.
        visible: bool [R, S].
        quick: whether nothing is compiled that takes long.
    """
    makers = {"sdpa_mask": _sdpa, "flex_attention": _flex, "flash_attn": _flash_attn, "flashinfer": _flashinfer}
    found: dict[str, Peer] = {name: partial(make, q, k, v, visible) for name, make in makers.items()}
    slow = {"flex_attention": lacking("compiling it takes longer than --quick allows")}
    return found | slow if quick else found


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Call:
    bias = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, float("-inf"))
    attend, grouped = torch.nn.functional.scaled_dot_product_attention, q.shape[1] != k.shape[1]
    return partial(attend, q, k, v, attn_mask=bias, enable_gqa=grouped)


def _flex(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, row, key: visible[row, key], None, None, *visible.shape, device=str(q.device))
    attend, grouped = torch.compile(flex_attention, dynamic=False), q.shape[1] != k.shape[1]
    return partial(attend, q, k, v, block_mask=mask, enable_gqa=grouped)


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Call:
    if importlib.util.find_spec("flash_attn") is None:
        raise Missing("not installed (and it has no mask for trees: only a chain could be compared)")
    causal = torch.ones_like(visible).tril(visible.shape[1] - visible.shape[0])
    if not torch.equal(visible, causal):
        raise Missing("it has no mask for trees")
    from flash_attn import flash_attn_func

    q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    return lambda: flash_attn_func(q, k, v, causal=True).transpose(1, 2)


def _needs_flashinfer(tensor: Tensor) -> None:
    if tensor.device.type != "cuda":
        raise Missing("it needs a GPU")
    if importlib.util.find_spec("flashinfer") is None:
        raise Missing("not installed")


def _flashinfer(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Call:
    _needs_flashinfer(q)
    import flashinfer

    rows, keys, values = q[0].transpose(0, 1).contiguous(), k[0], v[0]
    attend = partial(flashinfer.single_prefill_with_kv_cache, custom_mask=visible, kv_layout="HND")
    return lambda: attend(rows, keys, values).transpose(0, 1)[None]


def sampling_peers(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> dict[str, Peer]:
    """Picking a token from logits [R, V] with PyTorch, in the order of operations of transformers' warpers."""
    if temperature == 0.0:
        return {"torch_argmax": ready(lambda: logits.argmax(-1))}

    def draw(scores: Tensor) -> Tensor:
        return torch.multinomial(scores.float().softmax(-1), 1)

    if top_k == 0 and top_p == 1.0:
        return {"torch_multinomial": ready(lambda: draw(logits / temperature))}

    def cut_by_sort() -> Tensor:
        scores = logits / temperature
        scores = scores.masked_fill(scores < scores.topk(top_k).values[:, -1:], float("-inf"))
        ordered, order = scores.sort(descending=False)
        drop = ordered.softmax(-1).cumsum(-1) <= 1.0 - top_p
        drop[:, -1] = False
        return draw(scores.masked_fill(drop.scatter(1, order, drop), float("-inf")))

    def cut_inside_topk() -> Tensor:
        values, tokens = (logits / temperature).topk(top_k)
        probs = values.softmax(-1)
        kept = torch.where(probs.cumsum(-1) - probs < top_p, probs, 0.0)
        return tokens.gather(1, torch.multinomial(kept.float(), 1))

    def flashinfer_sampling() -> Call:
        _needs_flashinfer(logits)
        from flashinfer.sampling import top_k_top_p_sampling_from_logits as sample

        return lambda: sample(logits.float() / temperature, top_k, top_p, filter_apply_order="top_k_first")

    made = {"torch_sort": ready(cut_by_sort), "torch_topk": ready(cut_inside_topk)}
    return {**made, "flashinfer_sampling": flashinfer_sampling}
