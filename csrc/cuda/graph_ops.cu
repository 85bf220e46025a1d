// merge, flatten and verify: the graph algorithms run by one thread block a sequence.
#include <cuda_runtime.h>

#include "launch.h"

namespace gsd {
namespace {

constexpr int kMaxThreads = 256;

__global__ void __launch_bounds__(kMaxThreads)
    merge_kernel(const __grid_constant__ MergeArgs first, const __grid_constant__ MergeSizes sizes) {
  extern __shared__ __align__(16) char arena[];
  CudaBlock group;
  merge_level(group, first.at(sizes, blockIdx.x), sizes, arena);
}

__global__ void __launch_bounds__(kMaxThreads)
    flatten_kernel(const __grid_constant__ FlattenArgs first, const __grid_constant__ FlattenSizes sizes) {
  extern __shared__ __align__(16) char arena[];
  CudaBlock group;
  flatten_graph(group, first.at(sizes, blockIdx.x), sizes, arena);
}

__global__ void __launch_bounds__(kMaxThreads)
    verify_kernel(const __grid_constant__ VerifyArgs first, const __grid_constant__ VerifySizes sizes) {
  extern __shared__ __align__(16) char arena[];
  CudaBlock group;
  verify_rows(group, first.at(sizes, blockIdx.x), sizes, arena);
}

// As many threads as there are items, in whole warps: a barrier costs less in a small block.
int threads_for(int items) { return min_int(kMaxThreads, (items + 31) / 32 * 32); }

template <class Kernel, class Args, class Sizes>
int launch(Kernel kernel, const Args& first, const Sizes& sizes, int64_t batch, int items, size_t arena, void* stream) {
  if (batch == 0) return cudaSuccess;
  constexpr size_t kWithoutOptIn = 48 * 1024;
  if (arena > kWithoutOptIn) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(arena));
    if (error != cudaSuccess) return error;
  }
  kernel<<<static_cast<unsigned>(batch), threads_for(items), arena, static_cast<cudaStream_t>(stream)>>>(first, sizes);
  return cudaGetLastError();
}

}  // namespace

int launch_merge(const MergeArgs& first, const MergeSizes& sizes, int64_t batch, void* stream) {
  // The widest steps handle a candidate or half a pair of sorted nodes a thread.
  const int items = max_int(sizes.candidates(), sizes.capacity / 2);
  return launch(merge_kernel, first, sizes, batch, items, MergeArena::bytes(sizes), stream);
}

int launch_flatten(const FlattenArgs& first, const FlattenSizes& sizes, int64_t batch, void* stream) {
  return launch(flatten_kernel, first, sizes, batch, sizes.rows * sizes.branch, FlattenArena::bytes(sizes), stream);
}

int launch_verify(const VerifyArgs& first, const VerifySizes& sizes, int64_t batch, void* stream) {
  return launch(verify_kernel, first, sizes, batch, sizes.rows, VerifyArena::bytes(sizes), stream);
}

}  // namespace gsd
