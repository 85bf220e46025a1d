// Levels that the history alone drafts: its candidates and their merge, level after level of one sequence.
// gsd_kernels/ops/recall_levels/reference.py is the specification.
#pragma once

#include "history.h"
#include "merge.h"

namespace gsd {

// L levels of W nodes with K candidates each, of which the first has G.
struct LevelSizes {
  int levels, width, branch, given;
  int at_once;  // nodes of a level whose evidence lies in memory side by side
  NgramSizes recall;
  MergeSizes merge;  // of the first level
};

struct LevelsArgs {
  HistoryRecall known;      // its nodes and results are those of a level
  MergeArgs merge;          // its frontier and candidates are those of a level
  const int32_t* frontier;  // [G]
  int32_t* nodes;           // [L, W], −1 for padding
  int32_t* tokens;          // [L, W, K], −1 for none
  float* log_probs;         // [L, W, K], −inf for none
  int32_t* matched;         // [L, W], 0 for none

  GSD_HD LevelsArgs at(const LevelSizes& s, int64_t b) const {
    const int64_t places = b * s.levels * s.width, k = places * s.branch;
    return {{known.asked.at(s.recall, b), known.history.at(s.recall, b, known.asked.graph_nodes)},
            merge.at(s.merge, b),
            frontier + b * s.given,
            nodes + places,
            tokens + k,
            log_probs + k,
            matched + places};
  }

  // What a level finds lies where the levels' results go.
  GSD_HD LevelsArgs of_level(const LevelSizes& s, int level) const {
    LevelsArgs mine = *this;
    mine.nodes += level * s.width, mine.matched += level * s.width;
    mine.tokens += level * s.width * s.branch, mine.log_probs += level * s.width * s.branch;
    NgramRecallArgs& asked = mine.known.asked;
    asked.nodes = mine.nodes, asked.tokens = mine.tokens, asked.log_probs = mine.log_probs;
    asked.matched = mine.matched;
    mine.merge.frontier = mine.nodes, mine.merge.tokens = mine.tokens, mine.merge.log_probs = mine.log_probs;
    return mine;
  }
};

GSD_HD size_t levels_bytes(const LevelSizes& s) {
  const size_t recall = s.at_once * HistoryArena::bytes(), merge = MergeArena::bytes(s.merge);
  return recall > merge ? recall : merge;
}

// Candidates of a level, which has a node unless it is empty; one that is not there has none.
template <class Group>
GSD_HD void recall_level(Group& group, const LevelsArgs& a, const LevelSizes& s, bool empty, char* memory) {
  const int rank = group.rank(), step = group.size();
  for (int first = 0; first < s.width && !empty; first += s.at_once) {
    recall_history(group, a.known.asked, a.known.history, s.recall, first, min_int(s.at_once, s.width - first), memory);
    group.sync("levels: nodes recalled");
  }
  for (int w = rank; w < s.width; w += step) {
    if (a.nodes[w] < 0) a.matched[w] = 0;
  }
  for (int i = rank; i < s.width * s.branch; i += step) {
    if (a.nodes[i / s.branch] < 0) a.tokens[i] = -1, a.log_probs[i] = negative_infinity();
  }
}

template <class Group>
GSD_HD void grow_levels(Group& group, const LevelsArgs& a, const LevelSizes& s, char* memory) {
  const int rank = group.rank(), step = group.size();
  MergeSizes merge = s.merge;
  for (int number = 0; number < s.levels; number++, merge.level++) {
    const LevelsArgs level = a.of_level(s, number);
    for (int w = rank; w < s.width; w += step) {
      level.nodes[w] = number > 0 ? a.merge.next_ids[w] : w < s.given ? a.frontier[w] : -1;
    }
    group.sync("levels: nodes known");
    bool empty = true;
    for (int w = 0; w < s.width; w++) empty = empty && level.nodes[w] < 0;
    recall_level(group, level, s, empty, memory);
    // What merge reads is behind the last barrier of the recall: places without a node, written since, it passes over.
    if (number == 0 || !empty) merge_level(group, level.merge, merge, memory);  // else the next are what they are: none
  }
}

GSD_GROUP_WORK(LevelsArgs, levels_bytes(s), grow_levels(group, a, s, memory))

}  // namespace gsd
