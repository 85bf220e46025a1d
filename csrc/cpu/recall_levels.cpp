// recall_levels on CPU tensors: the history's candidates, calibrate and merge of csrc/algorithms, level after level of
// each sequence.
#include <algorithm>

#include "../torch_ops/op.h"
#include "../torch_ops/recall_levels.h"
#include "../torch_ops/registration.h"
#include "sequences.h"

namespace gsd {
namespace {

void grow_sequence(const LevelsCall& call, int64_t b, char* arena) {
  SerialGroup group;
  NgramRecallArgs recall = call.history.recall.args.at(call.history.recall.sizes, b);
  MergeArgs merge = call.merge.args.at(call.merge.sizes, b);
  MergeSizes sizes = call.merge.sizes;
  for (int64_t l = 0; l < call.sizes.levels; l++, sizes.level++) {
    const LevelArgs level = call.args.at(call.sizes, b, l);
    if (l > 0) std::copy_n(merge.next_ids, sizes.frontier, level.nodes);
    recall.nodes = level.nodes, recall.tokens = level.tokens, recall.log_probs = level.log_probs;
    recall.matched = level.matched;
    const bool empty = std::all_of(level.nodes, level.nodes + sizes.frontier, [](int32_t node) { return node < 0; });
    if (!empty) call.history.answer(recall, b, arena);
    level.clear_absent(call.sizes);
    level.calibrate(call.sizes);
    merge.frontier = level.nodes, merge.tokens = level.tokens, merge.log_probs = level.calibrated;
    if (l == 0 || !empty) merge_level(group, merge, sizes, arena);  // else next_ids stay what they are: none
  }
}

void grow(const LevelsCall& call) {
  for_each_sequence(call.batch, std::max(MergeArena::bytes(call.merge.sizes), HistoryArena::bytes()),
                    [&](int64_t b, char* arena) { grow_sequence(call, b, arena); });
  const int32_t* nodes = call.merge.args.num_nodes;
  const int32_t needed = *std::max_element(nodes, nodes + call.batch);
  STD_TORCH_CHECK(needed <= call.merge.sizes.capacity, "recall_levels: the levels need ", needed,
                  " nodes, the graph holds ", call.merge.sizes.capacity);
}

}  // namespace
}  // namespace gsd

GSD_OPS(CPU, m) {
  m.impl("recall_levels", TORCH_BOX((&gsd::Op<gsd::prepare_levels, gsd::grow>::call)));
}
