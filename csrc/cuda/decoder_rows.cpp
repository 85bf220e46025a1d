// A decoder's forward over graph rows on a GPU: embedding, layers, norm and output matrix, nine launches a layer.
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
  int norm(const RowsNorm& args) const { return launch_rows_norm(args, how); }
  int product(const RowsProduct& args) const { return launch_rows_product(args, how); }
  int turn(const RowsTurn& args) const { return launch_rows_turn(args, how); }
  int ancestors(const AncestorListArgs& args) const { return launch_ancestors(args, how.stream); }
  int attention(const PathAttentionArgs& args, const PathAttentionSizes& sizes) const {
    return launch_path_attention(args, sizes, how.bfloat16, how.stream);
  }
};

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
  const RowsForward forward(call.decoder);
  Tensor memory = torch::stable::new_empty(embedding, {forward.bytes()}, ScalarType::Byte);
  Tensor cleared = torch::stable::narrow(memory, 0, 0, forward.cleared_bytes());
  torch::stable::zero_(cleared);
  const bool bfloat16 = final_norm.scalar_type() == ScalarType::BFloat16;
  CudaLaunches launches{{current_stream(token_ids), bfloat16, call.decoder.overlap, call.decoder.group}};
  check_launch(forward.run(written<char>(memory), launches));
  return call.outputs;
}

}  // namespace
}  // namespace gsd

GSD_OPS(CUDA, m) { m.impl("decoder_rows", TORCH_BOX(&gsd::decoder_rows)); }
