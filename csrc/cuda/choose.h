// Sizes and types that are known when a kernel is launched, as those that it was compiled for.
#pragma once

#include <type_traits>

#include "../algorithms/elements.h"

namespace gsd {

// work(Bfloat16()) or work(Half()).
template <class Work>
int with_type(bool bfloat16, const Work& work) {
  return bfloat16 ? work(Bfloat16{}) : work(Half{});
}

// work(n), a type whose `value` it is, for the first n that is not below `size`; else for the last.
template <int n, int... larger, class Work>
int with_size(int size, const Work& work) {
  if constexpr (sizeof...(larger) > 0) {
    if (size > n) return with_size<larger...>(size, work);
  }
  return work(std::integral_constant<int, n>{});
}

}  // namespace gsd
