// The graph and rows of flatten.
#pragma once

#include "../algorithms/flatten.h"
#include "common.h"

namespace gsd {

using FlattenCall = Call<FlattenSizes, FlattenArgs, 7>;
using FlattenOutputs = Fresh<7>::Results;

inline void check_flatten(int64_t nodes, int64_t branch, int64_t max_rows, int64_t max_path) {
  STD_TORCH_CHECK(max_rows >= 1 && max_rows <= 32 * kMaxRowWords, "max_rows: expected 1 ... ", 32 * kMaxRowWords,
                  ", got ", max_rows);
  STD_TORCH_CHECK(max_path >= 0 && max_path < max_rows, "max_path: expected 0 ... ", max_rows - 1, ", got ", max_path);
  STD_TORCH_CHECK(nodes >= 1 && branch >= 1 && branch <= 0xFFFF, "flatten: a graph of ", nodes, " nodes with ", branch,
                  " edges each");
}

// Rows' storage, behind what they are made of.
inline FlattenArgs new_rows(Fresh<7>* rows, const int32_t* token_ids, const int32_t* edge_targets,
                            const float* edge_log_probs, int64_t batch, int64_t count) {
  return {token_ids,
          edge_targets,
          edge_log_probs,
          rows->of<int32_t>({batch, count}),
          rows->of<int32_t>({batch, count}),
          rows->of<int32_t>({batch, count}),
          rows->of<int32_t>({batch, count, words_for(narrow(count))}),
          rows->of<int32_t>({batch, count}),
          rows->of<float>({batch, count}),
          rows->of<int32_t>({batch})};
}

inline FlattenCall prepare_flatten(const Tensor& node_tokens, const Tensor& edge_targets, const Tensor& edge_log_probs,
                                   int64_t max_rows, int64_t max_path) {
  const int32_t* token_ids = read<int32_t>("token_ids", node_tokens, {kAny, kAny});
  const int64_t batch = node_tokens.size(0), nodes = node_tokens.size(1);
  const int32_t* targets = read<int32_t>("edge_targets", edge_targets, {batch, nodes, kAny});
  const int64_t branch = edge_targets.size(2);
  const float* log_probs = read<float>("edge_log_probs", edge_log_probs, {batch, nodes, branch});
  check_flatten(nodes, branch, max_rows, max_path);
  const FlattenSizes sizes{narrow(nodes), narrow(branch), narrow(max_rows), narrow(max_path)};
  Fresh<7> rows(node_tokens);
  const FlattenArgs args = new_rows(&rows, token_ids, targets, log_probs, batch, max_rows);
  return {sizes, args, batch, rows.results()};
}

}  // namespace gsd
