// The online softmax of one row, block by block, and how long a block of scores is.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../algorithms/group.h"
#include "lanes.h"
#include "model_math.h"
#include "row_math.h"

namespace gsd {

inline int64_t padded_to_lanes(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// What was added so far is relative to `best`.
struct OnlineSoftmax {
  float best = negative_infinity(), total = 0.0f;

  // Takes n scores in, padded with −inf, and turns them into weights; what to scale the accumulated by.
  float take(float* scores, int64_t padded) {
    const Extremes found = extremes(scores, static_cast<int>(padded));
    const float top = found.has_nan ? NAN : found.max;
    float decay = 1.0f;
    if (top == negative_infinity()) {
      std::fill(scores, scores + padded, 0.0f);
      return decay;
    }
    if (top > best || top != top) {
      decay = best == negative_infinity() ? 0.0f : std::exp(best - top);
      total *= decay;
      best = top;
    }
    total += exp_row(scores, padded, best);
    return decay;
  }

  // What the accumulated is divided by, as a factor; 0 of a row that sees nothing.
  float inverse() const { return best == negative_infinity() ? 0.0f : 1.0f / total; }
  float log_sum() const { return best == negative_infinity() ? best : best + std::log(total); }
};

}  // namespace gsd
