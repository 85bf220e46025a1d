// Tiles of keys and values for tensor cores: copied through shared memory, multiplied with 16 rows a warp, and taken
// into the rows' online softmax (flash attention). Every attention runs this loop and says which positions its rows see.
//
// The code is written over a *warp machine*: lanes and warps, a block barrier, asynchronous 16-byte copies to shared
// memory, ldmatrix, mma, shuffles. CudaMachine (cuda/warp_machine.h) is PTX; FiberMachine
// (tests/block_code/fiber_machine.h) is fibers, on which the same source runs under sanitizers.
//
// What reaches a row's state is rounded as the source says (machine.times, machine.fma), never as a compiler finds best:
// two kernels that run the loop agree bit for bit.
#pragma once

#include "elements.h"

namespace gsd {

constexpr int kLanes = 32;
constexpr int kTileColumns = 32;  // cache positions of a tile: one word of the ancestor mask
constexpr int kStages = 3;        // tiles in shared memory; two are on their way while one is worked on

// The highest score of no column: finite, so that 2^(−∞ − kEmpty) is 0 and never NaN.
constexpr float kEmpty = -1.0e30f;
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

GSD_HD int clamped(int value, int most) { return min_int(max_int(value, 0), most); }
GSD_HD uint32_t bits_below(int n) { return n >= 32 ? 0xFFFFFFFFu : n <= 0 ? 0u : (1u << n) - 1u; }

template <class Machine>
GSD_HD float sum_of_lanes(Machine& machine, float x) {
  GSD_UNROLL
  for (int step = 1; step < kLanes; step *= 2) x += machine.shuffle_xor(x, step);
  return x;
}

template <class Machine>
GSD_HD float max_of_lanes(Machine& machine, float x) {
  GSD_UNROLL
  for (int step = 1; step < kLanes; step *= 2) x = machine.max(x, machine.shuffle_xor(x, step));
  return x;
}

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

// The rows of a block, as run() asks for them (`Rows`):
//   first, count               they begin at `first`; rows from `count` on do not exist
//   query(m)                   the D elements of row m, 16-byte aligned
//   keys, values, k_slot, v_slot, slot(column)   where a column lies, counted in slots; below 0: zeros, nothing is read
//   checked                    rows do not see the same columns, so that values have to be finite
//   masked(column), seen(m, column, lane)        whether rows miss columns of the tile from `column` on; which ones
//                              row m sees, at least of those that the lane holds
//   scale, softcap()           of the scores, to base 2
template <class Element, int kHeadDim, int kWarps>
struct AttentionTiles {
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

  // The online softmax of a thread's two rows: the highest score of the row, its own columns' sum of weights relative
  // to that, and its own dimensions of the output, not divided yet.
  struct State {
    float best[2] = {kEmpty, kEmpty}, total[2] = {0.0f, 0.0f}, out[kOutputTiles][4] = {};
  };

  // Takes columns begin … end − 1 into the state, tile by tile from `begin` on.
  template <class Machine, class Rows>
  static GSD_HD void run(Machine& machine, const Rows& rows, int begin, int end, State& state) {
    const int lane = machine.lane(), m_first = rows.first + 16 * machine.warp();
    const int m[2] = {m_first + lane / 4, m_first + lane / 4 + 8};
    const int tiles = (end - begin + kTileColumns - 1) / kTileColumns;
    copy_queries(machine, rows);
    machine.commit();
    GSD_ROLLED
    for (int tile = 0; tile < kStages - 1; tile++) {
      if (tile < tiles) copy_tile(machine, rows, begin, end, tile);
      machine.commit();
    }

    machine.template wait<kStages - 1>("queries arrived");
    machine.sync("queries arrived");
    uint32_t q[kSteps][4];
    load_queries(machine, q);

    const bool warp_has_rows = m_first < rows.count;
    for (int tile = 0; tile < tiles; tile++) {
      const int stage = tile % kStages, column = begin + tile * kTileColumns;
      const bool masked = rows.masked(column) || column + kTileColumns > end;
      uint32_t seen[2] = {0, 0};  // bit c: the row sees the tile's column c
      if (masked) {
        GSD_UNROLL
        for (int i = 0; i < 2; i++) {
          if (m[i] < rows.count) seen[i] = bits_below(end - column) & rows.seen(m[i], column, lane);
        }
      }

      // All copies of this tile are there after the barrier, and nobody reads the stage that is filled next.
      machine.template wait<kStages - 2>("tile arrived");
      uint32_t spoiled = 0;  // columns whose values are not all finite
      if (rows.checked) {
        if (machine.any("tile checked", copied_non_finite(machine, stage))) spoiled = clean_values(machine, stage);
      } else {
        machine.sync("tile arrived");
      }
      if (tile + kStages - 1 < tiles) copy_tile(machine, rows, begin, end, tile + kStages - 1);
      machine.commit();
      if (!warp_has_rows) continue;

      float scores[kScoreTiles][4] = {};
      multiply_keys(machine, scores, q, Layout::keys(stage));
      finish_scores(machine, rows.scale, rows.softcap(), scores);
      if (masked) hide(lane, seen, scores);
      accumulate(machine, scores, state);
      GSD_UNROLL
      for (int i = 0; i < 2; i++) {
        if ((seen[i] & spoiled) != 0) state.total[i] = float_from_bits(0x7FC00000u);  // NaN reaches who does see it
      }
      multiply_values(machine, scores, state.out, Layout::values(stage));
    }
  }

 private:
  // 16 bytes a thread and pass; rows beyond the last become zeros. They wait in the stage that is filled last.
  template <class Machine, class Rows>
  static GSD_HD void copy_queries(Machine& machine, const Rows& rows) {
    const int chunk = machine.thread() % Layout::kChunks;
    GSD_ROLLED
    for (int pass = 0; pass < kRows / kRowsPerPass; pass++) {
      const int row = pass * kRowsPerPass + machine.thread() / Layout::kChunks, m = rows.first + row;
      const bool inside = m < rows.count;
      machine.copy("queries", Layout::keys(kStages - 1) + Layout::at(row, chunk),
                   rows.query(inside ? m : rows.first) + chunk * 8, inside);
    }
  }

  // Positions from `end` on become zeros, and are not read.
  template <class Machine, class Rows>
  static GSD_HD void copy_tile(Machine& machine, const Rows& rows, int begin, int end, int tile) {
    const int stage = tile % kStages, chunk = machine.thread() % Layout::kChunks;
    GSD_UNROLL
    for (int pass = 0; pass < kTileColumns / kRowsPerPass; pass++) {
      const int row = pass * kRowsPerPass + machine.thread() / Layout::kChunks;
      const int column = begin + tile * kTileColumns + row, found = column < end ? rows.slot(column) : -1;
      const int64_t slot = max_int(found, 0);
      machine.copy("keys", Layout::keys(stage) + Layout::at(row, chunk), rows.keys + slot * rows.k_slot + chunk * 8,
                   found >= 0);
      machine.copy("values", Layout::values(stage) + Layout::at(row, chunk),
                   rows.values + slot * rows.v_slot + chunk * 8, found >= 0);
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

 protected:
  // Keys lie as [column][dimension], which is the second operand's own order. Four matrices: columns 0–7 with the
  // step's two chunks, columns 8–15 with the same.
  template <class Machine>
  static GSD_HD void multiply_keys(Machine& machine, float (&scores)[kScoreTiles][4], const uint32_t (&q)[kSteps][4],
                                   int keys) {
    const int lane = machine.lane(), place = Layout::at(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    GSD_UNROLL
    for (int step = 0; step < kSteps; step++) {
      int at[kScoreTiles / 2];
      GSD_UNROLL
      for (int pair = 0; pair < kScoreTiles / 2; pair++) {
        at[pair] = keys + 16 * pair * Layout::kRowBytes + Layout::later(place, 2 * step);
      }
      uint32_t matrices[kScoreTiles / 2][4];
      machine.template load_matrices<false>("keys", matrices, at);
      machine.template multiply<Element>(scores, 0, q[step], matrices);
    }
  }

  // Base-2 scores.
  template <class Machine>
  static GSD_HD void finish_scores(Machine& machine, float scale, float softcap, float (&scores)[kScoreTiles][4]) {
    GSD_UNROLL
    for (int n = 0; n < kScoreTiles; n++) {
      GSD_UNROLL
      for (int e = 0; e < 4; e++) scores[n][e] = machine.times(scores[n][e], scale);
    }
    if (softcap == 0.0f) return;
    GSD_UNROLL
    for (int n = 0; n < kScoreTiles; n++) {
      GSD_UNROLL
      for (int e = 0; e < 4; e++) scores[n][e] = tanh(machine, scores[n][e]) * softcap;
    }
  }

  // Of both rows of the lane: a column that is not seen weighs nothing.
  static GSD_HD void hide(int lane, const uint32_t (&seen)[2], float (&scores)[kScoreTiles][4]) {
    GSD_UNROLL
    for (int n = 0; n < kScoreTiles; n++) {
      GSD_UNROLL
      for (int e = 0; e < 4; e++) {
        if ((seen[e / 2] >> (8 * n + 2 * (lane % 4) + e % 2) & 1u) == 0) scores[n][e] = negative_infinity();
      }
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
  static GSD_HD void accumulate(Machine& machine, float (&scores)[kScoreTiles][4], State& state) {
    GSD_UNROLL
    for (int i = 0; i < 2; i++) {
      float highest = state.best[i];
      GSD_UNROLL
      for (int n = 0; n < kScoreTiles; n++) {
        highest = machine.max(highest, machine.max(scores[n][2 * i], scores[n][2 * i + 1]));
      }
      highest = machine.max(highest, machine.shuffle_xor(highest, 1));
      highest = machine.max(highest, machine.shuffle_xor(highest, 2));
      const float decay = machine.exp2(state.best[i] - highest);
      state.best[i] = highest;
      float sum = 0.0f;
      GSD_UNROLL
      for (int n = 0; n < kScoreTiles; n++) {
        GSD_UNROLL
        for (int e = 2 * i; e < 2 * i + 2; e++) {
          scores[n][e] = machine.exp2(scores[n][e] - highest);
          sum += scores[n][e];
        }
      }
      state.total[i] = machine.fma(state.total[i], decay, sum);
      GSD_UNROLL
      for (int d = 0; d < kOutputTiles; d++) {
        state.out[d][2 * i] *= decay;
        state.out[d][2 * i + 1] *= decay;
      }
    }
  }

  // Two neighbouring score tiles are a first operand as they are. Values lie as [column][dimension] and are transposed
  // by the load: columns 0–7 and 8–15 of one chunk, then of the next.
  template <class Machine>
  static GSD_HD void multiply_values(Machine& machine, const float (&weights)[kScoreTiles][4],
                                     float (&out)[kOutputTiles][4], int values) {
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
          at[pair] = values + 16 * step * Layout::kRowBytes + Layout::later(place, first + 2 * pair);
        }
        uint32_t matrices[4][4];
        machine.template load_matrices<true>("values", matrices, at);
        machine.template multiply<Element>(out, first, p, matrices);
      }
    }
  }
};

}  // namespace gsd
