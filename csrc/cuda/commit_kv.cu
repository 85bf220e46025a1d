// Move the accepted rows of all layers to the end of the prefix, in one launch.
//
// A thread owns one column of a head: the same few bytes of every row. Columns do not touch each other, so "read all
// sources before any write" needs no barrier: a thread reads its column of all accepted rows into its own part of shared
// memory (all loads are in flight together) and then writes.
#include <cuda_runtime.h>

#include "launch.h"

namespace gsd {
namespace {

constexpr int kMaxThreads = 128;

template <class Vector>
__global__ void __launch_bounds__(kMaxThreads) commit_kernel(const __grid_constant__ CommitArgs a) {
  extern __shared__ __align__(16) char memory[];
  Vector* staged = reinterpret_cast<Vector*>(memory) + threadIdx.x;  // row i at staged[i · blockDim.x]
  const int columns = a.row_bytes / static_cast<int>(sizeof(Vector));
  const int item = blockIdx.x * blockDim.x + threadIdx.x;
  if (item >= a.heads * columns) return;
  const int head = item / columns, column = item % columns;
  const int64_t b = blockIdx.z;

  char* slots = a.caches[blockIdx.y] + b * a.batch_stride + head * a.head_stride + a.kv_len[b] * a.slot_stride +
                column * static_cast<int64_t>(sizeof(Vector));
  const int32_t* rows = a.accepted_rows + b * a.path;
  const int count = min_int(a.num_accepted[b], a.path);
#pragma unroll 4
  for (int i = 0; i < count; i++) {
    staged[i * blockDim.x] = *reinterpret_cast<const Vector*>(slots + max_int(rows[i], 0) * a.slot_stride);
  }
#pragma unroll 4
  for (int i = 0; i < count; i++) *reinterpret_cast<Vector*>(slots + i * a.slot_stride) = staged[i * blockDim.x];
}

__global__ void advance_kernel(int32_t* kv_len, const int32_t* num_accepted, int batch) {
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b < batch) kv_len[b] += num_accepted[b];
}

template <class Vector>
int launch_columns(const CommitArgs& args, int64_t batch, void* stream) {
  const int items = args.heads * (args.row_bytes / static_cast<int>(sizeof(Vector)));
  int threads = kMaxThreads;
  const auto bytes = [&] { return static_cast<size_t>(threads) * args.path * sizeof(Vector); };
  while (threads > 32 && (bytes() > 48 * 1024 || threads / 2 >= items)) threads /= 2;
  if (bytes() > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(commit_kernel<Vector>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(bytes()));
    if (error != cudaSuccess) return error;
  }
  const dim3 grid((items + threads - 1) / threads, args.num_caches, static_cast<unsigned>(batch));
  commit_kernel<Vector><<<grid, threads, bytes(), static_cast<cudaStream_t>(stream)>>>(args);
  return cudaGetLastError();
}

}  // namespace

int launch_commit(const CommitArgs& args, int64_t batch, void* stream) {
  if (batch == 0 || args.num_caches == 0 || args.path == 0 || args.heads == 0 || args.row_bytes == 0) {
    return cudaSuccess;
  }
  uint64_t offsets = static_cast<uint64_t>(args.batch_stride | args.head_stride | args.slot_stride | args.row_bytes);
  for (int i = 0; i < args.num_caches; i++) offsets |= reinterpret_cast<uint64_t>(args.caches[i]);
  if (offsets % 16 == 0) return launch_columns<uint4>(args, batch, stream);
  if (offsets % 4 == 0) return launch_columns<uint32_t>(args, batch, stream);
  if (offsets % 2 == 0) return launch_columns<uint16_t>(args, batch, stream);
  return launch_columns<uint8_t>(args, batch, stream);
}

int launch_advance(int32_t* kv_len, const int32_t* num_accepted, int64_t batch, void* stream) {
  if (batch == 0) return cudaSuccess;
  constexpr int kThreads = 128;
  const unsigned blocks = static_cast<unsigned>((batch + kThreads - 1) / kThreads);
  advance_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(kv_len, num_accepted,
                                                                           static_cast<int>(batch));
  return cudaGetLastError();
}

}  // namespace gsd
