// Vectors of 16 floats for the passes and products of the CPU ops. A function marked GSD_CLONES is compiled for several
// instruction sets and picked when the library is loaded.
#pragma once

#include <cstdint>
#include <cstring>

// Clang has no target_clones for functions that use vector types, and what picks one runs before the thread sanitizer
// does; there the baseline instruction set serves.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__)
#define GSD_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define GSD_CLONES
#endif
#define GSD_INLINE static inline __attribute__((always_inline))

namespace gsd {

constexpr int kLanes = 16, kEight = 8;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef float Eight __attribute__((vector_size(32)));
typedef int32_t EightInts __attribute__((vector_size(32)));

// A C-style cast between vector types of one size keeps the bits.
template <class V>
GSD_INLINE void load(const void* from, V& to) {
  memcpy(&to, from, sizeof to);
}
template <class V>
GSD_INLINE void store(const V& from, void* to) {
  memcpy(to, &from, sizeof from);
}
GSD_INLINE void fill(float value, Floats& to) { to = value - Floats{}; }

// What a row still has, zeros beyond.
GSD_INLINE void load_some(const float* from, int64_t left, Floats& to) {
  if (left >= kLanes) return load(from, to);
  to = Floats{};
  memcpy(&to, from, static_cast<size_t>(left) * sizeof(float));
}
GSD_INLINE void store_some(const Floats& from, int64_t left, float* to) {
  if (left >= kLanes) return store(from, to);
  memcpy(to, &from, static_cast<size_t>(left) * sizeof(float));
}
GSD_INLINE float total(const Floats& x) {
  float sum = 0.0f;
  for (int lane = 0; lane < kLanes; lane++) sum += x[lane];
  return sum;
}

// Masks are −1 or 0. GCC takes comparisons of vectors wider than the registers apart, lane by lane, but not arithmetic:
// so the sign bits of a difference say what is less, and what is compared has to have exact differences, or Eight lanes.
GSD_INLINE void sign_of(const Floats& x, Ints& mask) { mask = (Ints)x >> 31; }
GSD_INLINE void is_nan(const Floats& x, Ints& mask) { mask = (0x7F800000 - ((Ints)x & 0x7FFFFFFF)) >> 31; }
GSD_INLINE void choose(const Ints& mask, const Floats& where, const Floats& elsewhere, Floats& out) {
  out = (Floats)((mask & (Ints)where) | (~mask & (Ints)elsewhere));
}

// Cephes' expf: relative error 1e-7. Of −87 … 88: exp(x) = p · 2ⁿ, n is what `shifted` ends with.
GSD_INLINE void exp_parts(const Floats& x, Floats& shifted, Floats& p) {
  shifted = x * 1.44269504088896341f + 12582912.0f;  // + 1.5·2²³ rounds to an integer
  const Floats n = shifted - 12582912.0f;
  const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
  p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
}

// 0 below −87.
GSD_INLINE void exp_lanes(const Floats& x, Floats& out) {
  Ints small, nan;
  sign_of(x + 87.0f, small);
  is_nan(x, nan);
  small &= ~nan;
  Floats clamped, shifted, p;
  choose(small, Floats{} - 87.0f, x, clamped);
  exp_parts(clamped, shifted, p);
  const Ints scale = (__builtin_convertvector(shifted - 12582912.0f, Ints) + 127) << 23;
  out = (Floats)(~small & (Ints)(p * (Floats)scale));
}

// The same bits of what is neither above 0 nor NaN, for two thirds of the work.
GSD_INLINE void exp_to_one(const Floats& x, Floats& out) {
  Ints small;
  Floats shifted, p;
  sign_of(x + 87.0f, small);
  exp_parts(x, shifted, p);
  out = (Floats)(~small & ((Ints)p + ((Ints)shifted << 23)));
}

}  // namespace gsd
