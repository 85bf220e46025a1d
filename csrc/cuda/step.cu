// What lies between the larger ops of a step: csrc/algorithms/step.h run by one thread block a sequence.
#include "block_launch.h"
#include "launch.h"

namespace gsd {
namespace {

__global__ void __launch_bounds__(kBlockThreads)
    start_kernel(const __grid_constant__ StartArgs first, const __grid_constant__ StartSizes sizes) {
  CudaBlock group;
  reset_to_root(group, first.at(sizes, blockIdx.x), sizes);
}

template <class Integer>
__global__ void __launch_bounds__(kBlockThreads)
    feed_kernel(const __grid_constant__ FeedArgs<Integer> first, const __grid_constant__ FeedSizes sizes) {
  CudaBlock group;
  place_rows(group, first.at(sizes, blockIdx.x), sizes);
}

__global__ void __launch_bounds__(kBlockThreads)
    chain_kernel(const __grid_constant__ ChainArgs first, const __grid_constant__ ChainSizes sizes) {
  CudaBlock group;
  chain_rows(group, first.at(sizes, blockIdx.x), sizes);
}

__global__ void __launch_bounds__(kBlockThreads)
    path_kernel(const __grid_constant__ PathArgs first, const __grid_constant__ PathSizes sizes) {
  CudaBlock group;
  walk_path(group, first.at(sizes, blockIdx.x), sizes);
}

__global__ void __launch_bounds__(kBlockThreads)
    text_kernel(const __grid_constant__ TextArgs first, const __grid_constant__ TextSizes sizes) {
  CudaBlock group;
  append_text(group, first.at(sizes, blockIdx.x), sizes);
}

}  // namespace

int launch_start(const StartArgs& first, const StartSizes& sizes, int64_t batch, void* stream) {
  return launch_blocks(start_kernel, first, sizes, batch, sizes.nodes, 0, stream);
}

int launch_feed(const FeedArgs<int64_t>& first, const FeedSizes& sizes, int64_t batch, void* stream) {
  return launch_blocks(feed_kernel<int64_t>, first, sizes, batch, sizes.rows, 0, stream);
}

int launch_feed(const FeedArgs<int32_t>& first, const FeedSizes& sizes, int64_t batch, void* stream) {
  return launch_blocks(feed_kernel<int32_t>, first, sizes, batch, sizes.rows, 0, stream);
}

int launch_chain(const ChainArgs& first, const ChainSizes& sizes, int64_t batch, void* stream) {
  return launch_blocks(chain_kernel, first, sizes, batch, sizes.rows, 0, stream);
}

int launch_path(const PathArgs& first, const PathSizes& sizes, int64_t batch, void* stream) {
  return launch_blocks(path_kernel, first, sizes, batch, sizes.path, 0, stream);
}

int launch_text(const TextArgs& first, const TextSizes& sizes, int64_t batch, void* stream) {
  return launch_blocks(text_kernel, first, sizes, batch, sizes.path, 0, stream);
}

}  // namespace gsd
