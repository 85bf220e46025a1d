// The levels of recall_levels and where each one's nodes and candidates go.
#pragma once

#include "history.h"
#include "merge.h"

namespace gsd {

// L levels of W nodes with K candidates each; a calibration of E lengths and C ranks, 0 lengths for none.
struct LevelSizes {
  int64_t levels, width, branch, entries, columns;
};

// One level of one sequence.
struct LevelArgs {
  int32_t* nodes;          // [W], −1 for padding
  int32_t* tokens;         // [W, K], −1 for none
  float* log_probs;        // [W, K], −inf for none
  int32_t* matched;        // [W], 0 for none
  float* calibrated;       // [W, K]
  const float* log_ratio;  // [E, C]

  LevelArgs at(const LevelSizes& s, int64_t b, int64_t level) const {
    const int64_t place = (b * s.levels + level) * s.width, k = place * s.branch;
    return {nodes + place, tokens + k, log_probs + k, matched + place, calibrated + k, log_ratio};
  }

  // A node that is not there has no candidate.
  void clear_absent(const LevelSizes& s) const {
    for (int64_t w = 0; w < s.width; w++) {
      if (nodes[w] >= 0) continue;
      matched[w] = 0;
      for (int64_t i = w * s.branch; i < (w + 1) * s.branch; i++) {
        tokens[i] = -1;
        log_probs[i] = negative_infinity();
      }
    }
  }

  void calibrate(const LevelSizes& s) const {
    const CalibrateArgs args{log_probs,
                             log_ratio,
                             matched,
                             nullptr,
                             calibrated,
                             narrow(s.branch),
                             narrow(s.entries),
                             narrow(s.columns)};
    for (int64_t i = 0; i < s.width * s.branch; i++) {
      if (s.entries > 0) {
        calibrate_candidate(args, i);
      } else {
        calibrated[i] = log_probs[i];
      }
    }
  }
};

struct LevelsCall {
  LevelSizes sizes;
  LevelArgs args;  // of the first level of the first sequence
  int64_t batch;
  Fresh<5>::Results outputs;
  HistoryAsked history;  // of one level
  MergeCall merge;       // of one level
};

inline LevelsCall prepare_levels(const Tensors& history, const Tensors& tensors,
                                 const Tensor& frontier, const MaybeTensor& log_ratio,
                                 const std::vector<int64_t>& table_sizes, int64_t level, int64_t levels, int64_t width,
                                 int64_t merge_context, double log_sibling_ratio, double log_min_prob,
                                 const MaybeTensor& first_pick, const MaybeTensor& seed,
                                 const MaybeTensor& sequence_ids) {
  HistoryTensors known = HistoryTensors::of(history, table_sizes);
  const GraphTensors graph = GraphTensors::of(tensors);
  const int64_t batch = graph.batch;
  STD_TORCH_CHECK(batch == known.table.batch, "keys: expected ", batch, " sequences, got ", known.table.batch);
  const int32_t* first = read<int32_t>("frontier", frontier, {batch, kAny});
  const int64_t branch = graph.branch, given = frontier.size(1);
  constexpr int64_t kMost = 1 << 15;
  STD_TORCH_CHECK(given >= 1 && given <= width && width < kMost, "width: expected at least the frontier's ", given,
                  " nodes, below ", kMost, ", got ", width);
  STD_TORCH_CHECK(levels >= 1 && levels < kMost && level >= 0 && level < kMost, "levels: expected at least 1 from 0 on, got ",
                  levels, " from ", level);
  const float* ratios = read<float>("log_ratio", log_ratio, {kAny, kAny});
  const int64_t entries = log_ratio ? log_ratio->size(0) : 0, columns = log_ratio ? log_ratio->size(1) : 0;
  STD_TORCH_CHECK(!log_ratio || (entries >= 1 && columns >= branch), "log_ratio: expected at least ", branch,
                  " ranks, got ", columns);
  const int64_t places = levels * width;
  Fresh<5> found(frontier);
  const LevelSizes sizes{levels, width, branch, entries, columns};
  const LevelArgs args{found.of<int32_t>({batch, places}), found.of<int32_t>({batch, places, branch}),
                       found.of<float>({batch, places, branch}), found.of<int32_t>({batch, places}),
                       found.of<float>({batch, places, branch}), ratios};
  for (int64_t b = 0; b < batch; b++) {
    int32_t* root = args.at(sizes, b, 0).nodes;
    for (int64_t w = 0; w < width; w++) {
      root[w] = w < given ? first[b * given + w] : -1;
      STD_TORCH_CHECK(root[w] < graph.nodes, "frontier: node ", root[w], " of ", graph.nodes);
    }
  }
  // Of one level, at places that the levels replace by their own.
  const Tensor asked = fresh<int32_t>(frontier, {batch, width});
  const GraphData& data = graph.data;
  known.args.parents = data.parents;
  NgramRecallCall recall =
      prepare_recall(known.table, {data.token_ids, data.contexts, data.depths, graph.nodes, kContext}, asked, branch,
                     table_sizes[0], table_sizes[1], first_pick, seed, sequence_ids);
  MergeCall merge = prepare_level(graph, asked, std::get<0>(recall.outputs), std::get<1>(recall.outputs), level, width,
                                  merge_context, log_sibling_ratio, log_min_prob);
  return {sizes, args, batch, found.results(), {std::move(recall), known.args}, std::move(merge)};
}

}  // namespace gsd
