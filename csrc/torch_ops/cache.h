// A KV cache of the caller: any strides, written in place.
#pragma once

#include "../algorithms/commit.h"
#include "common.h"

namespace gsd {

struct CacheTensor : CacheShape {
  char* data;
};

inline CacheTensor cache_tensor(const Tensor& t, int64_t batch) {
  STD_TORCH_CHECK(t.dim() == 4 && t.size(0) == batch, "cache: expected [", batch, ", heads, slots, head_dim]");
  STD_TORCH_CHECK(t.size(3) <= 1 || t.stride(3) == 1, "cache: the last dimension must have stride 1");
  const int64_t element = static_cast<int64_t>(t.element_size());
  return {{t.stride(0) * element, t.stride(1) * element, t.stride(2) * element, t.size(1), t.size(2), t.size(3) * element},
          static_cast<char*>(t.mutable_data_ptr())};
}

}  // namespace gsd
