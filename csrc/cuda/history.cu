// history_recall by one thread block a node, recall_levels and history_append by one a sequence: csrc/algorithms.
#include "block_launch.h"
#include "launch.h"

namespace gsd {
namespace {

constexpr int kNodeThreads = 96;  // lists and their votes in two warps, what takes long by itself in the third
constexpr int kNodesOfBlock = 12;  // of a level, in what shared memory a block has without asking

__global__ void __launch_bounds__(kNodeThreads, 10)  // blocks a multiprocessor; unsaid, ptxas takes fewer registers, and spills
    history_recall_kernel(const __grid_constant__ HistoryRecall first, const __grid_constant__ NgramSizes sizes) {
  extern __shared__ __align__(16) char arena[];
  CudaBlock group;
  const int64_t b = blockIdx.x / sizes.rows;
  const HistoryRecall mine = first.at(sizes, b);
  recall_history(group, mine.asked, mine.history, sizes, static_cast<int>(blockIdx.x % sizes.rows), 1, arena);
}

__global__ void __launch_bounds__(kBlockThreads, 4)  // as above
    recall_levels_kernel(const __grid_constant__ LevelsArgs first, const __grid_constant__ LevelSizes sizes) {
  extern __shared__ __align__(16) char arena[];
  CudaBlock group;
  grow_levels(group, first.at(sizes, blockIdx.x), sizes, arena);
}

__global__ void __launch_bounds__(kBlockThreads)
    history_append_kernel(const __grid_constant__ FollowArgs first, const __grid_constant__ NgramSizes sizes) {
  extern __shared__ __align__(16) char arena[];
  CudaBlock group;
  follow_step(group, first.at(sizes, blockIdx.x), sizes, arena);
}

}  // namespace

int launch_history_recall(const HistoryRecall& first, const NgramSizes& sizes, int64_t batch, void* stream) {
  return launch_blocks(history_recall_kernel, first, sizes, batch * sizes.rows, kNodeThreads, HistoryArena::bytes(),
                       stream);
}

int launch_levels(const LevelsArgs& first, const LevelSizes& sizes, int64_t batch, void* stream) {
  LevelSizes block = sizes;
  block.at_once = min_int(sizes.width, kNodesOfBlock);
  return launch_blocks(recall_levels_kernel, first, block, batch, kBlockThreads, levels_bytes(block), stream);
}

int launch_history_append(const FollowArgs& first, const NgramSizes& sizes, int64_t batch, void* stream) {
  const int entries = first.accepted_rows == nullptr ? 0 : sizes.chunk_entries();
  const int items = max_int(entries, min_int(first.given, kAppended));
  return launch_blocks(history_append_kernel, first, sizes, batch, items, follow_bytes(first, sizes), stream);
}

}  // namespace gsd
