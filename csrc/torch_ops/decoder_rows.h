// The arguments of decoder_rows and feature_rows, named once for all devices, and what is checked of them on each.
#pragma once

#include "common.h"

namespace gsd {

// As listed by LayerWeights.tensors and DecoderWeights.matrices.
constexpr size_t kTensorsPerLayer = 18, kFirstBias = 9, kMatricesPerLayer = 7, kMatricesBefore = 2;

using Numbers = std::vector<int64_t>;
using RowsOutputs = std::tuple<Tensor, Tensor, Tensor>;

// Of both.
struct DecoderInputs {
  const Tensor &token_ids, &positions, &slots, &ancestor_mask, &node_depths, &kv_len, &kv_start, &embedding;
  const Tensors& layers;
  const Numbers& kinds;
  const Tensors& scales;
  const Tensor &final_norm, &head, &inv_freq;
  const Tensors &k_caches, &v_caches;
  const Numbers& windows;
  int64_t heads;
  double eps, rope_scale;
  int64_t keep;

  int64_t batch() const { return token_ids.size(0); }
  int64_t rows() const { return token_ids.size(1); }
  size_t depth() const { return k_caches.size(); }

  void check_all() const {
    check("token_ids", token_ids, ScalarType::Int, {kAny, kAny});
    check("positions", positions, ScalarType::Int, {batch(), rows()});
    check("slots", slots, ScalarType::Int, {batch(), rows()});
    check("ancestor_mask", ancestor_mask, ScalarType::Int, {batch(), rows(), kAny});
    check("node_depths", node_depths, ScalarType::Int, {batch(), kAny});
    check("kv_len", kv_len, ScalarType::Int, {batch()});
    check("kv_start", kv_start, ScalarType::Int, {batch()});
    check("inv_freq", inv_freq, ScalarType::Float, {kAny});
    STD_TORCH_CHECK(depth() > 0 && layers.size() == kTensorsPerLayer * depth() && v_caches.size() == depth() &&
                        windows.size() == depth(),
                    "layers: expected ", kTensorsPerLayer, " tensors a layer, two caches and a window for each");
    STD_TORCH_CHECK(embedding.dim() == 2 && head.dim() == 2 && layers[6].dim() == 2 && k_caches[0].dim() == 4 &&
                        final_norm.dim() == 1,
                    "embedding, head, layers, k_caches, final_norm: wrong number of dimensions");
    STD_TORCH_CHECK(kinds.size() == scales.size() &&
                        (kinds.empty() || kinds.size() == kMatricesBefore + kMatricesPerLayer * depth()),
                    "kinds, scales: expected one for the embedding, the head and ", kMatricesPerLayer,
                    " a layer, or none");
    const int64_t kv_heads = k_caches[0].size(1);
    STD_TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, "heads: ", heads, " are not a multiple of the cache's ",
                    kv_heads);
    STD_TORCH_CHECK(keep >= 0 && keep <= rows(), "keep: expected 0 ... ", rows(), ", got ", keep);
  }
};

// Of feature_rows beside them. Without a norm layers store keys and values of features alone.
struct FeatureInputs {
  const Tensor &features, &feature_norm;
  bool normed_residual;
  const Tensors& projection;
  bool feature_first;

  bool stores() const { return feature_norm.numel() == 0; }
  bool projects() const { return !projection.empty(); }

  void check_all(int64_t keep) const {
    STD_TORCH_CHECK(!projects() || projection.size() == 3, "projection: expected matrix, norm and bias, or nothing");
    STD_TORCH_CHECK(!stores() || (!projects() && keep == 0),
                    "feature_norm: without one expected no projection, and keep 0; got ", keep);
  }
};

// Both operators, to which a device gives its Call: of DecoderInputs, layers whose states are asked for and marks; or of
// DecoderInputs and FeatureInputs.
template <class Call>
Call decoder_call(const Tensor& token_ids, const Tensor& positions, const Tensor& slots, const Tensor& ancestor_mask,
                  const Tensor& node_depths, const Tensor& kv_len, const Tensor& kv_start, const Tensor& embedding,
                  const Tensors& layers, const Numbers& kinds, const Tensors& scales, const Tensor& final_norm,
                  const Tensor& head, const Tensor& inv_freq, const Tensors& k_caches, const Tensors& v_caches,
                  const Numbers& windows, int64_t heads, double eps, double rope_scale, const Numbers& states,
                  int64_t keep, const MaybeTensor& spoiled) {
  return Call({token_ids, positions, slots, ancestor_mask, node_depths, kv_len, kv_start, embedding, layers, kinds, scales,
               final_norm, head, inv_freq, k_caches, v_caches, windows, heads, eps, rope_scale, keep},
              states, spoiled);
}

template <class Call>
Call feature_call(const Tensor& token_ids, const Tensor& features, const Tensor& positions, const Tensor& slots,
                  const Tensor& ancestor_mask, const Tensor& node_depths, const Tensor& kv_len, const Tensor& kv_start,
                  const Tensor& embedding, const Tensors& layers, const Numbers& kinds, const Tensors& scales,
                  const Tensor& feature_norm, bool normed_residual, const Tensors& projection, bool feature_first,
                  const Tensor& final_norm, const Tensor& head, const Tensor& inv_freq, const Tensors& k_caches,
                  const Tensors& v_caches, const Numbers& windows, int64_t heads, double eps, double rope_scale,
                  int64_t keep) {
  return Call({token_ids, positions, slots, ancestor_mask, node_depths, kv_len, kv_start, embedding, layers, kinds, scales,
               final_norm, head, inv_freq, k_caches, v_caches, windows, heads, eps, rope_scale, keep},
              {features, feature_norm, normed_residual, projection, feature_first});
}

}  // namespace gsd
