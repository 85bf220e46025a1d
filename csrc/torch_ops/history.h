// The tensors of a History of gsd_kernels/ops/history/records.py, in the order of its `tensors()`.
#pragma once

#include "../algorithms/graph.h"
#include "../algorithms/history.h"
#include "ngram.h"

namespace gsd {

inline CopyIndex copies_of(Arguments& in) {
  constexpr int64_t kMost = 1 << 30;
  const int64_t hashes = in['H'];
  STD_TORCH_CHECK(in['S'] < kMost, "text: too long, ", in['S']);
  STD_TORCH_CHECK(hashes >= 1 && hashes < kMost && (hashes & (hashes - 1)) == 0,
                  "heads: expected a power of two of hashes, got ", hashes);
  STD_TORCH_CHECK(in['G'] <= kRemembered, "runners: expected at most ", kRemembered, ", got ", in['G']);
  return {in.next(),    in.next(), in.next(), in.next(), in.size('S'),
          in.size('H'), in.next(), in.next(), in.next(), in.size('G')};
}

inline HistoryArgs history_of(Arguments& in) {
  HistoryArgs h{};
  h.table = table_of(in);
  h.copies = copies_of(in);
  STD_TORCH_CHECK(in['Y'] == kHistoryWeights, "weights: expected size ", kHistoryWeights, ", got ", in['Y']);
  h.weights = in.next();
  h.learned = table_of(in);
  if (in.has("learned_keys")) h.learned_sizes = ngram_sizes(in['D'], in['o'], in['E'], 1, kContext + 1, in['n']);
  return h;
}

// Of `wanted` candidates of each of `rows` nodes.
inline NgramSizes recall_sizes(const Arguments& in, int64_t nodes, int64_t rows, int64_t wanted) {
  STD_TORCH_CHECK(nodes >= 1, "token_ids: expected at least one node");
  const NgramSizes sizes = ngram_sizes(in['C'], in['w'], in['T'], rows, in['X'], in['m']);
  STD_TORCH_CHECK(wanted >= 0 && wanted <= sizes.branch, "branch: expected at most ", sizes.branch, ", got ", wanted);
  return sizes;
}

inline void take_noise(Arguments& in, NgramRecallArgs* asked) {
  in.together("first_pick", 3);
  asked->first_pick = in.next(), asked->seed = in.next(), asked->sequence_ids = in.next();
}

using HistoryCall = Call<NgramSizes, HistoryRecall>;  // a node in place of a sequence

inline HistoryCall prepare_history(Arguments& in) {
  const NgramSizes sizes = recall_sizes(in, in['N'], in['R'], in['k']);
  HistoryRecall recall{{}, history_of(in)};
  NgramRecallArgs& a = recall.asked;
  a.table = recall.history.table;
  a.token_ids = in.next(), recall.history.parents = in.next(), a.contexts = in.next(), a.depths = in.next();
  a.nodes = in.next();
  take_noise(in, &a);
  a.tokens = in.next(), a.log_probs = in.next(), a.matched = in.next();
  a.graph_nodes = in.size('N'), a.wanted = in.size('k');
  return {sizes, recall, in['B'] * in['R']};
}

using FollowCall = Call<NgramSizes, FollowArgs>;

inline FollowCall prepare_follow(Arguments& in) {
  FollowCall call{{}, {}, in['B']};
  FollowArgs& a = call.args;
  const NgramTable table = table_of(in);
  a.copies = copies_of(in);
  a.tokens = in.next(), a.counts = in.next();
  a.given = in.size('P');
  const NgramTree tree{in.next(), in.next(), in.next(), in.next(), in.next()};
  a.accepted_rows = in.next();
  if (!in.has("accepted_rows")) return call;
  call.sizes = ngram_sizes(in);
  a.seen = {table, nullptr, in.next(), in.next(), nullptr, tree};
  a.path = in.size('A');
  STD_TORCH_CHECK(a.path >= 1 && call.sizes.rows >= 1, "accepted_rows: expected at least one row");
  return call;
}

}  // namespace gsd
