// The graph, rows and text of start_graph, feed_rows, feed_chain, accepted_path and commit_text.
#pragma once

#include "../algorithms/step.h"
#include "op.h"

namespace gsd {

using StartCall = Call<StartSizes, StartArgs>;

inline StartCall prepare_start(Arguments& in) {
  return {{in.size('N'), in.size('K'), in.size('L'), in.size('S')}, in.each<StartArgs>(), in['B']};
}

template <class Integer>
auto prepare_feed(Arguments& in) {
  const int64_t last = in['f'] + in['R'];
  STD_TORCH_CHECK(!in.has("node_depths") || (!in.has("slots") && in['f'] >= 0 && last <= in['N']),
                  "node_depths: expected at least ", last, " nodes, got ", in['N']);
  const FeedSizes sizes{in.size('R'), in.size('N'), in.size('f'), in.size('s'), in.size('v')};
  return Call{sizes, in.each<FeedArgs<Integer>>(), in['B']};
}

// Of two ops, the one of 64-bit integers or that of 32-bit ones, as `wide` says.
template <class Wide, class Narrow>
struct OfWidth {
  static void add(torch::stable::detail::StableLibrary& library, const char* op) {
    Wide::name = Narrow::name = op;
    library.impl(op, boxed);
  }
  static void boxed(StableIValue* stack, uint64_t arguments, uint64_t results) {
    (torch::stable::detail::to<bool>(stack[9]) ? Wide::boxed : Narrow::boxed)(stack, arguments, results);
  }
};

using ChainCall = Call<ChainSizes, ChainArgs>;

inline ChainCall prepare_chain(Arguments& in) {
  STD_TORCH_CHECK(in['E'] >= 1 && in['E'] < (1 << 20), "width: expected at least 1, got ", in['E']);
  return {{in.size('E'), in.size('S')}, in.each<ChainArgs>(), in['B']};
}

inline auto prepare_path(Arguments& in) {
  STD_TORCH_CHECK(in['R'] >= 1, "token_ids: expected at least one row");
  return Call{PathSizes{in.size('P'), in.size('R')}, in.each<PathArgs>(), in['B']};
}

using TextCall = Call<TextSizes, TextArgs>;

inline TextCall prepare_text(Arguments& in) {
  in.together("nodes", 4);
  STD_TORCH_CHECK(in['M'] >= in['P'], "emitted: expected at least ", in['P'], " places, got ", in['M']);
  return {{in.size('P'), in.size('S'), in.size('N'), in.size('E')}, in.each<TextArgs>(), in['B']};
}

}  // namespace gsd
