// The forward of rows but for its attention: one kernel each for the embedding, a norm, a product (GEMM by mma.sync with
// split-K), the turning of heads (RoPE). Launches may begin early (programmatic dependent launch).
#include "../algorithms/rows_product.h"
#include "rows_launch.h"
#include "warp_machine.h"

namespace gsd {
namespace {

constexpr int kTurnWarps = 4;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define GSD_HAS_MMA
#endif

// Blocks of rows vary fastest: they run together and find each other's weights in the second-level cache. The bounds say how
// many blocks registers leave a multiprocessor; shared memory leaves as many on 8.0, 9.0 and 10.0, and two on 8.6, 8.9 and
// 12.0, which have 100 KiB.
template <class Element, int kRows>
__global__ void __launch_bounds__(ProductBlock<Element, kRows>::kThreads, kRows == kMostTileRows ? 4 : 5)
    rows_product_kernel(const __grid_constant__ RowsProduct args, const __grid_constant__ RowsCut cut) {
#if defined(GSD_HAS_MMA)
  __shared__ __align__(128) char arena[ProductBlock<Element, kRows>::kArenaBytes];
  CudaMachine machine(arena);
  ProductBlock<Element, kRows>::run(machine, args, cut, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y),
                                    static_cast<int>(blockIdx.z));
#endif
}

// Twice as many outputs a block, in shared memory that has to be opted into; of few rows for heads of as many. Two blocks
// share a multiprocessor of 8.0, 9.0 and 10.0; on 8.6, 8.9 and 12.0 there is memory for one.
template <class Element, int kRows>
using WideBlock = ProductBlock<Element, kRows, kWideOutputs>;
static_assert(WideBlock<Half, kMostTileRows>::kArenaBytes <= 80 * 1024, "two of 163 KiB");
static_assert(WideBlock<Half, 32>::kArenaBytes <= 80 * 1024, "two of 163 KiB");

template <class Element, int kRows>
__global__ void __launch_bounds__(WideBlock<Element, kRows>::kThreads, 2)
    rows_wide_product_kernel(const __grid_constant__ RowsProduct args, const __grid_constant__ RowsCut cut) {
#if defined(GSD_HAS_MMA)
  extern __shared__ __align__(128) char wide_arena[];
  CudaMachine machine(wide_arena);
  WideBlock<Element, kRows>::run(machine, args, cut, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y),
                                 static_cast<int>(blockIdx.z));
#endif
}

// Matrices that are packed, and dense ones beside them.
template <class Element, int kRows>
using PackedBlock = ProductBlock<Element, kRows, kTileOutputs, true>;

template <class Element, int kRows>
__global__ void __launch_bounds__(PackedBlock<Element, kRows>::kThreads, kRows == kMostTileRows ? 4 : 5)
    rows_packed_product_kernel(const __grid_constant__ RowsProduct args, const __grid_constant__ RowsCut cut) {
#if defined(GSD_HAS_MMA)
  __shared__ __align__(128) char arena[PackedBlock<Element, kRows>::kArenaBytes];
  CudaMachine machine(arena);
  PackedBlock<Element, kRows>::run(machine, args, cut, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y),
                                   static_cast<int>(blockIdx.z));
#endif
}

template <class Element>
__global__ void __launch_bounds__(kRowThreads) rows_norm_kernel(const __grid_constant__ RowsNorm args) {
#if defined(GSD_HAS_MMA)
  __shared__ __align__(16) char arena[kNormArenaBytes];
  CudaMachine machine(arena);
  norm_row<Element>(machine, args, static_cast<int>(blockIdx.x));
#endif
}

template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kLanes* kTurnWarps) rows_turn_kernel(const __grid_constant__ RowsTurn args) {
#if defined(GSD_HAS_MMA)
  CudaMachine machine(nullptr);
  const int head = static_cast<int>(blockIdx.y) * kTurnWarps + machine.warp();
  if (head < args.heads + 2 * args.kv_heads) {
    turn_head<Element, kHeadDim>(machine, args, static_cast<int>(blockIdx.x), head);
  }
#endif
}

template <class Element>
__global__ void __launch_bounds__(kRowThreads) rows_embed_kernel(const __grid_constant__ RowsEmbed args) {
#if defined(GSD_HAS_MMA)
  CudaMachine machine(nullptr);
  embed_row<Element>(machine, args, static_cast<int>(blockIdx.x));
#endif
}

template <class Element, int kRows>
int launch_wide(const RowsProduct& args, const RowsCut& cut, dim3 blocks, const RowsLaunch& how) {
  using Block = WideBlock<Element, kRows>;
  return launch_with(Block::kArenaBytes, rows_wide_product_kernel<Element, kRows>, blocks, Block::kThreads, how, args, cut);
}

template <class Element>
__global__ void __launch_bounds__(kRowThreads) rows_pair_kernel(const __grid_constant__ RowsPair args) {
#if defined(GSD_HAS_MMA)
  __shared__ __align__(16) char arena[kNormArenaBytes];
  CudaMachine machine(arena);
  pair_row<Element>(machine, args, static_cast<int>(blockIdx.x));
#endif
}

// A block a row, behind everything before.
template <class Args>
int launch_first(void (*bfloat16)(Args), void (*half)(Args), const std::remove_const_t<Args>& args, RowsLaunch how) {
  if (args.rows == 0) return cudaSuccess;
  how.overlap = false;  // whatever wrote the weights is done, which products rely on; and it may be no kernel
  return launch(how.bfloat16 ? bfloat16 : half, dim3(static_cast<unsigned>(args.rows)), kRowThreads, how, args);
}

template <class Element>
int launch_product(const RowsProduct& args, const RowsLaunch& how) {
  const RowsCut cut(args, args.tile_outputs());
  const dim3 blocks(static_cast<unsigned>(args.row_blocks()), static_cast<unsigned>(cut.output_blocks),
                    static_cast<unsigned>(cut.splits));
  if (args.tile_outputs() == kWideOutputs) {
    return args.tile_rows() == 32 ? launch_wide<Element, 32>(args, cut, blocks, how)
                                  : launch_wide<Element, kMostTileRows>(args, cut, blocks, how);
  }
  constexpr int kThreads = ProductBlock<Element, 16>::kThreads;
  const auto product = [&](auto dense, auto packed) {
    return launch(args.packed() ? packed : dense, blocks, kThreads, how, args, cut);
  };
  switch (args.tile_rows()) {
    case 16:
      return product(rows_product_kernel<Element, 16>, rows_packed_product_kernel<Element, 16>);
    case 32:
      return product(rows_product_kernel<Element, 32>, rows_packed_product_kernel<Element, 32>);
    default:
      return product(rows_product_kernel<Element, kMostTileRows>, rows_packed_product_kernel<Element, kMostTileRows>);
  }
}

template <class Element>
int launch_turn(const RowsTurn& args, const RowsLaunch& how) {
  const int heads = args.heads + 2 * args.kv_heads;
  const dim3 blocks(static_cast<unsigned>(args.batch * args.rows),
                    static_cast<unsigned>((heads + kTurnWarps - 1) / kTurnWarps));
  return args.head_dim == 64 ? launch(rows_turn_kernel<Element, 64>, blocks, kLanes * kTurnWarps, how, args)
                             : launch(rows_turn_kernel<Element, 128>, blocks, kLanes * kTurnWarps, how, args);
}

}  // namespace

int launch_rows_embed(const RowsEmbed& args, const RowsLaunch& how) {
  return launch_first(rows_embed_kernel<Bfloat16>, rows_embed_kernel<Half>, args, how);
}

int launch_rows_pair(const RowsPair& args, const RowsLaunch& how) {
  return launch_first(rows_pair_kernel<Bfloat16>, rows_pair_kernel<Half>, args, how);
}

int launch_rows_norm(const RowsNorm& args, const RowsLaunch& how) {
  if (args.batch * args.keep == 0) return cudaSuccess;
  const dim3 blocks(static_cast<unsigned>(args.batch * args.keep));
  return how.bfloat16 ? launch(rows_norm_kernel<Bfloat16>, blocks, kRowThreads, how, args)
                      : launch(rows_norm_kernel<Half>, blocks, kRowThreads, how, args);
}

int launch_rows_product(const RowsProduct& args, const RowsLaunch& how) {
  if (args.rows == 0 || args.output_blocks() == 0) return cudaSuccess;
  bool taken = false;
  const int error = how.group && args.grouped() ? launch_rows_group(args, how, taken) : 0;
  if (taken || error != 0) return error;
  return how.bfloat16 ? launch_product<Bfloat16>(args, how) : launch_product<Half>(args, how);
}

int launch_rows_turn(const RowsTurn& args, const RowsLaunch& how) {
  if (args.batch * args.rows == 0) return cudaSuccess;
  return how.bfloat16 ? launch_turn<Bfloat16>(args, how) : launch_turn<Half>(args, how);
}

}  // namespace gsd
