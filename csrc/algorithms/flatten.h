// Unroll the token graph of one sequence to at most R rows, best path first.
//
// Level-synchronous form of gsd_kernels/ops/flatten/reference.py: expand the rows of one depth, keep the best R of rows
// and children by (path score desc, depth asc, parent row asc, edge asc), go one deeper. Kept rows stay sorted, so one
// level is: sort the children, then merge two sorted lists, where every entry finds its own place by binary search.
// Whatever the edges hold, a child is never likelier than its parent (clean_log_prob), so a parent's row is before its
// children's.
#pragma once

#include "sort.h"

namespace gsd {

constexpr int kMaxRowWords = 4;  // MAX_ROWS = 128 rows of gsd_kernels/config.py

// N nodes, K edges a node, R rows, D deepest row.
struct FlattenSizes {
  int capacity, branch, rows, max_path;

  GSD_HD int words() const { return words_for(rows); }
  GSD_HD int max_children() const { return power_of_two_from(rows * branch); }
};

struct FlattenArgs {
  const int32_t* node_tokens;     // [N]
  const int32_t* edge_targets;    // [N, K], −1 for none
  const float* edge_log_probs;    // [N, K]
  int32_t* token_ids;             // [R], 0 padded
  int32_t* parent_rows;           // [R], −1 padded
  int32_t* depths;                // [R], 0 padded
  int32_t* ancestor_mask;         // [R, R/32]
  int32_t* node_ids;              // [R], −1 padded
  float* scores;                  // [R], −inf padded
  int32_t* num_rows;              // [1]
};

// The rows so far, sorted.
struct RowList {
  float* score;     // [R]
  int32_t* node;    // [R]
  int32_t* depth;   // [R]
  int32_t* parent;  // [R], a row of the same list
};

struct FlattenArena : Arena<FlattenArena> {
  RowList rows, next;    // the list, and the one being built from it
  int32_t* place;        // [R]: where a row of the current list goes in the next
  uint64_t* children;    // [pow2(R·K)]: score, parent row, edge
  int32_t* num_children; // [2], of this level and of the next

  template <class Carve>
  GSD_HD void lay(Carve& carve, const FlattenSizes& s) {
    for (RowList* list : {&rows, &next}) {
      carve(list->score, s.rows);
      carve(list->node, s.rows);
      carve(list->depth, s.rows);
      carve(list->parent, s.rows);
    }
    carve(place, s.rows);
    carve(children, s.max_children());
    carve(num_children, 2);
  }
};

// Rows of the sorted list whose score is at least that of `word` (a descending() score).
GSD_HD int count_rows_at_least(const RowList& rows, int n, uint32_t word) {
  int low = 0, high = n;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (descending(rows.score[middle]) <= word) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

template <class Group>
GSD_HD void flatten_graph(Group& group, const FlattenArgs& a, const FlattenSizes& s, char* memory) {
  const auto arena = FlattenArena::in(memory, s);
  const int rank = group.rank(), step = group.size();
  RowList rows = arena.rows, next = arena.next;
  if (rank == 0) {
    rows.score[0] = 0.0f;
    rows.node[0] = rows.depth[0] = 0;
    rows.parent[0] = -1;
    arena.num_children[0] = arena.num_children[1] = 0;
  }
  group.sync("flatten: root placed");

  int n = 1;
  for (int level = 0; level < s.max_path; level++) {
    // 1. List the children of this depth's rows, without those that a full list leaves no room for.
    for (int i = rank; i < n * s.branch; i += step) {
      const int row = i / s.branch, edge = i % s.branch;
      if (rows.depth[row] != level) continue;
      const int64_t from = static_cast<int64_t>(rows.node[row]) * s.branch + edge;
      const int32_t target = a.edge_targets[from];
      if (target < 0 || target >= s.capacity) continue;
      const float score = rows.score[row] + clean_log_prob(a.edge_log_probs[from]);
      if (!(score > negative_infinity()) || (n == s.rows && score <= rows.score[n - 1])) continue;
      const int at = group.atomic_add(&arena.num_children[level % 2], 1);
      arena.children[at] = score_key(score, static_cast<uint32_t>(row) << 16 | edge);
    }
    group.sync("flatten: children listed");
    const int born = arena.num_children[level % 2];
    if (born == 0) break;  // the same for the whole group
    if (rank == 0) arena.num_children[(level + 1) % 2] = 0;

    // 2. Sort them: the list was filled in no particular order, but its keys are all different.
    const int padded = power_of_two_from(born);
    for (int i = born + rank; i < padded; i += step) arena.children[i] = kAbsent;
    group.sync("flatten: children padded");
    sort_keys(group, arena.children, padded);

    // 3. Rows and children take their places in the next list; at equal scores rows come first.
    for (int i = rank; i < n; i += step) {
      const uint64_t equal_score = static_cast<uint64_t>(descending(rows.score[i])) << 32;
      arena.place[i] = i + count_below(arena.children, born, equal_score);
    }
    group.sync("flatten: places known");
    for (int i = rank; i < n; i += step) {
      const int at = arena.place[i];
      if (at >= s.rows) continue;
      next.score[at] = rows.score[i];
      next.node[at] = rows.node[i];
      next.depth[at] = rows.depth[i];
      next.parent[at] = rows.parent[i] < 0 ? -1 : arena.place[rows.parent[i]];
    }
    for (int i = rank; i < min_int(born, s.rows); i += step) {
      const uint64_t key = arena.children[i];
      const uint32_t word = static_cast<uint32_t>(key >> 32);
      const int at = i + count_rows_at_least(rows, n, word);
      if (at >= s.rows) continue;
      const int row = key >> 16 & 0xFFFF, edge = key & 0xFFFF;
      next.score[at] = score_of(word);
      next.node[at] = a.edge_targets[static_cast<int64_t>(rows.node[row]) * s.branch + edge];
      next.depth[at] = level + 1;
      next.parent[at] = arena.place[row];  // a child is never before its parent, so the parent stays too
    }
    group.sync("flatten: rows merged");
    n = min_int(n + born, s.rows);
    const RowList old = rows;
    rows = next;
    next = old;
  }

  for (int i = rank; i < s.rows; i += step) {
    const bool real = i < n;
    a.node_ids[i] = real ? rows.node[i] : -1;
    a.token_ids[i] = real ? a.node_tokens[rows.node[i]] : 0;
    a.parent_rows[i] = real ? rows.parent[i] : -1;
    a.depths[i] = real ? rows.depth[i] : 0;
    a.scores[i] = real ? rows.score[i] : negative_infinity();
    uint32_t mask[kMaxRowWords] = {};
    for (int on_path = i; on_path >= 0; on_path = real ? rows.parent[on_path] : -1) {
GSD_UNROLL
      for (int w = 0; w < kMaxRowWords; w++) mask[w] |= w == on_path / 32 ? 1u << on_path % 32 : 0u;
    }
GSD_UNROLL
    for (int w = 0; w < kMaxRowWords; w++) {
      if (w < s.words()) a.ancestor_mask[i * s.words() + w] = static_cast<int32_t>(mask[w]);
    }
  }
  if (rank == 0) *a.num_rows = n;
}

GSD_GROUP_WORK(FlattenArgs, FlattenArena::bytes(s), flatten_graph(group, all[number], s, memory))

}  // namespace gsd
