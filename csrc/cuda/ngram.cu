// The n-gram table's ops: csrc/algorithms/ngram.h run by one thread block a sequence, mix_candidates by one a row, and
// perturb_candidates by one thread a row.
#include "block_launch.h"
#include "launch.h"

namespace gsd {
namespace {

__global__ void __launch_bounds__(kBlockThreads)
    ngram_insert_kernel(const __grid_constant__ NgramInsertArgs first, const __grid_constant__ NgramSizes sizes) {
  extern __shared__ __align__(16) char arena[];
  CudaBlock group;
  insert_rows(group, first.at(sizes, blockIdx.x), sizes, arena);
}

__global__ void __launch_bounds__(kBlockThreads)
    ngram_lookup_kernel(const __grid_constant__ NgramLookupArgs first, const __grid_constant__ NgramSizes sizes) {
  CudaBlock group;
  look_up_rows(group, first.at(sizes, blockIdx.x), sizes);
}

constexpr int kPerturbThreads = 32;

__global__ void __launch_bounds__(kPerturbThreads)
    perturb_kernel(const __grid_constant__ PerturbArgs args, const __grid_constant__ int64_t rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kPerturbThreads + threadIdx.x;
  if (row < rows) perturb_row(args, row);
}

__global__ void __launch_bounds__(kBlockThreads)
    mix_kernel(const __grid_constant__ MixArgs first, const __grid_constant__ MixSizes sizes) {
  extern __shared__ __align__(16) char arena[];
  CudaBlock group;
  mix_row(group, first.at(sizes, blockIdx.x), sizes, arena);
}

}  // namespace

int launch_ngram_insert(const NgramInsertArgs& first, const NgramSizes& sizes, int64_t batch, void* stream) {
  if (sizes.rows == 0) return cudaSuccess;
  return launch_blocks(ngram_insert_kernel, first, sizes, batch, sizes.chunk_entries(), NgramArena::bytes(sizes),
                       stream);
}

int launch_ngram_lookup(const NgramLookupArgs& first, const NgramSizes& sizes, int64_t batch, void* stream) {
  if (sizes.rows == 0) return cudaSuccess;
  return launch_blocks(ngram_lookup_kernel, first, sizes, batch, sizes.rows, 0, stream);
}

int launch_perturb(const PerturbArgs& args, int64_t rows, void* stream) {
  if (rows == 0 || args.branch == 0) return cudaSuccess;
  const int64_t blocks = (rows + kPerturbThreads - 1) / kPerturbThreads;
  perturb_kernel<<<static_cast<unsigned>(blocks), kPerturbThreads, 0, static_cast<cudaStream_t>(stream)>>>(args, rows);
  return cudaGetLastError();
}

int launch_mix(const MixArgs& first, const MixSizes& sizes, int64_t rows, void* stream) {
  if (sizes.branch == 0) return cudaSuccess;
  return launch_blocks(mix_kernel, first, sizes, rows, sizes.candidates(), MixArena::bytes(sizes), stream);
}

}  // namespace gsd
