// A decoder's forward over graph rows on a GPU: embedding, layers, norm and output matrix, eight launches a layer; and that
// of a drafter which reads a feature a row besides.
//
// gsd_kernels/ops/decoder_rows/reference.py is the specification. One call allocates once beside its outputs and reads
// nothing back, so a CUDA graph can hold it.
#include "../torch_ops/registration.h"
#include "glue.h"
#include "path_attention.h"
#include "rows.h"
#include "rows_tensors.h"

namespace gsd {
namespace {

struct CudaLaunches {
  RowsLaunch how;

  int embed(const RowsEmbed& args) const { return launch_rows_embed(args, how); }
  int pair(const RowsPair& args) const { return launch_rows_pair(args, how); }
  int norm(const RowsNorm& args) const { return launch_rows_norm(args, how); }
  int product(const RowsProduct& args) const { return launch_rows_product(args, how); }
  int turn(const RowsTurn& args) const { return launch_rows_turn(args, how); }
  int ancestors(const AncestorListArgs& args) const { return launch_ancestors(args, how.stream); }
  int attention(const PathAttentionArgs& args, const PathAttentionSizes& sizes) const {
    return launch_path_attention(args, sizes, how);
  }
};

// On the device of `like`, which is the current one.
RowsOutputs launched(const RowsCall& call, void* stream, const Tensor& like) {
  const RowsForward forward(call.decoder);
  Tensor memory = torch::stable::new_empty(like, {forward.bytes()}, ScalarType::Byte);
  Tensor cleared = torch::stable::narrow(memory, 0, 0, forward.cleared_bytes());
  torch::stable::zero_(cleared);
  const bool bfloat16 = like.scalar_type() == ScalarType::BFloat16;
  CudaLaunches launches{{stream, bfloat16, call.decoder.overlap, call.decoder.group}};
  check_launch(forward.run(written<char>(memory), launches));
  return call.outputs;
}

RowsOutputs decoder_rows(const Tensor& token_ids, const Tensor& positions, const Tensor& slots,
                         const Tensor& ancestor_mask, const Tensor& node_depths, const Tensor& kv_len,
                         const Tensor& kv_start, const Tensor& embedding, const std::vector<Tensor>& layers,
                         const std::vector<int64_t>& kinds, const std::vector<Tensor>& scales,
                         const Tensor& final_norm, const Tensor& head, const Tensor& inv_freq,
                         const std::vector<Tensor>& k_caches, const std::vector<Tensor>& v_caches,
                         const std::vector<int64_t>& windows, int64_t heads, double eps, double rope_scale,
                         const std::vector<int64_t>& states, int64_t keep, const std::optional<Tensor>& spoiled) {
  check_device({&token_ids, &positions, &slots, &ancestor_mask, &node_depths, &kv_len, &kv_start, &embedding,
                &final_norm, &head, &inv_freq});
  for (const auto* list : {&layers, &scales, &k_caches, &v_caches}) check_device(token_ids, *list);
  check_device(token_ids, {&spoiled});
  const DeviceGuard guard(token_ids.get_device_index());
  const RowsCall call =
      prepare_rows(token_ids, positions, slots, ancestor_mask, node_depths, kv_len, kv_start, embedding, layers, kinds,
                   scales, final_norm, head, inv_freq, k_caches, v_caches, windows, heads, eps, rope_scale, states, keep,
                   spoiled);
  return launched(call, current_stream(token_ids), final_norm);
}

RowsOutputs feature_rows(const Tensor& token_ids, const Tensor& features, const Tensor& positions, const Tensor& slots,
                         const Tensor& ancestor_mask, const Tensor& node_depths, const Tensor& kv_len,
                         const Tensor& kv_start, const Tensor& embedding, const std::vector<Tensor>& layers,
                         const std::vector<int64_t>& kinds, const std::vector<Tensor>& scales,
                         const Tensor& feature_norm, bool normed_residual, const std::vector<Tensor>& projection,
                         bool feature_first, const Tensor& final_norm, const Tensor& head, const Tensor& inv_freq,
                         const std::vector<Tensor>& k_caches, const std::vector<Tensor>& v_caches,
                         const std::vector<int64_t>& windows, int64_t heads, double eps, double rope_scale,
                         int64_t keep) {
  check_device({&token_ids, &features, &positions, &slots, &ancestor_mask, &node_depths, &kv_len, &kv_start, &embedding,
                &feature_norm, &final_norm, &head, &inv_freq});
  for (const auto* list : {&layers, &scales, &projection, &k_caches, &v_caches}) check_device(token_ids, *list);
  const DeviceGuard guard(token_ids.get_device_index());
  RowsCall call = prepare_rows(token_ids, positions, slots, ancestor_mask, node_depths, kv_len, kv_start, embedding,
                               layers, kinds, scales, final_norm, head, inv_freq, k_caches, v_caches, windows, heads,
                               eps, rope_scale, {}, keep, std::nullopt, projection.empty());
  add_features(call, features, feature_norm, normed_residual, projection, feature_first, final_norm);
  return launched(call, current_stream(token_ids), final_norm);
}

}  // namespace
}  // namespace gsd

GSD_OPS(CUDA, m) {
  m.impl("decoder_rows", TORCH_BOX(&gsd::decoder_rows));
  m.impl("feature_rows", TORCH_BOX(&gsd::feature_rows));
}
