// The graph and rows of flatten.
#pragma once

#include <tuple>
#include <utility>

#include "../algorithms/flatten.h"
#include "common.h"

namespace gsd {

using FlattenOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

struct FlattenCall {
  FlattenSizes sizes;
  FlattenArgs args;  // of the first sequence
  int64_t batch;
  FlattenOutputs outputs;
};

inline void check_flatten(int64_t nodes, int64_t branch, int64_t max_rows, int64_t max_path) {
  STD_TORCH_CHECK(max_rows >= 1 && max_rows <= 32 * kMaxRowWords, "max_rows: expected 1 ... ", 32 * kMaxRowWords,
                  ", got ", max_rows);
  STD_TORCH_CHECK(max_path >= 0 && max_path < max_rows, "max_path: expected 0 ... ", max_rows - 1, ", got ", max_path);
  STD_TORCH_CHECK(nodes >= 1 && branch >= 1 && branch <= 0xFFFF, "flatten: a graph of ", nodes, " nodes with ", branch,
                  " edges each");
}

inline FlattenOutputs new_rows(const Tensor& node_tokens, const Tensor& edge_log_probs, int64_t batch, int64_t rows) {
  return {new_int32(node_tokens, {batch, rows}),
          new_int32(node_tokens, {batch, rows}),
          new_int32(node_tokens, {batch, rows}),
          new_int32(node_tokens, {batch, rows, words_for(static_cast<int>(rows))}),
          new_int32(node_tokens, {batch, rows}),
          torch::stable::new_empty(edge_log_probs, {batch, rows}),
          new_int32(node_tokens, {batch})};
}

inline FlattenCall prepare_flatten(const Tensor& node_tokens, const Tensor& edge_targets, const Tensor& edge_log_probs,
                                   int64_t max_rows, int64_t max_path) {
  check("token_ids", node_tokens, ScalarType::Int, {kAny, kAny});
  const int64_t batch = node_tokens.size(0), nodes = node_tokens.size(1);
  check("edge_targets", edge_targets, ScalarType::Int, {batch, nodes, kAny});
  const int64_t branch = edge_targets.size(2);
  check("edge_log_probs", edge_log_probs, ScalarType::Float, {batch, nodes, branch});
  check_flatten(nodes, branch, max_rows, max_path);
  const FlattenSizes sizes{static_cast<int>(nodes), static_cast<int>(branch), static_cast<int>(max_rows),
                           static_cast<int>(max_path)};
  FlattenOutputs outputs = new_rows(node_tokens, edge_log_probs, batch, max_rows);
  const FlattenArgs args{read<int32_t>(node_tokens),
                         read<int32_t>(edge_targets),
                         read<float>(edge_log_probs),
                         written<int32_t>(std::get<0>(outputs)),
                         written<int32_t>(std::get<1>(outputs)),
                         written<int32_t>(std::get<2>(outputs)),
                         written<int32_t>(std::get<3>(outputs)),
                         written<int32_t>(std::get<4>(outputs)),
                         written<float>(std::get<5>(outputs)),
                         written<int32_t>(std::get<6>(outputs))};
  return {sizes, args, batch, std::move(outputs)};
}

}  // namespace gsd
