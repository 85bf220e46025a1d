// The tensors of a History of gsd_kernels/ops/history/records.py, in the order of its `tensors()`.
#pragma once

#include "../algorithms/graph.h"
#include "../algorithms/history.h"
#include "ngram.h"

namespace gsd {

// What steps write, the first ten.
struct FollowedTensors {
  NgramTensors table;
  CopyIndex copies;
  int32_t* runners;
  float* runner_log_probs;
  int32_t* emitted;
  int num_runners;

  static FollowedTensors of(const Tensors& t) {
    FollowedTensors f{NgramTensors::of(t[0], t[1], t[2]), {}, nullptr, nullptr, nullptr, 0};
    const int64_t batch = f.table.batch;
    f.copies = copies_of(t[3], t[4], t[5], t[6], batch);
    f.runners = written<int32_t>("runners", t[7], {batch, kAny});
    const int64_t runners = t[7].size(1);
    STD_TORCH_CHECK(runners <= kRemembered, "runners: expected at most ", kRemembered, ", got ", runners);
    f.runner_log_probs = written<float>("runner_log_probs", t[8], {batch, runners});
    f.emitted = written<int32_t>("emitted", t[9], {batch});
    f.num_runners = narrow(runners);
    return f;
  }

  static CopyIndex copies_of(const Tensor& text, const Tensor& length, const Tensor& heads, const Tensor& previous,
                             int64_t batch) {
    int32_t* const tokens = written<int32_t>("text", text, {batch, kAny});
    int32_t* const firsts = written<int32_t>("heads", heads, {batch, kAny});
    const int64_t room = text.size(1), hashes = heads.size(1);
    constexpr int64_t kMost = 1 << 30;
    STD_TORCH_CHECK(room < kMost, "text: too long, ", room);
    STD_TORCH_CHECK(hashes >= 1 && hashes < kMost && (hashes & (hashes - 1)) == 0,
                    "heads: expected a power of two of hashes, got ", hashes);
    return {tokens,       written<int32_t>("length", length, {batch}), firsts,
            written<int32_t>("previous", previous, {batch, room}), narrow(room), narrow(hashes)};
  }
};

struct HistoryTensors {
  NgramTensors table;
  HistoryArgs args;  // of the first sequence; its parents are the graph's

  // sizes: tokens of the longest context and entries of a set, of the text's table and of what was learned.
  static HistoryTensors of(const Tensors& t, const std::vector<int64_t>& sizes) {
    STD_TORCH_CHECK(t.size() == 11 || t.size() == 14, "history: expected 11 tensors, or 14 with what was learned, got ",
                    t.size());
    STD_TORCH_CHECK(sizes.size() == 4, "sizes: expected 4, got ", sizes.size());
    const FollowedTensors text = FollowedTensors::of(t);
    HistoryTensors h{text.table, {}};
    h.args.table = h.table.data;
    h.args.copies = text.copies;
    h.args.runners = text.runners;
    h.args.runner_log_probs = text.runner_log_probs;
    h.args.num_runners = text.num_runners;
    h.args.emitted = text.emitted;
    h.args.weights = read<double>("weights", t[10], {kHistoryWeights});
    if (t.size() == 11) return h;
    const NgramTensors learned = NgramTensors::of(t[11], t[12], t[13]);
    STD_TORCH_CHECK(learned.batch == 1, "learned: expected one table, got ", learned.batch);
    h.args.learned = learned.data;
    h.args.learned_sizes = ngram_sizes(learned, 1, kContext + 1, sizes[2], sizes[3]);
    return h;
  }
};

struct HistoryCall {
  NgramRecallCall recall;
  HistoryRecall first;  // of the first sequence
  Fresh<3>::Results outputs;
};

inline HistoryCall prepare_history(const Tensors& history, const Tensor& token_ids, const Tensor& parents,
                                   const Tensor& contexts, const Tensor& depths, const Tensor& nodes, int64_t branch,
                                   const std::vector<int64_t>& sizes, const MaybeTensor& first_pick,
                                   const MaybeTensor& seed, const MaybeTensor& sequence_ids) {
  HistoryTensors h = HistoryTensors::of(history, sizes);
  const NodeTensors graph = NodeTensors::of(token_ids, contexts, depths, h.table.batch);
  h.args.parents = read<int32_t>("parents", parents, {h.table.batch, graph.nodes});
  NgramRecallCall recall =
      prepare_recall(h.table, graph, nodes, branch, sizes[0], sizes[1], first_pick, seed, sequence_ids);
  const HistoryRecall first{recall.args, h.args};
  Fresh<3>::Results outputs = recall.outputs;
  return {std::move(recall), first, std::move(outputs)};
}

using FollowCall = Call<NgramSizes, FollowArgs>;

// seen: of the tree's rows token_ids, parent_rows, depths and num_rows; the tail, the accepted rows, and the target's
// likeliest tokens and their log-probabilities. Empty where nothing was drafted.
inline FollowCall prepare_follow(const Tensors& history, const Tensor& tokens, const Tensor& counts, const Tensors& seen,
                                 const std::vector<int64_t>& sizes) {
  STD_TORCH_CHECK(history.size() == 10, "history: expected 10 tensors, got ", history.size());
  STD_TORCH_CHECK(seen.empty() || seen.size() == 8, "seen: expected 8 tensors or none, got ", seen.size());
  STD_TORCH_CHECK(sizes.size() >= 2, "sizes: expected at least 2, got ", sizes.size());
  const FollowedTensors text = FollowedTensors::of(history);
  const int64_t batch = text.table.batch;
  FollowCall call{{}, {}, batch};
  FollowArgs& a = call.args;
  a.copies = text.copies;
  a.runners = text.runners;
  a.runner_log_probs = text.runner_log_probs;
  a.emitted = text.emitted;
  a.num_runners = text.num_runners;
  a.tokens = read<int32_t>("tokens", tokens, {batch, kAny});
  a.given = narrow(tokens.size(1));
  a.counts = read<int32_t>("counts", counts, {batch});
  if (seen.empty()) return call;
  const NgramInsertCall insert = prepare_ngram_remember(history[0], history[1], history[2], seen[0], seen[1], seen[2],
                                                        seen[3], seen[4], seen[6], seen[7], sizes[0], sizes[1]);
  call.sizes = insert.sizes;
  a.seen = insert.args;
  a.accepted_rows = read<int32_t>("accepted_rows", seen[5], {batch, kAny});
  a.path = narrow(seen[5].size(1));
  STD_TORCH_CHECK(a.path >= 1 && call.sizes.rows >= 1, "accepted_rows: expected at least one row");
  return call;
}

}  // namespace gsd
