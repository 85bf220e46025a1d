// A decoder's forward over graph rows in one call: embedding, layers, norm and output matrix; and that of a drafter which
// reads a feature a row besides.
//
// Called module by module, a forward of few rows reads its weights far slower than memory gives them, and its rounding
// depends on how many rows there are. gsd_kernels/ops/decoder_rows/reference.py is the specification, and that in
// feature_rows.
#include <algorithm>

#include "../torch_ops/registration.h"
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
  const Tensors& scales;
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
                      const Packing& packing, int64_t capacity, int64_t window, int64_t inputs) {
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
  layer.q = projection("q", 1, s.q_size(), inputs);
  layer.k = projection("k", 2, s.kv_size(), inputs);
  layer.v = projection("v", 3, s.kv_size(), inputs);
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

// What both ops are given, checked and unpacked, and what both return.
struct Call {
  DecoderSizes s{};
  Packing packing;
  DecoderRows rows{};
  Weights embedding{};
  std::vector<DecoderLayer> layers;
  std::vector<float> norm;
  Projection head;
  std::unique_ptr<const Paths> paths;
  Tensor logits, hidden;  // of the last `keep` rows

  // `inputs`: of the first layer's queries, keys and values, in hidden sizes; `rounded`: logits are of the weights' dtype.
  Call(const Tensor& token_ids, const Tensor& positions, const Tensor& slots, const Tensor& ancestor_mask,
       const Tensor& node_depths, const Tensor& kv_len, const Tensor& kv_start, const Tensor& embedded,
       const Tensors& tensors, const std::vector<int64_t>& kinds, const Tensors& scales,
       const Tensor& final_norm, const Tensor& output, const Tensor& inv_freq, const Tensors& k_caches,
       const Tensors& v_caches, const std::vector<int64_t>& windows, int64_t heads, double eps,
       double rope_scale, int64_t keep, int64_t inputs, bool rounded,
       const std::optional<Tensor>& spoiled = std::nullopt)
      : packing{kinds, scales, kinds.empty() ? element_of("embedding", embedded.scalar_type())
                                             : element_of("final norm", final_norm.scalar_type())} {
    check("token_ids", token_ids, ScalarType::Int, {kAny, kAny});
    s.batch = token_ids.size(0), s.rows = token_ids.size(1);
    check("positions", positions, ScalarType::Int, {s.batch, s.rows});
    check("slots", slots, ScalarType::Int, {s.batch, s.rows});
    check("ancestor_mask", ancestor_mask, ScalarType::Int, {s.batch, s.rows, kAny});
    check("node_depths", node_depths, ScalarType::Int, {s.batch, kAny});
    check("kv_len", kv_len, ScalarType::Int, {s.batch});
    check("kv_start", kv_start, ScalarType::Int, {s.batch});
    check("inv_freq", inv_freq, ScalarType::Float, {kAny});
    STD_TORCH_CHECK(embedded.dim() == 2 && output.dim() == 2 && final_norm.dim() == 1,
                    "embedding, head: expected matrices; final norm: a vector");
    const size_t depth = k_caches.size();
    STD_TORCH_CHECK(depth > 0 && tensors.size() == kTensorsPerLayer * depth && v_caches.size() == depth &&
                        windows.size() == depth,
                    "layers: expected ", kTensorsPerLayer, " tensors a layer, two caches and a window for each");
    STD_TORCH_CHECK(
        kinds.size() == scales.size() && (kinds.empty() || kinds.size() == kMatricesBefore + depth * kMatricesPerLayer),
        "kinds, scales: expected one for the embedding, the head and ", kMatricesPerLayer, " a layer, or none");
    STD_TORCH_CHECK(k_caches[0].dim() == 4 && tensors[6].dim() == 2, "k_caches, layers: wrong number of dimensions");
    const int64_t vocab = embedded.size(0), out_vocab = output.size(0), capacity = k_caches[0].size(2);
    s.hidden = final_norm.size(0), s.head_dim = 2 * inv_freq.size(0), s.inner = tensors[6].size(0);
    s.heads = heads, s.kv_heads = k_caches[0].size(1);
    s.eps = static_cast<float>(eps), s.rope_scale = static_cast<float>(rope_scale);
    STD_TORCH_CHECK(s.kv_heads > 0 && heads % s.kv_heads == 0, "heads: ", heads, " are not a multiple of the cache's ",
                    s.kv_heads);
    STD_TORCH_CHECK(keep >= 0 && keep <= s.rows, "keep: expected 0 ... ", s.rows, ", got ", keep);

    embedding = packing.of("embedding", 0, embedded, vocab, s.hidden);
    rows = {read<int32_t>(token_ids), read<int32_t>(positions), read<int32_t>(slots),
            read<int32_t>(kv_len),    read<int32_t>(kv_start),  read<float>(inv_freq),
            written<float>("spoiled", spoiled, {s.batch, s.rows})};
    check_ranges(rows, s, capacity, vocab);
    layers.reserve(depth);
    for (size_t l = 0; l < depth; l++) {
      layers.push_back(layer_of(tensors.data() + l * kTensorsPerLayer, l, k_caches[l], v_caches[l], s, packing, capacity,
                                windows[l], (l == 0 ? inputs : 1) * s.hidden));
    }
    norm = vector_of("final norm", final_norm, s.hidden);
    head = {packing.of("head", 1, output, out_vocab, s.hidden), {}};
    paths = std::make_unique<const Paths>(read<int32_t>(ancestor_mask), read<int32_t>(node_depths), s.batch, s.rows,
                                          ancestor_mask.size(2), node_depths.size(1), rows.kv_len, rows.kv_start,
                                          capacity);
    const ScalarType own = kinds.empty() ? embedded.scalar_type() : final_norm.scalar_type();
    logits = torch::stable::new_empty(final_norm, {s.batch, keep, out_vocab}, rounded ? own : ScalarType::Float);
    hidden = torch::stable::new_empty(final_norm, {s.batch, keep, s.hidden}, ScalarType::Float);
  }

  // Done before other threads are awake.
  bool is_small() const {
    const int64_t layer = s.hidden * (2 * s.q_size() + 2 * s.kv_size() + 3 * s.inner);
    return (static_cast<int64_t>(layers.size()) * layer + head.outputs() * s.hidden) * s.count() < 1 << 20;
  }

  template <class Body>
  void run(const Body& body) const {
    Team::run(is_small(), [&](Team& team) {
      Decoder decoder(team, s, rows, *paths, packing.element, embedding);
      body(decoder);
      const Element element = logits.scalar_type() == ScalarType::Float ? Element::kFloat32 : packing.element;
      decoder.finish(norm, head, written<float>(hidden), element, logits.mutable_data_ptr());
    });
  }
};

std::tuple<Tensor, Tensor, Tensor> decoder_rows(
    const Tensor& token_ids, const Tensor& positions, const Tensor& slots, const Tensor& ancestor_mask,
    const Tensor& node_depths, const Tensor& kv_len, const Tensor& kv_start, const Tensor& embedding,
    const Tensors& layers, const std::vector<int64_t>& kinds, const Tensors& scales,
    const Tensor& final_norm, const Tensor& head, const Tensor& inv_freq, const Tensors& k_caches,
    const Tensors& v_caches, const std::vector<int64_t>& windows, int64_t heads, double eps,
    double rope_scale, const std::vector<int64_t>& states, int64_t keep,
    const std::optional<Tensor>& spoiled) {
  const Call call(token_ids, positions, slots, ancestor_mask, node_depths, kv_len, kv_start, embedding, layers, kinds,
                  scales, final_norm, head, inv_freq, k_caches, v_caches, windows, heads, eps, rope_scale, keep, 1,
                  true, spoiled);
  const DecoderSizes& s = call.s;
  const size_t depth = call.layers.size();
  for (const int64_t state : states) {
    STD_TORCH_CHECK(state >= 0 && state <= static_cast<int64_t>(depth), "states: expected layers 0 ... ", depth,
                    ", got ", state);
  }
  const bool every_row = std::count(states.begin(), states.end(), static_cast<int64_t>(depth)) > 0;
  const Tensor read_by = torch::stable::new_empty(
      final_norm, {static_cast<int64_t>(states.size()), s.batch, s.rows, s.hidden}, ScalarType::Float);
  call.run([&](Decoder& decoder) {
    for (size_t l = 0; l <= depth; l++) {
      for (size_t i = 0; i < states.size(); i++) {
        if (states[i] != static_cast<int64_t>(l)) continue;
        float* out = written<float>(read_by) + static_cast<int64_t>(i) * s.count() * s.hidden;
        l < depth ? decoder.copy_state(out) : decoder.norm_state(call.norm, out);
      }
      if (l + 1 < depth) decoder.forward(call.layers[l]);
      if (l + 1 == depth) decoder.forward_last(call.layers.back(), every_row ? s.rows : keep);
    }
    decoder.keep_last(keep);
  });
  return {call.logits, call.hidden, read_by};
}

std::tuple<Tensor, Tensor, Tensor> feature_rows(
    const Tensor& token_ids, const Tensor& features, const Tensor& positions, const Tensor& slots,
    const Tensor& ancestor_mask, const Tensor& node_depths, const Tensor& kv_len, const Tensor& kv_start,
    const Tensor& embedding, const Tensors& layers, const std::vector<int64_t>& kinds,
    const Tensors& scales, const Tensor& feature_norm, bool normed_residual, const Tensors& projection,
    bool feature_first, const Tensor& final_norm, const Tensor& head, const Tensor& inv_freq, const Tensors& k_caches,
    const Tensors& v_caches, const std::vector<int64_t>& windows, int64_t heads, double eps,
    double rope_scale, int64_t keep) {
  const bool projected = !projection.empty();
  STD_TORCH_CHECK(!projected || projection.size() == 3,
                  "projection: expected matrix, norm and bias, or nothing");
  const Call call(token_ids, positions, slots, ancestor_mask, node_depths, kv_len, kv_start, embedding, layers, kinds,
                  scales, final_norm, head, inv_freq, k_caches, v_caches, windows, heads, eps, rope_scale, keep,
                  projected ? 1 : 2, false);
  const DecoderSizes& s = call.s;
  check("features", features, features.scalar_type(), {s.batch, s.rows, s.hidden});
  const Features paired{{features.const_data_ptr(), s.hidden, element_of("features", features.scalar_type())},
                        vector_of("feature norm", feature_norm, s.hidden),
                        projected ? vector_of("token norm", projection[1], s.hidden) : call.layers[0].input_norm,
                        feature_first,
                        normed_residual};
  Projection first{};
  if (projected) {
    first = {weights_of("projection", projection[0], kDense, nullptr, s.hidden, 2 * s.hidden, call.packing.element),
             vector_of("projection bias", projection[2], s.hidden, true)};
  }
  const size_t depth = call.layers.size();
  const Tensor state = torch::stable::new_empty(final_norm, {s.batch, keep, s.hidden}, ScalarType::Float);
  call.run([&](Decoder& decoder) {
    const int64_t rows = depth > 1 ? s.rows : keep;
    if (projected) {
      decoder.project_pairs(first, paired);
      decoder.forward_last(call.layers[0], rows);
    } else {
      decoder.forward_paired(call.layers[0], paired, rows);
    }
    for (size_t l = 1; l < depth; l++) decoder.forward_last(call.layers[l], l + 1 < depth ? s.rows : keep);
    decoder.copy_state(written<float>(state));
  });
  return {call.logits, call.hidden, state};
}

}  // namespace
}  // namespace gsd

GSD_OPS(CPU, m) {
  m.impl("decoder_rows", TORCH_BOX(&gsd::decoder_rows));
  m.impl("feature_rows", TORCH_BOX(&gsd::feature_rows));
}
