// The attention of a model's modules over its cache, and what writes that cache.
#include <algorithm>
#include <vector>

#include "../algorithms/group.h"
#include "../torch_ops/cache.h"
#include "../torch_ops/elements.h"
#include "../torch_ops/op.h"
#include "../torch_ops/registration.h"
#include "../torch_ops/sight.h"
#include "path_attention.h"

namespace gsd {
namespace {

void dag_attention(Arguments& in) {
  const Tensor &q = in.tensor("q"), &k = in.tensor("k"), &v = in.tensor("v");
  for (const Tensor* t : {&q, &k, &v}) {
    STD_TORCH_CHECK(t->scalar_type() == q.scalar_type() && t->stride(3) == 1,
                    "q, k, v: expected one dtype, and stride 1 in the last dimension");
  }
  PathAttention a{};
  a.element = a.cache_element = element_of("q", q.scalar_type());
  a.batch = in['B'], a.heads = in['H'], a.rows = a.graph_rows = in['R'], a.head_dim = in['D'];
  a.keys = cache_tensor(k, a.batch), a.values = cache_tensor(v, a.batch);
  a.kv_heads = in['G'], a.value_dim = in['V'];
  STD_TORCH_CHECK(a.kv_heads >= 1 && a.heads % a.kv_heads == 0, "q: ", a.heads, " heads are not a multiple of ",
                  a.kv_heads);
  const std::vector<int32_t> no_padding(static_cast<size_t>(a.batch), 0);
  a.kv_len = in.at("kv_len"), a.kv_start = in.at("kv_start");
  if (a.kv_start == nullptr) a.kv_start = no_padding.data();
  for (int64_t b = 0; b < a.batch; b++) {
    STD_TORCH_CHECK(a.kv_len[b] >= 0 && a.kv_len[b] <= a.keys.slots && a.kv_start[b] >= 0,
                    "kv_len: the prefix ends at ", a.kv_len[b], ", the cache at ", a.keys.slots);
  }
  const int64_t words = in['W'];
  const int32_t* mask = in.at("ancestor_mask");
  int64_t nodes = std::min(32 * words, a.keys.slots);
  std::vector<int32_t> positions, near;  // near: the mask without nodes that are too far from a row
  if (limits_sight(in)) {
    const int32_t *const row_depths = in.at("row_depths"), *const node_depths = in.at("node_depths");
    a.window = in['w'], a.chunk = in['c'];
    nodes = std::min(nodes, in['N']);
    near.assign(mask, mask + a.batch * a.rows * words);
    for (int64_t m = 0; m < a.batch * a.rows; m++) {
      const int64_t b = m / a.rows;
      const int32_t prefix = a.kv_len[b] - a.kv_start[b], *depths = node_depths + b * in['N'];
      positions.push_back(prefix + row_depths[m]);
      const int64_t oldest = oldest_seen(positions.back(), a.window, a.chunk);
      for (int64_t node = 0; node < nodes; node++) {
        if (prefix + depths[node] < oldest) near[m * words + node / 32] &= ~(1u << node % 32);
      }
    }
    a.positions = positions.data(), mask = near.data();
  }
  a.sinks = in.at("sinks");
  const Paths paths(mask, nullptr, a.batch, a.rows, words, nodes, a.kv_len, a.kv_start, a.keys.slots);
  a.paths = &paths;
  a.q = static_cast<const char*>(q.const_data_ptr());
  a.q_batch = q.stride(0), a.q_head = q.stride(1), a.q_row = q.stride(2);
  a.scale = static_cast<float>(in.real('s')), a.softcap = static_cast<float>(in.real('p'));
  const Tensor out = torch::stable::new_empty(q, {a.batch, a.rows, a.heads, a.value_dim});
  a.out = static_cast<char*>(out.mutable_data_ptr());
  in.results.push_back(torch::stable::transpose(out, 1, 2));
  a.lse = in.result();
  const RowKernel& kernel = kernels().small[static_cast<int>(a.element)];
  const int64_t most = a.batch == 0 ? 0 : *std::max_element(a.kv_len, a.kv_len + a.batch);
  const bool small = a.batch * a.heads * a.rows * (most + a.rows) * (a.head_dim + a.value_dim) < 1 << 18;
  Team::run(small, [&](Team& team) { attend_paths(team, a, kernel); });
}

// One row of a cache, finite: NaN becomes 0, infinities the largest values. Integers, so no rule of a float unit enters.
// Returns whether one was not.
template <class Int, Int infinity>
bool copy_finite(const char* from, int64_t step, char* to, int64_t width) {
  constexpr Int kMagnitude = static_cast<Int>(~(Int{1} << (8 * sizeof(Int) - 1)));
  const Int* source = reinterpret_cast<const Int*>(from);
  Int* target = reinterpret_cast<Int*>(to);
  int changed = 0;
  for (int64_t i = 0; i < width; i++) {
    const Int bits = source[i * step], magnitude = bits & kMagnitude;
    changed |= magnitude >= infinity;
    target[i] = magnitude > infinity ? 0 : static_cast<Int>(bits - (magnitude == infinity ? 1 : 0));
  }
  return changed != 0;
}

void write_kv(Arguments& in) {
  const int64_t batch = in['B'], rows = in['R'];
  const int64_t* const position = in.at("positions");
  float* const marks = in.at("spoiled");
  for (const bool is_k : {true, false}) {
    const Tensor &cache = in.tensor(is_k ? "k_cache" : "v_cache"), &from = in.tensor(is_k ? "k" : "v");
    const CacheTensor to = cache_tensor(cache, batch);
    STD_TORCH_CHECK(from.scalar_type() == cache.scalar_type(), "k, v: expected the cache's dtype");
    const ScalarType dtype = cache.scalar_type();
    const auto copy = dtype == ScalarType::Half       ? copy_finite<uint16_t, 0x1F << 10>
                      : dtype == ScalarType::BFloat16 ? copy_finite<uint16_t, 0xFF << 7>
                      : dtype == ScalarType::Float    ? copy_finite<uint32_t, 0xFFu << 23>
                      : dtype == ScalarType::Double   ? copy_finite<uint64_t, 0x7FFull << 52>
                                                      : nullptr;
    STD_TORCH_CHECK(copy != nullptr, "k_cache: expected a float dtype");
    const int64_t size = static_cast<int64_t>(cache.element_size()), width = cache.size(3);
    for (int64_t i = 0; i < batch * rows; i++) {
      STD_TORCH_CHECK(position[i] >= 0 && position[i] < to.slots, "positions: ", position[i],
                      " is outside the cache's ", to.slots);
      for (int64_t h = 0; h < to.heads; h++) {
        const char* source = static_cast<const char*>(from.const_data_ptr()) +
                             (i / rows * from.stride(0) + h * from.stride(1) + i % rows * from.stride(2)) * size;
        char* target = to.data + i / rows * to.batch_stride + h * to.head_stride + position[i] * to.slot_stride;
        const int64_t step = width > 1 ? from.stride(3) : 1;
        if (copy(source, step, target, width) && marks != nullptr) marks[i] = NAN;
      }
    }
  }
}

}  // namespace
}  // namespace gsd

GSD_OPS(CPU, m) {
  gsd::Op<gsd::dag_attention>::add(m, "dag_attention");
  gsd::Op<gsd::write_kv>::add(m, "write_kv");
}
