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

int launch_forward(const RowsCall& call, void* stream) {
  const RowsForward forward(call.decoder);
  const Tensor& like = call.outputs[0];
  Tensor memory = torch::stable::new_empty(like, {forward.bytes()}, ScalarType::Byte);
  Tensor cleared = torch::stable::narrow(memory, 0, 0, forward.cleared_bytes());
  torch::stable::zero_(cleared);
  const bool bfloat16 = like.scalar_type() == ScalarType::BFloat16;
  const RowsLaunch how{stream, bfloat16, forward.early(), call.decoder.group};
  const auto launch = [&](const auto&... args) { return launch_rows(args..., how); };
  const int error = forward.run(written<char>(memory), launch);
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
  LaunchedOp<decoder_call, launch_forward>::add(m, "decoder_rows");
  LaunchedOp<feature_call, launch_forward>::add(m, "feature_rows");
}
