// The attention of decoder_rows: a launch for the prefix, one for the ends of the rows.
#include "path_attention.h"

#include "../algorithms/path_end.h"
#include "choose.h"
#include "rows_launch.h"

namespace gsd {
namespace {

// Blocks of rows vary fastest, as in attention_split_kernel. The longest splits are the last ones and begin first. Blocks
// of four warps and small heads are told that three share a multiprocessor: for a fourth one 8.6 and 8.9 would spill.
template <class Element, int kHeadDim, int kWarps>
__global__ void __launch_bounds__(kLanes* kWarps, kHeadDim == 64 && kWarps == 4 ? 3 : 0)
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

// Three blocks share a multiprocessor of 9.0, by registers and by memory, which has to be opted into. From 8.6 on others
// have memory for one of the largest.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int kEndBlocks = 1;
#else
constexpr int kEndBlocks = 3;
#endif

template <class Element, int kHeadDim>
__global__ void __launch_bounds__(PathEnd<Element, kHeadDim>::kThreads, kHeadDim == 64 ? 3 : kEndBlocks)
    path_end_kernel(const __grid_constant__ PathAttentionArgs args, const __grid_constant__ PathAttentionSizes sizes) {
#if defined(GSD_HAS_MMA)
  extern __shared__ __align__(128) char end_arena[];
  CudaMachine machine(end_arena);
  PathEnd<Element, kHeadDim>::run(machine, args, sizes, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y));
#endif
}

unsigned blocks_of(int rows, int size) { return static_cast<unsigned>((rows + size - 1) / size); }

template <class Element, int kHeadDim, int kWarps>
int launch_prefix(const PathAttentionArgs& args, const PathAttentionSizes& sizes, const RowsLaunch& how) {
  using Tiles = AttentionTiles<Element, kHeadDim, kWarps>;
  const dim3 grid(blocks_of(sizes.query_rows(), Tiles::kRows), static_cast<unsigned>(sizes.batch * sizes.kv_heads),
                  static_cast<unsigned>(sizes.splits()));
  return launch(path_split_kernel<Element, kHeadDim, kWarps>, grid, Tiles::kThreads, how, args, sizes);
}

template <class Element, int kHeadDim>
int launch_both(const PathAttentionArgs& args, const PathAttentionSizes& sizes, const RowsLaunch& how) {
  using End = PathEnd<Element, kHeadDim>;
  const int error = sizes.query_rows() <= 16 ? launch_prefix<Element, kHeadDim, 1>(args, sizes, how)
                                             : launch_prefix<Element, kHeadDim, 4>(args, sizes, how);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(End::blocks(sizes)), static_cast<unsigned>(sizes.batch * sizes.kv_heads));
  return launch_with(End::kArenaBytes, path_end_kernel<Element, kHeadDim>, grid, End::kThreads, how, args, sizes);
}

}  // namespace

int launch_rows(const PathAttentionArgs& args, const PathAttentionSizes& sizes, const RowsLaunch& how) {
  if (sizes.batch * sizes.kv_heads == 0 || sizes.query_rows() == 0) return cudaSuccess;
  return with_type(how.bfloat16, [&](auto type) {
    return with_size<64, 128>(sizes.head_dim, [&](auto dim) {
      return launch_both<decltype(type), decltype(dim)::value>(args, sizes, how);
    });
  });
}

}  // namespace gsd
