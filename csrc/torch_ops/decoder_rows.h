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
