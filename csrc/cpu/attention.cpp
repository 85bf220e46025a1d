#include "attention.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "../algorithms/group.h"
#include "../torch_ops/cache.h"
#include "../torch_ops/elements.h"
#include "../torch_ops/sight.h"
#include "online_softmax.h"

namespace gsd {
namespace {

constexpr int64_t kItemRows = 32;   // packed rows that share the reading of K and V
constexpr int64_t kPositions = 512;  // of the prefix at a time: scores of an item stay in the first-level caches

int64_t items_of_head(const RowAttention& a) {
  return (a.heads / a.kv_heads * a.rows + kItemRows - 1) / kItemRows;
}

// Rows of one cache head and sequence.
void attend_item(const RowAttention& a, int64_t item) {
  const int64_t cuts = items_of_head(a), b = item / cuts / a.kv_heads, kv_head = item / cuts % a.kv_heads;
  const int64_t group = a.heads / a.kv_heads, size = bytes_of(a.cache_element), q_size = bytes_of(a.element);
  const int64_t begin = item % cuts * kItemRows, count = std::min(kItemRows, group * a.rows - begin);
  const int64_t kv_len = a.kv_len[b], start = a.kv_start ? a.kv_start[b] : 0;
  const int64_t nodes = std::min(a.words * 32, a.slots - kv_len);
  const char* keys = a.k + (b * a.k_batch + kv_head * a.k_head) * size;
  const char* values = a.v + (b * a.v_batch + kv_head * a.v_head) * size;

  std::vector<float> queries(static_cast<size_t>(count * a.head_dim));
  std::vector<float> acc(static_cast<size_t>(count * a.value_dim), 0.0f);
  std::vector<float> scores(static_cast<size_t>(count * kPositions));
  std::vector<OnlineSoftmax> running(static_cast<size_t>(count));
  for (int64_t m = 0; m < count; m++) {
    const int64_t row = (begin + m) % a.rows, head = kv_head * group + (begin + m) / a.rows;
    const char* q = a.q + (b * a.q_batch + head * a.q_head + row * a.q_row) * q_size;
    read_row({q, 0, a.element}, 0, queries.data() + m * a.head_dim, a.head_dim);
    scale_row(queries.data() + m * a.head_dim, a.scale, a.head_dim);
  }
  const auto cap = [&](float* score, int64_t n) {
    if (a.softcap == 0.0f) return;
    for (int64_t i = 0; i < n; i++) score[i] = a.softcap * std::tanh(score[i] / a.softcap);
  };
  const auto take = [&](int64_t m, float* score, int64_t padded) {
    const float decay = running[static_cast<size_t>(m)].take(score, padded);
    if (decay != 1.0f) scale_row(acc.data() + m * a.value_dim, decay, a.value_dim);
  };
  const bool limited = a.window > 0 || a.chunk > 0;
  const auto oldest = [&](int64_t m) {  // first position of the cache that the window or chunk leaves to a row
    if (!limited) return start;
    const int64_t position = kv_len + a.row_depths[b * a.rows + (begin + m) % a.rows];
    const int64_t rest = a.chunk > 0 ? (position - start) % a.chunk : a.window - 1;  // below 0: still padding
    return std::max(start, position - (rest < 0 ? rest + a.chunk : rest));
  };

  // The prefix, dense: all rows of the item at once, or one by one where each has its own window.
  const int64_t together = limited ? 1 : count;
  for (int64_t m0 = 0; m0 < count; m0 += together) {
    for (int64_t p = oldest(m0); p < kv_len; p += kPositions) {
      const int64_t n = std::min(kPositions, kv_len - p), padded = padded_to_lanes(n);
      products(queries.data() + m0 * a.head_dim, a.head_dim, together, a.head_dim,
               {keys + p * a.k_slot * size, a.k_slot, a.cache_element}, 0, n, scores.data(), kPositions);
      for (int64_t m = m0; m < m0 + together; m++) {
        float* score = scores.data() + (m - m0) * kPositions;
        cap(score, n);
        std::fill(score + n, score + padded, negative_infinity());
        take(m, score, padded);
      }
      weighted_rows(scores.data(), kPositions, together, {values + p * a.v_slot * size, a.v_slot, a.cache_element}, n,
                    a.value_dim, acc.data() + m0 * a.value_dim, a.value_dim);
    }
  }

  // The graph, by bits: up to kPositions of a row's nodes at a time.
  std::vector<int64_t> seen(kPositions);
  for (int64_t m = 0; m < count; m++) {
    const int64_t row = (begin + m) % a.rows, first = oldest(m);
    const int32_t* words = a.mask + (b * a.rows + row) * a.words;
    float* sum = acc.data() + m * a.value_dim;
    int64_t n = 0;
    const auto flush = [&] {
      for (int64_t i = 0; i < n; i++) {
        products(queries.data() + m * a.head_dim, a.head_dim, 1, a.head_dim,
                 {keys + seen[i] * a.k_slot * size, 0, a.cache_element}, 0, 1, scores.data() + i, 1);
      }
      cap(scores.data(), n);
      std::fill(scores.begin() + n, scores.begin() + padded_to_lanes(n), negative_infinity());
      take(m, scores.data(), padded_to_lanes(n));
      for (int64_t i = 0; i < n; i++) {
        weighted_rows(scores.data() + i, 0, 1, {values + seen[i] * a.v_slot * size, 0, a.cache_element}, 1, a.value_dim, sum,
                      a.value_dim);
      }
      n = 0;
    };
    for (int64_t node = 0; node < nodes; node++) {
      const uint32_t word = static_cast<uint32_t>(words[node / 32]);
      if (word == 0) node |= 31;  // on to the next word
      if (!((word >> (node % 32)) & 1)) continue;
      if (limited && kv_len + a.node_depths[b * a.node_depths_batch + node] < first) continue;
      seen[n++] = kv_len + node;
      if (n == kPositions) flush();
    }
    if (n > 0) flush();
  }

  for (int64_t m = 0; m < count; m++) {
    const int64_t row = (begin + m) % a.rows, head = kv_head * group + (begin + m) / a.rows;
    const OnlineSoftmax& r = running[m];
    float inverse = r.inverse();
    if (a.sinks != nullptr && inverse != 0.0f) inverse /= 1.0f + std::exp(a.sinks[head] - r.log_sum());
    scale_row(acc.data() + m * a.value_dim, inverse, a.value_dim);
    write_row(acc.data() + m * a.value_dim, a.out + ((b * a.rows + row) * a.heads + head) * a.value_dim * q_size,
              a.element, a.value_dim);
    if (a.lse) a.lse[(b * a.heads + head) * a.rows + row] = r.log_sum();
  }
}

}  // namespace

void attend_rows(const RowAttention& a) {
  if (a.batch == 0 || a.rows == 0) return;
  constexpr int64_t kWorkPerThread = 1 << 18;  // multiplications that make a thread worth waking
  const int64_t packed = std::min(kItemRows, a.heads / a.kv_heads * a.rows);
  const int64_t work = packed * (a.kv_len[0] + 1) * (a.head_dim + a.value_dim);
  torch::stable::parallel_for(0, a.batch * a.kv_heads * items_of_head(a), std::max<int64_t>(1, kWorkPerThread / work),
                              [&](int64_t begin, int64_t end) {
                                for (int64_t item = begin; item < end; item++) attend_item(a, item);
                              });
}

namespace {

std::tuple<Tensor, Tensor> dag_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                         const Tensor& ancestor_mask, const Tensor& kv_len,
                                         const std::optional<Tensor>& kv_start,
                                         const std::optional<Tensor>& row_depths,
                                         const std::optional<Tensor>& node_depths, double scale,
                                         std::optional<double> softcap, std::optional<int64_t> sliding_window,
                                         std::optional<int64_t> chunk, const std::optional<Tensor>& sinks) {
  RowAttention a{};
  a.element = a.cache_element = element_of("q", q.scalar_type());
  for (const Tensor* t : {&q, &k, &v}) {
    STD_TORCH_CHECK(t->dim() == 4 && t->scalar_type() == q.scalar_type() && t->stride(3) == 1,
                    "q, k, v: expected 4 dimensions, one dtype, and stride 1 in the last dimension");
  }
  a.batch = q.size(0), a.heads = q.size(1), a.rows = q.size(2), a.head_dim = q.size(3);
  a.kv_heads = k.size(1), a.slots = k.size(2), a.value_dim = v.size(3);
  STD_TORCH_CHECK(a.kv_heads >= 1 && a.heads % a.kv_heads == 0, "q: ", a.heads, " heads are not a multiple of ",
                  a.kv_heads);
  STD_TORCH_CHECK(a.head_dim % kLanes == 0 && a.value_dim % kLanes == 0, "q, v: expected head sizes in multiples of ",
                  kLanes, ", got ", a.head_dim, " and ", a.value_dim);
  STD_TORCH_CHECK(k.size(0) == a.batch && k.size(3) == a.head_dim && v.size(0) == a.batch &&
                      v.size(1) == a.kv_heads && v.size(2) == a.slots,
                  "k, v: expected [", a.batch, ", heads, slots, head_dim]");
  check("ancestor_mask", ancestor_mask, ScalarType::Int, {a.batch, a.rows, kAny});
  a.words = ancestor_mask.size(2);
  a.mask = read<int32_t>(ancestor_mask);
  const auto lengths = [&](const char* name, const Tensor& t) {
    check(name, t, ScalarType::Int, {a.batch});
    return read<int32_t>(t);
  };
  a.kv_len = lengths("kv_len", kv_len);
  a.kv_start = kv_start ? lengths("kv_start", *kv_start) : nullptr;
  for (int64_t b = 0; b < a.batch; b++) {
    STD_TORCH_CHECK(a.kv_len[b] >= 0 && a.kv_len[b] <= a.slots && (!a.kv_start || a.kv_start[b] >= 0),
                    "kv_len: the prefix ends at ", a.kv_len[b], ", the cache at ", a.slots);
  }
  if (sliding_window || chunk) {
    check_sight(sliding_window, chunk, row_depths && node_depths);
    check("row_depths", *row_depths, ScalarType::Int, {a.batch, a.rows});
    check("node_depths", *node_depths, ScalarType::Int, {a.batch, kAny});
    a.row_depths = read<int32_t>(*row_depths);
    a.node_depths = read<int32_t>(*node_depths);
    a.node_depths_batch = node_depths->size(1);
    a.window = sliding_window.value_or(0);
    a.chunk = chunk.value_or(0);
    a.words = std::min(a.words, (a.node_depths_batch + 31) / 32);
  }
  if (sinks) {
    check("sinks", *sinks, ScalarType::Float, {a.heads});
    a.sinks = read<float>(*sinks);
  }
  a.q = static_cast<const char*>(q.const_data_ptr());
  a.k = static_cast<const char*>(k.const_data_ptr());
  a.v = static_cast<const char*>(v.const_data_ptr());
  a.q_batch = q.stride(0), a.q_head = q.stride(1), a.q_row = q.stride(2);
  a.k_batch = k.stride(0), a.k_head = k.stride(1), a.k_slot = k.stride(2);
  a.v_batch = v.stride(0), a.v_head = v.stride(1), a.v_slot = v.stride(2);
  a.scale = static_cast<float>(scale);
  a.softcap = static_cast<float>(softcap.value_or(0.0));
  Tensor out = torch::stable::new_empty(q, {a.batch, a.rows, a.heads, a.value_dim});
  Tensor lse = torch::stable::new_empty(q, {a.batch, a.heads, a.rows}, ScalarType::Float);
  a.out = static_cast<char*>(out.mutable_data_ptr());
  a.lse = written<float>(lse);
  attend_rows(a);
  return {torch::stable::transpose(out, 1, 2), lse};
}

// One row of a cache, finite: NaN becomes 0, infinities the largest values. Integers, so no rule of a float unit enters.
template <class Int>
void copy_finite(const char* from, int64_t step, char* to, int64_t width, Int infinity) {
  constexpr Int kMagnitude = static_cast<Int>(~(Int{1} << (8 * sizeof(Int) - 1)));
  const Int* source = reinterpret_cast<const Int*>(from);
  Int* target = reinterpret_cast<Int*>(to);
  for (int64_t i = 0; i < width; i++) {
    const Int bits = source[i * step], magnitude = bits & kMagnitude;
    target[i] = magnitude > infinity ? 0 : static_cast<Int>(bits - (magnitude == infinity ? 1 : 0));
  }
}

void write_kv(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v,
              const Tensor& positions) {
  STD_TORCH_CHECK(positions.dim() == 2 && positions.scalar_type() == ScalarType::Long && positions.is_contiguous(),
                  "positions: expected int64 [batch, rows], contiguous");
  const int64_t batch = positions.size(0), rows = positions.size(1);
  const int64_t* position = read<int64_t>(positions);
  for (const bool is_k : {true, false}) {
    const Tensor &cache = is_k ? k_cache : v_cache, &from = is_k ? k : v;
    const CacheTensor to = cache_tensor(cache, batch);
    STD_TORCH_CHECK(from.scalar_type() == cache.scalar_type() && from.dim() == 4 && from.size(0) == batch &&
                        from.size(1) == to.heads && from.size(2) == rows && from.size(3) == cache.size(3),
                    "k, v: expected [", batch, ", ", to.heads, ", ", rows, ", ", cache.size(3), "] in the cache's dtype");
    const ScalarType dtype = cache.scalar_type();
    const int64_t size = static_cast<int64_t>(cache.element_size()), width = cache.size(3);
    for (int64_t i = 0; i < batch * rows; i++) {
      STD_TORCH_CHECK(position[i] >= 0 && position[i] < to.slots, "positions: ", position[i],
                      " is outside the cache's ", to.slots);
      for (int64_t h = 0; h < to.heads; h++) {
        const char* source = static_cast<const char*>(from.const_data_ptr()) +
                             (i / rows * from.stride(0) + h * from.stride(1) + i % rows * from.stride(2)) * size;
        char* target = to.data + i / rows * to.batch_stride + h * to.head_stride + position[i] * to.slot_stride;
        const int64_t step = width > 1 ? from.stride(3) : 1;
        if (dtype == ScalarType::Half) {
          copy_finite<uint16_t>(source, step, target, width, 0x1F << 10);
        } else if (dtype == ScalarType::BFloat16) {
          copy_finite<uint16_t>(source, step, target, width, 0xFF << 7);
        } else if (dtype == ScalarType::Float) {
          copy_finite<uint32_t>(source, step, target, width, 0xFFu << 23);
        } else {
          STD_TORCH_CHECK(dtype == ScalarType::Double, "k_cache: expected a float dtype");
          copy_finite<uint64_t>(source, step, target, width, 0x7FFull << 52);
        }
      }
    }
  }
}

}  // namespace
}  // namespace gsd

STABLE_TORCH_LIBRARY_IMPL(gsd_kernels, CPU, m) {
  m.impl("dag_attention", TORCH_BOX(&gsd::dag_attention));
  m.impl("write_kv", TORCH_BOX(&gsd::write_kv));
}
