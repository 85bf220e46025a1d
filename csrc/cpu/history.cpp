// The history's ops on CPU tensors, and what is learned of a source: csrc/algorithms/history.h, recall_levels.h, learn.h.
#include <algorithm>

#include "../torch_ops/history.h"
#include "../torch_ops/registration.h"
#include "sequences.h"

namespace gsd {
namespace {

// Nodes of a sequence by one thread.
void recall(const Call<HistorySizes, HistoryRecall>& call) { run_sequences(call, 8 * max_int(call.sizes.rows, 1)); }

void check_frontier(const LevelsCall& call) {
  for (int64_t i = 0; i < call.batch * call.sizes.given; i++) {
    const int32_t node = call.args.first.frontier[i];
    STD_TORCH_CHECK(node < call.sizes.merge.capacity, "frontier: node ", node, " of ", call.sizes.merge.capacity);
  }
}

void check_merged(const LevelsCall& call) {
  const int32_t* const num_nodes = call.args.first.graph.num_nodes;
  const int32_t needed = *std::max_element(num_nodes, num_nodes + call.batch);
  STD_TORCH_CHECK(needed <= call.sizes.merge.capacity, "recall_levels: the levels need ", needed,
                  " nodes, the graph holds ", call.sizes.merge.capacity);
}

}  // namespace
}  // namespace gsd

GSD_OPS(CPU, m) {
  using namespace gsd;
  Op<prepare_history, recall>::add(m, "history_recall");
  Op<prepare_follow, &run_sequences>::add(m, "history_append");
  Op<prepare_levels<1>, check_frontier, &run_sequences, check_merged>::add(m, "recall_levels");
  Op<prepare_learn, &run_in_turn>::add(m, "learn_source");
}
