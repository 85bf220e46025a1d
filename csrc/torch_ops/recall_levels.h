// The history, graph and results of recall_levels.
#pragma once

#include "../algorithms/recall_levels.h"
#include "history.h"
#include "merge.h"

namespace gsd {

struct LevelsCall : Call<LevelSizes, LevelsArgs> {
  Tensor next;  // working memory: the frontier behind a level
};

template <int at_once>
LevelsCall prepare_levels(Arguments& in) {
  constexpr int64_t kMost = 1 << 15;
  const int64_t given = in['I'], width = in['F'], levels = in['v'], level = in['l'];
  STD_TORCH_CHECK(given >= 1 && given <= width && width < kMost, "width: expected at least the frontier's ", given,
                  " nodes, below ", kMost, ", got ", width);
  STD_TORCH_CHECK(levels >= 1 && levels < kMost && level >= 0 && level < kMost,
                  "levels: expected at least 1 from 0 on, got ", levels, " from ", level);
  in.set('X', kContext), in.set('P', levels * width);
  const NgramSizes recall = recall_sizes(in, in['N'], width, in['K']);
  const LevelSizes sizes{narrow(levels), narrow(width), in.size('K'), narrow(given), min_int(narrow(width), at_once), recall, merge_sizes(in, width)};
  const HistoryArgs history = history_of(in);
  const GraphData graph = in.fill<GraphData, 11>();
  LevelsArgs args{{{}, history}, {}, in.next(), nullptr, nullptr, nullptr, nullptr};
  NgramRecallArgs& any = args.known.asked;  // nodes and results are replaced by those of a level
  take_noise(in, &any);
  args.nodes = in.next(), args.tokens = in.next(), args.log_probs = in.next(), args.matched = in.next();
  args.known.history.parents = graph.parents;
  any.table = history.table, any.token_ids = graph.token_ids, any.contexts = graph.contexts, any.depths = graph.depths;
  any.nodes = args.nodes, any.tokens = args.tokens, any.log_probs = args.log_probs, any.matched = args.matched;
  any.graph_nodes = in.size('N'), any.wanted = in.size('K');
  const int64_t nodes = in['B'] * width;
  Tensor next = fresh<int32_t>(in.first(), {nodes * (3 + in['L'])});
  int32_t* const ids = written<int32_t>(next);
  args.merge = {graph, args.nodes, args.tokens, args.log_probs, ids, ids + nodes, ids + 2 * nodes, ids + 3 * nodes};
  return {{sizes, args, in['B']}, std::move(next)};
}

}  // namespace gsd
