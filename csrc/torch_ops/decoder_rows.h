// The arguments of decoder_rows and feature_rows: what is checked of them on each device.
#pragma once

#include "op.h"

namespace gsd {

// As listed by LayerWeights.tensors and DecoderWeights.matrices.
constexpr size_t kTensorsPerLayer = 18, kFirstBias = 9, kMatricesPerLayer = 7, kMatricesBefore = 2;

using Numbers = std::vector<int64_t>;

// Of both operators: how many layers there are.
inline size_t check_decoder(const Arguments& in) {
  const Tensors &layers = in.list("layers"), &k_caches = in.list("k_caches");
  const size_t depth = k_caches.size(), packed = in.numbers("kinds").size();
  STD_TORCH_CHECK(depth > 0 && layers.size() == kTensorsPerLayer * depth && in.list("v_caches").size() == depth &&
                      in.numbers("windows").size() == depth,
                  "layers: expected ", kTensorsPerLayer, " tensors a layer, two caches and a window for each");
  STD_TORCH_CHECK(layers[6].dim() == 2 && k_caches[0].dim() == 4, "layers, k_caches: wrong number of dimensions");
  STD_TORCH_CHECK(packed == in.list("scales").size() &&
                      (packed == 0 || packed == kMatricesBefore + kMatricesPerLayer * depth),
                  "kinds, scales: expected one for the embedding, the head and ", kMatricesPerLayer,
                  " a layer, or none");
  const int64_t kv_heads = k_caches[0].size(1);
  STD_TORCH_CHECK(kv_heads > 0 && in['h'] % kv_heads == 0, "heads: ", in['h'], " are not a multiple of the cache's ",
                  kv_heads);
  STD_TORCH_CHECK(in['k'] >= 0 && in['k'] <= in['R'], "keep: expected 0 ... ", in['R'], ", got ", in['k']);
  return depth;
}

// Of one layer what both devices read alike. `t`: its tensors; of.vector and of.projection check and unpack one, the latter a
// matrix, by its place in DecoderWeights.matrices, with its bias. `read`: inputs of q, k and v.
template <class Layer, class Of, class Sizes>
Layer layer_of(const Of& of, const Tensor* t, size_t number, const Sizes& s, int64_t read) {
  const int64_t q_size = int64_t{s.heads} * s.head_dim, kv_size = int64_t{s.kv_heads} * s.head_dim;
  const auto projection = [&](const char* name, size_t at, int64_t outputs, int64_t inputs) {
    const size_t among = at < 5 ? at - 1 : at - 2;  // q, k, v, o: 1 … 4; gate, up, down: 6 … 8
    return of.projection(name, kMatricesBefore + kMatricesPerLayer * number + among, t[at], t[kFirstBias + among],
                         outputs, inputs);
  };
  Layer layer{};
  layer.input_norm = of.vector("input norm", t[0], s.hidden);
  layer.second_norm = of.vector("second norm", t[5], s.hidden);
  layer.q_norm = of.vector("q norm", t[16], s.head_dim, true);
  layer.k_norm = of.vector("k norm", t[17], s.head_dim, true);
  layer.q = projection("q", 1, q_size, read);
  layer.k = projection("k", 2, kv_size, read);
  layer.v = projection("v", 3, kv_size, read);
  layer.o = projection("o", 4, s.hidden, q_size);
  layer.gate = projection("gate", 6, s.inner, s.hidden);
  layer.up = projection("up", 7, s.inner, s.hidden);
  layer.down = projection("down", 8, s.hidden, s.inner);
  return layer;
}

// Whether there is such a vector: an optional one may be empty.
inline bool has_vector(const char* name, const Tensor& t, int64_t size, bool optional) {
  if (optional && t.numel() == 0) return false;
  STD_TORCH_CHECK(t.dim() == 1 && t.size(0) == size && t.is_contiguous(), name, ": expected [", size, "], contiguous");
  return true;
}

// Of feature_rows beside them. Without a norm layers store keys and values of features alone.
struct FeatureInputs {
  explicit FeatureInputs(const Arguments& in)
      : features(in.tensor("features")),
        feature_norm(in.tensor("feature_norm")),
        projection(in.list("projection")),
        normed_residual(in['n'] != 0),
        feature_first(in['f'] != 0) {
    STD_TORCH_CHECK(!projects() || projection.size() == 3, "projection: expected matrix, norm and bias, or nothing");
    STD_TORCH_CHECK(!stores() || (!projects() && in['k'] == 0),
                    "feature_norm: without one expected no projection, and keep 0; got ", in['k']);
  }

  const Tensor &features, &feature_norm;
  const Tensors& projection;
  bool normed_residual, feature_first;

  bool stores() const { return feature_norm.numel() == 0; }
  bool projects() const { return !projection.empty(); }
};

}  // namespace gsd
