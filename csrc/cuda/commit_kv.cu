// Move the accepted rows of all layers to the end of the prefix, in one launch: csrc/algorithms/commit.h by one thread a
// column, whose rows lie in shared memory in between.
#include <cuda_runtime.h>

#include "launch.h"
#include "shared_memory.h"

namespace gsd {
namespace {

constexpr int kMaxThreads = 128;

// Columns of all heads.
template <class Vector>
GSD_HD int items_of(const CommitArgs& a) {
  return static_cast<int>(a.shape.heads * (a.shape.row_bytes / static_cast<int64_t>(sizeof(Vector))));
}

template <class Vector>
__global__ void __launch_bounds__(kMaxThreads) commit_kernel(const __grid_constant__ CommitArgs a) {
  extern __shared__ __align__(16) char memory[];
  const int item = blockIdx.x * blockDim.x + threadIdx.x;
  if (item >= items_of<Vector>(a)) return;
  commit_column(a, a.caches[blockIdx.y], blockIdx.z, item, reinterpret_cast<Vector*>(memory) + threadIdx.x,
                static_cast<int>(blockDim.x));
}

__global__ void advance_kernel(int32_t* kv_len, const int32_t* num_accepted, int batch, int path) {
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b < batch) kv_len[b] += accepted_of(num_accepted[b], path);
}

template <class Vector>
int launch_columns(const CommitArgs& args, int64_t batch, void* stream) {
  const int items = items_of<Vector>(args);
  int threads = kMaxThreads;
  const auto bytes = [&] { return static_cast<size_t>(threads) * args.path * sizeof(Vector); };
  while (threads > 32 && (bytes() > kWithoutOptIn || threads / 2 >= items)) threads /= 2;
  const int allowed = allow_memory(reinterpret_cast<const void*>(commit_kernel<Vector>), bytes());
  if (allowed != cudaSuccess) return allowed;
  const dim3 grid((items + threads - 1) / threads, args.num_caches, static_cast<unsigned>(batch));
  commit_kernel<Vector><<<grid, threads, bytes(), static_cast<cudaStream_t>(stream)>>>(args);
  return cudaGetLastError();
}

}  // namespace

int launch_commit(const CommitArgs& args, int64_t batch, void* stream) {
  const CacheShape& s = args.shape;
  if (batch == 0 || args.num_caches == 0 || args.path == 0 || s.heads == 0 || s.row_bytes == 0) return cudaSuccess;
  uint64_t offsets = static_cast<uint64_t>(s.batch_stride | s.head_stride | s.slot_stride | s.row_bytes);
  for (int i = 0; i < args.num_caches; i++) offsets |= reinterpret_cast<uint64_t>(args.caches[i]);
  if (offsets % 16 == 0) return launch_columns<uint4>(args, batch, stream);
  if (offsets % 4 == 0) return launch_columns<uint32_t>(args, batch, stream);
  if (offsets % 2 == 0) return launch_columns<uint16_t>(args, batch, stream);
  return launch_columns<uint8_t>(args, batch, stream);
}

int launch_advance(int32_t* kv_len, const int32_t* num_accepted, int64_t batch, int path, void* stream) {
  if (batch == 0) return cudaSuccess;
  constexpr int kThreads = 128;
  const unsigned blocks = static_cast<unsigned>((batch + kThreads - 1) / kThreads);
  advance_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(kv_len, num_accepted,
                                                                           static_cast<int>(batch), path);
  return cudaGetLastError();
}

}  // namespace gsd
