// The queries, caches and masks of dag_attention.
#pragma once

#include <algorithm>

#include "../algorithms/attention.h"
#include "op.h"
#include "sight.h"

namespace gsd {

// A query or cache tensor of dag_attention, which is copied 16 bytes at a time.
inline const uint16_t* aligned_rows(const char* name, const Tensor& t, ScalarType dtype) {
  STD_TORCH_CHECK(t.scalar_type() == dtype, name, ": wrong dtype");
  STD_TORCH_CHECK(t.stride(3) == 1, name, ": expected the last dimension with stride 1");
  uint64_t offsets = reinterpret_cast<uint64_t>(t.const_data_ptr());
  for (int64_t d = 0; d < 3; d++) offsets |= t.size(d) > 1 ? static_cast<uint64_t>(t.stride(d) * 2) : 0;
  STD_TORCH_CHECK(offsets % 16 == 0, name, ": expected rows that begin at multiples of 16 bytes");
  return read<uint16_t>(t);
}

struct AttentionCall {
  AttentionSizes sizes;  // splits not chosen yet
  AttentionArgs args;    // partial results not allocated yet
  bool bfloat16;
};

inline AttentionCall prepare_attention(Arguments& in) {
  const Tensor &q = in.tensor("q"), &k = in.tensor("k"), &v = in.tensor("v"), &mask = in.tensor("ancestor_mask");
  const int64_t batch = in['B'], heads = in['H'], rows = in['R'], kv_heads = in['G'], words = in['W'];
  const ScalarType dtype = q.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Half || dtype == ScalarType::BFloat16, "q: expected float16 or bfloat16");
  STD_TORCH_CHECK((in['D'] == 64 || in['D'] == 128) && in['V'] == in['D'],
                  "q, v: expected one head size, 64 or 128, got ", in['D'], " and ", in['V']);
  STD_TORCH_CHECK(kv_heads >= 1 && heads % kv_heads == 0, "q: ", heads, " heads are not a multiple of the cache's ",
                  kv_heads);
  constexpr int64_t kMost = 1 << 30, kMostBlocks = 65535;  // blocks: the second dimension of a grid
  STD_TORCH_CHECK(in['S'] < kMost && words < kMost / 32 && heads * rows < kMost && batch * kv_heads <= kMostBlocks,
                  "dag_attention: a batch of ", batch, " with ", heads, " heads, ", rows, " rows, ", in['S'],
                  " positions and ", words, " mask words is too large");

  const AttentionSizes sizes{in.size('B'), in.size('G'), narrow(heads / kv_heads), in.size('R'), in.size('D'), in.size('W'), in.size('S'), 0, 0, 0};
  AttentionCall call{sizes, {}, dtype == ScalarType::BFloat16};
  AttentionArgs& a = call.args;
  a.q = aligned_rows("q", q, dtype), a.k = aligned_rows("k", k, dtype), a.v = aligned_rows("v", v, dtype);
  a.q_batch = q.stride(0), a.q_head = q.stride(1), a.q_row = q.stride(2);
  STD_TORCH_CHECK(k.stride(2) < kMost && v.stride(2) < kMost, "k, v: positions too far apart in memory");
  a.k_batch = k.stride(0), a.k_head = k.stride(1), a.k_slot = narrow(k.stride(2));
  a.v_batch = v.stride(0), a.v_head = v.stride(1), a.v_slot = narrow(v.stride(2));

  STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Int && (words <= 1 || mask.stride(2) == 1),
                  "ancestor_mask: expected int32, the last dimension with stride 1");
  a.ancestor_mask = read<int32_t>(mask);
  a.mask_batch = mask.stride(0), a.mask_row = mask.stride(1);
  a.kv_len = in.at("kv_len"), a.kv_start = in.at("kv_start");
  if (limits_sight(in)) {
    a.row_depths = in.at("row_depths"), a.node_depths = in.at("node_depths");
    STD_TORCH_CHECK(in['N'] >= 1 || words == 0, "node_depths: expected a depth for every node");
    a.nodes = a.node_depths_batch = in.size('N');
    a.window = narrow(std::min(in['w'], kMost));
    a.chunk = narrow(std::min(in['c'], kMost));
  }
  a.sinks = in.at("sinks");
  const double scale = in.real('s'), softcap = in.real('p');
  a.softcap = static_cast<float>(softcap * kLog2E);
  a.scale = static_cast<float>(softcap != 0.0 ? scale / softcap : scale * kLog2E);

  const Tensor out = torch::stable::new_empty(q, {batch, rows, heads, in['D']});
  a.out = static_cast<uint16_t*>(out.mutable_data_ptr());
  in.results.push_back(torch::stable::transpose(out, 1, 2));
  a.lse = in.result();
  return call;
}

}  // namespace gsd
