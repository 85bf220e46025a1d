// recall_levels on CPU tensors: recall, calibrate and merge of csrc/algorithms, level after level of each sequence.
#include <algorithm>

#include "../torch_ops/recall_levels.h"
#include "sequences.h"

namespace gsd {
namespace {

void grow_sequence(const LevelsCall& call, int64_t b, char* arena) {
  SerialGroup group;
  NgramRecallArgs recall = call.recall.args.at(call.recall.sizes, b);
  MergeArgs merge = call.merge.args.at(call.merge.sizes, b);
  MergeSizes sizes = call.merge.sizes;
  for (int64_t l = 0; l < call.sizes.levels; l++, sizes.level++) {
    const LevelArgs level = call.args.at(call.sizes, b, l);
    if (l > 0) std::copy_n(merge.next_ids, sizes.frontier, level.nodes);
    recall.nodes = level.nodes, recall.tokens = level.tokens, recall.log_probs = level.log_probs;
    recall.matched = level.matched;
    const bool empty = std::all_of(level.nodes, level.nodes + sizes.frontier, [](int32_t node) { return node < 0; });
    if (!empty) recall_nodes(group, recall, call.recall.sizes);
    level.clear_absent(call.sizes);
    level.calibrate(call.sizes);
    merge.frontier = level.nodes, merge.tokens = level.tokens, merge.log_probs = level.calibrated;
    if (l == 0 || !empty) merge_level(group, merge, sizes, arena);  // else next_ids stay what they are: none
  }
}

RecalledLevels recall_levels(const Tensor& keys, const Tensor& table_tokens, const Tensor& table_log_probs,
                             const std::vector<Tensor>& graph, const Tensor& frontier,
                             const std::optional<Tensor>& log_ratio, int64_t max_context, int64_t ways, int64_t level,
                             int64_t levels, int64_t width, int64_t merge_context, double log_sibling_ratio,
                             double log_min_prob, const std::optional<Tensor>& first_pick,
                             const std::optional<Tensor>& seed, const std::optional<Tensor>& sequence_ids) {
  const LevelsCall call = prepare_levels(NgramTensors::of(keys, table_tokens, table_log_probs),
                                         GraphTensors::of(graph), frontier, log_ratio, max_context, ways, level,
                                         levels, width, merge_context, log_sibling_ratio, log_min_prob, first_pick,
                                         seed, sequence_ids);
  for_each_sequence(call.batch, MergeArena::bytes(call.merge.sizes),
                    [&](int64_t b, char* arena) { grow_sequence(call, b, arena); });
  const int32_t* nodes = call.merge.args.num_nodes;
  const int32_t needed = *std::max_element(nodes, nodes + call.batch);
  STD_TORCH_CHECK(needed <= call.merge.sizes.capacity, "recall_levels: the levels need ", needed,
                  " nodes, the graph holds ", call.merge.sizes.capacity);
  return call.outputs;
}

}  // namespace
}  // namespace gsd

STABLE_TORCH_LIBRARY_IMPL(gsd_kernels, CPU, m) { m.impl("recall_levels", TORCH_BOX(&gsd::recall_levels)); }
