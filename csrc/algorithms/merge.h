// Merge one drafted level into the token graph of one sequence and choose the next frontier.
//
// Rule, order and tie-breaks are those of gsd_kernels/ops/merge/reference.py, bit for bit:
//   a candidate joins an existing node that holds the same token in the same context; of the rest, the first in order
//   (score desc, parent id asc, rank asc) with a given token and context becomes a node and the others join it.
#pragma once

#include "graph.h"
#include "sort.h"

namespace gsd {

constexpr int kMostNodes = 1 << 30;  // that a count may say; none is written beyond the capacity

// N nodes, W expanded nodes, K candidates after each, M = W·K candidates, F next frontier, L mask words.
struct MergeSizes {
  int capacity, expanded, branch, frontier, words;
  int level, merge_context;
  float log_sibling_ratio, log_min_prob;

  GSD_HD int candidates() const { return expanded * branch; }

  // What the 16-bit fields of the sort keys can hold.
  GSD_HD bool fits() const { return capacity <= 0xFFFF && candidates() <= 0xFFFF; }
};

struct MergeArgs : GraphData {
  const int32_t* frontier;  // [W], −1 padded
  const int32_t* tokens;    // [W, K]
  const float* log_probs;   // [W, K]
  int32_t* next_ids;        // [F]
  int32_t* next_tokens;     // [F]
  int32_t* next_depths;     // [F]
  int32_t* next_mask;       // [F, L]
};

struct MergeArena : Arena<MergeArena> {
  uint64_t* keys;         // [pow2(max(M, N))]: candidates in order, later the nodes in order
  int32_t* joined;        // [M], in order: existing node that the candidate joins, −1 for none
  int32_t* leader;        // [M], in order: place of the candidate whose node this one shares
  uint32_t* leader_bits;  // [M/32]: the candidates that become nodes

  static GSD_HD int num_keys(const MergeSizes& s) { return power_of_two_from(max_int(s.candidates(), s.capacity)); }

  template <class Carve>
  GSD_HD void lay(Carve& carve, const MergeSizes& s) {
    carve(keys, num_keys(s));
    carve(joined, s.candidates());
    carve(leader, s.candidates());
    carve(leader_bits, words_for(s.candidates()));
  }
};

// Context of a child of `node`, entry i: the node's own token, then the tokens before it.
GSD_HD int32_t child_context(const MergeArgs& a, int node, int i) {
  return i == 0 ? a.token_ids[node] : a.contexts[node * kContext + i - 1];
}

// Leading tokens that the context of a child of `parent` shares with that of `node`.
GSD_HD int shared_context(const MergeArgs& a, int parent, int node) {
  int n = 0;
  while (n < kContext) {
    const int32_t token = child_context(a, parent, n);
    if (token < 0 || token != a.contexts[node * kContext + n]) break;
    n++;
  }
  return n;
}

// Would children of u and v have the same `needed` tokens before them?
GSD_HD bool same_child_context(const MergeArgs& a, int u, int v, int needed) {
  for (int i = 0; i < needed; i++) {
    const int32_t token = child_context(a, u, i);
    if (token < 0 || token != child_context(a, v, i)) return false;
  }
  return true;
}

// Absent, too improbable beside its best sibling, or the token of an earlier sibling?
GSD_HD bool candidate_survives(const MergeArgs& a, const MergeSizes& s, int slot, int rank) {
  const int32_t* tokens = a.tokens + slot * s.branch;
  const float* log_probs = a.log_probs + slot * s.branch;
  const float log_prob = clean_log_prob(log_probs[rank]);
  if (!(log_prob > negative_infinity()) || tokens[rank] < 0) return false;
  float best = negative_infinity();
  for (int i = 0; i < s.branch; i++) {
    const float sibling = clean_log_prob(log_probs[i]);
    best = sibling > best ? sibling : best;
  }
  const float threshold = best + s.log_sibling_ratio;
  if (!(log_prob >= threshold)) return false;
  for (int i = 0; i < rank; i++) {
    const float sibling = clean_log_prob(log_probs[i]);
    if (tokens[i] == tokens[rank] && sibling > negative_infinity() && sibling >= threshold) return false;
  }
  return true;
}

// The node that a candidate (child of `parent`) joins: longest shared context, best score, lowest id; −1 for none.
GSD_HD int find_joinable(const MergeArgs& a, int parent, int32_t token, int num_nodes, int merge_context) {
  if (merge_context < 0) return -1;
  int best = -1, best_shared = -1;
  for (int node = parent + 1; node < num_nodes; node++) {
    if (a.token_ids[node] != token) continue;
    const int shared = shared_context(a, parent, node);
    if (shared < merge_context || shared < best_shared) continue;
    if (best < 0 || shared > best_shared || a.scores[node] > a.scores[best]) {
      best = node;
      best_shared = shared;
    }
  }
  return best;
}

// Set bits below position `end`.
GSD_HD int count_bits_before(const uint32_t* words, int end) {
  int count = 0;
  for (int w = 0; w < end / 32; w++) count += popcount(words[w]);
  if (end % 32 != 0) count += popcount(words[end / 32] & ((1u << end % 32) - 1));
  return count;
}

// num_nodes above the capacity afterwards means that the graph was too small for the level and lost nodes.
template <class Group>
GSD_HD void merge_level(Group& group, const MergeArgs& a, const MergeSizes& s, char* memory) {
  const auto arena = MergeArena::in(memory, s);
  const int rank = group.rank(), step = group.size();
  const int m = s.candidates(), padded_m = power_of_two_from(m);
  const int old_nodes = min_int(max_int(*a.num_nodes, 0), kMostNodes);
  const int readable = min_int(old_nodes, s.capacity);

  // 1. Prune, and give every surviving candidate its place in the order. Key: score, parent id, place in [W, K].
  for (int i = rank; i < words_for(m); i += step) arena.leader_bits[i] = 0;
  for (int i = rank; i < padded_m; i += step) {
    uint64_t key = kAbsent;
    if (i < m) {
      const int slot = i / s.branch, node = a.frontier[slot];
      if (node >= 0 && node < readable) {
        if (candidate_survives(a, s, slot, i % s.branch)) {
          key = score_key(a.scores[node] + clean_log_prob(a.log_probs[i]), static_cast<uint32_t>(node) << 16 | i);
        }
        a.edge_targets[node * s.branch + i % s.branch] = -1;
        a.edge_log_probs[node * s.branch + i % s.branch] = 0.0f;
      }
    }
    arena.keys[i] = key;
  }
  group.sync("merge: candidates keyed");
  sort_keys(group, arena.keys, padded_m);
  const int present = count_below(arena.keys, padded_m, kAbsent);

  // 2. Join existing nodes.
  for (int i = rank; i < present; i += step) {
    const int candidate = arena.keys[i] & 0xFFFF, parent = arena.keys[i] >> 16 & 0xFFFF;
    arena.joined[i] = find_joinable(a, parent, a.tokens[candidate], readable, s.merge_context);
  }
  group.sync("merge: joins known");

  // 3. Of the rest, the first with a given token and context leads.
  for (int i = rank; i < present; i += step) {
    if (arena.joined[i] >= 0) continue;
    const int32_t token = a.tokens[arena.keys[i] & 0xFFFF];
    const int parent = arena.keys[i] >> 16 & 0xFFFF;
    int leader = i;
    for (int j = 0; j < i && s.merge_context >= 0; j++) {
      if (arena.joined[j] >= 0 || a.tokens[arena.keys[j] & 0xFFFF] != token) continue;
      if (same_child_context(a, parent, arena.keys[j] >> 16 & 0xFFFF, s.merge_context)) {
        leader = j;
        break;
      }
    }
    arena.leader[i] = leader;
    if (leader == i) group.atomic_or(&arena.leader_bits[i / 32], 1u << i % 32);
  }
  group.sync("merge: leaders marked");

  // 4. Write nodes and edges; node ids follow the order.
  const int num_leaders = count_bits_before(arena.leader_bits, present);
  for (int i = rank; i < present; i += step) {
    const int candidate = arena.keys[i] & 0xFFFF, parent = arena.keys[i] >> 16 & 0xFFFF;
    const bool joins = arena.joined[i] >= 0;
    const int target =
        joins ? arena.joined[i] : old_nodes + count_bits_before(arena.leader_bits, arena.leader[i]);
    const int edge = parent * s.branch + candidate % s.branch;
    a.edge_targets[edge] = target;
    a.edge_log_probs[edge] = clean_log_prob(a.log_probs[candidate]);
    if (joins || arena.leader[i] != i || target >= s.capacity) continue;
    a.token_ids[target] = a.tokens[candidate];
    a.parents[target] = parent;
    a.depths[target] = a.depths[parent] + 1;
    a.scores[target] = a.scores[parent] + clean_log_prob(a.log_probs[candidate]);
    for (int c = 0; c < kContext; c++) a.contexts[target * kContext + c] = child_context(a, parent, c);
  }
  for (int i = rank; i < s.expanded; i += step) {
    if (a.frontier[i] >= 0 && a.frontier[i] < readable) a.expanded[a.frontier[i]] = true;
  }
  if (rank == 0) {
    *a.num_nodes = old_nodes + num_leaders;
    *a.num_merges += present - num_leaders;
  }
  group.sync("merge: graph written");

  // 5. The next frontier: the best unexpanded nodes. Key: score, id.
  const int nodes = min_int(old_nodes + num_leaders, s.capacity), padded_nodes = power_of_two_from(nodes);
  for (int i = rank; i < padded_nodes; i += step) {
    const bool eligible = i < nodes && !a.expanded[i] && a.scores[i] >= s.log_min_prob &&
                          a.scores[i] > negative_infinity();
    arena.keys[i] = eligible ? score_key(a.scores[i], i) : kAbsent;
  }
  group.sync("merge: nodes keyed");
  sort_keys(group, arena.keys, padded_nodes);
  for (int i = rank; i < s.frontier; i += step) {
    const bool valid = i < padded_nodes && arena.keys[i] != kAbsent;
    const int node = valid ? static_cast<int>(arena.keys[i] & 0xFFFF) : 0;
    a.next_ids[i] = valid ? node : -1;
    a.next_tokens[i] = valid ? a.token_ids[node] : 0;
    a.next_depths[i] = valid ? a.depths[node] : 1;
    // The node's draft-cache slots: those of its parent, which was expanded before it, and its own.
    const int parent = min_int(max_int(a.parents[node], 0), s.capacity - 1), slot = s.level * s.frontier + i;
    for (int w = 0; w < s.words; w++) {
      const uint32_t own = w == slot / 32 ? 1u << slot % 32 : 0u;
      const uint32_t above = valid ? static_cast<uint32_t>(a.ancestor_mask[parent * s.words + w]) : 0u;
      const int32_t word = static_cast<int32_t>(above | own);
      a.next_mask[i * s.words + w] = word;
      if (valid) a.ancestor_mask[node * s.words + w] = word;
    }
  }
}

GSD_GROUP_WORK(MergeArgs, MergeArena::bytes(s), merge_level(group, all[number], s, memory))

}  // namespace gsd
