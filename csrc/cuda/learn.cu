// learn_source: one thread block for all sequences, whose statistics are common.
#include "block_launch.h"
#include "launch.h"

namespace gsd {
namespace {

__global__ void __launch_bounds__(kBlockThreads)
    learn_kernel(const __grid_constant__ LearnArgs args, const __grid_constant__ LearnSizes sizes) {
  CudaBlock group;
  learn_all(group, args, sizes);
}

}  // namespace

int launch_learn(const LearnArgs& args, const LearnSizes& sizes, void* stream) {
  const int items = max_int(sizes.nodes(), sizes.entries);
  return launch_blocks(learn_kernel, args, sizes, 1, items, 0, stream);
}

}  // namespace gsd
