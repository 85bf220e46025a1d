// A decoder's forward over graph rows on a GPU: embedding, layers, norm and output matrix, in launches that
// rows_forward.h lists; that of a drafter which reads a feature a row besides; and keys and values of features.
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
  int attention(const PathAttentionArgs& args, const PathAttentionSizes& sizes) const {
    return launch_path_attention(args, sizes, how);
  }
};

int launch_rows(const RowsCall& call, void* stream) {
  const RowsForward forward(call.decoder);
  const Tensor& like = call.outputs[0];
  Tensor memory = torch::stable::new_empty(like, {forward.bytes()}, ScalarType::Byte);
  Tensor cleared = torch::stable::narrow(memory, 0, 0, forward.cleared_bytes());
  torch::stable::zero_(cleared);
  const bool bfloat16 = like.scalar_type() == ScalarType::BFloat16;
  CudaLaunches launches{{stream, bfloat16, forward.early(), call.decoder.group}};
  const int error = forward.run(written<char>(memory), launches);
  if (error == 0) call.repeat_states();
  return error;
}

}  // namespace
}  // namespace gsd

extern "C" __attribute__((visibility("default"))) void gsd_force_rows(int overlap, int ahead, int group) {
  gsd::rows_forced = {overlap, ahead, group};
}

GSD_OPS(CUDA, m) {
  using namespace gsd;
  LaunchedOp<decoder_call, launch_rows>::add(m, "decoder_rows");
  LaunchedOp<feature_call, launch_rows>::add(m, "feature_rows");
}
