// The history, graph and results of recall_levels.
#pragma once

#include "../algorithms/recall_levels.h"
#include "history.h"
#include "merge.h"

namespace gsd {

struct LevelsCall : Call<LevelSizes, LevelsArgs, 4> {
  Tensor next;  // working memory: the frontier behind a level
};

inline LevelsCall prepare_levels(const Tensors& history, const Tensors& tensors,
                                 const Tensor& frontier,
                                 const std::vector<int64_t>& table_sizes, int64_t level, int64_t levels, int64_t width,
                                 int64_t merge_context, double log_sibling_ratio, double log_min_prob,
                                 const MaybeTensor& first_pick, const MaybeTensor& seed,
                                 const MaybeTensor& sequence_ids) {
  HistoryTensors known = HistoryTensors::of(history, table_sizes);
  const GraphTensors graph = GraphTensors::of(tensors);
  const int64_t batch = graph.batch;
  STD_TORCH_CHECK(batch == known.table.batch, "keys: expected ", batch, " sequences, got ", known.table.batch);
  const int32_t* first = read<int32_t>("frontier", frontier, {batch, kAny});
  const int64_t branch = graph.branch, given = frontier.size(1), places = levels * width;
  constexpr int64_t kMost = 1 << 15;
  STD_TORCH_CHECK(given >= 1 && given <= width && width < kMost, "width: expected at least the frontier's ", given,
                  " nodes, below ", kMost, ", got ", width);
  STD_TORCH_CHECK(levels >= 1 && levels < kMost && level >= 0 && level < kMost, "levels: expected at least 1 from 0 on, got ",
                  levels, " from ", level);
  const GraphData& data = graph.data;
  known.args.parents = data.parents;
  const RecallAsked asked =
      RecallAsked::of(known.table, {data.token_ids, data.contexts, data.depths, graph.nodes, kContext}, width, branch,
                      table_sizes[0], table_sizes[1], first_pick, seed, sequence_ids);
  const MergeSizes merge = merge_sizes(graph, width, level, width, merge_context, log_sibling_ratio, log_min_prob);
  const LevelSizes sizes{narrow(levels), narrow(width), narrow(branch), narrow(given), 1, asked.sizes, merge};
  Fresh<4> found(frontier);
  LevelsArgs args{{asked.args, known.args},
                  {},
                  first,
                  found.of<int32_t>({batch, places}),
                  found.of<int32_t>({batch, places, branch}),
                  found.of<float>({batch, places, branch}),
                  found.of<int32_t>({batch, places})};
  NgramRecallArgs& any = args.known.asked;  // replaced by those of a level
  any.nodes = args.nodes, any.tokens = args.tokens, any.log_probs = args.log_probs, any.matched = args.matched;
  const int64_t nodes = batch * width;
  Tensor next = fresh<int32_t>(frontier, {nodes * (3 + graph.words)});
  static_cast<GraphData&>(args.merge) = data;
  args.merge.frontier = args.nodes, args.merge.tokens = args.tokens, args.merge.log_probs = args.log_probs;
  args.merge.next_ids = written<int32_t>(next);
  args.merge.next_tokens = args.merge.next_ids + nodes, args.merge.next_depths = args.merge.next_tokens + nodes;
  args.merge.next_mask = args.merge.next_depths + nodes;
  return {{sizes, args, batch, found.results()}, std::move(next)};
}

}  // namespace gsd
