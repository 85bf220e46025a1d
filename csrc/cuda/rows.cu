// The forward of rows but for its attention: one kernel each for the embedding, a norm, a product (GEMM by mma.sync with
// split-K), the turning of heads (RoPE). Launches may begin early (programmatic dependent launch).
#include "../algorithms/rows_product.h"
#include "choose.h"
#include "rows_launch.h"

namespace gsd {
namespace {

constexpr int kTurnWarps = 4;

// Blocks of rows vary fastest: they run together and find each other's weights in the second-level cache. The bounds say how
// many blocks registers leave a multiprocessor; shared memory leaves as many on 8.0, 9.0 and 10.0, and two on 8.6, 8.9 and
// 12.0, which have 100 KiB. Of twice as many outputs a block, whose shared memory has to be opted into, two share a
// multiprocessor of 8.0, 9.0 and 10.0; on 8.6, 8.9 and 12.0 there is memory for one.
template <class Element, int kOutputs, int kRows, bool kPacked>
__global__ void __launch_bounds__(ProductBlock<Element, kRows, kOutputs, kPacked>::kThreads,
                                  kOutputs == kWideOutputs ? 2 : kRows == kMostTileRows ? 4 : 5)
    rows_product_kernel(const __grid_constant__ RowsProduct args, const __grid_constant__ RowsCut cut) {
#if defined(GSD_HAS_MMA)
  using Block = ProductBlock<Element, kRows, kOutputs, kPacked>;
  static_assert(Block::kArenaBytes <= (kOutputs == kWideOutputs ? 80 : 48) * 1024, "two of 163 KiB, or without opting in");
  extern __shared__ __align__(128) char product_arena[];
  CudaMachine machine(product_arena);
  Block::run(machine, args, cut, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z));
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

template <class Element, int kOutputs, int kRows, bool kPacked = false>
int launch_blocks(const RowsProduct& args, const RowsLaunch& how) {
  using Block = ProductBlock<Element, kRows, kOutputs, kPacked>;
  const RowsCut cut(args, kOutputs);
  const dim3 blocks(static_cast<unsigned>(args.row_blocks()), static_cast<unsigned>(cut.output_blocks),
                    static_cast<unsigned>(cut.splits));
  return launch_with(Block::kArenaBytes, rows_product_kernel<Element, kOutputs, kRows, kPacked>, blocks, Block::kThreads,
                     how, args, cut);
}

template <class Element>
int launch_product(const RowsProduct& args, const RowsLaunch& how) {
  if (args.tile_outputs() == kWideOutputs) {  // of few rows for heads of as many
    return with_size<32, kMostTileRows>(args.tile_rows(), [&](auto rows) {
      return launch_blocks<Element, kWideOutputs, decltype(rows)::value>(args, how);
    });
  }
  return with_size<16, 32, kMostTileRows>(args.tile_rows(), [&](auto rows) {
    // Matrices that are packed, and dense ones beside them, have blocks of their own.
    return args.packed() ? launch_blocks<Element, kTileOutputs, decltype(rows)::value, true>(args, how)
                         : launch_blocks<Element, kTileOutputs, decltype(rows)::value>(args, how);
  });
}

}  // namespace

int launch_rows(const RowsEmbed& args, const RowsLaunch& how) {
  return launch_first(rows_embed_kernel<Bfloat16>, rows_embed_kernel<Half>, args, how);
}

int launch_rows(const RowsPair& args, const RowsLaunch& how) {
  return launch_first(rows_pair_kernel<Bfloat16>, rows_pair_kernel<Half>, args, how);
}

int launch_rows(const RowsNorm& args, const RowsLaunch& how) {
  if (args.batch * args.keep == 0) return cudaSuccess;
  const dim3 blocks(static_cast<unsigned>(args.batch * args.keep));
  return how.bfloat16 ? launch(rows_norm_kernel<Bfloat16>, blocks, kRowThreads, how, args)
                      : launch(rows_norm_kernel<Half>, blocks, kRowThreads, how, args);
}

int launch_rows(const RowsProduct& args, const RowsLaunch& how) {
  if (args.rows == 0 || args.output_blocks() == 0) return cudaSuccess;
  bool taken = false;
  const int error = how.group && args.grouped() ? launch_rows_group(args, how, taken) : 0;
  if (taken || error != 0) return error;
  return how.bfloat16 ? launch_product<Bfloat16>(args, how) : launch_product<Half>(args, how);
}

int launch_rows(const RowsTurn& args, const RowsLaunch& how) {
  if (args.batch * args.rows == 0) return cudaSuccess;
  const int heads = args.heads + 2 * args.kv_heads;
  const dim3 blocks(static_cast<unsigned>(args.batch * args.rows),
                    static_cast<unsigned>((heads + kTurnWarps - 1) / kTurnWarps));
  return with_type(how.bfloat16, [&](auto type) {
    return with_size<64, 128>(args.head_dim, [&](auto dim) {
      return launch(rows_turn_kernel<decltype(type), decltype(dim)::value>, blocks, kLanes * kTurnWarps, how, args);
    });
  });
}

}  // namespace gsd
