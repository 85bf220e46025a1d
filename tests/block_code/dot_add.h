// What a tensor core of compute capability 9.0 or newer makes of 16 products and a sum, as mma.m16n8k16 and as wgmma, by
// the model of MMA-Sim (arXiv 2511.10909, compared with the hardware there bit for bit): products exact, every term cut off
// 25 bits below the largest exponent among them, the terms added exactly, the sum rounded towards zero.
#pragma once

#include <type_traits>

#include "../../csrc/algorithms/elements.h"

namespace gsd {

constexpr int kSumBits = 25, kNoExponent = -126;  // of a zero

struct Factor {
  float value;
  int exponent;  // of the significand as it is stored: that of subnormal numbers is the smallest one
};

template <class Element>
Factor factor(uint16_t bits) {
  const float value = Element::widen(bits);
  return {value, max_int(static_cast<int>(float_bits(value) >> 23 & 255) - 127, std::is_same_v<Element, Half> ? -14 : -126)};
}

// It is called for every number that the tests' tensor cores make, so it is optimised in every build.
__attribute__((optimize("O2"), no_sanitize("thread", "address", "undefined"))) inline float dot_add(
    float sum, const Factor* const (&a)[16], const Factor* const (&b)[16]) {
  double terms[17], plain = sum;
  terms[16] = sum;
  int highest = sum == 0.0f ? kNoExponent : static_cast<int>(__builtin_bit_cast(uint32_t, sum) >> 23 & 255) - 127;
  if (highest < -126) highest = -126;
  for (int k = 0; k < 16; k++) {
    terms[k] = static_cast<double>(a[k]->value) * b[k]->value;
    plain += terms[k];
    const int exponent = terms[k] == 0.0 ? kNoExponent : a[k]->exponent + b[k]->exponent;
    if (exponent > highest) highest = exponent;
  }
  if (!__builtin_isfinite(plain)) return plain == plain ? static_cast<float>(plain) : __builtin_bit_cast(float, 0x7FFFFFFFu);
  const auto power = [](int exponent) { return __builtin_bit_cast(double, static_cast<uint64_t>(exponent + 1023) << 52); };
  const double scale = power(kSumBits - highest);
  int64_t total = 0;
  for (const double term : terms) total += static_cast<int64_t>(term * scale);
  const double exact = static_cast<double>(total) * power(highest - kSumBits);
  const float nearest = static_cast<float>(exact);
  const double size = exact < 0 ? -exact : exact, got = nearest < 0 ? -nearest : nearest;
  if (got <= size || size >= 0x1p128) return nearest;
  return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, nearest) - 1);  // towards zero, from infinity too
}

}  // namespace gsd
