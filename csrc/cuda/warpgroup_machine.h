// The warpgroup machine of csrc/algorithms/rows_group_product.h on a GPU of compute capability 9.0: inline PTX, which only
// code for 9.0a may hold.
#pragma once

#include <cuda.h>

#include "../algorithms/rows_group_product.h"
#include "warp_machine.h"

namespace gsd {

// Where boxes come from, in the layout that the driver made of it.
struct GroupMaps {
  CUtensorMap rows, matrices[kMaxMatrices];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define GSD_8(x, i) x(i), x(i + 1), x(i + 2), x(i + 3), x(i + 4), x(i + 5), x(i + 6), x(i + 7)
#define GSD_32(x, i) GSD_8(x, i), GSD_8(x, i + 8), GSD_8(x, i + 16), GSD_8(x, i + 24)
#define GSD_64(x) GSD_32(x, 0), GSD_32(x, 32)
#define GSD_SUM(i) "+f"(sums[(i) / 4][(i) % 4])
// %1d, %2d …: names of ten registers each.
#define GSD_TEN(t) "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define GSD_FIRST_TEN "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
#define GSD_TENS_TO_59 GSD_FIRST_TEN GSD_TEN(1) GSD_TEN(2) GSD_TEN(3) GSD_TEN(4) GSD_TEN(5)
#define GSD_NAMES_32 GSD_FIRST_TEN GSD_TEN(1) GSD_TEN(2) "%30, %31"
#define GSD_NAMES_64 GSD_TENS_TO_59 "%60, %61, %62, %63"
#define GSD_NAMES_128 \
  GSD_TENS_TO_59 GSD_TEN(6) GSD_TEN(7) GSD_TEN(8) GSD_TEN(9) GSD_TEN(10) GSD_TEN(11) "%120, %121, %122, %123, %124, %125, %126, %127"
// Sums of 64 outputs × `rows`: += weights · rows, both with their inputs side by side.
#define GSD_WGMMA(type, rows, names, first, second, ...)                                                              \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #rows "k16.f32." type "." type " {" names "}, %" #first ", %" #second \
               ", 1, 1, 1, 0, 0;"                                                                                     \
               : __VA_ARGS__                                                                                          \
               : "l"(weights), "l"(other))
#define GSD_WGMMA_SIZES(type)                                                                                        \
  if constexpr (kTiles == 8) {                                                                                       \
    GSD_WGMMA(type, 64, GSD_NAMES_32, 32, 33, GSD_32(GSD_SUM, 0));                                                   \
  } else if constexpr (kTiles == 16) {                                                                               \
    GSD_WGMMA(type, 128, GSD_NAMES_64, 64, 65, GSD_64(GSD_SUM));                                                     \
  } else {                                                                                                           \
    GSD_WGMMA(type, 256, GSD_NAMES_128, 128, 129, GSD_64(GSD_SUM), GSD_32(GSD_SUM, 64), GSD_32(GSD_SUM, 96));        \
  }

struct CudaWarpgroupMachine : CudaMachine {
  uint32_t barriers;  // of 8 bytes, in the shared address space
  const GroupMaps& maps;

  __device__ __forceinline__ CudaWarpgroupMachine(char* memory, uint64_t* barriers, const GroupMaps& maps)
      : CudaMachine(memory), barriers(static_cast<uint32_t>(__cvta_generic_to_shared(barriers))), maps(maps) {}

  __device__ __forceinline__ void init_barrier(int b, int arrivals) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barriers + 8 * b), "r"(arrivals) : "memory");
  }
  __device__ __forceinline__ void publish_barriers(const char*) const {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __device__ __forceinline__ void expect(int b, int bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barriers + 8 * b), "r"(bytes) : "memory");
  }
  __device__ __forceinline__ void arrive_barrier(const char*, int b) const {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barriers + 8 * b) : "memory");
  }
  __device__ __forceinline__ void wait_barrier(const char*, int b, int parity) const {
    uint32_t over;
    do {
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
          : "=r"(over)
          : "r"(barriers + 8 * b), "r"(parity)
          : "memory");
    } while (over == 0);
  }
  __device__ __forceinline__ void load_box(const char*, int b, int at, int map, int input, int row, int eight,
                                           int head) const {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(arena + at),
        "l"(&maps.rows + map), "r"(barriers + 8 * b), "r"(input), "r"(row), "n"(0), "r"(eight), "r"(head)
        : "memory");
  }
  __device__ __forceinline__ void prefetch_map(int map) const {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&maps.rows + map) : "memory");
  }

  __device__ __forceinline__ void multiply_begin() const { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
  __device__ __forceinline__ void multiply_commit() const {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  template <int kNewer>
  __device__ __forceinline__ void multiply_wait(const char*) const {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNewer) : "memory");
  }
  template <class Element, int kTiles>
  __device__ __forceinline__ void multiply_group(float (&sums)[kTiles][4], int weights_at, int rows_at) const {
    const uint64_t weights = described(weights_at), other = described(rows_at);
    if constexpr (Element::kExponent == Bfloat16::kExponent) {
      GSD_WGMMA_SIZES("bf16");
    } else {
      GSD_WGMMA_SIZES("f16");
    }
  }

  template <int kCount>
  __device__ __forceinline__ void fewer_registers() const {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
  }
  template <int kCount>
  __device__ __forceinline__ void more_registers() const {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
  }

  __device__ __forceinline__ void sync_consumers(const char*) const { asm volatile("bar.sync 1, 256;" ::: "memory"); }
  __device__ __forceinline__ int cluster_blocks() const {
    int blocks;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return blocks;
  }
  __device__ __forceinline__ void cluster_sync(const char*) const {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
  }
  __device__ __forceinline__ float* cluster_memory(int block) const {
    float* there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(memory), "r"(block));
    return there;
  }

 private:
  // Of operands in rows of 128 bytes with exchanged chunks: the address in units of 16 bytes, from bit 32 on the distance
  // of eight rows, from bit 62 on the exchange. 16 inputs further on are 32 bytes, which the exchange applies to as well.
  __device__ __forceinline__ uint64_t described(int at) const {
    constexpr uint64_t kEightRows = 1024 >> 4, kExchanged = uint64_t{1} << 62;
    return kExchanged | kEightRows << 32 | uint64_t{1} << 16 | ((arena + at) & 0x3FFFFu) >> 4;
  }
};

#undef GSD_WGMMA_SIZES
#undef GSD_WGMMA
#undef GSD_NAMES_128
#undef GSD_NAMES_64
#undef GSD_NAMES_32
#undef GSD_TENS_TO_59
#undef GSD_FIRST_TEN
#undef GSD_TEN
#undef GSD_SUM
#undef GSD_64
#undef GSD_32
#undef GSD_8

#endif  // 9.0a

}  // namespace gsd
