// The ops' tensors: checked, unpacked to the plain structs of csrc/graph, outputs allocated. Shared by the CPU and the
// CUDA library. Schemas are declared in gsd_kernels/compiled.py.
//
// Only LibTorch's stable ABI is used (oldest torch served: TORCH_TARGET_VERSION, set by setup.py), so that one wheel
// serves every torch from there on.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <initializer_list>
#include <optional>
#include <tuple>
#include <vector>

#include "attention.h"
#include "graph/flatten.h"
#include "graph/merge.h"
#include "graph/verify.h"
#include "ngram.h"

namespace gsd {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kAny = -1;  // any size

inline void check(const char* name, const Tensor& t, ScalarType dtype, std::initializer_list<int64_t> shape) {
  STD_TORCH_CHECK(t.scalar_type() == dtype, name, ": wrong dtype");
  STD_TORCH_CHECK(t.dim() == static_cast<int64_t>(shape.size()), name, ": expected ", shape.size(), " dimensions, got ",
                  t.dim());
  int64_t d = 0;
  for (const int64_t size : shape) {
    STD_TORCH_CHECK(size == kAny || t.size(d) == size, name, ": expected size ", size, " in dimension ", d, ", got ",
                    t.size(d));
    d++;
  }
  STD_TORCH_CHECK(t.is_contiguous(), name, ": must be contiguous");
}

template <class T>
T* written(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

template <class T>
const T* read(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

inline Tensor new_int32(const Tensor& like, std::initializer_list<int64_t> shape) {
  return torch::stable::new_empty(like, shape, ScalarType::Int);
}

using MergeOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor>;

struct MergeCall {
  MergeSizes sizes;
  MergeArgs args;  // of the first sequence
  int64_t batch;
  MergeOutputs outputs;
};

inline MergeCall prepare_merge(const Tensor& token_ids, const Tensor& parents, const Tensor& depths,
                               const Tensor& scores, const Tensor& contexts, const Tensor& expanded,
                               const Tensor& ancestor_mask, const Tensor& edge_targets, const Tensor& edge_log_probs,
                               const Tensor& num_nodes, const Tensor& num_merges, const Tensor& frontier,
                               const Tensor& cand_tokens, const Tensor& cand_log_probs, int64_t level, int64_t width,
                               int64_t merge_context, double log_sibling_ratio, double log_min_prob) {
  check("token_ids", token_ids, ScalarType::Int, {kAny, kAny});
  const int64_t batch = token_ids.size(0), nodes = token_ids.size(1);
  check("cand_tokens", cand_tokens, ScalarType::Int, {batch, kAny, kAny});
  const int64_t expanding = cand_tokens.size(1), branch = cand_tokens.size(2);
  check("ancestor_mask", ancestor_mask, ScalarType::Int, {batch, nodes, kAny});
  const int64_t words = ancestor_mask.size(2);
  check("parents", parents, ScalarType::Int, {batch, nodes});
  check("depths", depths, ScalarType::Int, {batch, nodes});
  check("scores", scores, ScalarType::Float, {batch, nodes});
  check("contexts", contexts, ScalarType::Int, {batch, nodes, kContext});
  check("expanded", expanded, ScalarType::Bool, {batch, nodes});
  check("edge_targets", edge_targets, ScalarType::Int, {batch, nodes, branch});
  check("edge_log_probs", edge_log_probs, ScalarType::Float, {batch, nodes, branch});
  check("num_nodes", num_nodes, ScalarType::Int, {batch});
  check("num_merges", num_merges, ScalarType::Int, {batch});
  check("frontier", frontier, ScalarType::Int, {batch, expanding});
  check("cand_log_probs", cand_log_probs, ScalarType::Float, {batch, expanding, branch});
  STD_TORCH_CHECK(width >= 1 && level >= 0, "merge: expected width >= 1 and level >= 0, got ", width, " and ", level);
  STD_TORCH_CHECK(merge_context >= -1 && merge_context <= kContext, "merge_context: expected -1 ... ", kContext,
                  ", got ", merge_context);

  const MergeSizes sizes{static_cast<int>(nodes),
                         static_cast<int>(expanding),
                         static_cast<int>(branch),
                         static_cast<int>(width),
                         static_cast<int>(words),
                         static_cast<int>(level),
                         static_cast<int>(merge_context),
                         static_cast<float>(log_sibling_ratio),
                         static_cast<float>(log_min_prob)};
  STD_TORCH_CHECK(nodes >= 1 && expanding >= 1 && branch >= 1 && sizes.fits(), "merge: ", nodes, " nodes with ",
                  expanding, " x ", branch, " candidates: expected 1 ... 65535 of each");
  MergeOutputs outputs{new_int32(frontier, {batch, width}), new_int32(frontier, {batch, width}),
                       new_int32(frontier, {batch, width}), new_int32(frontier, {batch, width, words})};
  const MergeArgs args{written<int32_t>(token_ids),
                       written<int32_t>(parents),
                       written<int32_t>(depths),
                       written<float>(scores),
                       written<int32_t>(contexts),
                       written<bool>(expanded),
                       written<int32_t>(ancestor_mask),
                       written<int32_t>(edge_targets),
                       written<float>(edge_log_probs),
                       written<int32_t>(num_nodes),
                       written<int32_t>(num_merges),
                       read<int32_t>(frontier),
                       read<int32_t>(cand_tokens),
                       read<float>(cand_log_probs),
                       written<int32_t>(std::get<0>(outputs)),
                       written<int32_t>(std::get<1>(outputs)),
                       written<int32_t>(std::get<2>(outputs)),
                       written<int32_t>(std::get<3>(outputs))};
  return {sizes, args, batch, std::move(outputs)};
}

using FlattenOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

struct FlattenCall {
  FlattenSizes sizes;
  FlattenArgs args;  // of the first sequence
  int64_t batch;
  FlattenOutputs outputs;
};

inline FlattenCall prepare_flatten(const Tensor& node_tokens, const Tensor& edge_targets, const Tensor& edge_log_probs,
                                   int64_t max_rows, int64_t max_path) {
  check("token_ids", node_tokens, ScalarType::Int, {kAny, kAny});
  const int64_t batch = node_tokens.size(0), nodes = node_tokens.size(1);
  check("edge_targets", edge_targets, ScalarType::Int, {batch, nodes, kAny});
  const int64_t branch = edge_targets.size(2);
  check("edge_log_probs", edge_log_probs, ScalarType::Float, {batch, nodes, branch});
  STD_TORCH_CHECK(max_rows >= 1 && max_rows <= 32 * kMaxRowWords, "max_rows: expected 1 ... ", 32 * kMaxRowWords,
                  ", got ", max_rows);
  STD_TORCH_CHECK(max_path >= 0 && max_path < max_rows, "max_path: expected 0 ... ", max_rows - 1, ", got ", max_path);
  STD_TORCH_CHECK(nodes >= 1 && branch >= 1 && branch <= 0xFFFF, "flatten: a graph of ", nodes, " nodes with ", branch,
                  " edges each");

  const FlattenSizes sizes{static_cast<int>(nodes), static_cast<int>(branch), static_cast<int>(max_rows),
                           static_cast<int>(max_path)};
  FlattenOutputs outputs{new_int32(node_tokens, {batch, max_rows}),
                         new_int32(node_tokens, {batch, max_rows}),
                         new_int32(node_tokens, {batch, max_rows}),
                         new_int32(node_tokens, {batch, max_rows, sizes.words()}),
                         new_int32(node_tokens, {batch, max_rows}),
                         torch::stable::new_empty(edge_log_probs, {batch, max_rows}),
                         new_int32(node_tokens, {batch})};
  const FlattenArgs args{read<int32_t>(node_tokens),
                         read<int32_t>(edge_targets),
                         read<float>(edge_log_probs),
                         written<int32_t>(std::get<0>(outputs)),
                         written<int32_t>(std::get<1>(outputs)),
                         written<int32_t>(std::get<2>(outputs)),
                         written<int32_t>(std::get<3>(outputs)),
                         written<int32_t>(std::get<4>(outputs)),
                         written<float>(std::get<5>(outputs)),
                         written<int32_t>(std::get<6>(outputs))};
  return {sizes, args, batch, std::move(outputs)};
}

using VerifyOutputs = std::tuple<Tensor, Tensor, Tensor>;

struct VerifyCall {
  VerifySizes sizes;
  VerifyArgs args;  // of the first sequence
  int64_t batch;
  VerifyOutputs outputs;
};

inline VerifyCall prepare_verify(const Tensor& token_ids, const Tensor& parent_rows, const Tensor& depths,
                                 const Tensor& ancestor_mask, const Tensor& num_rows, const Tensor& sampled,
                                 const Tensor& eos_ids, const Tensor& remaining, const Tensor& done,
                                 int64_t max_path) {
  check("token_ids", token_ids, ScalarType::Int, {kAny, kAny});
  const int64_t batch = token_ids.size(0), rows = token_ids.size(1);
  const VerifySizes sizes{static_cast<int>(rows), static_cast<int>(eos_ids.numel()), static_cast<int>(max_path)};
  check("parent_rows", parent_rows, ScalarType::Int, {batch, rows});
  check("depths", depths, ScalarType::Int, {batch, rows});
  check("ancestor_mask", ancestor_mask, ScalarType::Int, {batch, rows, sizes.words()});
  check("num_rows", num_rows, ScalarType::Int, {batch});
  check("sampled", sampled, ScalarType::Int, {batch, rows});
  check("eos_ids", eos_ids, ScalarType::Int, {kAny});
  check("remaining", remaining, ScalarType::Int, {batch});
  check("done", done, ScalarType::Bool, {batch});
  STD_TORCH_CHECK(rows >= 1 && max_path >= 0, "verify: expected at least one row and max_path >= 0, got ", rows,
                  " and ", max_path);

  VerifyOutputs outputs{new_int32(sampled, {batch, max_path + 1}), new_int32(sampled, {batch}),
                        new_int32(sampled, {batch})};
  const VerifyArgs args{read<int32_t>(token_ids),
                        read<int32_t>(parent_rows),
                        read<int32_t>(depths),
                        read<int32_t>(ancestor_mask),
                        read<int32_t>(num_rows),
                        read<int32_t>(sampled),
                        read<int32_t>(eos_ids),
                        read<int32_t>(remaining),
                        read<bool>(done),
                        written<int32_t>(std::get<0>(outputs)),
                        written<int32_t>(std::get<1>(outputs)),
                        written<int32_t>(std::get<2>(outputs))};
  return {sizes, args, batch, std::move(outputs)};
}

inline NgramTable ngram_table(const Tensor& keys, const Tensor& tokens, const Tensor& log_probs, int64_t batch,
                              const NgramSizes& s) {
  check("keys", keys, ScalarType::Long, {batch, s.capacity});
  check("table_tokens", tokens, ScalarType::Int, {batch, s.capacity, s.branch});
  check("table_log_probs", log_probs, ScalarType::Float, {batch, s.capacity, s.branch});
  return {written<int64_t>(keys), written<int32_t>(tokens), written<float>(log_probs)};
}

inline NgramSizes ngram_sizes(const Tensor& keys, const Tensor& tokens, const Tensor& contexts, int64_t max_context,
                              int64_t ways) {
  check("keys", keys, ScalarType::Long, {kAny, kAny});
  check("table_tokens", tokens, ScalarType::Int, {kAny, kAny, kAny});
  check("contexts", contexts, ScalarType::Int, {keys.size(0), kAny, kAny});
  const int64_t capacity = keys.size(1), rows = contexts.size(1), context = contexts.size(2);
  constexpr int64_t kMost = 1 << 30;
  STD_TORCH_CHECK(ways >= 1 && ways <= kMostWays && (ways & (ways - 1)) == 0, "ways: expected a power of two up to ",
                  kMostWays, ", got ", ways);
  STD_TORCH_CHECK(capacity >= ways && capacity <= kMost && (capacity & (capacity - 1)) == 0,
                  "keys: expected a power of two of at least ", ways, " entries, got ", capacity);
  STD_TORCH_CHECK(max_context >= 1 && max_context <= kMostLengths && max_context <= context,
                  "contexts: expected at least ", max_context, " tokens of each, 1 ... ", kMostLengths, ", got ",
                  context);
  STD_TORCH_CHECK(rows < kMost / kMostLengths && tokens.size(2) < kMost, "contexts: too many rows, ", rows);
  return {static_cast<int>(capacity), static_cast<int>(ways),    static_cast<int>(tokens.size(2)),
          static_cast<int>(rows),     static_cast<int>(context), static_cast<int>(max_context)};
}

struct NgramInsertCall {
  NgramSizes sizes;
  NgramInsertArgs args;  // of the first sequence
  int64_t batch;
};

inline NgramInsertCall prepare_ngram_insert(const Tensor& keys, const Tensor& table_tokens,
                                            const Tensor& table_log_probs, const Tensor& contexts,
                                            const Tensor& tokens, const Tensor& log_probs, const Tensor& valid,
                                            int64_t max_context, int64_t ways) {
  const NgramSizes sizes = ngram_sizes(keys, table_tokens, contexts, max_context, ways);
  const int64_t batch = keys.size(0);
  check("tokens", tokens, ScalarType::Int, {batch, sizes.rows, sizes.branch});
  check("log_probs", log_probs, ScalarType::Float, {batch, sizes.rows, sizes.branch});
  check("valid", valid, ScalarType::Bool, {batch, sizes.rows});
  const NgramInsertArgs args{ngram_table(keys, table_tokens, table_log_probs, batch, sizes), read<int32_t>(contexts),
                             read<int32_t>(tokens), read<float>(log_probs), read<bool>(valid)};
  return {sizes, args, batch};
}

using NgramLookupOutputs = std::tuple<Tensor, Tensor, Tensor>;

struct NgramLookupCall {
  NgramSizes sizes;
  NgramLookupArgs args;  // of the first sequence
  int64_t batch;
  NgramLookupOutputs outputs;
};

inline NgramLookupCall prepare_ngram_lookup(const Tensor& keys, const Tensor& table_tokens,
                                            const Tensor& table_log_probs, const Tensor& contexts,
                                            int64_t max_context, int64_t ways) {
  const NgramSizes sizes = ngram_sizes(keys, table_tokens, contexts, max_context, ways);
  const int64_t batch = keys.size(0);
  NgramLookupOutputs outputs{new_int32(contexts, {batch, sizes.rows, sizes.branch}),
                             torch::stable::new_empty(table_log_probs, {batch, sizes.rows, sizes.branch}),
                             new_int32(contexts, {batch, sizes.rows})};
  const NgramLookupArgs args{ngram_table(keys, table_tokens, table_log_probs, batch, sizes), read<int32_t>(contexts),
                             written<int32_t>(std::get<0>(outputs)), written<float>(std::get<1>(outputs)),
                             written<int32_t>(std::get<2>(outputs))};
  return {sizes, args, batch, std::move(outputs)};
}

struct PerturbCall {
  PerturbArgs args;
  int64_t rows;  // of all sequences
  Tensor output;
};

inline PerturbCall prepare_perturb(const Tensor& tokens, const Tensor& log_probs, const Tensor& positions,
                                   const Tensor& seed, const Tensor& sequence_ids) {
  check("tokens", tokens, ScalarType::Int, {kAny, kAny, kAny});
  const int64_t batch = tokens.size(0), rows = tokens.size(1), branch = tokens.size(2);
  check("log_probs", log_probs, ScalarType::Float, {batch, rows, branch});
  check("positions", positions, ScalarType::Int, {batch, rows});
  check("seed", seed, ScalarType::Long, {});
  check("sequence_ids", sequence_ids, ScalarType::Int, {batch});
  Tensor output = torch::stable::new_empty(log_probs, {batch, rows, branch});
  const PerturbArgs args{read<int32_t>(tokens),       read<float>(log_probs),     read<int32_t>(positions),
                         read<int64_t>(seed),         read<int32_t>(sequence_ids), written<float>(output),
                         static_cast<int>(rows),      static_cast<int>(branch)};
  return {args, batch * rows, std::move(output)};
}

using MixOutputs = std::tuple<Tensor, Tensor>;

struct MixCall {
  MixSizes sizes;
  MixArgs args;  // of the first row
  int64_t rows;
  MixOutputs outputs;
};

inline MixCall prepare_mix(const Tensor& tokens, const Tensor& log_probs, const Tensor& other_tokens,
                           const Tensor& other_log_probs, const Tensor& weight) {
  check("tokens", tokens, ScalarType::Int, {kAny, kAny, kAny});
  const int64_t batch = tokens.size(0), rows = tokens.size(1), branch = tokens.size(2);
  check("log_probs", log_probs, ScalarType::Float, {batch, rows, branch});
  check("other_tokens", other_tokens, ScalarType::Int, {batch, rows, kAny});
  const int64_t others = other_tokens.size(2);
  check("other_log_probs", other_log_probs, ScalarType::Float, {batch, rows, others});
  check("weight", weight, ScalarType::Float, {batch, rows});
  constexpr int64_t kMost = 8192;  // their probabilities lie in shared memory
  STD_TORCH_CHECK(branch + others <= kMost, "other_tokens: expected at most ", kMost, " candidates in all, got ",
                  branch + others);
  MixOutputs outputs{new_int32(tokens, {batch, rows, branch}),
                     torch::stable::new_empty(log_probs, {batch, rows, branch})};
  const MixArgs args{read<int32_t>(tokens),
                     read<float>(log_probs),
                     read<int32_t>(other_tokens),
                     read<float>(other_log_probs),
                     read<float>(weight),
                     written<int32_t>(std::get<0>(outputs)),
                     written<float>(std::get<1>(outputs))};
  return {{static_cast<int>(branch), static_cast<int>(others)}, args, batch * rows, std::move(outputs)};
}

// A query or cache tensor of dag_attention, which is copied 16 bytes at a time.
inline const uint16_t* aligned_rows(const char* name, const Tensor& t, ScalarType dtype,
                                    std::initializer_list<int64_t> shape) {
  STD_TORCH_CHECK(t.scalar_type() == dtype, name, ": wrong dtype");
  STD_TORCH_CHECK(t.dim() == 4 && t.stride(3) == 1, name, ": expected 4 dimensions, the last with stride 1");
  const int64_t* size = shape.begin();
  uint64_t offsets = reinterpret_cast<uint64_t>(t.const_data_ptr());
  for (int64_t d = 0; d < 4; d++) {
    STD_TORCH_CHECK(t.size(d) == size[d], name, ": expected size ", size[d], " in dimension ", d, ", got ", t.size(d));
    if (d < 3 && size[d] > 1) offsets |= static_cast<uint64_t>(t.stride(d) * 2);
  }
  STD_TORCH_CHECK(offsets % 16 == 0, name, ": expected rows that begin at multiples of 16 bytes");
  return read<uint16_t>(t);
}

struct AttentionCall {
  AttentionSizes sizes;  // splits not chosen yet
  AttentionArgs args;    // partial results not allocated yet
  std::tuple<Tensor, Tensor> outputs;
};

inline AttentionCall prepare_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& ancestor_mask,
                                       const Tensor& kv_len, const std::optional<Tensor>& kv_start,
                                       const std::optional<Tensor>& num_nodes, const std::optional<Tensor>& row_depths,
                                       const std::optional<Tensor>& node_depths, double scale,
                                       std::optional<double> softcap, std::optional<int64_t> sliding_window) {
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && ancestor_mask.dim() == 3,
                  "dag_attention: expected q, k and v with 4 dimensions, ancestor_mask with 3");
  const int64_t batch = q.size(0), heads = q.size(1), rows = q.size(2), head_dim = q.size(3);
  const int64_t kv_heads = k.size(1), capacity = k.size(2), words = ancestor_mask.size(2);
  STD_TORCH_CHECK(q.scalar_type() == ScalarType::Half || q.scalar_type() == ScalarType::BFloat16,
                  "q: expected float16 or bfloat16");
  STD_TORCH_CHECK(head_dim == 64 || head_dim == 128, "q: expected head size 64 or 128, got ", head_dim);
  STD_TORCH_CHECK(kv_heads >= 1 && heads % kv_heads == 0, "q: ", heads, " heads are not a multiple of the cache's ",
                  kv_heads);
  constexpr int64_t kMost = 1 << 30, kMostBlocks = 65535;  // blocks: the second dimension of a grid
  STD_TORCH_CHECK(capacity < kMost && words < kMost / 32 && heads * rows < kMost && batch * kv_heads <= kMostBlocks,
                  "dag_attention: a batch of ", batch, " with ", heads, " heads, ", rows, " rows, ", capacity,
                  " positions and ", words, " mask words is too large");

  AttentionCall call{};
  AttentionSizes& s = call.sizes;
  s.batch = static_cast<int>(batch);
  s.kv_heads = static_cast<int>(kv_heads);
  s.group = static_cast<int>(heads / kv_heads);
  s.rows = static_cast<int>(rows);
  s.head_dim = static_cast<int>(head_dim);
  s.words = static_cast<int>(words);
  s.capacity = static_cast<int>(capacity);

  AttentionArgs& a = call.args;
  a.q = aligned_rows("q", q, q.scalar_type(), {batch, heads, rows, head_dim});
  a.k = aligned_rows("k", k, q.scalar_type(), {batch, kv_heads, capacity, head_dim});
  a.v = aligned_rows("v", v, q.scalar_type(), {batch, kv_heads, capacity, head_dim});
  a.q_batch = q.stride(0), a.q_head = q.stride(1), a.q_row = q.stride(2);
  STD_TORCH_CHECK(k.stride(2) < kMost && v.stride(2) < kMost, "k, v: positions too far apart in memory");
  a.k_batch = k.stride(0), a.k_head = k.stride(1), a.k_slot = static_cast<int>(k.stride(2));
  a.v_batch = v.stride(0), a.v_head = v.stride(1), a.v_slot = static_cast<int>(v.stride(2));

  STD_TORCH_CHECK(ancestor_mask.scalar_type() == ScalarType::Int && ancestor_mask.size(0) == batch &&
                      ancestor_mask.size(1) == rows && (words <= 1 || ancestor_mask.stride(2) == 1),
                  "ancestor_mask: expected int32 [", batch, ", ", rows, ", words], the last with stride 1");
  a.ancestor_mask = read<int32_t>(ancestor_mask);
  a.mask_batch = ancestor_mask.stride(0), a.mask_row = ancestor_mask.stride(1);
  const auto lengths = [&](const char* name, const Tensor& t) {
    check(name, t, ScalarType::Int, {batch});
    return read<int32_t>(t);
  };
  a.kv_len = lengths("kv_len", kv_len);
  a.kv_start = kv_start ? lengths("kv_start", *kv_start) : nullptr;
  a.num_nodes = num_nodes ? lengths("num_nodes", *num_nodes) : nullptr;
  if (sliding_window) {
    STD_TORCH_CHECK(row_depths && node_depths, "sliding_window: needs row_depths and node_depths");
    STD_TORCH_CHECK(*sliding_window >= 1, "sliding_window: expected at least 1, got ", *sliding_window);
    check("row_depths", *row_depths, ScalarType::Int, {batch, rows});
    check("node_depths", *node_depths, ScalarType::Int, {batch, kAny});
    STD_TORCH_CHECK(node_depths->size(1) >= 1 || words == 0, "node_depths: expected a depth for every node");
    a.row_depths = read<int32_t>(*row_depths);
    a.node_depths = read<int32_t>(*node_depths);
    a.nodes = static_cast<int>(node_depths->size(1));
    a.node_depths_batch = a.nodes;
    a.window = static_cast<int>(*sliding_window < kMost ? *sliding_window : kMost);
  }
  a.softcap = softcap ? static_cast<float>(*softcap * kLog2E) : 0.0f;
  a.scale = static_cast<float>(softcap ? scale / *softcap : scale * kLog2E);

  const Tensor out = torch::stable::new_empty(q, {batch, rows, heads, head_dim});
  const Tensor lse = torch::stable::new_empty(q, {batch, heads, rows}, ScalarType::Float);
  a.out = written<uint16_t>(out);
  a.lse = written<float>(lse);
  call.outputs = {torch::stable::transpose(out, 1, 2), lse};
  return call;
}

// One layer's keys or values, [B, Hkv, S, D] with any strides and unit last dimension, in bytes.
struct CacheTensor {
  char* data;
  int64_t batch_stride, head_stride, slot_stride;
  int64_t heads, slots, row_bytes;
};

inline CacheTensor cache_tensor(const Tensor& t, int64_t batch) {
  STD_TORCH_CHECK(t.dim() == 4 && t.size(0) == batch, "cache: expected [", batch, ", heads, slots, head_dim]");
  STD_TORCH_CHECK(t.size(3) <= 1 || t.stride(3) == 1, "cache: the last dimension must have stride 1");
  const int64_t element = static_cast<int64_t>(t.element_size());
  return {static_cast<char*>(t.mutable_data_ptr()),
          t.stride(0) * element,
          t.stride(1) * element,
          t.stride(2) * element,
          t.size(1),
          t.size(2),
          t.size(3) * element};
}

inline std::vector<CacheTensor> cache_tensors(const std::vector<Tensor>& k, const std::vector<Tensor>& v,
                                              const Tensor& accepted_rows, const Tensor& num_accepted,
                                              const Tensor& kv_len) {
  check("accepted_rows", accepted_rows, ScalarType::Int, {kAny, kAny});
  const int64_t batch = accepted_rows.size(0);
  check("num_accepted", num_accepted, ScalarType::Int, {batch});
  check("kv_len", kv_len, ScalarType::Int, {batch});
  std::vector<CacheTensor> caches;
  caches.reserve(k.size() + v.size());
  for (const Tensor& t : k) caches.push_back(cache_tensor(t, batch));
  for (const Tensor& t : v) caches.push_back(cache_tensor(t, batch));
  return caches;
}

}  // namespace gsd
