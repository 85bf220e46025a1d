// dag_attention for tensor cores: graph rows over the committed prefix and over their own ancestors in the graph.
//
// Query heads that share a cache head are rows of one problem, M = group · rows. The cache's positions are cut into
// splits; a block takes one split of one cache head for up to 16 rows a warp, in tiles of 32 positions:
//   prefix splits  cut kv_start … kv_len − 1, which every row sees;
//   graph splits   cut the node slots. They begin at kv_len, so one word of the ancestor mask is one row of a tile.
// Every split writes its normalised output and the base-2 logarithm of its sum of exponentials, and combine_row merges
// the splits. docs/kernels.md has the reasons.
//
// The code is written over a *warp machine*: lanes and warps, a block barrier, asynchronous 16-byte copies to shared
// memory, ldmatrix, mma, shuffles. CudaMachine (cuda/warp_machine.h) is PTX; OsMachine (tests/block_code/os_machine.h)
// is operating-system threads, on which the same source runs under sanitizers.
#pragma once

#include "elements.h"

namespace gsd {

constexpr int kLanes = 32;
constexpr int kTileColumns = 32;         // cache positions of a tile: one word of the ancestor mask
constexpr int kStages = 3;               // tiles in shared memory; two are on their way while one is worked on
constexpr int kNodesPerSplit = 256;      // of a graph split
constexpr int kPositionsPerSplit = 256;  // a shorter prefix split costs more to combine than it gains
constexpr int kMaxSplits = kLanes;       // a lane holds one when they are combined
constexpr int kMaxGraphSplits = kMaxSplits / 2;

// The logarithm of an empty sum: finite, so that 2^(−∞ − kEmpty) is 0 and never NaN.
constexpr float kEmpty = -1.0e30f;
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

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
  const int32_t* row_depths;     // [B, R], null: no sliding window
  const int32_t* node_depths;    // [B, ≥ nodes]
  float* partial_out;            // [B · Hkv, splits, M, D]
  float* partial_lse;            // [B · Hkv, splits, M], base 2
  uint16_t* out;                 // [B, R, Hq, D]: the projection that follows reads it without a copy
  float* lse;                    // [B, Hq, R], natural logarithm
  int64_t q_batch, q_head, q_row, k_batch, k_head, v_batch, v_head;  // strides in elements
  int k_slot, v_slot;  // narrow, because every copy multiplies by them
  int64_t mask_batch, mask_row, node_depths_batch;
  float scale;    // of the scores; holds log2(e), or with a soft cap its inverse
  float softcap;  // 0: none; holds log2(e)
  int window;     // positions that a row sees, its own included
  int nodes;      // width of node_depths
};

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
  const int kv_len = min_int(max_int(a.kv_len[batch], 0), s.capacity);
  if (split >= s.prefix_splits) {
    const int nodes = min_int(32 * s.words, s.capacity - kv_len);
    const int begin = (split - s.prefix_splits) * s.nodes_per_split;
    return {begin, min_int(begin + s.nodes_per_split, nodes), kv_len, true};
  }
  int first = a.kv_start != nullptr ? max_int(a.kv_start[batch], 0) : 0;
  // The cut may not depend on any row's depth, or rows would depend on each other: the shallowest one, 0, decides.
  if (a.row_depths != nullptr) first = max_int(first, kv_len - (a.window - 1));
  const int tiles = (max_int(kv_len - first, 0) + kTileColumns - 1) / kTileColumns;
  const int own = max_int((tiles + s.prefix_splits - 1) / s.prefix_splits, kPositionsPerSplit / kTileColumns);
  // In 64 bits: kv_start near the largest integer may not wrap around.
  const int64_t begin = first + static_cast<int64_t>(split) * own * kTileColumns;
  if (begin >= kv_len) return {0, 0, 0, false};
  return {static_cast<int>(begin), min_int(static_cast<int>(begin) + own * kTileColumns, kv_len), 0, false};
}

GSD_HD uint32_t bits_below(int n) { return n >= 32 ? 0xFFFFFFFFu : n <= 0 ? 0u : (1u << n) - 1u; }

// One tile of keys and one of values in shared memory, as rows of 16-byte chunks. A chunk's place in its row is
// exchanged by the row's low bits: eight rows of one chunk column, which ldmatrix reads at once, lie in eight different
// bank groups.
template <int kHeadDim>
struct TileLayout {
  static constexpr int kChunks = kHeadDim / 8;
  static constexpr int kRowBytes = 2 * kHeadDim;
  static constexpr int kTileBytes = kTileColumns * kRowBytes;
  static constexpr int kStageBytes = 2 * kTileBytes;

  static GSD_HD int at(int row, int chunk) { return row * kRowBytes + (chunk ^ (row & 7)) * 16; }
  // From the place of chunk 0 or 1 of a row to that of the chunk `even` later. Lanes differ in the place only, which is
  // one register for all chunks.
  static GSD_HD int later(int place, int even) { return (place ^ even % 8 * 16) + even / 8 * 128; }
  static GSD_HD int keys(int stage) { return stage * kStageBytes; }
  static GSD_HD int values(int stage) { return stage * kStageBytes + kTileBytes; }
};

template <class Element, int kHeadDim, int kWarps>
struct SplitAttention {
  using Layout = TileLayout<kHeadDim>;
  static constexpr int kRows = 16 * kWarps;  // query rows of a block
  static constexpr int kThreads = kLanes * kWarps;
  static constexpr int kArenaBytes = kStages * Layout::kStageBytes;
  static constexpr int kSteps = kHeadDim / 16;                     // of q · k, 16 dimensions each
  static constexpr int kScoreTiles = kTileColumns / 8;             // of 8 columns
  static constexpr int kOutputTiles = kHeadDim / 8;                // of 8 dimensions
  static constexpr int kRowsPerPass = kThreads / Layout::kChunks;  // rows of a tile that the block copies at once
  static_assert(kRows * Layout::kRowBytes <= Layout::kStageBytes, "queries wait in one stage");
  static_assert(kTileColumns % kRowsPerPass == 0, "a copy is whole passes");

  // What a thread holds of a 16 × 8 tile of scores or outputs: rows r and r + 8 with r = lane / 4, and in both of them
  // columns 2 (lane % 4) and the next. Element e of four is row r + 8 (e / 2), column 2 (lane % 4) + e % 2.

  template <class Machine>
  static GSD_HD void run(Machine& machine, const AttentionArgs& a, const AttentionSizes& s, int m_block, int batch_head,
                         int split) {
    const int lane = machine.lane(), batch = batch_head / s.kv_heads, head = batch_head % s.kv_heads;
    const int m_first = m_block * kRows + 16 * machine.warp();
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

    const int64_t origin = span.origin;
    const uint16_t* keys = a.k + batch * a.k_batch + head * a.k_head + origin * a.k_slot;
    const uint16_t* values = a.v + batch * a.v_batch + head * a.v_head + origin * a.v_slot;
    const int tiles = (span.end - span.begin + kTileColumns - 1) / kTileColumns;
    copy_queries(machine, a, s, m_block, batch, head);
    machine.commit();
    GSD_ROLLED
    for (int tile = 0; tile < kStages - 1; tile++) {
      if (tile < tiles) copy_tile(machine, a, keys, values, span, tile);
      machine.commit();
    }

    machine.template wait<kStages - 1>("queries arrived");
    machine.sync("queries arrived");
    uint32_t q[kSteps][4];
    load_queries(machine, q);

    const bool windowed = a.row_depths != nullptr, warp_has_rows = m_first < size_m;
    float best[2] = {kEmpty, kEmpty}, total[2] = {0.0f, 0.0f}, out[kOutputTiles][4] = {};
    for (int tile = 0; tile < tiles; tile++) {
      const int stage = tile % kStages, column = span.begin + tile * kTileColumns;
      const bool masked = span.graph || windowed || column + kTileColumns > span.end;
      uint32_t seen[2] = {0, 0};  // bit c: the row sees the tile's column c
      if (masked) {
        GSD_UNROLL
        for (int i = 0; i < 2; i++) {
          if (m[i] < size_m) seen[i] = columns_seen(a, s, span, batch, m[i] % s.rows, column, lane);
        }
      }

      // All copies of this tile are there after the barrier, and nobody reads the stage that is filled next.
      machine.template wait<kStages - 2>("tile arrived");
      uint32_t spoiled = 0;  // columns whose values are not all finite
      if (span.graph || windowed) {
        if (machine.any("tile checked", copied_non_finite(machine, stage))) spoiled = clean_values(machine, stage);
      } else {
        machine.sync("tile arrived");
      }
      if (tile + kStages - 1 < tiles) copy_tile(machine, a, keys, values, span, tile + kStages - 1);
      machine.commit();
      if (!warp_has_rows) continue;

      float scores[kScoreTiles][4] = {};
      multiply_keys(machine, scores, q, stage);
      finish_scores(machine, a, scores);
      if (masked) {
        GSD_UNROLL
        for (int n = 0; n < kScoreTiles; n++) {
          GSD_UNROLL
          for (int e = 0; e < 4; e++) {
            if ((seen[e / 2] >> (8 * n + 2 * (lane % 4) + e % 2) & 1u) == 0) scores[n][e] = negative_infinity();
          }
        }
      }
      accumulate(machine, scores, best, total, out);
      GSD_UNROLL
      for (int i = 0; i < 2; i++) {
        if ((seen[i] & spoiled) != 0) total[i] = float_from_bits(0x7FC00000u);  // NaN reaches the rows that do see it
      }
      multiply_values(machine, scores, out, stage);
    }
    if (warp_has_rows) write_partial(machine, a, m, size_m, partial, best, total, out);
  }

 private:
  // 16 bytes a thread and pass; rows beyond M become zeros. They wait in the stage that is filled last.
  template <class Machine>
  static GSD_HD void copy_queries(Machine& machine, const AttentionArgs& a, const AttentionSizes& s, int m_block,
                                  int batch, int head) {
    const int chunk = machine.thread() % Layout::kChunks;
    GSD_ROLLED
    for (int pass = 0; pass < kRows / kRowsPerPass; pass++) {
      const int row = pass * kRowsPerPass + machine.thread() / Layout::kChunks;
      const int m = m_block * kRows + row;
      const bool inside = m < s.query_rows();
      const uint16_t* from = a.q;
      if (inside) {
        from += batch * a.q_batch + static_cast<int64_t>(head * s.group + m / s.rows) * a.q_head +
                static_cast<int64_t>(m % s.rows) * a.q_row + chunk * 8;
      }
      machine.copy("queries", Layout::keys(kStages - 1) + Layout::at(row, chunk), from, inside);
    }
  }

  // Positions from the split's end on become zeros, and are not read.
  template <class Machine>
  static GSD_HD void copy_tile(Machine& machine, const AttentionArgs& a, const uint16_t* keys, const uint16_t* values,
                               const Span& span, int tile) {
    const int stage = tile % kStages, chunk = machine.thread() % Layout::kChunks;
    GSD_UNROLL
    for (int pass = 0; pass < kTileColumns / kRowsPerPass; pass++) {
      const int row = pass * kRowsPerPass + machine.thread() / Layout::kChunks;
      const int column = span.begin + tile * kTileColumns + row;
      const bool inside = column < span.end;
      const int64_t slot = inside ? column : span.begin;
      machine.copy("keys", Layout::keys(stage) + Layout::at(row, chunk), keys + slot * a.k_slot + chunk * 8, inside);
      machine.copy("values", Layout::values(stage) + Layout::at(row, chunk), values + slot * a.v_slot + chunk * 8,
                   inside);
    }
  }

  // A matrix is 8 × 8; ldmatrix fetches four of them, whose rows the lanes 0–7, 8–15, 16–23 and 24–31 point to. The
  // operand of 16 rows × 16 dimensions: rows 0–7 and 8–15, then the same of the next 8 dimensions.
  template <class Machine>
  static GSD_HD void load_queries(Machine& machine, uint32_t (&q)[kSteps][4]) {
    const int lane = machine.lane(), place = Layout::at(16 * machine.warp() + lane % 16, lane / 16);
    GSD_UNROLL
    for (int step = 0; step < kSteps; step++) {
      const int at[1] = {Layout::keys(kStages - 1) + Layout::later(place, 2 * step)};
      uint32_t matrices[1][4];
      machine.template load_matrices<false>("queries", matrices, at);
      GSD_UNROLL
      for (int i = 0; i < 4; i++) q[step][i] = matrices[0][i];
    }
  }

  // Which columns of the tile from `column` on the row sees; among nodes with a window, of those this thread holds.
  static GSD_HD uint32_t columns_seen(const AttentionArgs& a, const AttentionSizes& s, const Span& span, int batch,
                                      int row, int column, int lane) {
    uint32_t seen = bits_below(span.end - column);
    if (span.graph) {
      seen &= static_cast<uint32_t>(a.ancestor_mask[batch * a.mask_batch + row * a.mask_row + column / kTileColumns]);
    }
    if (a.row_depths == nullptr) return seen;
    // The first position in the row's window, counted from kv_len; nodes go by their depth.
    const int oldest = a.row_depths[static_cast<int64_t>(batch) * s.rows + row] - (a.window - 1);
    if (!span.graph) {
      const int kv_len = min_int(max_int(a.kv_len[batch], 0), s.capacity);
      return seen & ~bits_below(kv_len + oldest - column);
    }
    const int32_t* depths = a.node_depths + batch * a.node_depths_batch;
    seen &= 0x03030303u << 2 * (lane % 4);
    GSD_UNROLL
    for (int i = 0; i < 2 * kScoreTiles; i++) {
      const int c = 8 * (i / 2) + 2 * (lane % 4) + i % 2;
      if ((seen >> c & 1u) != 0 && depths[min_int(column + c, a.nodes - 1)] < oldest) seen &= ~(1u << c);
    }
    return seen;
  }

  // Masked and free slots may hold anything, and a weight of 0 times NaN is NaN: where rows do not see the same
  // columns, every thread looks at the values that it copied itself, which needs no barrier.
  template <class Machine>
  static GSD_HD bool copied_non_finite(Machine& machine, int stage) {
    const int chunk = machine.thread() % Layout::kChunks;
    bool found = false;
    GSD_UNROLL
    for (int pass = 0; pass < kTileColumns / kRowsPerPass; pass++) {
      const int row = pass * kRowsPerPass + machine.thread() / Layout::kChunks;
      found |= holds_non_finite<Element>(machine.read(Layout::values(stage) + Layout::at(row, chunk)));
    }
    return found;
  }

  // Rare: zeroes what is not finite and returns the columns that held it.
  template <class Machine>
  static GSD_HD uint32_t clean_values(Machine& machine, int stage) {
    bool found = false;
    for (int chunk = 0; chunk < Layout::kChunks; chunk++) {
      found |= holds_non_finite<Element>(machine.read(Layout::values(stage) + Layout::at(machine.lane(), chunk)));
    }
    const uint32_t columns = machine.ballot(found);
    machine.sync("spoiled columns found");
    const int chunk = machine.thread() % Layout::kChunks;
    for (int pass = 0; pass < kTileColumns / kRowsPerPass; pass++) {
      const int row = pass * kRowsPerPass + machine.thread() / Layout::kChunks;
      const int at = Layout::values(stage) + Layout::at(row, chunk);
      machine.write(at, finite_elements<Element>(machine.read(at)));
    }
    machine.sync("values cleaned");
    return columns;
  }

  // Keys lie as [column][dimension], which is the second operand's own order. Four matrices: columns 0–7 with the
  // step's two chunks, columns 8–15 with the same.
  template <class Machine>
  static GSD_HD void multiply_keys(Machine& machine, float (&scores)[kScoreTiles][4], const uint32_t (&q)[kSteps][4],
                                   int stage) {
    const int lane = machine.lane(), place = Layout::at(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    GSD_UNROLL
    for (int step = 0; step < kSteps; step++) {
      int at[kScoreTiles / 2];
      GSD_UNROLL
      for (int pair = 0; pair < kScoreTiles / 2; pair++) {
        at[pair] = Layout::keys(stage) + 16 * pair * Layout::kRowBytes + Layout::later(place, 2 * step);
      }
      uint32_t matrices[kScoreTiles / 2][4];
      machine.template load_matrices<false>("keys", matrices, at);
      machine.template multiply<Element>(scores, 0, q[step], matrices);
    }
  }

  // Base-2 scores.
  template <class Machine>
  static GSD_HD void finish_scores(Machine& machine, const AttentionArgs& a, float (&scores)[kScoreTiles][4]) {
    GSD_UNROLL
    for (int n = 0; n < kScoreTiles; n++) {
      GSD_UNROLL
      for (int e = 0; e < 4; e++) scores[n][e] *= a.scale;
    }
    if (a.softcap == 0.0f) return;
    GSD_UNROLL
    for (int n = 0; n < kScoreTiles; n++) {
      GSD_UNROLL
      for (int e = 0; e < 4; e++) scores[n][e] = tanh(machine, scores[n][e]) * a.softcap;
    }
  }

  // The series keeps the relative error of small arguments, which the ratio loses to cancellation.
  template <class Machine>
  static GSD_HD float tanh(Machine& machine, float x) {
    const float magnitude = x < 0.0f ? -x : x, square = x * x;
    const float series =
        x * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315 + square * (62.0f / 2835)))));
    const float decay = machine.exp2(-2.0f * kLog2E * magnitude), ratio = machine.divide(1.0f - decay, 1.0f + decay);
    return magnitude < 0.25f ? series : x < 0.0f ? -ratio : ratio;
  }

  // One step of the online softmax: scores become weights. Row by row, which makes rows independent bit for bit. A
  // thread's total is over its own columns.
  template <class Machine>
  static GSD_HD void accumulate(Machine& machine, float (&scores)[kScoreTiles][4], float (&best)[2], float (&total)[2],
                                float (&out)[kOutputTiles][4]) {
    GSD_UNROLL
    for (int i = 0; i < 2; i++) {
      float highest = best[i];
      GSD_UNROLL
      for (int n = 0; n < kScoreTiles; n++) {
        highest = machine.max(highest, machine.max(scores[n][2 * i], scores[n][2 * i + 1]));
      }
      highest = machine.max(highest, machine.shuffle_xor(highest, 1));
      highest = machine.max(highest, machine.shuffle_xor(highest, 2));
      const float decay = machine.exp2(best[i] - highest);
      best[i] = highest;
      float sum = 0.0f;
      GSD_UNROLL
      for (int n = 0; n < kScoreTiles; n++) {
        GSD_UNROLL
        for (int e = 2 * i; e < 2 * i + 2; e++) {
          scores[n][e] = machine.exp2(scores[n][e] - highest);
          sum += scores[n][e];
        }
      }
      total[i] = total[i] * decay + sum;
      GSD_UNROLL
      for (int d = 0; d < kOutputTiles; d++) {
        out[d][2 * i] *= decay;
        out[d][2 * i + 1] *= decay;
      }
    }
  }

  // Two neighbouring score tiles are a first operand as they are. Values lie as [column][dimension] and are transposed
  // by the load: columns 0–7 and 8–15 of one chunk, then of the next.
  template <class Machine>
  static GSD_HD void multiply_values(Machine& machine, const float (&weights)[kScoreTiles][4],
                                     float (&out)[kOutputTiles][4], int stage) {
    const int lane = machine.lane(), place = Layout::at(lane % 16, lane / 16);
    GSD_UNROLL
    for (int step = 0; step < kTileColumns / 16; step++) {
      const float(&left)[4] = weights[2 * step], (&right)[4] = weights[2 * step + 1];
      const uint32_t p[4] = {Element::pack(left[0], left[1]), Element::pack(left[2], left[3]),
                             Element::pack(right[0], right[1]), Element::pack(right[2], right[3])};
      GSD_UNROLL
      for (int first = 0; first < kOutputTiles; first += 8) {  // a few at a time: loaded matrices take registers
        int at[4];
        GSD_UNROLL
        for (int pair = 0; pair < 4; pair++) {
          at[pair] = Layout::values(stage) + 16 * step * Layout::kRowBytes + Layout::later(place, first + 2 * pair);
        }
        uint32_t matrices[4][4];
        machine.template load_matrices<true>("values", matrices, at);
        machine.template multiply<Element>(out, first, p, matrices);
      }
    }
  }

  template <class Machine>
  static GSD_HD void write_partial(Machine& machine, const AttentionArgs& a, const int (&m)[2], int size_m,
                                   int64_t partial, const float (&best)[2], const float (&total)[2],
                                   const float (&out)[kOutputTiles][4]) {
    const int lane = machine.lane();
    GSD_UNROLL
    for (int i = 0; i < 2; i++) {
      float sum = total[i] + machine.shuffle_xor(total[i], 1);
      sum += machine.shuffle_xor(sum, 2);
      if (m[i] >= size_m) continue;  // after the shuffles, which need every lane
      const bool empty = sum == 0.0f;
      if (lane % 4 == 0) a.partial_lse[partial + m[i]] = empty ? kEmpty : best[i] + machine.log2(sum);
      if (empty) continue;  // never read
      const float inverse = 1.0f / sum;
      float* row = a.partial_out + (partial + m[i]) * kHeadDim + 2 * (lane % 4);
      GSD_UNROLL
      for (int d = 0; d < kOutputTiles; d++) {
        machine.store(row + 8 * d, out[d][2 * i] * inverse, out[d][2 * i + 1] * inverse);
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
  float best = filled ? lse : kEmpty;
  GSD_UNROLL
  for (int step = 1; step < kLanes; step *= 2) best = machine.max(best, machine.shuffle_xor(best, step));
  const float weight = filled ? machine.exp2(lse - best) : 0.0f;
  float total = weight;
  GSD_UNROLL
  for (int step = 1; step < kLanes; step *= 2) total += machine.shuffle_xor(total, step);

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
  const float inverse = some ? 1.0f / total : 0.0f;
  uint32_t* target = reinterpret_cast<uint32_t*>(a.out + ((batch * s.rows + row) * heads + head) * kHeadDim) +
                     kOwn / 2 * lane;
  GSD_UNROLL
  for (int d = 0; d < kOwn / 2; d++) target[d] = Element::pack(out[2 * d] * inverse, out[2 * d + 1] * inverse);
  if (lane == 0) {
    a.lse[(batch * heads + head) * s.rows + row] = some ? (best + machine.log2(total)) * kLn2 : negative_infinity();
  }
}

}  // namespace gsd
