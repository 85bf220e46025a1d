// What lies between the larger ops of a step: the root of a graph, what a model reads of rows, the text that grows.
// gsd_kernels/ops/step/reference.py is the specification, bit for bit. Every element is written by one thread from
// arguments that nobody writes, so there are no barriers but before what is advanced, and no arena.
#pragma once

#include "graph.h"

namespace gsd {

// Of a graph, and S positions of the text.
struct StartSizes {
  int nodes, branch, words, length;
};

struct StartArgs : GraphData {
  const int64_t* tokens;    // [S]
  const int32_t* out_len;   // [1]
  const int32_t* kv_start;  // [1]
  int32_t* first_pick;      // [1], index in the text of the token after the root
};

template <class Group>
GSD_HD void reset_to_root(Group& group, const StartArgs& a, const StartSizes& s) {
  const int root = *a.out_len - 1;
  const auto token_at = [&](int place, int first, int32_t none) {
    return place >= max_int(first, 0) && place < s.length ? static_cast<int32_t>(a.tokens[place]) : none;
  };
  for (int n = group.rank(); n < s.nodes; n += group.size()) {
    a.token_ids[n] = n == 0 ? token_at(root, 0, 0) : 0;
    a.parents[n] = -1;
    a.depths[n] = 0;
    a.scores[n] = 0.0f;
    a.expanded[n] = false;
    GSD_ROLLED  // unrolled, its addresses spill
    for (int i = 0; i < kContext; i++) {
      a.contexts[n * kContext + i] = n == 0 ? token_at(root - 1 - i, *a.kv_start, -1) : -1;
    }
    for (int i = 0; i < s.words; i++) a.ancestor_mask[n * s.words + i] = 0;
    for (int i = 0; i < s.branch; i++) {
      a.edge_targets[n * s.branch + i] = -1;
      a.edge_log_probs[n * s.branch + i] = 0.0f;
    }
  }
  if (group.rank() == 0) {
    *a.num_nodes = 1;
    *a.num_merges = 0;
    *a.first_pick = *a.out_len - *a.kv_start;
  }
}

// R rows; `slots` of each given, or the rows follow each other from first_slot on. Nodes: N' of node_depths.
struct FeedSizes {
  int rows, nodes, first_slot, shift, vocab;
};

template <class Integer>
struct FeedArgs {
  const int32_t* token_ids;  // [R]
  const int32_t* depths;     // [R]
  const int32_t* slots;      // [R] or null
  const int32_t* kv_len;     // [1]
  const int32_t* kv_start;   // [1]
  int32_t* node_depths;      // [N'] or null; those of the rows' slots are written
  Integer* ids;              // [R]; 0 for what is not in the vocabulary
  Integer* places;           // [R], in the cache
  Integer* positions;        // [R], in the text
  int32_t* row_depths;       // [R], less the shift
  int32_t* after;            // [R], index in the text of the token after each row
};

template <class Group, class Integer>
GSD_HD void place_rows(Group& group, const FeedArgs<Integer>& a, const FeedSizes& s) {
  for (int r = group.rank(); r < s.rows; r += group.size()) {
    const int slot = a.slots != nullptr ? a.slots[r] : s.first_slot + r, depth = a.depths[r] - s.shift;
    const int position = *a.kv_len - *a.kv_start + depth;
    a.ids[r] = a.token_ids[r] >= 0 && a.token_ids[r] < s.vocab ? a.token_ids[r] : 0;
    a.places[r] = *a.kv_len + slot;
    a.positions[r] = position;
    a.row_depths[r] = depth;
    a.after[r] = position + 1;
    if (a.node_depths != nullptr) a.node_depths[slot] = depth;
  }
}

// The last E tokens before `end`, as far as they are not in the cache: a chain whose end is the last row.
struct ChainSizes {
  int rows, length;  // E, S

  GSD_HD int words() const { return words_for(rows); }
};

struct ChainArgs {
  const int64_t* tokens;   // [S]
  const int32_t* end;      // [1]
  int32_t* cached;         // [1], advanced
  int32_t* base;           // [1], as it was
  int32_t* token_ids;      // [E], 0 for padding
  int32_t* slots;          // [E], after the cached tokens; padding lies above the chain
  int32_t* depths;         // [E]
  int32_t* ancestor_mask;  // [E, E/32]
  int32_t* node_depths;    // [E]
};

template <class Group>
GSD_HD void chain_rows(Group& group, const ChainArgs& a, const ChainSizes& s) {
  const int cached = *a.cached, count = max_int(min_int(*a.end - cached, s.rows), 0);
  group.sync("chain: length read");
  for (int r = group.rank(); r < s.rows; r += group.size()) {
    const int link = r - (s.rows - count);  // place in the chain, negative for padding
    const int slot = link >= 0 ? link : count + r;
    const int place = cached + max_int(link, 0);
    a.token_ids[r] = link >= 0 && place >= 0 && place < s.length ? static_cast<int32_t>(a.tokens[place]) : 0;
    a.slots[r] = slot;
    a.depths[r] = max_int(link, 0);
    a.node_depths[r] = r;
    for (int w = 0; w < s.words(); w++) {
      const int seen = link + 1 - 32 * w;  // of this word's slots, as many see each other
      uint32_t bits = seen >= 32 ? ~0u : seen > 0 ? (1u << seen) - 1 : 0u;
      if (slot / 32 == w) bits |= 1u << slot % 32;
      a.ancestor_mask[r * s.words() + w] = static_cast<int32_t>(bits);
    }
  }
  if (group.rank() == 0) {
    *a.base = cached;
    *a.cached = cached + count;
  }
}

constexpr int kNoNode = -2;  // NO_NODE of gsd_kernels/ops/step/api.py

// P rows of the longest path, R rows.
struct PathSizes {
  int path, rows;
};

struct PathArgs {
  const int32_t* accepted_rows;  // [P]
  const int32_t* num_accepted;   // [1]
  const int32_t* next_token;     // [1]
  const int32_t* token_ids;      // [R]
  const int32_t* node_ids;       // [R]
  int32_t* tokens;               // [P], emitted after each accepted row, 0 beyond
  int32_t* nodes;                // [P], kNoNode beyond
};

template <class Group>
GSD_HD void walk_path(Group& group, const PathArgs& a, const PathSizes& s) {
  const int count = *a.num_accepted;
  for (int p = group.rank(); p < s.path; p += group.size()) {
    const int row = min_int(a.accepted_rows[p], s.rows - 1);
    const int next = p + 1 < s.path ? min_int(max_int(a.accepted_rows[p + 1], 0), s.rows - 1) : 0;
    a.tokens[p] = p >= count ? 0 : p == count - 1 ? *a.next_token : a.token_ids[next];
    a.nodes[p] = row >= 0 ? a.node_ids[row] : kNoNode;
  }
}

// P tokens of a path, S positions of the text, N nodes, `ends` end-of-text tokens.
struct TextSizes {
  int path, length, nodes, ends;
};

struct TextArgs {
  const int32_t* new_tokens;    // [P]
  const int32_t* num_accepted;  // [1]
  const int32_t* next_token;    // [1]
  const int32_t* eos_ids;       // [ends], of all sequences
  int64_t* tokens;              // [S]
  int32_t* out_len;             // [1]
  int32_t* remaining;           // [1]
  bool* done;                   // [1]
  int32_t* emitted;             // [≥ P]
  int32_t* num_emitted;         // [1]
  int64_t* counts;              // [3], of all sequences: nodes, merge edges, merge edges on accepted paths
  const int32_t* nodes;         // [P]; null where nothing was drafted, and so the next three
  const int32_t* parents;       // [N]
  const int32_t* num_nodes;     // [1]
  const int32_t* num_merges;    // [1]
};

template <class Group>
GSD_HD void count_drafted(Group& group, const TextArgs& a, const TextSizes& s) {
  uint64_t merged = 0;
  for (int p = 1; p < s.path; p++) {
    const int node = a.nodes[p];
    merged += node >= 0 && node < s.nodes && a.parents[node] != a.nodes[p - 1] ? 1 : 0;
  }
  uint64_t* counts = reinterpret_cast<uint64_t*>(a.counts);
  group.atomic_add64(&counts[0], static_cast<uint64_t>(*a.num_nodes));
  group.atomic_add64(&counts[1], static_cast<uint64_t>(*a.num_merges));
  group.atomic_add64(&counts[2], merged);
}

template <class Group>
GSD_HD void append_text(Group& group, const TextArgs& a, const TextSizes& s) {
  const int count = *a.num_accepted, length = *a.out_len;
  group.sync("text: length read");
  for (int p = group.rank(); p < s.path; p += group.size()) {
    a.emitted[p] = a.new_tokens[p];
    if (p < count && length >= 0 && length < s.length - p) a.tokens[length + p] = a.new_tokens[p];
  }
  if (group.rank() != 0) return;
  *a.num_emitted = count;
  *a.out_len = length + count;
  *a.remaining -= count;
  bool ended = *a.remaining <= 0;
  for (int i = 0; i < s.ends; i++) ended = ended || *a.next_token == a.eos_ids[i];
  *a.done = *a.done || (ended && count > 0);
  if (a.nodes != nullptr) count_drafted(group, a, s);
}

GSD_GROUP_WORK(StartArgs, 0, reset_to_root(group, all[number], s))
GSD_GROUP_WORK(FeedArgs<int64_t>, 0, place_rows(group, all[number], s))
GSD_GROUP_WORK(FeedArgs<int32_t>, 0, place_rows(group, all[number], s))
GSD_GROUP_WORK(ChainArgs, 0, chain_rows(group, all[number], s))
GSD_GROUP_WORK(PathArgs, 0, walk_path(group, all[number], s))
GSD_GROUP_WORK(TextArgs, 0, append_text(group, all[number], s))

}  // namespace gsd
