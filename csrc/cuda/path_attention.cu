// The attention of decoder_rows: a launch for the prefix, one for the ends of the rows.
#include "path_attention.h"

#include <cuda_runtime.h>

#include "warp_machine.h"

namespace gsd {
namespace {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define GSD_HAS_MMA
#endif

constexpr int kListThreads = 128;

__global__ void __launch_bounds__(kListThreads) ancestors_kernel(const __grid_constant__ AncestorListArgs args) {
  const auto row = static_cast<int64_t>(blockIdx.x);
  if (threadIdx.x == 0) count_ancestors(args, row);
  for (int node = static_cast<int>(threadIdx.x); node < args.width(); node += kListThreads) {
    list_ancestor(args, row, node);
  }
}

// Blocks of rows vary fastest, as in attention_split_kernel. The longest splits are the last ones and begin first.
template <class Element, int kHeadDim, int kWarps>
__global__ void __launch_bounds__(kLanes* kWarps)
    path_split_kernel(const __grid_constant__ PathAttentionArgs args,
                      const __grid_constant__ PathAttentionSizes sizes) {
#if defined(GSD_HAS_MMA)
  __shared__ __align__(128) char arena[AttentionTiles<Element, kHeadDim, kWarps>::kArenaBytes];
  CudaMachine machine(arena);
  PathPrefix<Element, kHeadDim, kWarps>::run(machine, args, sizes, static_cast<int>(blockIdx.x),
                                             static_cast<int>(blockIdx.y),
                                             static_cast<int>(gridDim.z - 1 - blockIdx.z));
#endif
}

template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kLanes* PathEnd<Element, kHeadDim>::kWarps, kHeadDim == 64 ? 3 : 2)
    path_end_kernel(const __grid_constant__ PathAttentionArgs args, const __grid_constant__ PathAttentionSizes sizes) {
#if defined(GSD_HAS_MMA)
  using End = PathEnd<Element, kHeadDim>;
  __shared__ __align__(128) char arena[End::Tiles::kArenaBytes];
  CudaMachine machine(arena);
  End::run(machine, args, sizes, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y),
           static_cast<int>(blockIdx.z));
#endif
}

unsigned blocks_of(int rows, int size) { return static_cast<unsigned>((rows + size - 1) / size); }

template <class Element, int kHeadDim, int kWarps>
int launch_prefix(const PathAttentionArgs& args, const PathAttentionSizes& sizes, cudaStream_t stream) {
  using Tiles = AttentionTiles<Element, kHeadDim, kWarps>;
  const dim3 grid(blocks_of(sizes.query_rows(), Tiles::kRows), static_cast<unsigned>(sizes.batch * sizes.kv_heads),
                  static_cast<unsigned>(sizes.splits()));
  path_split_kernel<Element, kHeadDim, kWarps><<<grid, Tiles::kThreads, 0, stream>>>(args, sizes);
  return cudaGetLastError();
}

template <class Element, int kHeadDim>
int launch(const PathAttentionArgs& args, const PathAttentionSizes& sizes, cudaStream_t stream) {
  using End = PathEnd<Element, kHeadDim>;
  const int error = sizes.query_rows() <= 16 ? launch_prefix<Element, kHeadDim, 1>(args, sizes, stream)
                                             : launch_prefix<Element, kHeadDim, 4>(args, sizes, stream);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(sizes.rows), static_cast<unsigned>(sizes.batch * sizes.kv_heads),
                  blocks_of(sizes.group, End::Tiles::kRows));
  path_end_kernel<Element, kHeadDim><<<grid, End::Tiles::kThreads, 0, stream>>>(args, sizes);
  return cudaGetLastError();
}

template <class Element>
int launch_dims(const PathAttentionArgs& args, const PathAttentionSizes& sizes, cudaStream_t stream) {
  return sizes.head_dim == 64 ? launch<Element, 64>(args, sizes, stream) : launch<Element, 128>(args, sizes, stream);
}

}  // namespace

int launch_ancestors(const AncestorListArgs& args, void* stream) {
  const int64_t rows = static_cast<int64_t>(args.batch) * args.rows;
  if (rows == 0) return cudaSuccess;
  ancestors_kernel<<<static_cast<unsigned>(rows), kListThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return cudaGetLastError();
}

int launch_path_attention(const PathAttentionArgs& args, const PathAttentionSizes& sizes, bool bfloat16, void* stream) {
  if (sizes.batch * sizes.kv_heads == 0 || sizes.query_rows() == 0) return cudaSuccess;
  const auto on = static_cast<cudaStream_t>(stream);
  return bfloat16 ? launch_dims<Bfloat16>(args, sizes, on) : launch_dims<Half>(args, sizes, on);
}

}  // namespace gsd
