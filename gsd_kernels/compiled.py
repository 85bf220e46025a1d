"""The compiled ops: their schemas under ``torch.ops.gsd_kernels``, shape functions, and the libraries behind them.

One schema an op serves the CPU and the CUDA library; corpus_recall, history_append, history_recall, recall_levels,
row_linear, select_rows, state_commit, state_rows, update_edge_model and write_kv exist on the CPU only.
Importing this loads what setup.py built beside this file and costs about a millisecond; nothing is compiled here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .graph import TokenGraph, num_words

LIBRARIES = {"cpu": "_cpu.abi3.so", "cuda": "_cuda.abi3.so"}

_WARPERS = (
    "float temperature, int top_k, float top_p, float min_p, "
    "Tensor? temperatures=None, Tensor? top_ks=None, Tensor? top_ps=None, Tensor? min_ps=None"
)
SCHEMAS = (
    "merge(Tensor(a!)[] graph, Tensor frontier, Tensor cand_tokens, Tensor cand_log_probs, int level, int width, "
    "int merge_context, float log_sibling_ratio, float log_min_prob) -> (Tensor, Tensor, Tensor, Tensor)",
    "flatten(Tensor token_ids, Tensor edge_targets, Tensor edge_log_probs, int max_rows, int max_path) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "verify(Tensor token_ids, Tensor parent_rows, Tensor depths, Tensor ancestor_mask, Tensor num_rows, "
    "Tensor sampled, Tensor eos_ids, Tensor remaining, Tensor done, int max_path) -> (Tensor, Tensor, Tensor)",
    "commit_kv(Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, Tensor accepted_rows, Tensor num_accepted, "
    "Tensor(c!) kv_len) -> ()",
    f"sample_rows(Tensor logits, Tensor positions, Tensor seed, Tensor sequence_ids, {_WARPERS}) -> Tensor",
    "draft_candidates(Tensor logits, Tensor positions, int branch, Tensor seed, Tensor sequence_ids, "
    f"{_WARPERS}, bool noise=True) -> (Tensor, Tensor)",
    f"warped_log_probs(Tensor logits, {_WARPERS}) -> Tensor",
    "dag_attention(Tensor q, Tensor k, Tensor v, Tensor ancestor_mask, Tensor kv_len, Tensor? kv_start, "
    "Tensor? row_depths, Tensor? node_depths, float scale, float? softcap, int? sliding_window, int? chunk=None, "
    "Tensor? sinks=None) -> (Tensor, Tensor)",
    "decoder_rows(Tensor token_ids, Tensor positions, Tensor slots, Tensor ancestor_mask, Tensor node_depths, "
    "Tensor kv_len, Tensor kv_start, Tensor embedding, Tensor[] layers, int[] kinds, Tensor[] scales, "
    "Tensor final_norm, Tensor head, "
    "Tensor inv_freq, Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, int[] windows, int heads, float eps, "
    "float rope_scale, int[] states, int keep) -> (Tensor, Tensor, Tensor)",
    "feature_rows(Tensor token_ids, Tensor features, Tensor positions, Tensor slots, Tensor ancestor_mask, "
    "Tensor node_depths, Tensor kv_len, Tensor kv_start, Tensor embedding, Tensor[] layers, int[] kinds, "
    "Tensor[] scales, Tensor feature_norm, bool normed_residual, Tensor final_norm, Tensor head, Tensor inv_freq, "
    "Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, int[] windows, int heads, float eps, float rope_scale, int keep) "
    "-> (Tensor, Tensor, Tensor)",
    "ngram_insert(Tensor(a!) keys, Tensor(b!) table_tokens, Tensor(c!) table_log_probs, Tensor contexts, "
    "Tensor tokens, Tensor log_probs, Tensor valid, int max_context, int ways) -> ()",
    "ngram_lookup(Tensor keys, Tensor table_tokens, Tensor table_log_probs, Tensor contexts, int max_context, "
    "int ways) -> (Tensor, Tensor, Tensor)",
    "perturb_candidates(Tensor tokens, Tensor log_probs, Tensor positions, Tensor seed, Tensor sequence_ids) -> Tensor",
    "mix_candidates(Tensor tokens, Tensor log_probs, Tensor other_tokens, Tensor other_log_probs, Tensor weight, "
    "Tensor? index=None) -> (Tensor, Tensor)",
    "ngram_remember(Tensor(a!) keys, Tensor(b!) table_tokens, Tensor(c!) table_log_probs, Tensor token_ids, "
    "Tensor parent_rows, Tensor depths, Tensor num_rows, Tensor tail, Tensor tokens, Tensor log_probs, "
    "int max_context, int ways) -> ()",
    "ngram_recall(Tensor keys, Tensor table_tokens, Tensor table_log_probs, Tensor token_ids, Tensor contexts, "
    "Tensor depths, Tensor nodes, int branch, int max_context, int ways, Tensor? first_pick, Tensor? seed, "
    "Tensor? sequence_ids) -> (Tensor, Tensor, Tensor)",
    "calibrate_candidates(Tensor log_probs, Tensor log_ratio, Tensor? index, Tensor? edges) -> Tensor",
    "learn_source(Tensor nodes, Tensor picked, Tensor[] node_ids, Tensor[] tokens, Tensor[] log_probs, "
    "Tensor[] index, Tensor[] first_tokens, Tensor[] first_log_probs, Tensor start, Tensor(a!) shares, "
    "Tensor(b!) counts, Tensor(c!) weights, Tensor? prior, Tensor(d!)? hits, Tensor(e!)? claimed, "
    "Tensor(f!)? log_ratio, float prior_count, float memory) -> ()",
    "select_rows(Tensor token_ids, Tensor depths, Tensor edge_targets, Tensor edge_log_probs, Tensor num_accepted, "
    "Tensor weights, Tensor? seconds, float row_bonus, int max_rows, int max_path) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "update_edge_model(Tensor token_ids, Tensor depths, Tensor edge_targets, Tensor edge_log_probs, "
    "Tensor num_accepted, Tensor nodes, Tensor picked, Tensor weights, Tensor covariance, Tensor prior, "
    "float process_noise) -> (Tensor, Tensor)",
    "history_recall(Tensor[] history, Tensor token_ids, Tensor parents, Tensor contexts, Tensor depths, Tensor nodes, "
    "int branch, int[] sizes, Tensor? first_pick, Tensor? seed, Tensor? sequence_ids) -> (Tensor, Tensor, Tensor)",
    "history_append(Tensor(a!) text, Tensor(b!) length, Tensor(c!) heads, Tensor(d!) previous, Tensor tokens, "
    "Tensor counts) -> ()",
    "recall_levels(Tensor[] history, Tensor(a!)[] graph, Tensor frontier, Tensor? log_ratio, int[] sizes, int level, "
    "int levels, int width, int merge_context, float log_sibling_ratio, float log_min_prob, Tensor? first_pick, "
    "Tensor? seed, Tensor? sequence_ids) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "row_linear(Tensor x, Tensor weight, int kind=-1, Tensor? scales=None) -> Tensor",
    "unpack_rows(Tensor weight, int kind, Tensor? scales, int inputs, Tensor? rows, Tensor like) -> Tensor",
    "start_graph(Tensor(a!)[] graph, Tensor tokens, Tensor out_len, Tensor kv_start) -> Tensor",
    "feed_rows(Tensor token_ids, Tensor depths, Tensor? slots, Tensor kv_len, Tensor kv_start, "
    "Tensor(a!)? node_depths, int first_slot, int shift, int vocab, bool wide) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "feed_chain(Tensor tokens, Tensor end, Tensor(a!) cached, int width) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "accepted_path(Tensor accepted_rows, Tensor num_accepted, Tensor next_token, Tensor token_ids, Tensor node_ids) "
    "-> (Tensor, Tensor)",
    "commit_text(Tensor new_tokens, Tensor num_accepted, Tensor next_token, Tensor eos_ids, Tensor(a!) tokens, "
    "Tensor(b!) out_len, Tensor(c!) remaining, Tensor(d!) done, Tensor(e!) emitted, Tensor(f!) num_emitted, "
    "Tensor(g!) counts, Tensor? nodes, Tensor? parents, Tensor? num_nodes, Tensor? num_merges) -> ()",
    "corpus_recall(Tensor text, Tensor order, Tensor following, Tensor token_ids, Tensor parents, Tensor tokens, "
    "Tensor out_len, Tensor kv_start, Tensor frontier, int branch, int vocab) -> (Tensor, Tensor, Tensor)",
    "state_rows(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? beta, Tensor parents, Tensor depths, "
    "Tensor lengths, Tensor state, Tensor(a!) keys, Tensor(b!) updates, Tensor(c!) sums, int block) -> Tensor",
    "state_commit(Tensor accepted_rows, Tensor num_accepted, Tensor lengths, Tensor(a!) state, Tensor(b!) keys, "
    "Tensor(c!) updates, Tensor(d!) sums, int block) -> ()",
    "write_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor positions) -> ()",
)


def load(backend: str) -> str | None:
    """Load the library of ``"cpu"`` or ``"cuda"``; the reason if that is impossible."""
    path = Path(__file__).with_name(LIBRARIES[backend])
    if not path.exists():
        return f"the compiled {backend} ops were not built when the package was installed; " + (
            "with a C++ compiler: pip install --no-build-isolation ."
            if backend == "cpu"
            else "with nvcc: GSD_KERNELS_BUILD_CUDA=1 pip install --no-build-isolation ."
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path.name} cannot be loaded: {error}"
    return None


def no_result(*_: object) -> None:
    """Shape function of the ops that only write in place."""


for schema in SCHEMAS:
    op = f"gsd_kernels::{schema.partition('(')[0]}"
    torch.library.define(op, schema[schema.index("(") :])
    if schema.endswith("-> ()"):
        torch.library.register_fake(op, no_result)


def schema_of(name: str) -> str:
    """Arguments and results of an op."""
    return next(schema for schema in SCHEMAS if schema.startswith(f"{name}("))[len(name) :]


def _int32(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int32)


@torch.library.register_fake("gsd_kernels::merge")
def empty_frontier(
    graph: list[Tensor], frontier: Tensor, cand_tokens: Tensor, cand_log_probs: Tensor, level: int, width: int, *_: Any
) -> tuple[Tensor, ...]:
    batch, words = frontier.shape[0], TokenGraph(*graph).ancestor_mask.shape[2]
    return (*(_int32(frontier, batch, width) for _ in range(3)), _int32(frontier, batch, width, words))


@torch.library.register_fake("gsd_kernels::flatten")
def empty_rows(
    token_ids: Tensor, edge_targets: Tensor, edge_log_probs: Tensor, max_rows: int, max_path: int
) -> tuple[Tensor, ...]:
    batch = token_ids.shape[0]
    token, parent, depth, node = (_int32(token_ids, batch, max_rows) for _ in range(4))
    mask = _int32(token_ids, batch, max_rows, num_words(max_rows))
    return token, parent, depth, mask, node, edge_log_probs.new_empty(batch, max_rows), _int32(token_ids, batch)


@torch.library.register_fake("gsd_kernels::verify")
def empty_acceptance(token_ids: Tensor, *args: object) -> tuple[Tensor, ...]:
    batch, max_path = token_ids.shape[0], args[-1]
    assert isinstance(max_path, (int, torch.SymInt))
    return _int32(token_ids, batch, max_path + 1), _int32(token_ids, batch), _int32(token_ids, batch)


@torch.library.register_fake("gsd_kernels::sample_rows")
def _sample_rows(logits: Tensor, positions: Tensor, *args: object, **kwargs: object) -> Tensor:
    return torch.empty_like(positions)


@torch.library.register_fake("gsd_kernels::draft_candidates")
def _draft_candidates(
    logits: Tensor, positions: Tensor, branch: int, *args: object, **kwargs: object
) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, branch)
    return positions.new_empty(shape), logits.new_empty(shape, dtype=torch.float32)


@torch.library.register_fake("gsd_kernels::warped_log_probs")
def _warped_log_probs(logits: Tensor, *args: object, **kwargs: object) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


@torch.library.register_fake("gsd_kernels::dag_attention")
def empty_attention(q: Tensor, k: Tensor, v: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
    batch, heads, rows, _ = q.shape
    out = q.new_empty(batch, rows, heads, v.shape[3]).transpose(1, 2)
    return out, q.new_empty(batch, heads, rows, dtype=torch.float32)


@torch.library.register_fake("gsd_kernels::ngram_lookup")
def empty_lookup(
    keys: Tensor, table_tokens: Tensor, table_log_probs: Tensor, contexts: Tensor, max_context: int, ways: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*contexts.shape[:2], table_tokens.shape[2])
    return contexts.new_empty(shape), table_log_probs.new_empty(shape), contexts.new_empty(shape[:2])


@torch.library.register_fake("gsd_kernels::ngram_recall")
def _ngram_recall(
    keys: Tensor, table_tokens: Tensor, table_log_probs: Tensor, *args: object
) -> tuple[Tensor, Tensor, Tensor]:
    nodes, branch = args[3], args[4]
    assert isinstance(nodes, Tensor) and isinstance(branch, (int, torch.SymInt))
    shape = (*nodes.shape, branch)
    return nodes.new_empty(shape), table_log_probs.new_empty(shape), torch.empty_like(nodes)


@torch.library.register_fake("gsd_kernels::calibrate_candidates")
def _calibrate_candidates(log_probs: Tensor, *args: object) -> Tensor:
    return torch.empty_like(log_probs)


@torch.library.register_fake("gsd_kernels::perturb_candidates")
def empty_log_probs(tokens: Tensor, log_probs: Tensor, *args: object) -> Tensor:
    return torch.empty_like(log_probs)


@torch.library.register_fake("gsd_kernels::mix_candidates")
def empty_candidates(tokens: Tensor, log_probs: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(tokens), torch.empty_like(log_probs)


@torch.library.register_fake("gsd_kernels::corpus_recall")
def _corpus_recall(*args: object) -> tuple[Tensor, Tensor, Tensor]:
    frontier, branch = args[8], args[9]
    assert isinstance(frontier, Tensor) and isinstance(branch, (int, torch.SymInt))
    shape = (*frontier.shape, branch)
    return frontier.new_empty(shape), frontier.new_empty(shape, dtype=torch.float32), torch.empty_like(frontier)


@torch.library.register_fake("gsd_kernels::history_recall")
def _history_recall(
    history: list[Tensor], token_ids: Tensor, parents: Tensor, contexts: Tensor, depths: Tensor, *args: object
) -> tuple[Tensor, Tensor, Tensor]:
    nodes, branch = args[0], args[1]
    assert isinstance(nodes, Tensor) and isinstance(branch, (int, torch.SymInt))
    shape = (*nodes.shape, branch)
    return nodes.new_empty(shape), nodes.new_empty(shape, dtype=torch.float32), torch.empty_like(nodes)


@torch.library.register_fake("gsd_kernels::recall_levels")
def _recall_levels(
    history: list[Tensor], graph: list[Tensor], frontier: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    levels, width = args[3:5]
    places = (frontier.shape[0], levels * width)
    candidates = (*places, TokenGraph(*graph).branch)
    nodes, tokens, matched = (frontier.new_empty(shape) for shape in (places, candidates, places))
    log_probs, calibrated = (frontier.new_empty(candidates, dtype=torch.float32) for _ in range(2))
    return nodes, tokens, log_probs, matched, calibrated


@torch.library.register_fake("gsd_kernels::state_rows")
def _state_rows(query: Tensor, key: Tensor, value: Tensor, *args: object) -> Tensor:
    return torch.empty_like(value)


@torch.library.register_fake("gsd_kernels::row_linear")
def _row_linear(x: Tensor, weight: Tensor, kind: int = -1, scales: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.register_fake("gsd_kernels::unpack_rows")
def _unpack_rows(
    weight: Tensor, kind: int, scales: Tensor | None, inputs: int, rows: Tensor | None, like: Tensor
) -> Tensor:
    return like.new_empty((weight if rows is None else rows).shape[0], inputs)


@torch.library.register_fake("gsd_kernels::start_graph")
def _start_graph(graph: list[Tensor], tokens: Tensor, out_len: Tensor, kv_start: Tensor) -> Tensor:
    return torch.empty_like(out_len)


@torch.library.register_fake("gsd_kernels::feed_rows")
def _feed_rows(token_ids: Tensor, *args: object) -> tuple[Tensor, ...]:
    dtype = torch.int64 if args[-1] else torch.int32
    read = (token_ids.new_empty(token_ids.shape, dtype=dtype) for _ in range(3))
    return (*read, torch.empty_like(token_ids), torch.empty_like(token_ids))


@torch.library.register_fake("gsd_kernels::feed_chain")
def _feed_chain(tokens: Tensor, end: Tensor, cached: Tensor, width: int) -> tuple[Tensor, ...]:
    batch = tokens.shape[0]
    token, slot, depth, node = (_int32(tokens, batch, width) for _ in range(4))
    return _int32(tokens, batch), token, slot, depth, _int32(tokens, batch, width, num_words(width)), node


@torch.library.register_fake("gsd_kernels::accepted_path")
def _accepted_path(accepted_rows: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(accepted_rows), torch.empty_like(accepted_rows)


@torch.library.register_fake("gsd_kernels::select_rows")
def _select_rows(token_ids: Tensor, depths: Tensor, edge_targets: Tensor, edge_log_probs: Tensor, *args: Any) -> Any:
    rows = torch.library.get_ctx().new_dynamic_size(min=1)
    batch = token_ids.shape[0]
    token, parent, depth, node = (_int32(token_ids, batch, rows) for _ in range(4))
    mask = _int32(token_ids, batch, rows, (rows + 31) // 32)
    return token, parent, depth, mask, node, edge_log_probs.new_empty(batch, rows), _int32(token_ids, batch)


@torch.library.register_fake("gsd_kernels::update_edge_model")
def _update_edge_model(*args: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(args[7]), torch.empty_like(args[8])


@torch.library.register_fake("gsd_kernels::decoder_rows")
def _decoder_rows(token_ids: Tensor, *args: object) -> tuple[Tensor, Tensor, Tensor]:
    final_norm, head, states, keep = args[10], args[11], args[-2], args[-1]
    assert isinstance(final_norm, Tensor) and isinstance(head, Tensor)
    assert isinstance(states, list) and isinstance(keep, (int, torch.SymInt))
    hidden_size = final_norm.shape[0]
    logits, hidden = ((token_ids.shape[0], keep, size) for size in (head.shape[0], hidden_size))
    read_by = (len(states), *token_ids.shape, hidden_size)
    exact = tuple(head.new_empty(shape, dtype=torch.float32) for shape in (hidden, read_by))
    return head.new_empty(logits, dtype=torch.float32 if head.device.type == "cpu" else final_norm.dtype), *exact


@torch.library.register_fake("gsd_kernels::feature_rows")
def _feature_rows(token_ids: Tensor, *args: object) -> tuple[Tensor, Tensor, Tensor]:
    head, hidden_size, keep = args[14], args[13].shape[0], args[-1]
    assert isinstance(head, Tensor) and isinstance(keep, (int, torch.SymInt))
    shapes = ((token_ids.shape[0], keep, size) for size in (head.shape[0], hidden_size, hidden_size))
    logits, hidden, state = (head.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return logits, hidden, state


UNAVAILABLE: dict[str, str | None] = {
    "cpu": load("cpu"),
    # A CUDA library beside a CPU-only torch could be loaded but never run.
    "cuda": load("cuda") if torch.version.cuda is not None else "this torch was built without CUDA",
}
