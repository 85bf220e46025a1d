// One block of a RowsProduct: 64 or 128 outputs of up to 64 rows over one split of the inputs (split-K GEMM by mma.sync,
// fed by cp.async).
//
// Stages of 64 inputs travel to shared memory, weights and rows side by side; two or three are on their way while one
// is multiplied. A warp has 16 outputs, eight in each half of the tile. With more than one split, the last block to
// arrive at a tile adds the splits in order.
//
// What every kernel of a product keeps, so that all of them have the same bits: a split is a chain of instructions of 16
// inputs, in the inputs' order, into one float32; an output is the sum of its splits in their order.
//
// The weights are the first operand of mma.m16n8k16, so that eight rows fill a tile. A thread's element e of it is
// output lane / 4 of half e / 2, row 2 (lane % 4) + e % 2.
//
// Of packed matrices, with kPacked, the stage's weights are decoded on the way into the same tile (rows_packed.h).
//
// Written over the warp machine of attention.h, of which it uses more: await_previous (from here on, what the launches
// before wrote may be read) and release_next (the launch after may begin, up to its own await_previous); prefetch (memory
// into the second-level cache); publish and
// collect (numbers for another block), and arrive (the last of so many blocks to do so is told, and sees what the
// others published before).
#pragma once

#include "attention.h"
#include "rows_heads.h"
#include "rows_packed.h"

namespace gsd {

template <class Element, int kRows, int kOutputs = kTileOutputs, bool kPacked = false>
struct ProductBlock {
  static constexpr int kWarps = kOutputs / 16, kThreads = kLanes * kWarps;
  static constexpr int kStages = kRows == kMostTileRows ? 3 : 4;  // with 64 outputs 48 KiB, which need no opt-in
  using Layout = TileLayout<kTileInputs>;
  static constexpr int kRowBytes = Layout::kRowBytes;
  static constexpr int kWeightBytes = kOutputs * kRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kRows * kRowBytes;
  static constexpr int kArenaBytes = kStages * kStageBytes;
  static constexpr int kRowTiles = kRows / 8;
  static constexpr int kHalf = kOutputs / 2;
  static constexpr int kChunks = kTileInputs / 8;          // of a row of a stage
  static constexpr int kRowsPerPass = kThreads / kChunks;  // that the block copies at once
  static constexpr int kPasses = 4;                        // over weights
  static_assert(kPasses * kRowsPerPass == kOutputs && kRows % kRowsPerPass == 0, "a copy is whole passes");

  template <class Machine>
  static GSD_HD void run(Machine& machine, const RowsProduct& a, const RowsCut& cut, int row_block, int output_block,
                         int split) {
    const Weights weights = weights_of(machine, a, output_block);
    const int first = split * cut.split_stages, stages = min_int(cut.split_stages, cut.stages - first);
    const int first_row = row_block * kRows;

    // Weights do not depend on the launch before. They belong to the first group.
    GSD_ROLLED
    for (int i = 0; i < kStages - 1; i++) {
      if (i < stages) fetch_weights(machine, a, weights, first + i, i);
    }
    machine.await_previous("product");
    machine.release_next();  // not earlier: a launch would have to wait for more than the one before it
    GSD_ROLLED
    for (int i = 0; i < kStages - 1; i++) {
      if (i < stages) copy_rows(machine, a, first_row, first + i, i);
      machine.commit();
    }

    float sums[kRowTiles][4] = {};  // of every eight rows: of both halves' output two rows
    GSD_ROLLED
    for (int i = 0; i < stages; i++) {
      // All copies of this stage are there after the barrier, and nobody reads the one that is filled next.
      machine.template wait<kStages - 2>("stage arrived");
      machine.sync("stage arrived");
      const int next = i + kStages - 1;
      if (next < stages) {
        fetch_weights(machine, a, weights, first + next, next % kStages);
        copy_rows(machine, a, first_row, first + next, next % kStages);
      }
      machine.commit();
      if (next == max_int(stages, kStages - 1)) {  // all that this block reads is on its way
        const int block = (split * cut.output_blocks + output_block) * a.row_blocks() + row_block;
        fetch_ahead(machine, a.ahead, block * kThreads + machine.thread(),
                    cut.splits * cut.output_blocks * a.row_blocks() * kThreads);
      }
      multiply(machine, sums, i % kStages);
    }

    if (cut.splits > 1 && !add_splits(machine, a, cut, sums, row_block, output_block, split)) return;
    const int output = weights.tile.first + 8 * machine.warp() + machine.lane() / 4, row = first_row + 2 * (machine.lane() % 4);
    if constexpr (!kPacked) {
      if (a.end == RowsEnd::kTurn) {
        return TurnedSums<Element, kRowTiles, kWarps>::finish(machine, a, weights.tile, output, row, a.rows, sums);
      }
    }
    RowsSums<Element, kRowTiles>::finish(machine, a, weights.tile, output, kHalf, row, a.rows, sums);
  }

 private:
  // The outputs of a tile are two halves. Of gate and up each is one: a warp has the same outputs of both.
  struct Weights {
    const uint16_t* from[2];  // of this thread, in both halves, where they are copied
    RowsMatrix of[2];         // what both halves are of
    RowsTile tile;
    int second;               // outputs from the first half to the second
  };

  static GSD_HD int weights_at(int stage) { return stage * kStageBytes; }
  static GSD_HD int rows_at(int stage) { return stage * kStageBytes + kWeightBytes; }

  template <class Machine>
  static GSD_HD Weights weights_of(Machine& machine, const RowsProduct& a, int block) {
    const bool gate = a.end == RowsEnd::kGate;
    Weights w{{}, {}, RowsTile(a, block, kOutputs), gate ? 0 : kHalf};
    w.of[0] = w.tile.of(a);
    const int row = machine.thread() / kChunks;
    const int64_t start = static_cast<int64_t>(w.tile.first + row) * a.inputs + machine.thread() % kChunks * 8;
    w.of[1] = gate ? a.matrices[1] : w.of[0];
    w.from[0] = w.of[0].weight + start;
    w.from[1] = gate ? w.of[1].weight + start : w.from[0] + static_cast<int64_t>(kHalf) * a.inputs;
    return w;
  }

  template <class Machine>
  static GSD_HD void fetch_weights(Machine& machine, const RowsProduct& a, const Weights& w, int stage, int to) {
    kPacked ? decode_weights(machine, a, w, stage, to) : copy_weights(machine, a, w, stage, to);
  }

  // Outputs and inputs beyond the matrix become zeros, and are not read.
  template <class Machine>
  static GSD_HD void copy_weights(Machine& machine, const RowsProduct& a, const Weights& w, int stage, int to) {
    const int row = machine.thread() / kChunks, chunk = machine.thread() % kChunks;
    const bool inside = stage * kTileInputs + chunk * 8 < a.inputs;
    GSD_UNROLL
    for (int pass = 0; pass < kPasses; pass++) {
      const int half = pass / 2, later = pass % 2 * kRowsPerPass;
      const uint16_t* from = a.matrices[0].weight;
      const bool there = inside && w.tile.first + half * w.second + later + row < w.tile.outputs;
      if (there) from = w.from[half] + static_cast<int64_t>(later) * a.inputs + stage * kTileInputs;
      machine.copy("weights", weights_at(to) + Layout::at(pass * kRowsPerPass + row, chunk), from, there);
    }
  }

  // The same where a matrix is packed: decoded weights are there from the next barrier on.
  template <class Machine>
  static GSD_HD void decode_weights(Machine& machine, const RowsProduct& a, const Weights& w, int stage, int to) {
    GSD_ROLLED
    for (int half = 0; half < 2; half++) decode_half(machine, a, w, half, stage, to);
  }

  // Loads come before the first use of any.
  template <class Machine>
  static GSD_HD void decode_half(Machine& machine, const RowsProduct& a, const Weights& w, int half, int stage, int to) {
    RowsMatrix m{};  // one by one: an index would be a copy on the stack
    m.weight = half == 0 ? w.of[0].weight : w.of[1].weight, m.kind = half == 0 ? w.of[0].kind : w.of[1].kind;
    m.scales = half == 0 ? w.of[0].scales : w.of[1].scales, m.groups = half == 0 ? w.of[0].groups : w.of[1].groups;
    const int chunk = machine.thread() % kChunks, row = half * kHalf + machine.thread() / kChunks;
    const int input = stage * kTileInputs + chunk * 8, output = w.tile.first + half * w.second + machine.thread() / kChunks;
    with_format(m.kind, [&](auto format) {
      using Format = decltype(format);
      PackedEight eights[kPasses / 2] = {};
      GSD_UNROLL
      for (int pass = 0; pass < kPasses / 2; pass++) {
        const int n = output + pass * kRowsPerPass;
        if (input < a.inputs && n < w.tile.outputs) eights[pass] = Format::load(m, a.inputs, n, input);
      }
      GSD_UNROLL
      for (int pass = 0; pass < kPasses / 2; pass++) {
        const bool there = input < a.inputs && output + pass * kRowsPerPass < w.tile.outputs;
        const Chunk decoded = there ? chunk_of<Element, Format>(machine, eights[pass]) : Chunk{};
        machine.write(weights_at(to) + Layout::at(row + pass * kRowsPerPass, chunk), decoded);
      }
    });
  }

  template <class Machine>
  static GSD_HD void copy_rows(Machine& machine, const RowsProduct& a, int first_row, int stage, int to) {
    const int chunk = machine.thread() % kChunks, input = stage * kTileInputs + chunk * 8;
    GSD_UNROLL
    for (int pass = 0; pass < kRows / kRowsPerPass; pass++) {
      const int row = pass * kRowsPerPass + machine.thread() / kChunks;
      const bool there = first_row + row < a.rows && input < a.inputs;
      const uint16_t* from = there ? a.x + static_cast<int64_t>(first_row + row) * a.inputs + input : a.x;
      machine.copy("rows", rows_at(to) + Layout::at(row, chunk), from, there);
    }
  }

  // Four steps of 16 inputs.
  template <class Machine>
  static GSD_HD void multiply(Machine& machine, float (&sums)[kRowTiles][4], int stage) {
    const int lane = machine.lane();
    const int weights = weights_at(stage) + lane / 8 % 2 * kHalf * kRowBytes + Layout::at(8 * machine.warp() + lane % 8, lane / 16);
    const int rows = rows_at(stage) + Layout::at(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    GSD_UNROLL_BY(kRows == kMostTileRows ? 1 : kChunks / 2)  // of the most rows, whose registers do not suffice
    for (int step = 0; step < kChunks / 2; step++) {
      const int later = 32 * step, weight_places[1] = {weights ^ later};
      uint32_t left[1][4], right[kRowTiles / 2][4];
      machine.template load_matrices<false>("weights", left, weight_places);
      int row_places[kRowTiles / 2];
      GSD_UNROLL
      for (int i = 0; i < kRowTiles / 2; i++) row_places[i] = (rows ^ later) + 16 * i * kRowBytes;
      machine.template load_matrices<false>("rows", right, row_places);
      machine.template multiply<Element>(sums, 0, left[0], right);
    }
  }

  // False if other splits of the tile are not done: their block adds.
  template <class Machine>
  static GSD_HD bool add_splits(Machine& machine, const RowsProduct& a, const RowsCut& cut,
                                float (&own)[kRowTiles][4], int row_block, int output_block, int split) {
    const int64_t tile = static_cast<int64_t>(row_block) * cut.output_blocks + output_block;
    constexpr int kPart = kOutputs * kRows;
    const int splits = cut.splits;
    float* parts = a.partials + tile * splits * kPart + 4 * machine.thread();
    GSD_UNROLL
    for (int j = 0; j < kRowTiles; j++) machine.publish(parts + split * kPart + 4 * kThreads * j, own[j]);
    machine.sync("partials written");
    if (!machine.any("last block known", machine.thread() == 0 && machine.arrive(a.counters + tile, splits))) return false;
    GSD_UNROLL
    for (int j = 0; j < kRowTiles; j++) machine.collect(parts + 4 * kThreads * j, own[j]);
    GSD_UNROLL_4
    for (int s = 1; s < splits; s++) {
      float part[kRowTiles][4];
      GSD_UNROLL
      for (int j = 0; j < kRowTiles; j++) machine.collect(parts + s * kPart + 4 * kThreads * j, part[j]);
      GSD_UNROLL
      for (int j = 0; j < kRowTiles; j++) {
        GSD_UNROLL
        for (int i = 0; i < 4; i++) own[j][i] += part[j][i];
      }
    }
    return true;
  }
};

}  // namespace gsd
