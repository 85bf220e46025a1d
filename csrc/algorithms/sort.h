// Sorting by score: 64-bit keys (descending score, then 32 bits of tie-break) in a bitonic network.
#pragma once

#include "group.h"

namespace gsd {

constexpr uint64_t kAbsent = ~0ull;  // sorts last

// What a log-probability counts as: NaN as −inf, above 0 as +0, −0 as +0. So no child is likelier than its parent, which
// the order of rows relies on.
GSD_HD float clean_log_prob(float x) {
  // The sum comes first: compilers make a minimum of "x < 0 ? x : 0", and a GPU's minimum of −0 and +0 is −0.
  return x > negative_infinity() ? (x <= 0.0f ? x + 0.0f : 0.0f) : negative_infinity();
}

// A larger float gives a smaller word; −0 and +0 give the same one.
GSD_HD uint32_t descending(float score) {
  const uint32_t bits = float_bits(score + 0.0f);
  return (bits & 0x80000000u) ? bits : ~bits & 0x7FFFFFFFu;
}

GSD_HD float score_of(uint32_t word) {  // inverse of descending()
  return float_from_bits((word & 0x80000000u) ? word : ~word & 0x7FFFFFFFu);
}

GSD_HD uint64_t score_key(float score, uint32_t tie_break) {
  return static_cast<uint64_t>(descending(score)) << 32 | tie_break;
}

// Ascending; n is a power of two. The keys must be visible to the group (a barrier before the call); afterwards the
// sorted keys are.
template <class Group>
GSD_HD void sort_keys(Group& group, uint64_t* keys, int n) {
  for (int run = 2; run <= n; run *= 2) {
    for (int stride = run / 2; stride > 0; stride /= 2) {
      for (int i = group.rank(); i < n / 2; i += group.size()) {
        const int low = (i & ~(stride - 1)) * 2 + (i & (stride - 1));
        const int high = low + stride;
        const bool ascending = (low & run) == 0;
        const uint64_t a = keys[low], b = keys[high];
        if ((a > b) == ascending) {
          keys[low] = b;
          keys[high] = a;
        }
      }
      group.sync("sort: step done");
    }
  }
}

// Keys below `bound` in ascending keys[0 … n).
GSD_HD int count_below(const uint64_t* keys, int n, uint64_t bound) {
  int low = 0, high = n;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (keys[middle] < bound) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace gsd
