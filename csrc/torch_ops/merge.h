// The graph and candidates of merge.
#pragma once

#include <tuple>
#include <utility>

#include "../algorithms/merge.h"
#include "common.h"

namespace gsd {

using MergeOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor>;

struct MergeCall {
  MergeSizes sizes;
  MergeArgs args;  // of the first sequence
  int64_t batch;
  MergeOutputs outputs;
};

inline MergeCall prepare_merge(const Tensor& token_ids, const Tensor& parents, const Tensor& depths,
                               const Tensor& scores, const Tensor& contexts, const Tensor& expanded,
                               const Tensor& ancestor_mask, const Tensor& edge_targets, const Tensor& edge_log_probs,
                               const Tensor& num_nodes, const Tensor& num_merges, const Tensor& frontier,
                               const Tensor& cand_tokens, const Tensor& cand_log_probs, int64_t level, int64_t width,
                               int64_t merge_context, double log_sibling_ratio, double log_min_prob) {
  check("token_ids", token_ids, ScalarType::Int, {kAny, kAny});
  const int64_t batch = token_ids.size(0), nodes = token_ids.size(1);
  check("cand_tokens", cand_tokens, ScalarType::Int, {batch, kAny, kAny});
  const int64_t expanding = cand_tokens.size(1), branch = cand_tokens.size(2);
  check("ancestor_mask", ancestor_mask, ScalarType::Int, {batch, nodes, kAny});
  const int64_t words = ancestor_mask.size(2);
  check("parents", parents, ScalarType::Int, {batch, nodes});
  check("depths", depths, ScalarType::Int, {batch, nodes});
  check("scores", scores, ScalarType::Float, {batch, nodes});
  check("contexts", contexts, ScalarType::Int, {batch, nodes, kContext});
  check("expanded", expanded, ScalarType::Bool, {batch, nodes});
  check("edge_targets", edge_targets, ScalarType::Int, {batch, nodes, branch});
  check("edge_log_probs", edge_log_probs, ScalarType::Float, {batch, nodes, branch});
  check("num_nodes", num_nodes, ScalarType::Int, {batch});
  check("num_merges", num_merges, ScalarType::Int, {batch});
  check("frontier", frontier, ScalarType::Int, {batch, expanding});
  check("cand_log_probs", cand_log_probs, ScalarType::Float, {batch, expanding, branch});
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
  const MergeArgs args{written<int32_t>(token_ids),
                       written<int32_t>(parents),
                       written<int32_t>(depths),
                       written<float>(scores),
                       written<int32_t>(contexts),
                       written<bool>(expanded),
                       written<int32_t>(ancestor_mask),
                       written<int32_t>(edge_targets),
                       written<float>(edge_log_probs),
                       written<int32_t>(num_nodes),
                       written<int32_t>(num_merges),
                       read<int32_t>(frontier),
                       read<int32_t>(cand_tokens),
                       read<float>(cand_log_probs),
                       written<int32_t>(std::get<0>(outputs)),
                       written<int32_t>(std::get<1>(outputs)),
                       written<int32_t>(std::get<2>(outputs)),
                       written<int32_t>(std::get<3>(outputs))};
  return {sizes, args, batch, std::move(outputs)};
}

}  // namespace gsd
