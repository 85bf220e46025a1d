// A kernel that runs a group algorithm by one thread block an item: its size, its shared memory, its launch.
#pragma once

#include <cuda_runtime.h>

#include "../algorithms/group.h"
#include "shared_memory.h"

namespace gsd {

constexpr int kBlockThreads = 256;

// As many threads as there are items, in whole warps: a barrier costs less in a small block. One warp without items.
inline int threads_for(int items) { return min_int(kBlockThreads, (max_int(items, 1) + 31) / 32 * 32); }

template <class Kernel, class Args, class Sizes>
int launch_blocks(Kernel kernel, const Args& first, const Sizes& sizes, int64_t blocks, int items, size_t arena,
                  void* stream) {
  if (blocks == 0) return cudaSuccess;
  const int allowed = allow_memory(reinterpret_cast<const void*>(kernel), arena);
  if (allowed != cudaSuccess) return allowed;
  kernel<<<static_cast<unsigned>(blocks), threads_for(items), arena, static_cast<cudaStream_t>(stream)>>>(first, sizes);
  return cudaGetLastError();
}

}  // namespace gsd
