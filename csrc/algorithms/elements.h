// The two 16-bit floats that tensor cores multiply, as bit patterns. Two of them share a 32-bit word, the first in its
// low half, as in memory.
#pragma once

#include "group.h"

namespace gsd {

struct Half {
  static constexpr uint32_t kExponent = 0x7C00;  // all ones: infinity or NaN

  GSD_HD static uint32_t pack(float first, float second) {
#if defined(__CUDA_ARCH__)
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
#else
    return round(first) | static_cast<uint32_t>(round(second)) << 16;
#endif
  }

  GSD_HD static float widen(uint16_t bits) { return float_from_half(bits); }

  // To the nearest, ties to even.
  GSD_HD static uint16_t round(float value) {
    const uint32_t bits = float_bits(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
    if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7C00u);
    if (magnitude < 0x38800000u) {  // subnormal: ½ has the unit 2⁻²⁴ as its last bit
      return static_cast<uint16_t>(sign | (float_bits(float_from_bits(magnitude) + 0.5f) - float_bits(0.5f)));
    }
    const uint32_t even = magnitude >> 13 & 1u;
    return static_cast<uint16_t>(sign | ((magnitude - (112u << 23) + 0xFFFu + even) >> 13));
  }
};

struct Bfloat16 {
  static constexpr uint32_t kExponent = 0x7F80;

  GSD_HD static uint32_t pack(float first, float second) {
#if defined(__CUDA_ARCH__)
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
#else
    return round(first) | static_cast<uint32_t>(round(second)) << 16;
#endif
  }

  GSD_HD static float widen(uint16_t bits) { return float_from_bits(static_cast<uint32_t>(bits) << 16); }

  // Without a branch, so that loops over it become vectors.
  GSD_HD static uint16_t round(float value) {
    const uint32_t bits = float_bits(value), up = bits + 0x7FFFu + (bits >> 16 & 1u);
    return static_cast<uint16_t>(((bits & 0x7FFFFFFFu) > 0x7F800000u ? bits | 0x400000u : up) >> 16);
  }
};

// Whether one of the two elements in `word` is infinite or NaN.
template <class Element>
GSD_HD bool holds_non_finite(uint32_t word) {
  constexpr uint32_t first = Element::kExponent, second = first << 16;
  return (word & first) == first || (word & second) == second;
}

// A copy's unit: eight elements.
struct alignas(16) Chunk {
  uint32_t words[4];
};

template <class Element>
GSD_HD Chunk finite_elements(Chunk chunk) {
  constexpr uint32_t first = Element::kExponent, second = first << 16;
  GSD_UNROLL
  for (uint32_t& word : chunk.words) {
    if ((word & first) == first) word &= 0xFFFF0000u;
    if ((word & second) == second) word &= 0x0000FFFFu;
  }
  return chunk;
}

template <class Element>
GSD_HD bool holds_non_finite(const Chunk& chunk) {
  bool found = false;
  GSD_UNROLL
  for (const uint32_t word : chunk.words) found |= holds_non_finite<Element>(word);
  return found;
}

}  // namespace gsd
