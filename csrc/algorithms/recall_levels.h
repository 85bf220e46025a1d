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
  HistorySizes recall;
  MergeSizes merge;  // of the first level
};

struct LevelsArgs {
  HistoryArgs known;
  GraphData graph;
  const int32_t* frontier;  // [G]
  PickNoise noise;
  int32_t* nodes;    // [L, W], −1 for padding
  int32_t* tokens;   // [L, W, K], −1 for none
  float* log_probs;  // [L, W, K], −inf for none
  int32_t* matched;  // [L, W], 0 for none

  // What a level finds lies where the levels' results go.
  GSD_HD LevelsArgs of_level(const LevelSizes& s, int level) const {
    LevelsArgs mine = *this;
    mine.nodes += level * s.width, mine.matched += level * s.width;
    mine.tokens += level * s.width * s.branch, mine.log_probs += level * s.width * s.branch;
    return mine;
  }
};

struct LevelsArena : Arena<LevelsArena> {
  int32_t *next, *next_tokens, *next_depths;  // [W], the frontier behind a level
  int32_t* next_mask;                         // [W, words]
  char* work;                                 // of a level's recall, then of its merge

  template <class Carve>
  GSD_HD void lay(Carve& carve, const LevelSizes& s) {
    for (int32_t** ids : {&next, &next_tokens, &next_depths}) carve(*ids, s.width);
    carve(next_mask, s.width * s.merge.words);
    const size_t recall = s.at_once * HistoryArena::bytes(), merge = MergeArena::bytes(s.merge);
    carve(work, recall > merge ? recall : merge);
  }
};

// Candidates of a level, which has a node unless it is empty; one that is not there has none.
template <class Group>
GSD_HD void recall_level(Group& group, const LevelsArgs& a, const LevelSizes& s, bool empty, char* memory) {
  const int rank = group.rank(), step = group.size();
  const HistoryRecall recall{a.known,  a.graph.token_ids, a.graph.parents, a.graph.contexts, a.graph.depths,
                             a.nodes,  a.noise,           a.tokens,        a.log_probs,      a.matched};
  for (int first = 0; first < s.width && !empty; first += s.at_once) {
    recall_history(group, recall, s.recall, first, min_int(s.at_once, s.width - first), memory);
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
  const auto arena = LevelsArena::in(memory, s);
  const int rank = group.rank(), step = group.size();
  MergeSizes merge = s.merge;
  for (int number = 0; number < s.levels; number++, merge.level++) {
    const LevelsArgs level = a.of_level(s, number);
    for (int w = rank; w < s.width; w += step) {
      level.nodes[w] = number > 0 ? arena.next[w] : w < s.given ? a.frontier[w] : -1;
    }
    group.sync("levels: nodes known");
    bool empty = true;
    for (int w = 0; w < s.width; w++) empty = empty && level.nodes[w] < 0;
    recall_level(group, level, s, empty, arena.work);
    // What merge reads is behind the last barrier of the recall: places without a node, written since, it passes over.
    if (number > 0 && empty) continue;  // the next are what they are: none
    merge_level(group,
                {a.graph, level.nodes, level.tokens, level.log_probs, arena.next, arena.next_tokens, arena.next_depths,
                 arena.next_mask},
                merge, arena.work);
  }
}

GSD_GROUP_WORK(LevelsArgs, LevelsArena::bytes(s), grow_levels(group, all[number], s, memory))

}  // namespace gsd
