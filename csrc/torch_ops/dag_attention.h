// The queries, caches and masks of dag_attention.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <tuple>

#include "../algorithms/attention.h"
#include "common.h"
#include "sight.h"

namespace gsd {

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
                                       const Tensor& kv_len, const MaybeTensor& kv_start,
                                       const MaybeTensor& row_depths,
                                       const MaybeTensor& node_depths, double scale,
                                       std::optional<double> softcap, std::optional<int64_t> sliding_window,
                                       std::optional<int64_t> chunk, const MaybeTensor& sinks) {
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
  s.batch = narrow(batch);
  s.kv_heads = narrow(kv_heads);
  s.group = narrow(heads / kv_heads);
  s.rows = narrow(rows);
  s.head_dim = narrow(head_dim);
  s.words = narrow(words);
  s.capacity = narrow(capacity);

  AttentionArgs& a = call.args;
  a.q = aligned_rows("q", q, q.scalar_type(), {batch, heads, rows, head_dim});
  a.k = aligned_rows("k", k, q.scalar_type(), {batch, kv_heads, capacity, head_dim});
  a.v = aligned_rows("v", v, q.scalar_type(), {batch, kv_heads, capacity, head_dim});
  a.q_batch = q.stride(0), a.q_head = q.stride(1), a.q_row = q.stride(2);
  STD_TORCH_CHECK(k.stride(2) < kMost && v.stride(2) < kMost, "k, v: positions too far apart in memory");
  a.k_batch = k.stride(0), a.k_head = k.stride(1), a.k_slot = narrow(k.stride(2));
  a.v_batch = v.stride(0), a.v_head = v.stride(1), a.v_slot = narrow(v.stride(2));

  STD_TORCH_CHECK(ancestor_mask.scalar_type() == ScalarType::Int && ancestor_mask.size(0) == batch &&
                      ancestor_mask.size(1) == rows && (words <= 1 || ancestor_mask.stride(2) == 1),
                  "ancestor_mask: expected int32 [", batch, ", ", rows, ", words], the last with stride 1");
  a.ancestor_mask = read<int32_t>(ancestor_mask);
  a.mask_batch = ancestor_mask.stride(0), a.mask_row = ancestor_mask.stride(1);
  a.kv_len = read<int32_t>("kv_len", kv_len, {batch});
  a.kv_start = read<int32_t>("kv_start", kv_start, {batch});
  if (sliding_window || chunk) {
    check_sight(sliding_window, chunk, row_depths && node_depths);
    a.row_depths = read<int32_t>("row_depths", row_depths, {batch, rows});
    a.node_depths = read<int32_t>("node_depths", node_depths, {batch, kAny});
    STD_TORCH_CHECK(node_depths->size(1) >= 1 || words == 0, "node_depths: expected a depth for every node");
    a.nodes = narrow(node_depths->size(1));
    a.node_depths_batch = a.nodes;
    a.window = narrow(std::min(sliding_window.value_or(0), kMost));
    a.chunk = narrow(std::min(chunk.value_or(0), kMost));
  }
  a.sinks = read<float>("sinks", sinks, {heads});
  a.softcap = softcap ? static_cast<float>(*softcap * kLog2E) : 0.0f;
  a.scale = static_cast<float>(softcap ? scale / *softcap : scale * kLog2E);

  const Tensor out = torch::stable::new_empty(q, {batch, rows, heads, head_dim});
  const Tensor lse = fresh<float>(q, {batch, heads, rows});
  a.out = written<uint16_t>(out);
  a.lse = written<float>(lse);
  call.outputs = {torch::stable::transpose(out, 1, 2), lse};
  return call;
}

}  // namespace gsd
