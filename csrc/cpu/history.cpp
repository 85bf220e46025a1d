// The history's ops on CPU tensors, and what is learned of a source: csrc/algorithms/history.h, recall_levels.h, learn.h.
#include <algorithm>

#include "../torch_ops/learn.h"
#include "../torch_ops/recall_levels.h"
#include "../torch_ops/registration.h"
#include "sequences.h"

namespace gsd {
namespace {

// Nodes of a sequence by one thread.
void recall(const HistoryCall& call) { run_by(8 * max_int(call.sizes.rows, 1), call); }

void check_frontier(const LevelsCall& call) {
  for (int64_t i = 0; i < call.batch * call.sizes.given; i++) {
    STD_TORCH_CHECK(call.args.frontier[i] < call.sizes.merge.capacity, "frontier: node ", call.args.frontier[i], " of ",
                    call.sizes.merge.capacity);
  }
}

void check_merged(const LevelsCall& call) {
  const int32_t* const num_nodes = call.args.merge.num_nodes;
  const int32_t needed = *std::max_element(num_nodes, num_nodes + call.batch);
  STD_TORCH_CHECK(needed <= call.sizes.merge.capacity, "recall_levels: the levels need ", needed,
                  " nodes, the graph holds ", call.sizes.merge.capacity);
}

}  // namespace
}  // namespace gsd

GSD_OPS(CPU, m) {
  using namespace gsd;
  Op<prepare_history, recall>::add(m, "history_recall");
  Op<prepare_follow, run_sequences<FollowCall>>::add(m, "history_append");
  Op<prepare_levels<1>, check_frontier, run_sequences<LevelsCall>, check_merged>::add(m, "recall_levels");
  Op<prepare_learn, run_in_turn<LearnCall>>::add(m, "learn_source");
}
