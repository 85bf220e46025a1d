// dag_attention for tensor cores: graph rows over the committed prefix and over their own ancestors in the graph.
//
// Query heads that share a cache head are rows of one problem, M = group · rows. The cache's positions are cut into
// splits; a block takes one split of one cache head for up to 16 rows a warp, in tiles of 32 positions:
//   prefix splits  cut kv_start … kv_len − 1, which every row sees;
//   graph splits   cut the node slots. They begin at kv_len, so one word of the ancestor mask is one row of a tile.
// Every split writes its normalised output and the base-2 logarithm of its sum of exponentials, and combine_row merges
// the splits. docs/how-it-works.md has the reasons.
#pragma once

#include "attention_tiles.h"

namespace gsd {

constexpr int kNodesPerSplit = 256;      // of a graph split
constexpr int kPositionsPerSplit = 256;  // a shorter prefix split costs more to combine than it gains
constexpr int kMaxSplits = kLanes;       // a lane holds one when they are combined
constexpr int kMaxGraphSplits = kMaxSplits / 2;

struct AttentionSizes {
  int batch, kv_heads, group, rows, head_dim, words, capacity;  // B, Hkv, Hq / Hkv, R, D, mask words, S
  int prefix_splits, graph_splits, nodes_per_split;

  GSD_HD int query_rows() const { return group * rows; }  // M
  GSD_HD int splits() const { return prefix_splits + graph_splits; }
};

struct AttentionArgs {
  const uint16_t* q;             // [B, Hq, R, D], 16-byte aligned rows
  const uint16_t* k;             // [B, Hkv, S, D], likewise
  const uint16_t* v;             // [B, Hkv, S, D], likewise
  const int32_t* ancestor_mask;  // [B, R, words]
  const int32_t* kv_len;         // [B]
  const int32_t* kv_start;       // [B], null: 0
  const int32_t* row_depths;     // [B, R], null: no sliding window, no chunks
  const int32_t* node_depths;    // [B, ≥ nodes]
  float* partial_out;            // [B · Hkv, splits, M, D]
  float* partial_lse;            // [B · Hkv, splits, M], base 2
  uint16_t* out;                 // [B, R, Hq, D]: the projection that follows reads it without a copy
  float* lse;                    // [B, Hq, R], natural logarithm
  const float* sinks;            // [Hq], natural logarithm, null: none
  int64_t q_batch, q_head, q_row, k_batch, k_head, v_batch, v_head;  // strides in elements
  int k_slot, v_slot;  // narrow, because every copy multiplies by them
  int64_t mask_batch, mask_row, node_depths_batch;
  float scale;    // of the scores; holds log2(e), or with a soft cap its inverse
  float softcap;  // 0: none; holds log2(e)
  int window;     // positions that a row sees, its own included
  int chunk;      // of positions, of which a row sees its own alone; 0: none
  int nodes;      // width of node_depths
};

// How many positions before its own a row sees, by its depth: as far as its window or its chunk goes. Chunks are counted
// from kv_start, and floored: padding may have no end yet.
GSD_HD int positions_back(const AttentionArgs& a, int batch, int kv_len, int depth) {
  if (a.chunk == 0) return a.window - 1;
  const int rest = (kv_len + depth - (a.kv_start != nullptr ? a.kv_start[batch] : 0)) % a.chunk;
  return rest < 0 ? rest + a.chunk : rest;
}

// Query rows of a block: 16 a warp, one, two or four warps.
GSD_HD int attention_block_rows(int query_rows) { return query_rows <= 16 ? 16 : query_rows <= 32 ? 32 : 64; }

// Follows from shapes only, so that one captured launch serves every length. `blocks` is what fills the GPU.
GSD_HD void choose_splits(AttentionSizes& s, int64_t blocks) {
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t nodes = 32 * static_cast<int64_t>(s.words);
  const int64_t parts = ceil_div(nodes, static_cast<int64_t>(kNodesPerSplit) * kMaxGraphSplits);
  s.nodes_per_split = static_cast<int>(kNodesPerSplit * (parts > 1 ? parts : 1));
  s.graph_splits = static_cast<int>(ceil_div(nodes, s.nodes_per_split));
  const int64_t m_blocks = ceil_div(s.query_rows(), attention_block_rows(s.query_rows()));
  const int64_t per_split = m_blocks * s.batch * s.kv_heads, useful = ceil_div(s.capacity, kPositionsPerSplit);
  int64_t wanted = blocks / (per_split > 0 ? per_split : 1);
  if (wanted > useful) wanted = useful;
  if (wanted > kMaxSplits - s.graph_splits) wanted = kMaxSplits - s.graph_splits;
  s.prefix_splits = wanted > 1 ? static_cast<int>(wanted) : 1;
}

// Columns begin … end − 1 of a split; column c is cache position origin + c. Graph splits have origin kv_len, so that
// their columns are node numbers.
struct Span {
  int begin, end, origin;
  bool graph;
};

GSD_HD Span span_of(const AttentionArgs& a, const AttentionSizes& s, int batch, int split) {
  const int kv_len = clamped(a.kv_len[batch], s.capacity);
  if (split >= s.prefix_splits) {
    const int nodes = min_int(32 * s.words, s.capacity - kv_len);
    const int begin = (split - s.prefix_splits) * s.nodes_per_split;
    return {begin, min_int(begin + s.nodes_per_split, nodes), kv_len, true};
  }
  int first = a.kv_start != nullptr ? max_int(a.kv_start[batch], 0) : 0;
  // The cut may not depend on any row's depth, or rows would depend on each other: the shallowest one, 0, decides.
  if (a.row_depths != nullptr) first = max_int(first, kv_len - positions_back(a, batch, kv_len, 0));
  const int tiles = (max_int(kv_len - first, 0) + kTileColumns - 1) / kTileColumns;
  const int own = max_int((tiles + s.prefix_splits - 1) / s.prefix_splits, kPositionsPerSplit / kTileColumns);
  // In 64 bits: kv_start near the largest integer may not wrap around.
  const int64_t begin = first + static_cast<int64_t>(split) * own * kTileColumns;
  if (begin >= kv_len) return {0, 0, 0, false};
  return {static_cast<int>(begin), min_int(static_cast<int>(begin) + own * kTileColumns, kv_len), 0, false};
}

// The rows of one block in one split, for AttentionTiles. Columns are cache positions or nodes.
struct SplitRows {
  const AttentionArgs& a;
  const AttentionSizes& s;
  const Span span;
  const int first, count, batch, head;
  const uint16_t *keys, *values;
  const int k_slot, v_slot;
  const bool windowed, checked;
  const float scale;

  GSD_HD SplitRows(const AttentionArgs& a, const AttentionSizes& s, const Span& span, int first, int batch, int head)
      : a(a), s(s), span(span), first(first), count(s.query_rows()), batch(batch), head(head),
        keys(a.k + batch * a.k_batch + head * a.k_head + static_cast<int64_t>(span.origin) * a.k_slot),
        values(a.v + batch * a.v_batch + head * a.v_head + static_cast<int64_t>(span.origin) * a.v_slot),
        k_slot(a.k_slot), v_slot(a.v_slot), windowed(a.row_depths != nullptr), checked(span.graph || windowed),
        scale(a.scale) {}

  GSD_HD float softcap() const { return a.softcap; }
  GSD_HD int slot(int column) const { return column; }
  GSD_HD bool masked(int) const { return checked; }
  GSD_HD const uint16_t* query(int m) const {
    return a.q + batch * a.q_batch + static_cast<int64_t>(head * s.group + m / s.rows) * a.q_head +
           static_cast<int64_t>(m % s.rows) * a.q_row;
  }

  // Among nodes with a window, of the columns that this thread holds.
  GSD_HD uint32_t seen(int m, int column, int lane) const {
    const int row = m % s.rows;
    uint32_t seen = 0xFFFFFFFFu;
    if (span.graph) {
      seen = static_cast<uint32_t>(a.ancestor_mask[batch * a.mask_batch + row * a.mask_row + column / kTileColumns]);
      seen &= bits_below(span.end - column);  // behind the last node there are no depths
    }
    if (!windowed) return seen;
    // The first position in the row's window or chunk, counted from kv_len; nodes go by their depth.
    const int kv_len = clamped(a.kv_len[batch], s.capacity);
    const int depth = a.row_depths[static_cast<int64_t>(batch) * s.rows + row];
    const int oldest = depth - positions_back(a, batch, kv_len, depth);
    if (!span.graph) return seen & ~bits_below(kv_len + oldest - column);
    const int32_t* depths = a.node_depths + batch * a.node_depths_batch;
    seen &= 0x03030303u << 2 * (lane % 4);
    GSD_UNROLL
    for (int i = 0; i < kTileColumns / 4; i++) {
      const int c = 8 * (i / 2) + 2 * (lane % 4) + i % 2;
      if ((seen >> c & 1u) != 0 && depths[min_int(column + c, a.nodes - 1)] < oldest) seen &= ~(1u << c);
    }
    return seen;
  }
};

template <class Element, int kHeadDim, int kWarps>
struct SplitAttention {
  using Tiles = AttentionTiles<Element, kHeadDim, kWarps>;
  using State = typename Tiles::State;

  template <class Machine>
  static GSD_HD void run(Machine& machine, const AttentionArgs& a, const AttentionSizes& s, int m_block, int batch_head,
                         int split) {
    const int lane = machine.lane(), batch = batch_head / s.kv_heads, head = batch_head % s.kv_heads;
    const int m_first = m_block * Tiles::kRows + 16 * machine.warp();
    const int m[2] = {m_first + lane / 4, m_first + lane / 4 + 8};
    const int size_m = s.query_rows();
    const int64_t partial = (static_cast<int64_t>(batch_head) * s.splits() + split) * size_m;
    const Span span = span_of(a, s, batch, split);
    if (span.begin >= span.end) {  // nothing here: 4 bytes a row, no output
      GSD_UNROLL
      for (int i = 0; i < 2; i++) {
        if (lane % 4 == 0 && m[i] < size_m) a.partial_lse[partial + m[i]] = kEmpty;
      }
      return;
    }
    State state;
    Tiles::run(machine, SplitRows(a, s, span, m_block * Tiles::kRows, batch, head), span.begin, span.end, state);
    if (m_first < size_m) write_partial(machine, a, m, size_m, partial, state);
  }

 private:
  template <class Machine>
  static GSD_HD void write_partial(Machine& machine, const AttentionArgs& a, const int (&m)[2], int size_m,
                                   int64_t partial, const State& state) {
    const int lane = machine.lane();
    GSD_UNROLL
    for (int i = 0; i < 2; i++) {
      float sum = state.total[i] + machine.shuffle_xor(state.total[i], 1);
      sum += machine.shuffle_xor(sum, 2);
      if (m[i] >= size_m) continue;  // after the shuffles, which need every lane
      const bool empty = sum == 0.0f;
      if (lane % 4 == 0) a.partial_lse[partial + m[i]] = empty ? kEmpty : state.best[i] + machine.log2(sum);
      if (empty) continue;  // never read
      const float inverse = 1.0f / sum;
      float* row = a.partial_out + (partial + m[i]) * kHeadDim + 2 * (lane % 4);
      GSD_UNROLL
      for (int d = 0; d < Tiles::kOutputTiles; d++) {
        machine.store(row + 8 * d, state.out[d][2 * i] * inverse, state.out[d][2 * i + 1] * inverse);
      }
    }
  }
};

// One warp merges the splits of query row m: out = Σ 2^(l_s − m) out_s / Σ 2^(l_s − m) with m = max l_s.
template <class Element, int kHeadDim, class Machine>
GSD_HD void combine_row(Machine& machine, const AttentionArgs& a, const AttentionSizes& s, int batch_head, int m) {
  constexpr int kOwn = kHeadDim / kLanes;  // dimensions of a lane
  const int lane = machine.lane(), splits = s.splits(), size_m = s.query_rows();
  const int64_t first = static_cast<int64_t>(batch_head) * splits * size_m + m;
  const float lse = lane < splits ? a.partial_lse[first + static_cast<int64_t>(lane) * size_m] : kEmpty;
  const bool filled = !(lse <= 0.5f * kEmpty);  // not `lse > …`: NaN has to get through
  const float best = max_of_lanes(machine, filled ? lse : kEmpty);
  const float weight = filled ? machine.exp2(lse - best) : 0.0f, total = sum_of_lanes(machine, weight);

  float out[kOwn] = {};
  GSD_UNROLL_4
  for (int split = 0; split < splits; split++) {
    const float share = machine.shuffle(weight, split);
    if (share == 0.0f) continue;  // an empty split's output was never written
    const float* row = a.partial_out + (first + static_cast<int64_t>(split) * size_m) * kHeadDim + kOwn * lane;
    float part[kOwn];
    machine.load(row, part);
    GSD_UNROLL
    for (int d = 0; d < kOwn; d++) out[d] += share * part[d];
  }

  const int head = batch_head % s.kv_heads * s.group + m / s.rows, heads = s.kv_heads * s.group;
  const int64_t batch = batch_head / s.kv_heads, row = m % s.rows;
  const bool some = total != 0.0f;
  const float natural = some ? (best + machine.log2(total)) * kLn2 : negative_infinity();
  float inverse = some ? 1.0f / total : 0.0f;
  if (some && a.sinks != nullptr) inverse /= 1.0f + machine.exp2((a.sinks[head] - natural) * kLog2E);
  uint32_t* target = reinterpret_cast<uint32_t*>(a.out + ((batch * s.rows + row) * heads + head) * kHeadDim) +
                     kOwn / 2 * lane;
  GSD_UNROLL
  for (int d = 0; d < kOwn / 2; d++) target[d] = Element::pack(out[2 * d] * inverse, out[2 * d + 1] * inverse);
  if (lane == 0) {
    a.lse[(batch * heads + head) * s.rows + row] = natural;
  }
}

}  // namespace gsd
