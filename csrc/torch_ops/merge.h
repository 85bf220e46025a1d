// The graph and candidates of merge.
#pragma once

#include "../algorithms/merge.h"
#include "graph.h"

namespace gsd {

using MergeCall = Call<MergeSizes, MergeArgs, 4>;

inline MergeCall prepare_level(const GraphTensors& graph, const Tensor& frontier, const Tensor& cand_tokens,
                               const Tensor& cand_log_probs, int64_t level, int64_t width, int64_t merge_context,
                               double log_sibling_ratio, double log_min_prob) {
  const auto [data, batch, nodes, branch, words] = graph;
  const int32_t* first = read<int32_t>("frontier", frontier, {batch, kAny});
  const int64_t expanding = frontier.size(1);
  STD_TORCH_CHECK(width >= 1 && level >= 0, "merge: expected width >= 1 and level >= 0, got ", width, " and ", level);
  STD_TORCH_CHECK(merge_context >= -1 && merge_context <= kContext, "merge_context: expected -1 ... ", kContext,
                  ", got ", merge_context);

  const MergeSizes sizes{narrow(nodes), narrow(expanding), narrow(branch), narrow(width), narrow(words), narrow(level),
                         narrow(merge_context), static_cast<float>(log_sibling_ratio),
                         static_cast<float>(log_min_prob)};
  STD_TORCH_CHECK(nodes >= 1 && expanding >= 1 && branch >= 1 && sizes.fits(), "merge: ", nodes, " nodes with ",
                  expanding, " x ", branch, " candidates: expected 1 ... 65535 of each");
  Fresh<4> next(frontier);
  const MergeArgs args{data,
                       first,
                       read<int32_t>("cand_tokens", cand_tokens, {batch, expanding, branch}),
                       read<float>("cand_log_probs", cand_log_probs, {batch, expanding, branch}),
                       next.of<int32_t>({batch, width}),
                       next.of<int32_t>({batch, width}),
                       next.of<int32_t>({batch, width}),
                       next.of<int32_t>({batch, width, words})};
  return {sizes, args, batch, next.results()};
}

inline MergeCall prepare_merge(const Tensors& graph, const Tensor& frontier, const Tensor& cand_tokens,
                               const Tensor& cand_log_probs, int64_t level, int64_t width, int64_t merge_context,
                               double log_sibling_ratio, double log_min_prob) {
  return prepare_level(GraphTensors::of(graph), frontier, cand_tokens, cand_log_probs, level, width, merge_context,
                       log_sibling_ratio, log_min_prob);
}

}  // namespace gsd
