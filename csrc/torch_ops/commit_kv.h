// The caches of commit_kv.
#pragma once

#include "cache.h"

namespace gsd {

inline std::vector<CacheTensor> cache_tensors(const Tensors& k, const Tensors& v,
                                              const Tensor& accepted_rows, const Tensor& num_accepted,
                                              const Tensor& kv_len) {
  check("accepted_rows", accepted_rows, ScalarType::Int, {kAny, kAny});
  const int64_t batch = accepted_rows.size(0);
  check("num_accepted", num_accepted, ScalarType::Int, {batch});
  check("kv_len", kv_len, ScalarType::Int, {batch});
  std::vector<CacheTensor> caches;
  caches.reserve(k.size() + v.size());
  for (const Tensor& t : k) caches.push_back(cache_tensor(t, batch));
  for (const Tensor& t : v) caches.push_back(cache_tensor(t, batch));
  return caches;
}

}  // namespace gsd
