// The graphs, rows and caches of merge, flatten, verify and commit_kv.
#pragma once

#include "../algorithms/flatten.h"
#include "../algorithms/merge.h"
#include "../algorithms/verify.h"
#include "cache.h"
#include "op.h"

namespace gsd {

using MergeCall = Call<MergeSizes, MergeArgs>;

inline MergeSizes merge_sizes(const Arguments& in, int64_t expanding) {
  STD_TORCH_CHECK(in['F'] >= 1 && in['l'] >= 0, "merge: expected width >= 1 and level >= 0, got ", in['F'], " and ",
                  in['l']);
  STD_TORCH_CHECK(in['c'] >= -1 && in['c'] <= kContext, "merge_context: expected -1 ... ", kContext, ", got ", in['c']);
  const MergeSizes sizes{in.size('N'), narrow(expanding), in.size('K'), in.size('F'), in.size('L'),
                         in.size('l'), in.size('c'), static_cast<float>(in.real('r')), static_cast<float>(in.real('p'))};
  STD_TORCH_CHECK(in['N'] >= 1 && expanding >= 1 && in['K'] >= 1 && sizes.fits(), "merge: ", in['N'], " nodes with ",
                  expanding, " x ", in['K'], " candidates: expected 1 ... 65535 of each");
  return sizes;
}

inline MergeCall prepare_merge(Arguments& in) {
  return {merge_sizes(in, in['W']), in.each<MergeArgs>(), in['B']};
}

inline FlattenSizes flatten_sizes(const Arguments& in) {
  const int64_t nodes = in['N'], branch = in['K'], max_rows = in['R'], max_path = in['D'];
  STD_TORCH_CHECK(max_rows >= 1 && max_rows <= 32 * kMaxRowWords, "max_rows: expected 1 ... ", 32 * kMaxRowWords,
                  ", got ", max_rows);
  STD_TORCH_CHECK(max_path >= 0 && max_path < max_rows, "max_path: expected 0 ... ", max_rows - 1, ", got ", max_path);
  STD_TORCH_CHECK(nodes >= 1 && branch >= 1 && branch <= 0xFFFF, "flatten: a graph of ", nodes, " nodes with ", branch,
                  " edges each");
  return {narrow(nodes), narrow(branch), narrow(max_rows), narrow(max_path)};
}

inline auto prepare_flatten(Arguments& in) { return Call{flatten_sizes(in), in.each<FlattenArgs>(), in['B']}; }

inline auto prepare_verify(Arguments& in) {
  STD_TORCH_CHECK(in['R'] >= 1 && in['D'] >= 0, "verify: expected at least one row and max_path >= 0, got ", in['R'],
                  " and ", in['D']);
  return Call{VerifySizes{in.size('R'), in.size('E'), in.size('D')}, in.each<VerifyArgs>(), in['B']};
}

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
