// The table of remembered continuations, what sampling makes of them, and mixing them with what a draft model says.
// gsd_kernels/ops/ngram/reference.py is the specification, bit for bit but for exp and log.
//
// A set of the table lists its entries, the most recently inserted first. What a call leaves in a set therefore follows
// from the set's entries of that call alone: the newest `ways` different ones, then what the set held before. Sets are
// found by sorting the call's entries, one chunk after the other, and are then independent of each other.
#pragma once

#include "sort.h"
#include "random.h"

namespace gsd {

constexpr int kMostLengths = 8;     // MAX_CONTEXT of gsd_kernels/config.py
constexpr int kMostWays = 16;       // MAX_WAYS of gsd_kernels/ops/ngram/table.py
constexpr int kChunkEntries = 256;  // insertions at a time: 64 rows of 4 lengths

// N entries, W ways, K continuations, R rows of C tokens, contexts of 1 … L tokens.
struct NgramSizes {
  int capacity, ways, branch, rows, context, lengths;

  GSD_HD int sets() const { return capacity / ways; }
  GSD_HD int chunk_rows() const { return min_int(rows, kChunkEntries / lengths); }
  GSD_HD int chunk_entries() const { return chunk_rows() * lengths; }
};

struct NgramTable {
  int64_t* keys;     // [N], 0 for free; set s has s·W … s·W + W − 1
  int32_t* tokens;   // [N, K]
  float* log_probs;  // [N, K]
};

// The unrolled graph, whose rows' contexts run up the tree and on into the text before the root.
struct NgramTree {
  const int32_t* token_ids;    // [R]
  const int32_t* parent_rows;  // [R]
  const int32_t* depths;       // [R]
  const int32_t* num_rows;     // [1]
  const int32_t* tail;         // [C], the tokens before the root, nearest first
};

struct NgramInsertArgs {
  NgramTable table;
  const int32_t* contexts;  // [R, C], nearest token first; null with a tree, and so `valid`
  const int32_t* tokens;    // [R, K]
  const float* log_probs;   // [R, K]
  const bool* valid;        // [R]
};

// The tokens of a row's context, one after the other.
struct ContextWalk {
  const int32_t* contexts;
  const NgramTree& tree;
  const NgramSizes& s;
  const int64_t row;
  int64_t at = row;
  int back = 0;

  GSD_HD int32_t next() {
    if (contexts != nullptr) return contexts[row * s.context + back++];
    const int place = min_int(max_int(back++ - 1 - max_int(tree.depths[row], 0), 0), s.context - 1);
    if (at < 0) return tree.tail[place];
    const int32_t token = tree.token_ids[at];
    at = tree.parent_rows[at];
    if (at >= s.rows) at = -1;
    return token;
  }
};

struct NgramLookupArgs {
  NgramTable table;         // read only
  const int32_t* contexts;  // [R, C], nearest token first
  int32_t* tokens;          // [R, K], −1 for none
  float* log_probs;         // [R, K], −inf for none
  int32_t* matched;         // [R]
};

// The keys of a context, one token longer each time; 0 from the first token on that is none.
struct ContextKeys {
  uint64_t hash = 0;
  int length = 0;
  bool whole = true;

  GSD_HD int64_t next(int32_t token) {
    hash = (hash ^ static_cast<uint64_t>(static_cast<int64_t>(token) + 1)) * 0x9E3779B97F4A7C15u;
    hash ^= static_cast<uint64_t>(static_cast<int64_t>(hash) >> 29);
    whole = whole && token >= 0;
    const uint64_t key = (hash + static_cast<uint64_t>(length++)) | 1;
    return whole ? static_cast<int64_t>(key) : 0;
  }
};

GSD_HD int set_of(int64_t key, const NgramSizes& s) { return static_cast<int>((key >> 17) & (s.sets() - 1)); }

struct NgramArena : Arena<NgramArena> {
  int64_t* keys;    // [E], in the order of the call
  uint64_t* order;  // [pow2(E)]: set, then entry, the newest first
  int32_t* plan;    // [E, W]: at a set's first place, what its ways are to hold: entry e, or −1 − way

  template <class Carve>
  GSD_HD void lay(Carve& carve, const NgramSizes& s) {
    carve(keys, s.chunk_entries());
    carve(order, power_of_two_from(s.chunk_entries()));
    carve(plan, s.chunk_entries() * s.ways);
  }
};

// Of the sorted entries, one stands for its set: the first.
GSD_HD bool leads_set(const uint64_t* order, int place) {
  return order[place] != kAbsent && (place == 0 || order[place - 1] >> 32 != order[place] >> 32);
}

// What the ways of the set that begins at `place` are to hold.
GSD_HD void plan_set(const NgramArena& arena, const NgramTable& table, const NgramSizes& s, int place, int entries) {
  const uint64_t set = arena.order[place] >> 32;
  int32_t* plan = arena.plan + place * s.ways;
  int planned = 0;
  const auto among_new = [&](int64_t key, int count) {
    for (int i = 0; i < count; i++) {
      if (arena.keys[plan[i]] == key) return true;
    }
    return false;
  };
  for (int p = place; p < entries && planned < s.ways && arena.order[p] >> 32 == set; p++) {
    const int entry = entries - 1 - static_cast<int>(arena.order[p] & 0xFFFFFFFFu);
    if (!among_new(arena.keys[entry], planned)) plan[planned++] = entry;
  }
  // An entry that stays never comes nearer to the front: each that leaves has made room in front of it.
  const int fresh = planned;
  for (int way = 0; planned < s.ways && way < s.ways; way++) {
    const int64_t key = table.keys[static_cast<int64_t>(set) * s.ways + way];
    if (key == 0 || !among_new(key, fresh)) plan[planned++] = -1 - way;
  }
  for (; planned < s.ways; planned++) plan[planned] = -1 - planned;  // of a table that holds a key twice
}

// The set moves to its new ways: from the last to the first, nothing is read after it was overwritten.
GSD_HD void rewrite_set(const NgramArena& arena, const NgramInsertArgs& a, const NgramSizes& s, int place,
                        int first_row) {
  const int set = static_cast<int>(arena.order[place] >> 32) * s.ways;
GSD_ROLLED
  for (int way = s.ways - 1; way >= 0; way--) {
    const int from = arena.plan[place * s.ways + way];
    if (from == -1 - way) continue;
    const bool stays = from < 0;
    const int64_t old = stays ? set - 1 - from : first_row + from / s.lengths;  // an entry, or a row of the call
    const int64_t key = stays ? a.table.keys[old] : arena.keys[from];
    if (key == 0) continue;  // free ways come last: this one is free too
    a.table.keys[set + way] = key;
    const int32_t* tokens = (stays ? a.table.tokens : a.tokens) + old * s.branch;
    const float* log_probs = (stays ? a.table.log_probs : a.log_probs) + old * s.branch;
    const int64_t to = static_cast<int64_t>(set + way) * s.branch;
GSD_ROLLED
    for (int k = 0; k < s.branch; k++) {
      a.table.tokens[to + k] = tokens[k];
      a.table.log_probs[to + k] = log_probs[k];
    }
  }
}

// `tree`: where no contexts are given.
template <class Group>
GSD_HD void insert_rows(Group& group, const NgramInsertArgs& a, const NgramTree& tree, const NgramSizes& s, char* memory) {
  const auto arena = NgramArena::in(memory, s);
  const int rank = group.rank(), step = group.size();
  for (int first_row = 0; first_row < s.rows; first_row += s.chunk_rows()) {
    const int rows = min_int(s.rows - first_row, s.chunk_rows()), entries = rows * s.lengths;
    const int padded = power_of_two_from(entries);
    for (int row = rank; row < rows; row += step) {
      const int64_t from = first_row + row;
      ContextKeys keys;
      ContextWalk walk{a.contexts, tree, s, from};
      const bool takes = a.contexts != nullptr ? a.valid[from] : from < *tree.num_rows;
      for (int i = 0; i < s.lengths; i++) {
        const int entry = row * s.lengths + i;
        const int64_t key = keys.next(walk.next());
        const bool taken = key != 0 && takes;
        arena.keys[entry] = key;
        arena.order[entry] = taken ? static_cast<uint64_t>(set_of(key, s)) << 32 | (entries - 1 - entry) : kAbsent;
      }
    }
    for (int i = entries + rank; i < padded; i += step) arena.order[i] = kAbsent;
    group.sync("ngram: keys known");
    sort_keys(group, arena.order, padded);

    for (int place = rank; place < entries; place += step) {  // a set each
      if (!leads_set(arena.order, place)) continue;
      plan_set(arena, a.table, s, place, entries);
      rewrite_set(arena, a, s, place, first_row);
    }
    group.sync("ngram: sets rewritten");
  }
}

// The entry of a key; −1 for none.
GSD_HD int64_t entry_of(const NgramTable& table, const NgramSizes& s, int64_t key) {
  const int64_t set = static_cast<int64_t>(set_of(key, s)) * s.ways;
  for (int way = 0; key != 0 && way < s.ways; way++) {
    if (table.keys[set + way] == key) return set + way;
  }
  return -1;
}

// By the longest context that is in the table. Rows are independent: no barrier, no arena.
template <class Group>
GSD_HD void look_up_rows(Group& group, const NgramLookupArgs& a, const NgramSizes& s) {
  for (int64_t row = group.rank(); row < s.rows; row += group.size()) {
    ContextKeys keys;
    int64_t found = -1;
    a.matched[row] = 0;
    for (int i = 0; i < s.lengths; i++) {
      const int64_t entry = entry_of(a.table, s, keys.next(a.contexts[row * s.context + i]));
      if (entry >= 0) found = entry, a.matched[row] = i + 1;
    }
    for (int k = 0; k < s.branch; k++) {
      const int64_t at = found * s.branch + k;
      a.tokens[row * s.branch + k] = found >= 0 ? a.table.tokens[at] : -1;
      a.log_probs[row * s.branch + k] = found >= 0 ? a.table.log_probs[at] : negative_infinity();
    }
  }
}

constexpr float kMeanGumbel = 0.5772f;
constexpr float kLeastRest = 1e-6f;

struct PerturbSizes {
  int rows, branch;  // W, K
};

struct PerturbArgs {
  const int32_t* tokens;        // [W, K], −1 for none
  const float* log_probs;       // [W, K]
  const int32_t* positions;     // [W]
  const int64_t* seed;          // of all sequences
  const int32_t* sequence_ids;  // [1]
  float* perturbed;             // [W, K]
};

// K candidates by one thread: log-softmax of log_probs + noise, with all other tokens as one of average noise. In place
// too.
GSD_HD void perturb(const NoiseStream& stream, const int32_t* tokens, const float* log_probs, float* perturbed,
                    int branch) {
  float rest = 1.0f;
  for (int k = 0; k < branch; k++) rest -= expf(log_probs[k]);
  rest = logf(rest < kLeastRest ? kLeastRest : rest) + kMeanGumbel;
  float top = rest;
  for (int k = 0; k < branch; k++) {
    float noisy = negative_infinity();
    if (tokens[k] >= 0) noisy = log_probs[k] + gumbel_from(random_word(stream, tokens[k]));
    perturbed[k] = noisy;
    if (noisy > top) top = noisy;
  }
  float total = expf(rest - top);
  for (int k = 0; k < branch; k++) total += expf(perturbed[k] - top);
  const float log_total = top + logf(total);
  for (int k = 0; k < branch; k++) perturbed[k] -= log_total;
}

template <class Group>
GSD_HD void perturb_rows(Group& group, const PerturbArgs& a, const PerturbSizes& s) {
  for (int row = group.rank(); row < s.rows; row += group.size()) {
    const int64_t at = int64_t{row} * s.branch;
    perturb(noise_stream(*a.seed, a.positions[row], *a.sequence_ids), a.tokens + at, a.log_probs + at, a.perturbed + at,
            s.branch);
  }
}

// K candidates of one source, O of the other; `weights` entries to look a row's weight up in, 0: a row has its own.
struct MixSizes {
  int branch, others, weights;

  GSD_HD int candidates() const { return branch + others; }
};

struct MixArgs {
  const int32_t* tokens;         // [K], −1 for none
  const float* log_probs;        // [K]
  const int32_t* other_tokens;   // [O]
  const float* other_log_probs;  // [O]
  const float* weight;           // [1], of the other source; or the table
  const int32_t* index;          // [1], of the table; null: the first
  int32_t* mixed;                // [K], −1 for none
  float* mixed_log_probs;        // [K]
};

struct MixArena : Arena<MixArena> {
  float* probs;  // [K + O]

  template <class Carve>
  GSD_HD void lay(Carve& carve, const MixSizes& s) {
    carve(probs, s.candidates());
  }
};

// The larger probability, at ties the lower place; NaN before all others, as torch.sort has it.
GSD_HD bool comes_before(float a, int place_a, float b, int place_b) {
  if (a != a || b != b) return a != a && (b == b || place_a < place_b);
  return a > b || (a == b && place_a < place_b);
}

// One row by one group.
template <class Group>
GSD_HD void mix_row(Group& group, const MixArgs& a, const MixSizes& s, char* memory) {
  const auto arena = MixArena::in(memory, s);
  const int rank = group.rank(), step = group.size(), all = s.candidates();
  const float weight = a.weight[a.index == nullptr ? 0 : min_int(max_int(*a.index, 0), s.weights - 1)];
  const auto token_at = [&](int i) { return i < s.branch ? a.tokens[i] : a.other_tokens[i - s.branch]; };
  for (int i = rank; i < all; i += step) {
    const int32_t token = token_at(i);
    float prob = 0.0f;
    if (token >= 0 && i < s.branch) {
      prob = expf(a.log_probs[i]) * (1.0f - weight);
      for (int j = 0; j < s.others; j++) {
        if (a.other_tokens[j] == token) prob += expf(a.other_log_probs[j]) * weight;
      }
    } else if (token >= 0) {
      bool both = false;
      for (int j = 0; j < s.branch; j++) both = both || a.tokens[j] == token;
      prob = both ? 0.0f : expf(a.other_log_probs[i - s.branch]) * weight;
    }
    arena.probs[i] = prob;
  }
  group.sync("mix: probabilities known");
  for (int i = rank; i < all; i += step) {
    const float prob = arena.probs[i];
    int place = 0;
    for (int j = 0; j < all; j++) place += comes_before(arena.probs[j], j, prob, i) ? 1 : 0;
    if (place >= s.branch) continue;
    a.mixed[place] = prob == 0.0f ? -1 : token_at(i);
    a.mixed_log_probs[place] = logf(prob);
  }
}

GSD_GROUP_WORK(NgramInsertArgs, NgramArena::bytes(s), insert_rows(group, all[number], {}, s, memory))
GSD_GROUP_WORK(NgramLookupArgs, 0, look_up_rows(group, all[number], s))
GSD_GROUP_WORK(PerturbArgs, 0, perturb_rows(group, all[number], s))
GSD_GROUP_WORK(MixArgs, MixArena::bytes(s), mix_row(group, all[number], s, memory))  // of one row

}  // namespace gsd
