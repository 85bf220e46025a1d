// The graph and rows of flatten.
#pragma once

#include "../algorithms/flatten.h"
#include "op.h"

namespace gsd {

using FlattenCall = Call<FlattenSizes, FlattenArgs>;

inline FlattenSizes flatten_sizes(const Arguments& in) {
  const int64_t nodes = in['N'], branch = in['K'], max_rows = in['R'], max_path = in['D'];
  STD_TORCH_CHECK(max_rows >= 1 && max_rows <= 32 * kMaxRowWords, "max_rows: expected 1 ... ", 32 * kMaxRowWords,
                  ", got ", max_rows);
  STD_TORCH_CHECK(max_path >= 0 && max_path < max_rows, "max_path: expected 0 ... ", max_rows - 1, ", got ", max_path);
  STD_TORCH_CHECK(nodes >= 1 && branch >= 1 && branch <= 0xFFFF, "flatten: a graph of ", nodes, " nodes with ", branch,
                  " edges each");
  return {narrow(nodes), narrow(branch), narrow(max_rows), narrow(max_path)};
}

inline FlattenCall prepare_flatten(Arguments& in) {
  return {flatten_sizes(in), in.fill<FlattenArgs, 10>(), in['B']};
}

}  // namespace gsd
