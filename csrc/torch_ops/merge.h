// The graph and candidates of merge.
#pragma once

#include "../algorithms/merge.h"
#include "graph.h"

namespace gsd {

using MergeCall = Call<MergeSizes, MergeArgs, 4>;

inline MergeSizes merge_sizes(const GraphTensors& graph, int64_t expanding, int64_t level, int64_t width,
                              int64_t merge_context, double log_sibling_ratio, double log_min_prob) {
  STD_TORCH_CHECK(width >= 1 && level >= 0, "merge: expected width >= 1 and level >= 0, got ", width, " and ", level);
  STD_TORCH_CHECK(merge_context >= -1 && merge_context <= kContext, "merge_context: expected -1 ... ", kContext,
                  ", got ", merge_context);
  const MergeSizes sizes{narrow(graph.nodes), narrow(expanding), narrow(graph.branch), narrow(width),
                         narrow(graph.words), narrow(level), narrow(merge_context),
                         static_cast<float>(log_sibling_ratio), static_cast<float>(log_min_prob)};
  STD_TORCH_CHECK(graph.nodes >= 1 && expanding >= 1 && graph.branch >= 1 && sizes.fits(), "merge: ", graph.nodes,
                  " nodes with ", expanding, " x ", graph.branch, " candidates: expected 1 ... 65535 of each");
  return sizes;
}

inline MergeCall prepare_merge(const Tensors& tensors, const Tensor& frontier, const Tensor& cand_tokens,
                               const Tensor& cand_log_probs, int64_t level, int64_t width, int64_t merge_context,
                               double log_sibling_ratio, double log_min_prob) {
  const GraphTensors graph = GraphTensors::of(tensors);
  const int64_t batch = graph.batch, branch = graph.branch;
  const int32_t* first = read<int32_t>("frontier", frontier, {batch, kAny});
  const int64_t expanding = frontier.size(1);
  const MergeSizes sizes =
      merge_sizes(graph, expanding, level, width, merge_context, log_sibling_ratio, log_min_prob);
  Fresh<4> next(frontier);
  const MergeArgs args{graph.data,
                       first,
                       read<int32_t>("cand_tokens", cand_tokens, {batch, expanding, branch}),
                       read<float>("cand_log_probs", cand_log_probs, {batch, expanding, branch}),
                       next.of<int32_t>({batch, width}),
                       next.of<int32_t>({batch, width}),
                       next.of<int32_t>({batch, width}),
                       next.of<int32_t>({batch, width, graph.words})};
  return {sizes, args, batch, next.results()};
}

}  // namespace gsd
