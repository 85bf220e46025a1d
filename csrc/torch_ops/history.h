// The tensors of a History of gsd_kernels/ops/history/records.py, in the order of its `tensors()`.
#pragma once

#include "../algorithms/graph.h"
#include "../algorithms/history.h"
#include "ngram.h"

namespace gsd {

struct HistoryTensors {
  NgramTensors table;
  HistoryArgs args;  // of the first sequence; its parents are the graph's

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

  // sizes: tokens of the longest context and entries of a set, of the text's table and of what was learned.
  static HistoryTensors of(const Tensors& t, const std::vector<int64_t>& sizes) {
    STD_TORCH_CHECK(t.size() == 11 || t.size() == 14, "history: expected 11 tensors, or 14 with what was learned, got ",
                    t.size());
    STD_TORCH_CHECK(sizes.size() == 4, "sizes: expected 4, got ", sizes.size());
    HistoryTensors h{NgramTensors::of(t[0], t[1], t[2]), {}};
    const int64_t batch = h.table.batch;
    h.args.table = h.table.data;
    h.args.copies = copies_of(t[3], t[4], t[5], t[6], batch);
    h.args.runners = read<int32_t>("runners", t[7], {batch, kAny});
    const int64_t runners = t[7].size(1);
    h.args.runner_log_probs = read<float>("runner_log_probs", t[8], {batch, runners});
    h.args.num_runners = narrow(runners < kRemembered ? runners : kRemembered);
    STD_TORCH_CHECK(runners == h.args.num_runners, "runners: expected at most ", kRemembered, ", got ", runners);
    h.args.emitted = read<int32_t>("emitted", t[9], {batch});
    h.args.weights = read<double>("weights", t[10], {kHistoryWeights});
    if (t.size() == 11) return h;
    const NgramTensors learned = NgramTensors::of(t[11], t[12], t[13]);
    STD_TORCH_CHECK(learned.batch == 1, "learned: expected one table, got ", learned.batch);
    h.args.learned = learned.data;
    h.args.learned_sizes = ngram_sizes(learned, 1, kContext + 1, sizes[2], sizes[3]);
    return h;
  }
};

struct HistoryAsked {
  NgramRecallCall recall;
  HistoryArgs args;  // of the first sequence

  // Answer a sequence's part of a recall, which may be of other nodes than the call's.
  template <class Group>
  void answer(Group& group, const NgramRecallArgs& asked, int64_t b) const {
    recall_history(group, asked, args.at(recall.sizes, b, asked.graph_nodes), recall.sizes);
  }
};

struct HistoryCall {
  HistoryAsked asked;
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
  Fresh<3>::Results outputs = recall.outputs;
  return {{std::move(recall), h.args}, std::move(outputs)};
}

struct CopyCall {
  CopyIndex index;
  const int32_t* tokens;  // [B, M]
  const int32_t* counts;  // [B]
  int64_t batch, given;   // B, M
};

inline CopyCall prepare_copies(const Tensor& text, const Tensor& length, const Tensor& heads, const Tensor& previous,
                               const Tensor& tokens, const Tensor& counts) {
  const int32_t* added = read<int32_t>("tokens", tokens, {kAny, kAny});
  const int64_t batch = tokens.size(0), given = tokens.size(1);
  const CopyIndex index = HistoryTensors::copies_of(text, length, heads, previous, batch);
  return {index, added, read<int32_t>("counts", counts, {batch}), batch, given};
}

}  // namespace gsd
