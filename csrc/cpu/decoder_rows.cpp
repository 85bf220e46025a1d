// A small LLaMA decoder's forward over graph rows in one call: embedding, layers, norm and head.
//
// The forward of a draft of a few million parameters takes a fraction of a millisecond of arithmetic; called module by
// module and operator by operator it takes several times that. gsd_kernels/ops/decoder_rows/reference.py is the
// specification.
#include <algorithm>
#include <cmath>

#include "../torch_ops.h"
#include "attention.h"

namespace gsd {
namespace {

constexpr int64_t kLane = 16;
constexpr int64_t kWorkPerThread = 1 << 20;  // multiplications that make a thread worth waking
constexpr size_t kTensorsPerLayer = 9;

Matrix matrix(const char* name, const Tensor& t, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(t.dim() == 2 && t.size(0) == rows && t.size(1) == columns && t.is_contiguous(), name, ": expected [",
                  rows, ", ", columns, "], contiguous");
  return {t.const_data_ptr(), columns, element_of(name, t.scalar_type())};
}

std::vector<float> vector_of(const char* name, const Tensor& t, int64_t size) {
  STD_TORCH_CHECK(t.dim() == 1 && t.size(0) == size && t.is_contiguous(), name, ": expected [", size, "], contiguous");
  std::vector<float> values(static_cast<size_t>(size));
  read_row({t.const_data_ptr(), size, element_of(name, t.scalar_type())}, 0, values.data(), size);
  return values;
}

// out[m, n] = Σ x · w, columns shared out among threads.
void multiply(const float* x, int64_t rows, int64_t k, const Matrix& w, int64_t n, float* out) {
  const int64_t grain = std::max<int64_t>(16, kWorkPerThread / std::max<int64_t>(1, rows * k));
  torch::stable::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    products(x, k, rows, k, w, begin, end, out, n);
  });
}

// One row of every head into its slot, finite: what overflows in one row must not reach those that do not see it.
void store(float* x, const CacheTensor& cache, Element element, int64_t b, int64_t slot, int64_t head_dim) {
  for (int64_t h = 0; h < cache.heads; h++, x += head_dim) {
    make_finite(x, element, head_dim);
    write_row(x, cache.data + b * cache.batch_stride + h * cache.head_stride + slot * cache.slot_stride, element,
              head_dim);
  }
}

// x1, x2 → x1 cos − x2 sin, x2 cos + x1 sin of the two halves of every head.
void rotate(float* x, int64_t heads, int64_t head_dim, const float* cos, const float* sin) {
  const int64_t half = head_dim / 2;
  for (int64_t h = 0; h < heads; h++, x += head_dim) {
    for (int64_t i = 0; i < half; i++) {
      const float a = x[i], b = x[half + i];
      x[i] = a * cos[i] - b * sin[i];
      x[half + i] = b * cos[i] + a * sin[i];
    }
  }
}

Tensor decoder_rows(const Tensor& token_ids, const Tensor& positions, const Tensor& slots, const Tensor& ancestor_mask,
                    const Tensor& kv_len, const Tensor& kv_start, const Tensor& embedding,
                    const std::vector<Tensor>& layers, const Tensor& final_norm, const Tensor& head,
                    const Tensor& inv_freq, const std::vector<Tensor>& k_caches, const std::vector<Tensor>& v_caches,
                    int64_t heads, double eps, double rope_scale, int64_t keep) {
  check("token_ids", token_ids, ScalarType::Int, {kAny, kAny});
  const int64_t batch = token_ids.size(0), rows = token_ids.size(1), count = batch * rows;
  check("positions", positions, ScalarType::Int, {batch, rows});
  check("slots", slots, ScalarType::Int, {batch, rows});
  check("ancestor_mask", ancestor_mask, ScalarType::Int, {batch, rows, kAny});
  check("kv_len", kv_len, ScalarType::Int, {batch});
  check("kv_start", kv_start, ScalarType::Int, {batch});
  check("inv_freq", inv_freq, ScalarType::Float, {kAny});
  STD_TORCH_CHECK(embedding.dim() == 2 && head.dim() == 2, "embedding, head: expected matrices");
  const int64_t vocab = embedding.size(0), hidden = embedding.size(1), out_vocab = head.size(0);
  const int64_t half = inv_freq.size(0), head_dim = 2 * half, q_size = heads * head_dim;
  const size_t depth = k_caches.size();
  STD_TORCH_CHECK(layers.size() == kTensorsPerLayer * depth && v_caches.size() == depth && depth > 0,
                  "layers: expected ", kTensorsPerLayer, " tensors a layer and a cache for each");
  STD_TORCH_CHECK(k_caches[0].dim() == 4 && layers[6].dim() == 2, "k_caches, layers: wrong number of dimensions");
  const int64_t kv_heads = k_caches[0].size(1), kv_size = kv_heads * head_dim, inner = layers[6].size(0);
  STD_TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, "heads: ", heads, " are not a multiple of the cache's ",
                  kv_heads);
  STD_TORCH_CHECK(hidden % kLane == 0 && head_dim % kLane == 0 && inner % kLane == 0,
                  "decoder_rows: sizes must be multiples of ", kLane);
  STD_TORCH_CHECK(keep >= 1 && keep <= rows, "keep: expected 1 ... ", rows, ", got ", keep);

  const int32_t* position = read<int32_t>(positions);
  const int32_t* slot = read<int32_t>(slots);
  const int32_t* prefix = read<int32_t>(kv_len);
  const int32_t* start = read<int32_t>(kv_start);
  const int32_t* tokens = read<int32_t>(token_ids);
  const int64_t capacity = k_caches[0].size(2);
  for (int64_t b = 0; b < batch; b++) {
    STD_TORCH_CHECK(start[b] >= 0 && start[b] <= prefix[b] && prefix[b] <= capacity, "kv_len: the prefix ", start[b],
                    " ... ", prefix[b], " is outside the cache's ", capacity);
  }
  const size_t wide = static_cast<size_t>(count);
  std::vector<float> x(wide * hidden), normed(wide * hidden), added(wide * hidden);
  std::vector<float> q(wide * q_size), attended(wide * q_size), k(wide * kv_size), v(wide * kv_size);
  std::vector<float> gate(wide * inner), up(wide * inner), cos(wide * half), sin(wide * half);

  const Matrix embedded = matrix("embedding", embedding, vocab, hidden);
  const float* frequency = read<float>(inv_freq);
  for (int64_t m = 0; m < count; m++) {
    STD_TORCH_CHECK(tokens[m] >= 0 && tokens[m] < vocab, "token_ids: ", tokens[m], " is outside the vocabulary of ",
                    vocab);
    STD_TORCH_CHECK(slot[m] >= 0 && slot[m] < capacity, "slots: ", slot[m], " is outside the cache's ",
                    capacity);
    read_row(embedded, tokens[m], x.data() + m * hidden, hidden);
    for (int64_t i = 0; i < half; i++) {
      const float angle = static_cast<float>(position[m]) * frequency[i];
      cos[m * half + i] = std::cos(angle) * static_cast<float>(rope_scale);
      sin[m * half + i] = std::sin(angle) * static_cast<float>(rope_scale);
    }
  }
  const auto norm_rows = [&](const std::vector<float>& weight) {
    for (int64_t m = 0; m < count; m++) {
      rms_norm(x.data() + m * hidden, weight.data(), static_cast<float>(eps), normed.data() + m * hidden, hidden);
    }
  };
  const auto add_rows = [&] {
    for (size_t i = 0; i < x.size(); i++) x[i] += added[i];
  };
  for (size_t l = 0; l < depth; l++) {
    const Tensor* t = layers.data() + l * kTensorsPerLayer;
    const CacheTensor keys = cache_tensor(k_caches[l], batch), values = cache_tensor(v_caches[l], batch);
    const Element element = element_of("k_caches", k_caches[l].scalar_type());
    for (const Tensor* t : {&k_caches[l], &v_caches[l]}) {
      STD_TORCH_CHECK(t->size(1) == kv_heads && t->size(2) == capacity && t->size(3) == head_dim &&
                          t->stride(3) == 1 && t->scalar_type() == k_caches[l].scalar_type(),
                      "k_caches, v_caches: expected [", batch, ", ", kv_heads, ", ", capacity, ", ", head_dim,
                      "] of one dtype");
    }
    norm_rows(vector_of("input norm", t[0], hidden));
    multiply(normed.data(), count, hidden, matrix("q", t[1], q_size, hidden), q_size, q.data());
    multiply(normed.data(), count, hidden, matrix("k", t[2], kv_size, hidden), kv_size, k.data());
    multiply(normed.data(), count, hidden, matrix("v", t[3], kv_size, hidden), kv_size, v.data());
    for (int64_t m = 0; m < count; m++) {
      rotate(q.data() + m * q_size, heads, head_dim, cos.data() + m * half, sin.data() + m * half);
      rotate(k.data() + m * kv_size, kv_heads, head_dim, cos.data() + m * half, sin.data() + m * half);
      store(k.data() + m * kv_size, keys, element, m / rows, slot[m], head_dim);
      store(v.data() + m * kv_size, values, element, m / rows, slot[m], head_dim);
    }
    RowAttention a{};
    a.batch = batch, a.heads = heads, a.kv_heads = kv_heads, a.rows = rows;
    a.head_dim = a.value_dim = head_dim, a.words = ancestor_mask.size(2), a.slots = capacity;
    a.q = reinterpret_cast<const char*>(q.data()), a.k = keys.data, a.v = values.data;
    a.q_batch = rows * q_size, a.q_head = head_dim, a.q_row = q_size;
    a.k_batch = k_caches[l].stride(0), a.k_head = k_caches[l].stride(1), a.k_slot = k_caches[l].stride(2);
    a.v_batch = v_caches[l].stride(0), a.v_head = v_caches[l].stride(1), a.v_slot = v_caches[l].stride(2);
    a.element = Element::kFloat32, a.cache_element = element;
    a.mask = read<int32_t>(ancestor_mask), a.kv_len = prefix, a.kv_start = start;
    a.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
    a.out = reinterpret_cast<char*>(attended.data());
    attend_rows(a);
    multiply(attended.data(), count, q_size, matrix("o", t[4], hidden, q_size), hidden, added.data());
    add_rows();
    norm_rows(vector_of("second norm", t[5], hidden));
    multiply(normed.data(), count, hidden, matrix("gate", t[6], inner, hidden), inner, gate.data());
    multiply(normed.data(), count, hidden, matrix("up", t[7], inner, hidden), inner, up.data());
    silu_times(gate.data(), up.data(), count * inner);
    multiply(gate.data(), count, inner, matrix("down", t[8], hidden, inner), hidden, added.data());
    add_rows();
  }
  norm_rows(vector_of("final norm", final_norm, hidden));
  const Tensor logits = torch::stable::new_empty(embedding, {batch, keep, out_vocab}, ScalarType::Float);
  const Matrix head_matrix = matrix("head", head, out_vocab, hidden);
  float* out = written<float>(logits);
  for (int64_t b = 0; b < batch; b++) {
    multiply(normed.data() + (b * rows + rows - keep) * hidden, keep, hidden, head_matrix, out_vocab,
             out + b * keep * out_vocab);
  }
  return logits;
}

}  // namespace
}  // namespace gsd

STABLE_TORCH_LIBRARY_IMPL(gsd_kernels, CPU, m) { m.impl("decoder_rows", TORCH_BOX(&gsd::decoder_rows)); }
