// A thread group is all that the graph algorithms know about parallel execution: their rank in the group, its size, a
// barrier and three atomics. The same source therefore runs as
//   SerialGroup  a group of one thread: the CPU op,
//   CudaBlock    one CUDA thread block,
//   FiberGroup   T fibers (tests/block_code/fibers.h), under ThreadSanitizer.
// Shared memory is one arena, carved into arrays by the algorithm; every access to it is a plain load or store, so a
// missing barrier is a data race that the sanitizer sees.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define GSD_HD __host__ __device__ __forceinline__
#define GSD_UNROLL _Pragma("unroll")
#define GSD_UNROLL_4 _Pragma("unroll 4")
#define GSD_ROLLED _Pragma("unroll 1")
#define GSD_PRAGMA(text) _Pragma(#text)
#define GSD_UNROLL_BY(n) GSD_PRAGMA(unroll(n))
#else
#define GSD_HD inline
#define GSD_UNROLL _Pragma("GCC unroll 16")
#define GSD_UNROLL_4 _Pragma("GCC unroll 4")
#define GSD_ROLLED
#define GSD_UNROLL_BY(n)
#endif

namespace gsd {

struct SerialGroup {
  GSD_HD int rank() const { return 0; }
  GSD_HD int size() const { return 1; }
  // Every thread of the group must reach the same barrier; the name says which one it is.
  GSD_HD void sync(const char*) const {}
  GSD_HD void atomic_or(uint32_t* word, uint32_t bits) const { *word |= bits; }
  GSD_HD int32_t atomic_add(int32_t* counter, int32_t value) const {
    const int32_t before = *counter;
    *counter = before + value;
    return before;
  }
  GSD_HD void atomic_add64(uint64_t* counter, uint64_t value) const { *counter += value; }
};

#if defined(__CUDACC__)
struct CudaBlock {
  __device__ __forceinline__ int rank() const { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ int size() const { return static_cast<int>(blockDim.x); }
  __device__ __forceinline__ void sync(const char*) const { __syncthreads(); }
  __device__ __forceinline__ void atomic_or(uint32_t* word, uint32_t bits) const { atomicOr(word, bits); }
  __device__ __forceinline__ int32_t atomic_add(int32_t* counter, int32_t value) const {
    return atomicAdd(counter, value);
  }
  __device__ __forceinline__ void atomic_add64(uint64_t* counter, uint64_t value) const {
    atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(value));
  }
};
#endif

GSD_HD int min_int(int a, int b) { return a < b ? a : b; }
GSD_HD int max_int(int a, int b) { return a > b ? a : b; }
GSD_HD int words_for(int bits) { return (bits + 31) / 32; }

GSD_HD int power_of_two_from(int n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

GSD_HD int popcount(uint32_t word) {
#if defined(__CUDA_ARCH__)
  return __popc(word);
#else
  return __builtin_popcount(word);
#endif
}

GSD_HD uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

GSD_HD float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// The exponent is rebased by a multiplication, which also handles infinity and NaN; subnormals take the second form.
GSD_HD float float_from_half(uint16_t half) {
  const uint32_t wide = static_cast<uint32_t>(half) << 16, magnitude = wide << 1;
  const float normal = float_from_bits((magnitude >> 4) + (0xE0u << 23)) * 1.925929944387236e-34f;  // 2⁻¹¹²
  const float subnormal = float_from_bits((magnitude >> 17) | (126u << 23)) - 0.5f;
  return float_from_bits((wide & 0x80000000u) | float_bits(magnitude < (1u << 27) ? subnormal : normal));
}

// −infinity without <limits>, usable on host and device.
GSD_HD float negative_infinity() { return float_from_bits(0xFF800000u); }

// Arena offsets are kept at multiples of 8 bytes, so 64-bit keys may follow any array.
GSD_HD size_t arena_bytes(size_t count, size_t element) { return (count * element + 7) / 8 * 8; }

// Arrays of an arena, one behind the other; and how many bytes they are.
struct Carver {
  char* next;
  template <class T>
  GSD_HD void operator()(T*& array, size_t count) {
    array = reinterpret_cast<T*>(next);
    next += arena_bytes(count, sizeof(T));
  }
};
struct CarvedBytes {
  size_t all = 0;
  template <class T>
  GSD_HD void operator()(T*&, size_t count) {
    all += arena_bytes(count, sizeof(T));
  }
};

// What an algorithm keeps in its arena: `lay(carve, sizes)` of Self says each array once.
template <class Self>
struct Arena {
  template <class... Sizes>
  static GSD_HD size_t bytes(const Sizes&... sizes) {
    Self self;
    CarvedBytes carve;
    self.lay(carve, sizes...);
    return carve.all;
  }
  template <class... Sizes>
  static GSD_HD Self in(char* memory, const Sizes&... sizes) {
    Self self;
    Carver carve{memory};
    self.lay(carve, sizes...);
    return self;
  }
};

// The arguments of each of several sequences, or of what else groups take one by one. Args: pointers alone.
template <class Args>
struct Each {
  static constexpr int kPointers = sizeof(Args) / sizeof(char*);
  Args first;
  int32_t steps[kPointers];  // bytes from one to the next; 0 for what they share, and what is absent

  GSD_HD Args operator[](int number) const {
    char* pointers[kPointers];
    memcpy(pointers, &first, sizeof pointers);
    GSD_UNROLL
    for (int i = 0; i < kPointers; i++) pointers[i] += static_cast<int64_t>(number) * steps[i];  // one instruction
    Args found;
    memcpy(&found, pointers, sizeof pointers);
    return found;
  }
};

// What a group does with the arguments of an op, all[number] by all[number]: those of one sequence, or of one row or node
// where the algorithm says so. `bytes`: of its arena. Said once for an op, behind its algorithm; csrc/cpu/sequences.h and
// csrc/cuda/sequences.cu run it.
template <class Args>
struct GroupWork;

#define GSD_GROUP_WORK(Args, arena_size, work)                                                               \
  template <>                                                                                                \
  struct GroupWork<Args> {                                                                                   \
    template <class Sizes>                                                                                   \
    static size_t bytes([[maybe_unused]] const Sizes& s) {                                                   \
      return arena_size;                                                                                     \
    }                                                                                                        \
    template <class Group, class Sizes>                                                                      \
    static GSD_HD void run(Group& group, const Each<Args>& all, const Sizes& s,                              \
                           [[maybe_unused]] int number, [[maybe_unused]] char* memory) {                     \
      work;                                                                                                  \
    }                                                                                                        \
  };

}  // namespace gsd
