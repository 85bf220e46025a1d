// The warp machine of csrc/algorithms/attention_tiles.h on a GPU of compute capability 8.0 or newer: inline PTX.
#pragma once

#include "../algorithms/elements.h"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define GSD_HAS_MMA
#endif

namespace gsd {

constexpr int kOldestMajor = 8;  // compute capability; code for older GPUs is empty, so that the other ops build there

struct CudaMachine {
  char* memory;    // shared memory
  uint32_t arena;  // the same in the shared address space

  __device__ __forceinline__ explicit CudaMachine(char* memory)
      : memory(memory), arena(static_cast<uint32_t>(__cvta_generic_to_shared(memory))) {}

  __device__ __forceinline__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ int lane() const { return thread() % 32; }
  __device__ __forceinline__ int warp() const { return thread() / 32; }

  __device__ __forceinline__ void sync(const char*) const { __syncthreads(); }
  __device__ __forceinline__ void sync_warp(const char*) const { __syncwarp(); }
  __device__ __forceinline__ bool any(const char*, bool predicate) const { return __syncthreads_or(predicate) != 0; }

  // 16 bytes from global memory to arena + at, past the first-level cache. Zeros unless `inside`: nothing is read then.
  __device__ __forceinline__ void copy(const char*, int at, const void* from, bool inside) const {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(arena + at),
                 "l"(__cvta_generic_to_global(from)), "r"(inside ? 16 : 0)
                 : "memory");
  }
  __device__ __forceinline__ void commit() const { asm volatile("cp.async.commit_group;" ::: "memory"); }
  // Until at most kNewer of this thread's groups are on their way.
  template <int kNewer>
  __device__ __forceinline__ void wait(const char*) const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kNewer) : "memory");
  }

  // Nothing unless both kernels are launched as programmatically dependent ones.
  __device__ __forceinline__ void await_previous(const char*) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  }
  __device__ __forceinline__ void release_next() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  }

  // Into the second-level cache: an address and a size that are multiples of 16 bytes. Nothing before 9.0.
  __device__ __forceinline__ void prefetch(const void* from, int size) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(size));
#endif
  }

  // For another block of the launch; collected past the first-level cache, which may hold what was there before.
  __device__ __forceinline__ void publish(float* at, const float (&values)[4]) const {
    *reinterpret_cast<float4*>(at) = make_float4(values[0], values[1], values[2], values[3]);
  }
  __device__ __forceinline__ void collect(const float* at, float (&values)[4]) const {
    const float4 four = __ldcg(reinterpret_cast<const float4*>(at));
    values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
  }
  // One thread a block, between two barriers. True for the last of `blocks`, which sets the counter back.
  __device__ __forceinline__ bool arrive(int32_t* counter, int blocks) const {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(counter))
                 : "memory");
    if (before != blocks - 1) return false;
    *counter = 0;
    return true;
  }

  __device__ __forceinline__ Chunk read(int at) const { return *reinterpret_cast<const Chunk*>(memory + at); }
  __device__ __forceinline__ void write(int at, const Chunk& chunk) const {
    *reinterpret_cast<Chunk*>(memory + at) = chunk;
  }

  // Four 8 × 8 matrices a load: register i holds row lane / 4 of matrix i, elements 2 (lane % 4) and the next; with
  // kTransposed of its transpose. Lane l points to row l % 8 of matrix l / 8.
  template <bool kTransposed, int kLoads>
  __device__ __forceinline__ void load_matrices(const char*, uint32_t (&matrices)[kLoads][4],
                                                const int (&at)[kLoads]) const {
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      uint32_t(&r)[4] = matrices[i];
      if constexpr (kTransposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(arena + at[i])
                     : "memory");
      } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(arena + at[i])
                     : "memory");
      }
    }
  }

  // sums[first + j] += left (16 × 16) · right tile j (16 × 8); a load of four matrices holds two such tiles.
  template <class Element, int kTiles, int kLoads>
  __device__ __forceinline__ void multiply(float (&sums)[kTiles][4], int first, const uint32_t (&left)[4],
                                           const uint32_t (&right)[kLoads][4]) const {
#pragma unroll
    for (int j = 0; j < 2 * kLoads; j++) {
      multiply_tile(Element{}, sums[first + j], left, right[j / 2][2 * (j % 2)], right[j / 2][2 * (j % 2) + 1]);
    }
  }

  __device__ __forceinline__ float shuffle_xor(float value, int mask) const {
    return __shfl_xor_sync(0xFFFFFFFFu, value, mask);
  }
  __device__ __forceinline__ float shuffle(float value, int lane) const {
    return __shfl_sync(0xFFFFFFFFu, value, lane);
  }
  __device__ __forceinline__ uint32_t ballot(bool predicate) const { return __ballot_sync(0xFFFFFFFFu, predicate); }

  // The hardware's own; subnormal results are 0.
  __device__ __forceinline__ float exp2(float x) const {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  __device__ __forceinline__ float log2(float x) const { return log2f(x); }
  __device__ __forceinline__ float divide(float a, float b) const { return __fdividef(a, b); }  // to 2 units
  __device__ __forceinline__ float inverse_root(float x) const { return rsqrtf(x); }  // to 2 units
  __device__ __forceinline__ float max(float a, float b) const { return fmaxf(a, b); }
  // Never merged with what comes before or after, as the compiler may do with * and +.
  __device__ __forceinline__ float times(float a, float b) const { return __fmul_rn(a, b); }
  __device__ __forceinline__ float fma(float a, float b, float c) const { return __fmaf_rn(a, b, c); }

  __device__ __forceinline__ void store(float* at, float first, float second) const {
    *reinterpret_cast<float2*>(at) = make_float2(first, second);
  }
  __device__ __forceinline__ void load(const float* at, float (&values)[2]) const {
    const float2 pair = *reinterpret_cast<const float2*>(at);
    values[0] = pair.x, values[1] = pair.y;
  }
  __device__ __forceinline__ void load(const float* at, float (&values)[4]) const {
    const float4 four = *reinterpret_cast<const float4*>(at);
    values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
  }

 private:
  static __device__ __forceinline__ void multiply_tile(Half, float (&sums)[4], const uint32_t (&left)[4],
                                                       uint32_t upper, uint32_t lower) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(upper), "r"(lower));
  }
  static __device__ __forceinline__ void multiply_tile(Bfloat16, float (&sums)[4], const uint32_t (&left)[4],
                                                       uint32_t upper, uint32_t lower) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(upper), "r"(lower));
  }
};

}  // namespace gsd
