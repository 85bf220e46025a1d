// The graph and candidates of merge.
#pragma once

#include <tuple>
#include <utility>

#include "../algorithms/merge.h"
#include "graph.h"

namespace gsd {

using MergeOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor>;

struct MergeCall {
  MergeSizes sizes;
  MergeArgs args;  // of the first sequence
  int64_t batch;
  MergeOutputs outputs;
};

inline MergeCall prepare_level(const GraphTensors& graph, const Tensor& frontier, const Tensor& cand_tokens,
                               const Tensor& cand_log_probs, int64_t level, int64_t width, int64_t merge_context,
                               double log_sibling_ratio, double log_min_prob) {
  const auto [data, batch, nodes, branch, words] = graph;
  check("frontier", frontier, ScalarType::Int, {batch, kAny});
  const int64_t expanding = frontier.size(1);
  STD_TORCH_CHECK(width >= 1 && level >= 0, "merge: expected width >= 1 and level >= 0, got ", width, " and ", level);
  STD_TORCH_CHECK(merge_context >= -1 && merge_context <= kContext, "merge_context: expected -1 ... ", kContext,
                  ", got ", merge_context);

  const MergeSizes sizes{static_cast<int>(nodes),
                         static_cast<int>(expanding),
                         static_cast<int>(branch),
                         static_cast<int>(width),
                         static_cast<int>(words),
                         static_cast<int>(level),
                         static_cast<int>(merge_context),
                         static_cast<float>(log_sibling_ratio),
                         static_cast<float>(log_min_prob)};
  STD_TORCH_CHECK(nodes >= 1 && expanding >= 1 && branch >= 1 && sizes.fits(), "merge: ", nodes, " nodes with ",
                  expanding, " x ", branch, " candidates: expected 1 ... 65535 of each");
  MergeOutputs outputs{new_int32(frontier, {batch, width}), new_int32(frontier, {batch, width}),
                       new_int32(frontier, {batch, width}), new_int32(frontier, {batch, width, words})};
  const MergeArgs args{data,
                       read<int32_t>(frontier),
                       read<int32_t>("cand_tokens", cand_tokens, {batch, expanding, branch}),
                       read<float>("cand_log_probs", cand_log_probs, {batch, expanding, branch}),
                       written<int32_t>(std::get<0>(outputs)),
                       written<int32_t>(std::get<1>(outputs)),
                       written<int32_t>(std::get<2>(outputs)),
                       written<int32_t>(std::get<3>(outputs))};
  return {sizes, args, batch, std::move(outputs)};
}

inline MergeCall prepare_merge(const std::vector<Tensor>& graph, const Tensor& frontier, const Tensor& cand_tokens,
                               const Tensor& cand_log_probs, int64_t level, int64_t width, int64_t merge_context,
                               double log_sibling_ratio, double log_min_prob) {
  return prepare_level(GraphTensors::of(graph), frontier, cand_tokens, cand_log_probs, level, width, merge_context,
                       log_sibling_ratio, log_min_prob);
}

}  // namespace gsd
