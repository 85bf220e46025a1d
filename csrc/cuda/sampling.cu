// sample_rows, draft_candidates and warped_log_probs: one thread block a row.
#include <cuda_runtime.h>

#include "launch.h"

namespace gsd {
namespace {

// Two blocks a multiprocessor leave 64 registers a thread, which is enough.
template <class Logit>
__global__ void __launch_bounds__(kPickThreads, 2)
    pick_kernel(const __grid_constant__ PickBatch a, const __grid_constant__ PickSizes sizes) {
  extern __shared__ __align__(16) char arena[];
  const int64_t row = blockIdx.x;
  const PickArgs<Logit> args{static_cast<const Logit*>(a.logits) + row * sizes.vocab,
                             a.scores + row * sizes.vocab,
                             a.tokens + row * sizes.branch,
                             a.log_probs != nullptr ? a.log_probs + row * sizes.branch : nullptr,
                             a.warpers(row / a.rows),
                             a.noise(row)};
  CudaBlock group;
  pick_tokens(group, args, sizes, arena);
}

template <class Logit>
int launch(const PickBatch& args, const PickSizes& sizes, int64_t blocks, void* stream) {
  if (blocks == 0) return cudaSuccess;
  pick_kernel<Logit><<<static_cast<unsigned>(blocks), kPickThreads, PickArena::bytes(kPickThreads),
                       static_cast<cudaStream_t>(stream)>>>(args, sizes);
  return cudaGetLastError();
}

}  // namespace

int launch_pick(const PickBatch& args, const PickSizes& sizes, LogitType type, int64_t blocks, void* stream) {
  switch (type) {
    case LogitType::kFloat16:
      return launch<ShortLogit<Half>>(args, sizes, blocks, stream);
    case LogitType::kBfloat16:
      return launch<ShortLogit<Bfloat16>>(args, sizes, blocks, stream);
    case LogitType::kFloat64:
      return launch<FloatLogit<double>>(args, sizes, blocks, stream);
    default:
      return launch<FloatLogit<float>>(args, sizes, blocks, stream);
  }
}

}  // namespace gsd
