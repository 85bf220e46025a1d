// merge, flatten and verify: the graph algorithms run by one thread block a sequence.
#include "block_launch.h"
#include "launch.h"

namespace gsd {
namespace {

__global__ void __launch_bounds__(kBlockThreads)
    merge_kernel(const __grid_constant__ MergeArgs first, const __grid_constant__ MergeSizes sizes) {
  extern __shared__ __align__(16) char arena[];
  CudaBlock group;
  merge_level(group, first.at(sizes, blockIdx.x), sizes, arena);
}

__global__ void __launch_bounds__(kBlockThreads)
    flatten_kernel(const __grid_constant__ FlattenArgs first, const __grid_constant__ FlattenSizes sizes) {
  extern __shared__ __align__(16) char arena[];
  CudaBlock group;
  flatten_graph(group, first.at(sizes, blockIdx.x), sizes, arena);
}

__global__ void __launch_bounds__(kBlockThreads)
    verify_kernel(const __grid_constant__ VerifyArgs first, const __grid_constant__ VerifySizes sizes) {
  extern __shared__ __align__(16) char arena[];
  CudaBlock group;
  verify_rows(group, first.at(sizes, blockIdx.x), sizes, arena);
}

}  // namespace

int launch_merge(const MergeArgs& first, const MergeSizes& sizes, int64_t batch, void* stream) {
  // The widest steps handle a candidate or half a pair of sorted nodes a thread.
  const int items = max_int(sizes.candidates(), sizes.capacity / 2);
  return launch_blocks(merge_kernel, first, sizes, batch, items, MergeArena::bytes(sizes), stream);
}

int launch_flatten(const FlattenArgs& first, const FlattenSizes& sizes, int64_t batch, void* stream) {
  return launch_blocks(flatten_kernel, first, sizes, batch, sizes.rows * sizes.branch, FlattenArena::bytes(sizes), stream);
}

int launch_verify(const VerifyArgs& first, const VerifySizes& sizes, int64_t batch, void* stream) {
  return launch_blocks(verify_kernel, first, sizes, batch, sizes.rows, VerifyArena::bytes(sizes), stream);
}

}  // namespace gsd
