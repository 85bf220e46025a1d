// One block of a RowsProduct: 64 or 128 outputs of up to 64 rows over one split of the inputs.
//
// Stages of 64 inputs travel to shared memory, weights and rows side by side; two or three are on their way while one
// is multiplied. Two warps share 32 outputs: each has half of every stage's inputs, which are added at the end. With more
// than one split, the last block to arrive at a tile adds the splits in order.
//
// The weights are the first operand of mma.m16n8k16, so that eight rows fill a tile. A thread's element e of it is
// output lane / 4 + 8 (e / 2), row 2 (lane % 4) + e % 2.
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
#include "rows_packed.h"

namespace gsd {

template <class Element, int kRows, int kOutputs = kTileOutputs, bool kPacked = false>
struct ProductBlock {
  static constexpr int kWarps = kOutputs / 16, kThreads = kLanes * kWarps;
  static constexpr int kStages = kRows == kMostTileRows ? 3 : 4;  // with 64 outputs 48 KiB, which need no opt-in
  static constexpr int kRowBytes = 2 * kTileInputs;
  static constexpr int kWeightBytes = kOutputs * kRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kRows * kRowBytes;
  static constexpr int kArenaBytes = kStages * kStageBytes;
  static constexpr int kRowTiles = kRows / 8;
  static constexpr int kHalf = kOutputs / 2;
  static constexpr int kChunks = kTileInputs / 8;          // of a row of a stage
  static constexpr int kRowsPerPass = kThreads / kChunks;  // that the block copies at once
  static constexpr int kPasses = 4;                        // over weights
  static_assert(kPasses * kRowsPerPass == kOutputs && kRows % kRowsPerPass == 0, "a copy is whole passes");
  static_assert(kRowTiles * kThreads * 16 <= kArenaBytes, "sums are exchanged there");

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

    float sums[2][kRowTiles][4] = {};  // of 16 outputs in both halves of the tile
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
        fetch_ahead(machine, a, (split * cut.output_blocks + output_block) * a.row_blocks() + row_block,
                    cut.splits * cut.output_blocks * a.row_blocks());
      }
      multiply(machine, sums, i % kStages);
    }

    float own[kRowTiles][4];
    machine.sync("stages read");
    add_halves(machine, sums, own);
    if (cut.splits > 1 && !add_splits(machine, a, cut, own, row_block, output_block, split)) return;
    finish(machine, a, weights, first_row, own);
  }

 private:
  // The outputs of a tile are two halves. Of gate and up each is one: a warp has the same outputs of both.
  struct Weights {
    const uint16_t* from[2];  // of this thread, in both halves, where they are copied
    RowsMatrix of[2];         // what both halves are of
    int matrix, first;        // the tile's first output in it
    int second;               // outputs from the first half to the second
    int outputs;
  };

  static GSD_HD int at(int row, int chunk) { return row * kRowBytes + (chunk ^ (row & 7)) * 16; }
  static GSD_HD int weights_at(int stage) { return stage * kStageBytes; }
  static GSD_HD int rows_at(int stage) { return stage * kStageBytes + kWeightBytes; }

  template <class Machine>
  static GSD_HD Weights weights_of(Machine& machine, const RowsProduct& a, int block) {
    const bool gate = a.end == RowsEnd::kGate;
    Weights w;
    w.matrix = 0, w.second = gate ? 0 : kHalf;
    w.of[0] = a.matrices[0];
    w.outputs = w.of[0].outputs;
    if (!gate) {
      GSD_UNROLL
      for (int i = 1; i < kMaxMatrices; i++) {  // no index into the arguments: that would be a copy on the stack
        const int before = (w.outputs + kOutputs - 1) / kOutputs;
        if (w.matrix != i - 1 || block < before || i >= a.count) continue;
        block -= before;
        w.matrix = i, w.of[0] = a.matrices[i], w.outputs = w.of[0].outputs;
      }
    }
    w.first = block * (gate ? kHalf : kOutputs);
    const int row = machine.thread() / kChunks;
    const int64_t start = static_cast<int64_t>(w.first + row) * a.inputs + machine.thread() % kChunks * 8;
    w.of[1] = gate ? a.matrices[1] : w.of[0];
    w.from[0] = w.of[0].weight + start;
    w.from[1] = gate ? w.of[1].weight + start : w.from[0] + static_cast<int64_t>(kHalf) * a.inputs;
    return w;
  }

  template <class Machine>
  static GSD_HD void fetch_weights(Machine& machine, const RowsProduct& a, const Weights& w, int stage, int to) {
    kPacked ? decode_weights(machine, a, w, stage, to) : copy_weights(machine, a, w, stage, to);
  }

  // This block's share of the next product's weights.
  template <class Machine>
  static GSD_HD void fetch_ahead(Machine& machine, const RowsProduct& a, int block, int blocks) {
    const int pieces = a.ahead.pieces();
    GSD_ROLLED
    for (int i = block * kThreads + machine.thread(); i < pieces; i += blocks * kThreads) {
      int size;
      const char* from = a.ahead.piece(i, size);
      machine.prefetch(from, size);
    }
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
      const bool there = inside && w.first + half * w.second + later + row < w.outputs;
      if (there) from = w.from[half] + static_cast<int64_t>(later) * a.inputs + stage * kTileInputs;
      machine.copy("weights", weights_at(to) + at(pass * kRowsPerPass + row, chunk), from, there);
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
    const int input = stage * kTileInputs + chunk * 8, output = w.first + half * w.second + machine.thread() / kChunks;
    with_format(m.kind, [&](auto format) {
      using Format = decltype(format);
      PackedEight eights[kPasses / 2] = {};
      GSD_UNROLL
      for (int pass = 0; pass < kPasses / 2; pass++) {
        const int n = output + pass * kRowsPerPass;
        if (input < a.inputs && n < w.outputs) eights[pass] = Format::load(m, a.inputs, n, input);
      }
      GSD_UNROLL
      for (int pass = 0; pass < kPasses / 2; pass++) {
        const bool there = input < a.inputs && output + pass * kRowsPerPass < w.outputs;
        const Chunk decoded = there ? chunk_of<Element, Format>(machine, eights[pass]) : Chunk{};
        machine.write(weights_at(to) + at(row + pass * kRowsPerPass, chunk), decoded);
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
      machine.copy("rows", rows_at(to) + at(row, chunk), from, there);
    }
  }

  // The warp's half of a stage: two steps of 16 inputs.
  template <class Machine>
  static GSD_HD void multiply(Machine& machine, float (&sums)[2][kRowTiles][4], int stage) {
    const int lane = machine.lane(), outputs = machine.warp() / 2 * 16, chunk = machine.warp() % 2 * (kChunks / 2);
    const int weights = weights_at(stage) + at(outputs + lane % 16, chunk + lane / 16);
    const int rows = rows_at(stage) + at(lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2);
    GSD_UNROLL
    for (int step = 0; step < kChunks / 4; step++) {
      const int weight_places[2] = {weights ^ 32 * step, (weights ^ 32 * step) + kHalf * kRowBytes};
      uint32_t left[2][4], right[kRowTiles / 2][4];
      machine.template load_matrices<false>("weights", left, weight_places);
      int row_places[kRowTiles / 2];
      GSD_UNROLL
      for (int i = 0; i < kRowTiles / 2; i++) row_places[i] = (rows ^ 32 * step) + 16 * i * kRowBytes;
      machine.template load_matrices<false>("rows", right, row_places);
      GSD_UNROLL
      for (int m = 0; m < 2; m++) machine.template multiply<Element>(sums[m], 0, left[m], right);
    }
  }

  // Both warps of a pair have sums of all of its elements. Each finishes half of them: of every eight rows, output
  // lane / 4 (+ 8 for the odd warp) in both halves of the tile, two rows of each.
  template <class Machine>
  static GSD_HD void add_halves(Machine& machine, const float (&sums)[2][kRowTiles][4], float (&own)[kRowTiles][4]) {
    const bool odd = machine.warp() % 2 != 0;
    const int thread = machine.thread();
    GSD_UNROLL
    for (int j = 0; j < kRowTiles; j++) {
      Chunk given;
      GSD_UNROLL
      for (int i = 0; i < 4; i++) {
        const float(&both)[4] = sums[i / 2][j];
        own[j][i] = odd ? both[2 + i % 2] : both[i % 2];
        given.words[i] = float_bits(odd ? both[i % 2] : both[2 + i % 2]);
      }
      machine.write((j * kThreads + (thread ^ kLanes)) * 16, given);
    }
    machine.sync("halves exchanged");
    GSD_UNROLL
    for (int j = 0; j < kRowTiles; j++) {
      const Chunk other = machine.read((j * kThreads + thread) * 16);
      GSD_UNROLL
      for (int i = 0; i < 4; i++) own[j][i] += float_from_bits(other.words[i]);
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
    const bool last = machine.thread() == 0 && machine.arrive(a.counters + tile, splits);
    if (!machine.any("last block known", last)) return false;
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

  template <class Machine>
  static GSD_HD void finish(Machine& machine, const RowsProduct& a, const Weights& w, int first_row,
                            const float (&own)[kRowTiles][4]) {
    const int warp = machine.warp(), lane = machine.lane(), row = first_row + 2 * (lane % 4);
    const int output = w.first + warp / 2 * 16 + warp % 2 * 8 + lane / 4;
    if (a.end == RowsEnd::kGate) {
      if (output < w.outputs) gate(machine, a, row, output, own);
      return;
    }
    const uint16_t* biases = a.matrices[0].bias;
    float* out = a.matrices[0].out;
    GSD_UNROLL
    for (int i = 1; i < kMaxMatrices; i++) {
      if (w.matrix == i) biases = a.matrices[i].bias, out = a.matrices[i].out;
    }
    GSD_UNROLL
    for (int m = 0; m < 2; m++) {
      const int n = output + m * kHalf;
      if (n >= w.outputs) continue;
      const float bias = biases != nullptr ? Element::widen(biases[n]) : 0.0f;
      if (a.end == RowsEnd::kRound) {
        GSD_UNROLL
        for (int j = 0; j < 2 * kRowTiles; j++) {
          const int later = 8 * (j / 2) + j % 2;
          if (row + later >= a.rows) continue;
          a.rounded[(row + later) * a.out_stride + n] =
              static_cast<uint16_t>(Element::pack(own[j / 2][2 * m + j % 2] + bias, 0.0f));
        }
        continue;
      }
      float* to = out + row * a.out_stride + n;
      float values[kRowTiles][2] = {};
      if (a.end == RowsEnd::kAdd) {  // all of them before the first is written, or each would wait for the one before
        GSD_UNROLL
        for (int j = 0; j < 2 * kRowTiles; j++) {
          const int later = 8 * (j / 2) + j % 2;
          if (row + later < a.rows) values[j / 2][j % 2] = to[later * a.out_stride];
        }
      }
      GSD_UNROLL
      for (int j = 0; j < 2 * kRowTiles; j++) {
        const int later = 8 * (j / 2) + j % 2;
        if (row + later < a.rows) to[later * a.out_stride] = values[j / 2][j % 2] + (own[j / 2][2 * m + j % 2] + bias);
      }
    }
  }

  // silu(gate) · up of one output, rounded.
  template <class Machine>
  static GSD_HD void gate(Machine& machine, const RowsProduct& a, int row, int output,
                          const float (&own)[kRowTiles][4]) {
    const uint16_t *gate_bias = a.matrices[0].bias, *up_bias = a.matrices[1].bias;
    const float to_gate = gate_bias != nullptr ? Element::widen(gate_bias[output]) : 0.0f;
    const float to_up = up_bias != nullptr ? Element::widen(up_bias[output]) : 0.0f;
    GSD_UNROLL
    for (int j = 0; j < 2 * kRowTiles; j++) {
      const int later = 8 * (j / 2) + j % 2;
      const float g = own[j / 2][j % 2] + to_gate, up = own[j / 2][2 + j % 2] + to_up;
      const float decay = machine.exp2((g < 0.0f ? g : -g) * kLog2E);  // at most 1, so nothing overflows
      const float value = g * machine.divide(g < 0.0f ? decay : 1.0f, 1.0f + decay) * up;
      if (row + later >= a.rows) continue;
      a.rounded[(row + later) * a.out_stride + output] =
          static_cast<uint16_t>(Element::pack(value, 0.0f));
    }
  }
};

}  // namespace gsd
