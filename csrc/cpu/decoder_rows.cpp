// A decoder's forward over graph rows in one call: embedding, layers, norm and output matrix.
//
// Called module by module, a forward of few rows reads its weights far slower than memory gives them, and its rounding
// depends on how many rows there are. gsd_kernels/ops/decoder_rows/reference.py is the specification.
#include <algorithm>

#include "../torch_ops/weights.h"
#include "decoder.h"

namespace gsd {
namespace {

constexpr size_t kTensorsPerLayer = 18;  // as listed by LayerWeights.tensors
constexpr size_t kMatricesBefore = 2, kMatricesPerLayer = 7;

// Of the embedding, the output matrix and q, k, v, o, gate, up, down of every layer: how each is packed. Both are empty
// where all are dense, in one dtype.
struct Packing {
  const std::vector<int64_t>& kinds;
  const std::vector<Tensor>& scales;
  Element element;

  Weights of(const char* name, size_t number, const Tensor& t, int64_t outputs, int64_t inputs) const {
    if (kinds.empty()) {
      STD_TORCH_CHECK(element_of(name, t.scalar_type()) == element, name, ": expected the dtype of the embedding");
      return weights_of(name, t, kDense, nullptr, outputs, inputs, element);
    }
    return weights_of(name, t, kinds[number], &scales[number], outputs, inputs, element);
  }
};

// Empty where an optional tensor is.
std::vector<float> vector_of(const char* name, const Tensor& t, int64_t size, bool optional = false) {
  if (optional && t.numel() == 0) return {};
  STD_TORCH_CHECK(t.dim() == 1 && t.size(0) == size && t.is_contiguous(), name, ": expected [", size, "], contiguous");
  std::vector<float> values(static_cast<size_t>(size));
  read_row({t.const_data_ptr(), size, element_of(name, t.scalar_type())}, 0, values.data(), size);
  return values;
}

CacheTensor cache(const Tensor& t, const DecoderSizes& s, int64_t capacity, ScalarType dtype) {
  const CacheTensor found = cache_tensor(t, s.batch);
  STD_TORCH_CHECK(t.size(1) == s.kv_heads && t.size(2) == capacity && t.size(3) == s.head_dim &&
                      t.scalar_type() == dtype,
                  "k_caches, v_caches: expected [", s.batch, ", ", s.kv_heads, ", ", capacity, ", ", s.head_dim,
                  "] of one dtype");
  return found;
}

DecoderLayer layer_of(const Tensor* t, size_t number, const Tensor& keys, const Tensor& values, const DecoderSizes& s,
                      const Packing& packing, int64_t capacity, int64_t window) {
  const auto projection = [&](const char* name, int at, int64_t outputs, int64_t k) -> Projection {
    const int bias = at < 5 ? at + 8 : at + 7;  // q, k, v, o: 1 … 4; gate, up, down: 6 … 8
    const size_t matrix = kMatricesBefore + kMatricesPerLayer * number + static_cast<size_t>(at < 5 ? at - 1 : at - 2);
    return {packing.of(name, matrix, t[at], outputs, k), vector_of("bias", t[bias], outputs, true)};
  };
  DecoderLayer layer{};
  layer.input_norm = vector_of("input norm", t[0], s.hidden);
  layer.second_norm = vector_of("second norm", t[5], s.hidden);
  layer.q_norm = vector_of("q norm", t[16], s.head_dim, true);
  layer.k_norm = vector_of("k norm", t[17], s.head_dim, true);
  layer.q = projection("q", 1, s.q_size(), s.hidden);
  layer.k = projection("k", 2, s.kv_size(), s.hidden);
  layer.v = projection("v", 3, s.kv_size(), s.hidden);
  layer.o = projection("o", 4, s.hidden, s.q_size());
  layer.gate = projection("gate", 6, s.inner, s.hidden);
  layer.up = projection("up", 7, s.inner, s.hidden);
  layer.down = projection("down", 8, s.hidden, s.inner);
  layer.keys = cache(keys, s, capacity, keys.scalar_type());
  layer.values = cache(values, s, capacity, keys.scalar_type());
  layer.cache_element = element_of("k_caches", keys.scalar_type());
  layer.window = window;
  return layer;
}

void check_ranges(const DecoderRows& r, const DecoderSizes& s, int64_t capacity, int64_t vocab) {
  for (int64_t b = 0; b < s.batch; b++) {
    STD_TORCH_CHECK(r.kv_start[b] >= 0 && r.kv_start[b] <= capacity && r.kv_len[b] >= 0 && r.kv_len[b] <= capacity,
                    "kv_len: the prefix ", r.kv_start[b], " ... ", r.kv_len[b], " is outside the cache's ", capacity);
  }
  for (int64_t m = 0; m < s.count(); m++) {
    STD_TORCH_CHECK(r.tokens[m] >= 0 && r.tokens[m] < vocab, "token_ids: ", r.tokens[m],
                    " is outside the vocabulary of ", vocab);
    STD_TORCH_CHECK(r.slots[m] >= 0 && r.slots[m] < capacity, "slots: ", r.slots[m], " is outside the cache's ",
                    capacity);
  }
}

// Done before other threads are awake.
bool is_small(const DecoderSizes& s, size_t depth, int64_t vocab) {
  const int64_t layer = s.hidden * (2 * s.q_size() + 2 * s.kv_size() + 3 * s.inner);
  return (static_cast<int64_t>(depth) * layer + vocab * s.hidden) * s.count() < 1 << 20;
}

std::tuple<Tensor, Tensor, Tensor> decoder_rows(const Tensor& token_ids, const Tensor& positions, const Tensor& slots,
                                        const Tensor& ancestor_mask, const Tensor& node_depths, const Tensor& kv_len,
                                        const Tensor& kv_start, const Tensor& embedding,
                                        const std::vector<Tensor>& layers, const std::vector<int64_t>& kinds,
                                        const std::vector<Tensor>& scales, const Tensor& final_norm,
                                        const Tensor& head, const Tensor& inv_freq,
                                        const std::vector<Tensor>& k_caches, const std::vector<Tensor>& v_caches,
                                        const std::vector<int64_t>& windows, int64_t heads, double eps,
                                        double rope_scale, const std::vector<int64_t>& states, int64_t keep) {
  check("token_ids", token_ids, ScalarType::Int, {kAny, kAny});
  DecoderSizes s{};
  s.batch = token_ids.size(0), s.rows = token_ids.size(1);
  check("positions", positions, ScalarType::Int, {s.batch, s.rows});
  check("slots", slots, ScalarType::Int, {s.batch, s.rows});
  check("ancestor_mask", ancestor_mask, ScalarType::Int, {s.batch, s.rows, kAny});
  check("node_depths", node_depths, ScalarType::Int, {s.batch, kAny});
  check("kv_len", kv_len, ScalarType::Int, {s.batch});
  check("kv_start", kv_start, ScalarType::Int, {s.batch});
  check("inv_freq", inv_freq, ScalarType::Float, {kAny});
  STD_TORCH_CHECK(embedding.dim() == 2 && head.dim() == 2 && final_norm.dim() == 1,
                  "embedding, head: expected matrices; final norm: a vector");
  const size_t depth = k_caches.size();
  STD_TORCH_CHECK(depth > 0 && layers.size() == kTensorsPerLayer * depth && v_caches.size() == depth &&
                      windows.size() == depth,
                  "layers: expected ", kTensorsPerLayer, " tensors a layer, two caches and a window for each");
  STD_TORCH_CHECK(kinds.size() == scales.size() && (kinds.empty() || kinds.size() == kMatricesBefore + depth * kMatricesPerLayer),
                  "kinds, scales: expected one for the embedding, the head and ", kMatricesPerLayer, " a layer, or none");
  STD_TORCH_CHECK(k_caches[0].dim() == 4 && layers[6].dim() == 2, "k_caches, layers: wrong number of dimensions");
  const int64_t vocab = embedding.size(0), out_vocab = head.size(0), capacity = k_caches[0].size(2);
  s.hidden = final_norm.size(0), s.head_dim = 2 * inv_freq.size(0), s.inner = layers[6].size(0);
  s.heads = heads, s.kv_heads = k_caches[0].size(1);
  s.eps = static_cast<float>(eps), s.rope_scale = static_cast<float>(rope_scale);
  STD_TORCH_CHECK(s.kv_heads > 0 && heads % s.kv_heads == 0, "heads: ", heads, " are not a multiple of the cache's ",
                  s.kv_heads);
  for (const int64_t state : states) {
    STD_TORCH_CHECK(state >= 0 && state <= static_cast<int64_t>(depth), "states: expected layers 0 ... ", depth,
                    ", got ", state);
  }
  STD_TORCH_CHECK(keep >= 0 && keep <= s.rows, "keep: expected 0 ... ", s.rows, ", got ", keep);

  const Packing packing{kinds, scales, kinds.empty() ? element_of("embedding", embedding.scalar_type())
                                                     : element_of("final norm", final_norm.scalar_type())};
  const Weights embedded = packing.of("embedding", 0, embedding, vocab, s.hidden);
  const DecoderRows rows{read<int32_t>(token_ids), read<int32_t>(positions), read<int32_t>(slots),
                         read<int32_t>(kv_len),    read<int32_t>(kv_start),  read<float>(inv_freq)};
  check_ranges(rows, s, capacity, vocab);
  std::vector<DecoderLayer> parts;
  for (size_t l = 0; l < depth; l++) {
    parts.push_back(layer_of(layers.data() + l * kTensorsPerLayer, l, k_caches[l], v_caches[l], s, packing, capacity,
                             windows[l]));
  }
  const bool every_row = std::count(states.begin(), states.end(), static_cast<int64_t>(depth)) > 0;
  const std::vector<float> norm = vector_of("final norm", final_norm, s.hidden);
  const Projection output{packing.of("head", 1, head, out_vocab, s.hidden), {}};

  const Paths paths(read<int32_t>(ancestor_mask), read<int32_t>(node_depths), s.batch, s.rows, ancestor_mask.size(2),
                    node_depths.size(1), rows.kv_len, rows.kv_start, capacity);
  const Tensor logits = torch::stable::new_empty(final_norm, {s.batch, keep, out_vocab}, ScalarType::Float);
  const Tensor hidden = torch::stable::new_empty(final_norm, {s.batch, keep, s.hidden}, ScalarType::Float);
  const Tensor read_by = torch::stable::new_empty(
      final_norm, {static_cast<int64_t>(states.size()), s.batch, s.rows, s.hidden}, ScalarType::Float);
  Team::run(is_small(s, depth, out_vocab), [&](Team& team) {
    Decoder decoder(team, s, rows, paths, packing.element, embedded);
    for (size_t l = 0; l <= depth; l++) {
      for (size_t i = 0; i < states.size(); i++) {
        if (states[i] != static_cast<int64_t>(l)) continue;
        float* out = written<float>(read_by) + static_cast<int64_t>(i) * s.count() * s.hidden;
        l < depth ? decoder.copy_state(out) : decoder.norm_state(norm, out);
      }
      if (l + 1 < depth) decoder.forward(parts[l]);
      if (l + 1 == depth) decoder.forward_last(parts.back(), every_row ? s.rows : keep);
    }
    decoder.keep_last(keep);
    decoder.finish(norm, output, written<float>(hidden), written<float>(logits));
  });
  return {logits, hidden, read_by};
}

}  // namespace
}  // namespace gsd

STABLE_TORCH_LIBRARY_IMPL(gsd_kernels, CPU, m) { m.impl("decoder_rows", TORCH_BOX(&gsd::decoder_rows)); }
