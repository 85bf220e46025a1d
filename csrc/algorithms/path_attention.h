// Attention of rows over the committed prefix and then their own ancestors, in the order of the text.
//
// A row's visible positions are one list: the prefix behind the left padding, then the ancestors by depth. Tiles and
// splits are cut at fixed places of that list, whatever the slot a position lies in, so the bits of a row's output
// follow from what it sees alone: not from other rows, their number, the batch, padding, the cache's capacity, nor
// from how many of its ancestors are committed. Two launches:
//   PathPrefix  the whole tiles of the prefix, for all rows of a cache head together, split by split (split-KV, flash
//               decoding);
//   PathEnd     (path_end.h) row by row the rest of the prefix and the ancestors, gathered into tiles. It goes on from the
//               state that PathPrefix left of the split in which the prefix ends, and then combines the row's splits.
// docs/how-it-works.md has the reasons.
#pragma once

#include "attention_tiles.h"

namespace gsd {

constexpr int kFirstSplitPositions = 128, kSplitsPerSize = 8;

// The first 16 splits have 128 positions, eight each have 256, 512, …: many where the text is short, few where it is
// long, since every split of every row is a state to keep. A border is a number of four leading bits in units of 128, and
// a split's number the exponent and the rest of it. The cut follows from the position only.
GSD_HD int64_t path_split_begin(int split) {
  const int size = split / kSplitsPerSize, within = split % kSplitsPerSize;
  const int64_t first = size == 0 ? within : int64_t{kSplitsPerSize + within} << (size - 1);
  return kFirstSplitPositions * first;
}

GSD_HD int path_split_of(int position) {
  int units = position / kFirstSplitPositions, size = 0;
  for (; units >= 2 * kSplitsPerSize; units /= 2) size++;
  return kSplitsPerSize * size + units;
}

// The ancestors of every row, sorted once for all layers.
struct AncestorListArgs {
  const int32_t* mask;    // [B, R, words], contiguous: bit n of a row is set if it sees node n
  const int32_t* depths;  // [B, nodes], contiguous; those of a row's ancestors are 0, 1, …
  const int32_t* kv_len;  // [B]
  int32_t* slots;         // [B, R, width()]: cache slots of the ancestors by depth; behind the last unchanged
  int32_t* lengths;       // [B, R]: ancestors of the row
  int batch, rows, words, nodes, capacity;

  GSD_HD int width() const { return min_int(32 * words, nodes); }
};

// Nodes that have a depth and a slot.
GSD_HD int listed_nodes(const AncestorListArgs& a, int64_t row) {
  return min_int(a.width(), a.capacity - clamped(a.kv_len[row / a.rows], a.capacity));
}

GSD_HD uint32_t listed_word(const AncestorListArgs& a, int64_t row, int word, int nodes) {
  return static_cast<uint32_t>(a.mask[row * a.words + word]) & bits_below(nodes - 32 * word);
}

GSD_HD void count_ancestors(const AncestorListArgs& a, int64_t row) {
  const int nodes = listed_nodes(a, row);
  int length = 0;
  for (int word = 0; 32 * word < nodes; word++) length += popcount(listed_word(a, row, word, nodes));
  a.lengths[row] = length;
}

// A node's place is the number of ancestors before it: of lower depth, or of the same and listed first.
GSD_HD void list_ancestor(const AncestorListArgs& a, int64_t row, int node) {
  const int nodes = listed_nodes(a, row);
  if (node >= nodes || (listed_word(a, row, node / 32, nodes) >> node % 32 & 1u) == 0) return;
  const int64_t batch = row / a.rows;
  const int32_t* depths = a.depths + batch * a.nodes;
  const int own = depths[node];
  int place = 0;
  for (int word = 0; 32 * word < nodes; word++) {
    for (uint32_t bits = listed_word(a, row, word, nodes); bits != 0; bits &= bits - 1) {
      const int other = 32 * word + popcount((bits & (0u - bits)) - 1u), depth = depths[other];
      place += depth < own || (depth == own && other < node);
    }
  }
  a.slots[row * a.width() + place] = clamped(a.kv_len[batch], a.capacity) + node;
}

struct PathAttentionSizes {
  int batch, kv_heads, group, rows, head_dim, capacity;  // B, Hkv, Hq / Hkv, R, D, S

  GSD_HD int query_rows() const { return group * rows; }  // M: heads of a row are neighbours
  GSD_HD int splits() const { return capacity > 0 ? path_split_of(capacity - 1) + 1 : 1; }
  // Rows of partial results: [B · Hkv, splits, M].
  GSD_HD int64_t partials() const {
    return static_cast<int64_t>(batch) * kv_heads * splits() * static_cast<int64_t>(query_rows());
  }
};

struct PathAttentionArgs {
  const uint16_t* q;         // [B · R, q_row], head h at h · D; rows begin at multiples of 16 bytes
  const uint16_t* k;         // [B, Hkv, S, D], likewise
  const uint16_t* v;         // [B, Hkv, S, D], likewise
  const int32_t* slots;      // [B, R, path], of AncestorListArgs
  const int32_t* lengths;    // [B, R]
  const int32_t* kv_len;     // [B]
  const int32_t* kv_start;   // [B], null: 0
  const int32_t* positions;  // [B, R], of the rows in the text, at least prefix − 1; read with a window only
  float* scratch;            // path_scratch_floats(), 16-byte aligned; need not be cleared
  uint16_t* out;             // [B · R, out_row], head h at h · D; rows begin at multiples of 8 bytes
  int64_t q_row, out_row, k_batch, k_head, v_batch, v_head;  // strides in elements
  int k_slot, v_slot;
  int path;     // width() of the ancestor lists
  int window;   // positions that a row sees, its own included; 0: all
  float scale;  // of the scores; holds log2(e)
};

// A partial state: D outputs that are not divided yet, four parts of the sum of weights, the highest score.
GSD_HD int64_t path_scratch_floats(const PathAttentionSizes& s) { return s.partials() * (s.head_dim + 5); }

// Where a sequence's text lies, and how rows are cut into tiles.
struct PathText {
  int start, prefix;  // slot of position 0; positions of the committed prefix
  int first, whole;   // the prefix' whole tiles that a row may see are first … whole − 1

  GSD_HD PathText(const PathAttentionArgs& a, const PathAttentionSizes& s, int batch)
      : start(a.kv_start != nullptr ? max_int(a.kv_start[batch], 0) : 0),
        prefix(max_int(clamped(a.kv_len[batch], s.capacity) - start, 0)),
        // The window of a row at the prefix' end begins first. What others do not see leaves their states as they are.
        first(a.window > 0 ? max_int(prefix - a.window, 0) / kTileColumns * kTileColumns : 0),
        whole(prefix / kTileColumns * kTileColumns) {}
};

// The first position that the window leaves to a row.
GSD_HD int oldest_position(const PathAttentionArgs& a, int64_t flat_row) {
  return a.window > 0 ? a.positions[flat_row] - (a.window - 1) : 0;
}

// States in the scratch memory; `at` is a row of [B · Hkv, splits, M].
template <class Tiles, int kHeadDim>
struct PathStates {
  const PathAttentionArgs& a;
  const int64_t states;

  GSD_HD PathStates(const PathAttentionArgs& a, const PathAttentionSizes& s) : a(a), states(s.partials()) {}

  GSD_HD float* out(int64_t at) const { return a.scratch + at * kHeadDim; }
  GSD_HD float* totals(int64_t at) const { return a.scratch + states * kHeadDim + 4 * at; }
  GSD_HD float* best(int64_t at) const { return a.scratch + states * (kHeadDim + 4) + at; }

  // Of the thread's rows `local` and `local` + 8 of a block, which begins at `at` and has `rows`.
  template <class Machine>
  GSD_HD void load(Machine& machine, int64_t at, int local, int rows, typename Tiles::State& state) const {
    const int lane = machine.lane();
    GSD_UNROLL
    for (int i = 0; i < 2; i++) {
      if (local + 8 * i >= rows) continue;
      const int64_t row = at + local + 8 * i;
      state.best[i] = *best(row);
      state.total[i] = totals(row)[lane % 4];
      GSD_UNROLL
      for (int d = 0; d < Tiles::kOutputTiles; d++) {
        float pair[2];
        machine.load(out(row) + 8 * d + 2 * (lane % 4), pair);
        state.out[d][2 * i] = pair[0], state.out[d][2 * i + 1] = pair[1];
      }
    }
  }

  template <class Machine>
  GSD_HD void save(Machine& machine, int64_t at, int local, int rows, const typename Tiles::State& state) const {
    const int lane = machine.lane();
    GSD_UNROLL
    for (int i = 0; i < 2; i++) {
      if (local + 8 * i >= rows) continue;
      const int64_t row = at + local + 8 * i;
      if (lane % 4 == 0) *best(row) = state.best[i];
      totals(row)[lane % 4] = state.total[i];
      GSD_UNROLL
      for (int d = 0; d < Tiles::kOutputTiles; d++) {
        machine.store(out(row) + 8 * d + 2 * (lane % 4), state.out[d][2 * i], state.out[d][2 * i + 1]);
      }
    }
  }
};

// Rows of a block, for AttentionTiles; columns are positions of the text.
struct PathRows {
  const PathAttentionArgs& a;
  const PathAttentionSizes& s;
  const int first, count, batch, head;
  const uint16_t *keys, *values;
  const int k_slot, v_slot;
  const bool checked;
  const float scale;

  GSD_HD PathRows(const PathAttentionArgs& a, const PathAttentionSizes& s, int first, int count, int batch, int head,
                  int64_t origin)
      : a(a), s(s), first(first), count(count), batch(batch), head(head),
        keys(a.k + batch * a.k_batch + head * a.k_head + origin * a.k_slot),
        values(a.v + batch * a.v_batch + head * a.v_head + origin * a.v_slot), k_slot(a.k_slot), v_slot(a.v_slot),
        checked(a.window > 0), scale(a.scale) {}

  GSD_HD float softcap() const { return 0.0f; }
  GSD_HD bool masked(int) const { return checked; }
  GSD_HD const uint16_t* query_of(int64_t flat_row, int own_head) const {
    return a.q + flat_row * a.q_row + static_cast<int64_t>(head * s.group + own_head) * s.head_dim;
  }
};

// All rows of a cache head: row m is head m % group of row m / group.
struct PrefixRows : PathRows {
  GSD_HD PrefixRows(const PathAttentionArgs& a, const PathAttentionSizes& s, int first, int batch, int head, int start)
      : PathRows(a, s, first, s.query_rows(), batch, head, start) {}

  GSD_HD int64_t flat_row(int m) const { return static_cast<int64_t>(batch) * s.rows + m / s.group; }
  GSD_HD const uint16_t* query(int m) const { return query_of(flat_row(m), m % s.group); }
  GSD_HD int slot(int column) const { return column; }
  GSD_HD uint32_t seen(int m, int column, int) const { return ~bits_below(oldest_position(a, flat_row(m)) - column); }
};

// A block takes the whole tiles of one split for 16 rows a warp. A split without any leaves no state.
template <class Element, int kHeadDim, int kWarps>
struct PathPrefix {
  using Tiles = AttentionTiles<Element, kHeadDim, kWarps>;

  template <class Machine>
  static GSD_HD void run(Machine& machine, const PathAttentionArgs& a, const PathAttentionSizes& s, int m_block,
                         int batch_head, int split) {
    machine.await_previous("prefix");  // all blocks: a launch is over when they are, with what came before it
    machine.release_next();
    const int batch = batch_head / s.kv_heads, head = batch_head % s.kv_heads;
    const PathText text(a, s, batch);
    const int64_t split_begin = path_split_begin(split), split_end = path_split_begin(split + 1);
    if (split_begin >= text.whole || split_end <= text.first) return;
    const int begin = max_int(static_cast<int>(split_begin), text.first);
    const int end = split_end < text.whole ? static_cast<int>(split_end) : text.whole;
    if (begin >= end) return;
    const int m_first = m_block * Tiles::kRows;
    typename Tiles::State state;
    Tiles::run(machine, PrefixRows(a, s, m_first, batch, head, text.start), begin, end, state);
    const int64_t at = (static_cast<int64_t>(batch_head) * s.splits() + split) * s.query_rows() + m_first;
    const int local = 16 * machine.warp() + machine.lane() / 4;
    PathStates<Tiles, kHeadDim>(a, s).save(machine, at, local, s.query_rows() - m_first, state);
  }
};

}  // namespace gsd
