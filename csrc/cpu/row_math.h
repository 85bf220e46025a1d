// Vectorised passes over one row of logits. Each is compiled for several instruction sets and picked when the library
// is loaded, so one portable wheel uses AVX2 or AVX-512 where there is one. No fused multiply-adds are formed
// (-ffp-contract=off), hence the result does not depend on the machine.
//
// Rows are float32, padded with −inf to a multiple of kBlock.
#pragma once

#include <cstdint>

#include "../algorithms/random.h"

namespace gsd {

constexpr int kBlock = 256;  // tokens that one call of random_block covers: 64 Philox counters

struct Extremes {
  float max;  // −inf for an empty row
  bool has_nan;
};

// Any n, no padding needed.
Extremes extremes(const float* x, int n);

// x /= by, and the maximum of every block.
Extremes scale_and_block_maxima(float* x, int padded, float by, float* block_max);

// Everything below `floor` becomes −inf.
void cut_below(float* x, int padded, float floor);

// Σ exp(x − shift) of x ≤ shift
double sum_exp(const float* x, int padded, float shift);

// out = exp(x − shift)
void exp_shifted(const float* x, float* out, int padded, float shift);

// The random bits of one block of tokens.
void random_block(const NoiseStream& stream, int block, uint32_t* bits);

// x += g for one block of tokens; bits from random_block.
void add_gumbel(float* x, const uint32_t* bits);

}  // namespace gsd
