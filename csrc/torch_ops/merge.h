// The graph and candidates of merge.
#pragma once

#include "../algorithms/merge.h"
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
  return {merge_sizes(in, in['W']), in.fill<MergeArgs, 18>(), in['B']};
}

}  // namespace gsd
