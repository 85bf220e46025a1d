// The caches of commit_kv.
#pragma once

#include "cache.h"
#include "op.h"

namespace gsd {

struct CommitCall {
  std::vector<CacheTensor> caches;
  const int32_t *accepted_rows, *num_accepted;  // [B, P], [B]
  int32_t* kv_len;                              // [B]
  int64_t batch, path;
};

inline CommitCall prepare_commit(Arguments& in) {
  CommitCall call{{}, in.at("accepted_rows"), in.at("num_accepted"), in.at("kv_len"), in['B'], in['P']};
  for (const char* name : {"k_caches", "v_caches"}) {
    for (const Tensor& t : in.list(name)) call.caches.push_back(cache_tensor(t, call.batch));
  }
  return call;
}

}  // namespace gsd
