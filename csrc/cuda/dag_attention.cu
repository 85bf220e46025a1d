// dag_attention: one launch for all splits, one that combines them.
#include <cuda_runtime.h>

#include "choose.h"
#include "launch.h"
#include "warp_machine.h"

namespace gsd {
namespace {

constexpr int kCombineWarps = 4;

// Blocks of query rows vary fastest: those of one head run together and find its keys and values in the second-level
// cache.
template <class Element, int kHeadDim, int kWarps>
__global__ void __launch_bounds__(kLanes* kWarps)
    attention_split_kernel(const __grid_constant__ AttentionArgs args, const __grid_constant__ AttentionSizes sizes) {
#if defined(GSD_HAS_MMA)
  __shared__ __align__(128) char arena[AttentionTiles<Element, kHeadDim, kWarps>::kArenaBytes];
  CudaMachine machine(arena);
  SplitAttention<Element, kHeadDim, kWarps>::run(machine, args, sizes, static_cast<int>(blockIdx.x),
                                                 static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z));
#endif
}

template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kLanes* kCombineWarps)
    attention_combine_kernel(const __grid_constant__ AttentionArgs args, const __grid_constant__ AttentionSizes sizes) {
#if defined(GSD_HAS_MMA)
  CudaMachine machine(nullptr);
  const int m = static_cast<int>(blockIdx.x) * kCombineWarps + machine.warp();
  if (m < sizes.query_rows()) combine_row<Element, kHeadDim>(machine, args, sizes, static_cast<int>(blockIdx.y), m);
#endif
}

template <class Element, int kHeadDim, int kWarps>
int launch(const AttentionArgs& args, const AttentionSizes& sizes, void* stream) {
  using Tiles = AttentionTiles<Element, kHeadDim, kWarps>;
  const auto heads = static_cast<unsigned>(sizes.batch * sizes.kv_heads);
  const auto blocks = [&](int rows) { return static_cast<unsigned>((sizes.query_rows() + rows - 1) / rows); };
  const auto on = static_cast<cudaStream_t>(stream);
  attention_split_kernel<Element, kHeadDim, kWarps>
      <<<dim3(blocks(Tiles::kRows), heads, static_cast<unsigned>(sizes.splits())), Tiles::kThreads, 0,
         on>>>(args, sizes);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  attention_combine_kernel<Element, kHeadDim>
      <<<dim3(blocks(kCombineWarps), heads), kLanes * kCombineWarps, 0, on>>>(args, sizes);
  return cudaGetLastError();
}

}  // namespace

int plan_attention(AttentionSizes* sizes) {
  int device = 0, multiprocessors = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  if (major < kOldestMajor) return cudaErrorNoKernelImageForDevice;
  // What can be resident at once: three of the widest blocks by registers, four of the others by shared memory.
  choose_splits(*sizes, multiprocessors * (attention_block_rows(sizes->query_rows()) == 64 ? 3 : 4));
  return cudaSuccess;
}

int launch_attention(const AttentionArgs& args, const AttentionSizes& sizes, bool bfloat16, void* stream) {
  if (sizes.batch * sizes.kv_heads == 0 || sizes.query_rows() == 0) return cudaSuccess;
  return with_type(bfloat16, [&](auto type) {
    return with_size<64, 128>(sizes.head_dim, [&](auto dim) {
      return with_size<16, 32, 64>(attention_block_rows(sizes.query_rows()), [&](auto rows) {
        return launch<decltype(type), decltype(dim)::value, decltype(rows)::value / 16>(args, sizes, stream);
      });
    });
  });
}

}  // namespace gsd
