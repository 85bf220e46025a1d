// The ops of groups, by one thread block a sequence (row, node): csrc/algorithms.
#include <cuda_runtime.h>

#include "launch.h"
#include "shared_memory.h"

namespace gsd {

void drop_error() { (void)cudaGetLastError(); }

constexpr int kBlockThreads = 256;

// Threads of a block at most, and blocks that a multiprocessor is to have: unsaid, ptxas takes fewer registers, and spills.
template <class Args>
constexpr int kThreadsOf = kBlockThreads;
template <class Args>
constexpr int kBlocksOf = 0;
template <>
constexpr int kThreadsOf<HistoryRecall> = 96;
template <>
constexpr int kBlocksOf<HistoryRecall> = 10;
template <>
constexpr int kBlocksOf<LevelsArgs> = 4;
template <>
constexpr int kBlocksOf<StartArgs> = 4;

template <class Args, class Sizes>
__global__ void __launch_bounds__(kThreadsOf<Args>, kBlocksOf<Args>)
    sequence_kernel(const __grid_constant__ Each<Args> all, const __grid_constant__ Sizes sizes) {
  extern __shared__ __align__(16) char arena[];
  CudaBlock group;
  GroupWork<Args>::run(group, all, sizes, static_cast<int>(blockIdx.x), arena);
}

template <class Args, class Sizes>
int launch_sequences(const Each<Args>& all, const Sizes& sizes, int64_t batch, void* stream) {
  if (batch == 0) return cudaSuccess;
  // As many threads as there are items, in whole warps: a barrier costs less in a small block. One warp without items.
  const int threads = min_int(kThreadsOf<Args>, (max_int(items_of(all, sizes), 1) + 31) / 32 * 32);
  const size_t arena = GroupWork<Args>::bytes(sizes);
  const auto kernel = sequence_kernel<Args, Sizes>;
  const int allowed = allow_memory(reinterpret_cast<const void*>(kernel), arena);
  if (allowed != cudaSuccess) return allowed;
  kernel<<<static_cast<unsigned>(batch), threads, arena, static_cast<cudaStream_t>(stream)>>>(all, sizes);
  return cudaGetLastError();
}

// `items`: how many the threads of a block share.
#define GSD_LAUNCH(Args, Sizes, items)                                                       \
  static int items_of(const Each<Args>&, [[maybe_unused]] const Sizes& s) { return items; } \
  template int launch_sequences(const Each<Args>&, const Sizes&, int64_t, void*);

GSD_LAUNCH(MergeArgs, MergeSizes, max_int(s.candidates(), s.capacity / 2))  // a candidate or half a pair of sorted nodes
GSD_LAUNCH(FlattenArgs, FlattenSizes, s.rows * s.branch)
GSD_LAUNCH(VerifyArgs, VerifySizes, s.rows)
GSD_LAUNCH(NgramInsertArgs, NgramSizes, s.chunk_entries())
GSD_LAUNCH(NgramLookupArgs, NgramSizes, s.rows)
GSD_LAUNCH(PerturbArgs, PerturbSizes, s.rows)
GSD_LAUNCH(MixArgs, MixSizes, s.candidates())
GSD_LAUNCH(HistoryRecall, HistorySizes, 96)  // lists and their votes in two warps, in the third what takes long
GSD_LAUNCH(FollowArgs, FollowSizes, max_int(s.lengths == 0 ? 0 : s.chunk_entries(), min_int(s.given, kAppended)))
GSD_LAUNCH(LevelsArgs, LevelSizes, kBlockThreads)
GSD_LAUNCH(LearnArgs, LearnSizes, max_int(s.nodes(), s.entries))
GSD_LAUNCH(StartArgs, StartSizes, s.nodes)
GSD_LAUNCH(FeedArgs<int64_t>, FeedSizes, s.rows)
GSD_LAUNCH(FeedArgs<int32_t>, FeedSizes, s.rows)
GSD_LAUNCH(ChainArgs, ChainSizes, s.rows)
GSD_LAUNCH(PathArgs, PathSizes, s.path)
GSD_LAUNCH(TextArgs, TextSizes, s.path)

}  // namespace gsd
