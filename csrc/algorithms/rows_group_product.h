// One block of a RowsProduct of many rows: 128 outputs of 64, 128 or 256 rows, whose weights it reads once.
//
// Three groups of four warps. One thread of the first asks for stages of 64 inputs, boxes of weights and of rows, and is
// up to kStages ahead; the other two multiply, 64 outputs each, whose sums stay in registers. No barrier of the whole block
// stands between them: a stage has one barrier that says its boxes are there, and one that says it was multiplied.
//
// The bits are those of rows_product.h: a chain of instructions of 16 inputs a split, the splits added in their order. The
// splits of a tile are the blocks of a cluster. Each adds its share of the tile, from the others' shared memory. Without
// splits a block takes one tile after the other, and the stages of the next arrive while it writes.
//
// A thread has outputs lane / 4 and lane / 4 + 8 of the 16 of its warp. Of gate and up a warp's first eight are gates, the
// others the ups that go with them, so both are in one thread; therefore their boxes have eight outputs each.
//
// Written over a *warpgroup machine*, a warp machine (attention.h) that has besides:
//   init_barrier(b, arrivals), publish_barriers   barriers by phases, then known to those that bring boxes
//   expect(b, bytes), load_box(name, b, at, map, input, row)   an arrival that waits for so many bytes; a box of map 0
//                               (the rows) or 1 + i (matrix i), in rows of 128 bytes whose chunks are exchanged by the row's
//                               low bits; zeros outside. It arrives at any time, and its barrier counts the bytes
//   wait_barrier(name, b, parity), arrive_barrier(name, b)   until the phase of that parity is over; one arrival
//   multiply_begin, multiply_group<Element>(sums, weights, rows), multiply_commit, multiply_wait<n>(name)
//                               64 outputs × all rows × 16 inputs, read from shared memory at any time up to the wait
//                               that leaves at most n newer groups on their way
//   fewer_registers<n>, more_registers<n>, sync_consumers(name), cluster_rank, cluster_sync(name), read_cluster(block, at)
// CudaWarpgroupMachine (cuda/warpgroup_machine.h) is PTX of 9.0a; GroupMachine (tests/block_code) is fibers.
#pragma once

#include "rows_heads.h"

namespace gsd {

// Stages that lie in shared memory, 192 KiB of it.
constexpr int group_stages(int rows) { return rows == 256 ? 4 : rows == 128 ? 6 : 8; }

template <class Element, int kRows, int kStages = group_stages(kRows)>
struct GroupProduct {
  static constexpr int kOutputs = kWideOutputs, kConsumers = 2;
  static constexpr int kGroupThreads = 4 * kLanes, kThreads = (1 + kConsumers) * kGroupThreads;
  static constexpr int kRowBytes = 2 * kTileInputs;
  static constexpr int kWeightBytes = kOutputs * kRowBytes, kStageBytes = kWeightBytes + kRows * kRowBytes;
  static constexpr int kArenaBytes = kStages * kStageBytes;
  static constexpr int kBarriers = 2 * kStages;
  static constexpr int kRowTiles = kRows / 8, kPartTiles = 8;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(kGroupThreads * (kProducerRegisters + kConsumers * kConsumerRegisters) <= 65536, "of a multiprocessor");
  static_assert(kRowTiles * kConsumers * kGroupThreads * 16 <= kArenaBytes, "sums are exchanged there");

  // Whether a thread has outputs that go together, of boxes of eight in turn: gates and ups, or pairs that turn.
  static GSD_HD bool paired(const RowsProduct& a) { return a.end == RowsEnd::kGate || a.end == RowsEnd::kTurn; }

  // `block` of `blocks`: with splits, those of a tile lie side by side.
  template <class Machine>
  static GSD_HD void run(Machine& machine, const RowsProduct& a, const RowsCut& cut, int block, int blocks) {
    if (machine.thread() == 0) {
      GSD_ROLLED
      for (int stage = 0; stage < kStages; stage++) {
        machine.init_barrier(there(stage), 1);
        machine.init_barrier(free(stage), kConsumers * kGroupThreads / kLanes);
      }
      machine.publish_barriers("barriers");
    }
    machine.sync("barriers known");
    const Share share(a, cut, block, blocks);
    if (machine.warp() * kLanes < kGroupThreads) {
      machine.template fewer_registers<kProducerRegisters>();
      if (machine.thread() == 0) produce(machine, a, share);
      if (cut.splits > 1) {
        machine.cluster_sync("partial sums written");
        machine.cluster_sync("partial sums read");
      }
    } else {
      machine.template more_registers<kConsumerRegisters>();
      consume(machine, a, cut, share);
    }
  }

 private:
  // What a block works on: tiles first, first + step …, each over `stages` stages from `begin` on.
  struct Share {
    int first, step, tiles, begin, stages, row_blocks;

    GSD_HD Share(const RowsProduct& a, const RowsCut& cut, int block, int blocks) {
      const int split = block % cut.splits;
      row_blocks = (a.rows + kRows - 1) / kRows;
      first = block / cut.splits, step = blocks / cut.splits;
      tiles = (row_blocks * cut.output_blocks - first + step - 1) / step;
      begin = split * cut.split_stages, stages = min_int(cut.split_stages, cut.stages - begin);
    }
    // Row blocks vary fastest: the weights of a tile are in the second-level cache for the next.
    GSD_HD int first_row(int tile) const { return (first + tile * step) % row_blocks * kRows; }
    GSD_HD int output_block(int tile) const { return (first + tile * step) / row_blocks; }
  };

  static GSD_HD int there(int stage) { return stage; }
  static GSD_HD int free(int stage) { return kStages + stage; }
  static GSD_HD int weights_at(int stage) { return stage * kStageBytes; }
  static GSD_HD int rows_at(int stage) { return stage * kStageBytes + kWeightBytes; }

  template <class Machine>
  static GSD_HD void produce(Machine& machine, const RowsProduct& a, const Share& share) {
    const int total = share.tiles * share.stages, early = min_int(total, kStages);
    GSD_ROLLED
    for (int i = 0; i < early; i++) ask_weights(machine, a, share, i);  // which depend on no launch
    machine.await_previous("group's rows");
    machine.release_next();
    GSD_ROLLED
    for (int i = 0; i < early; i++) ask_rows(machine, share, i);
    GSD_ROLLED
    for (int i = early; i < total; i++) {
      machine.wait_barrier("stage free", free(i % kStages), (i / kStages - 1) & 1);
      ask_weights(machine, a, share, i);
      ask_rows(machine, share, i);
    }
  }

  // The first output of a tile's pair.
  static GSD_HD int first_of_pair(const RowsProduct& a, const RowsTile& tile, int pair) {
    if (a.end == RowsEnd::kGate) return tile.first + pair;
    const int half = a.turn.head_dim / 2;
    return tile.first + pair / half * 2 * half + pair % half;
  }

  template <class Machine>
  static GSD_HD void ask_weights(Machine& machine, const RowsProduct& a, const Share& share, int i) {
    const RowsTile tile(a, share.output_block(i / share.stages), kOutputs);
    const int stage = i % kStages, input = (share.begin + i % share.stages) * kTileInputs;
    machine.expect(there(stage), kStageBytes);
    if (paired(a)) {
      const bool gate = a.end == RowsEnd::kGate;
      GSD_ROLLED
      for (int eight = 0; eight < kOutputs / 8; eight++) {
        const int first = first_of_pair(a, tile, eight / 2 * 8), row = first + (gate ? 0 : eight % 2 * a.turn.head_dim / 2);
        machine.load_box("weights", there(stage), weights_at(stage) + eight * 8 * kRowBytes,
                         1 + (gate ? eight % 2 : tile.matrix), input, row);
      }
      return;
    }
    GSD_UNROLL
    for (int half = 0; half < 2; half++) {
      machine.load_box("weights", there(stage), weights_at(stage) + half * kOutputs / 2 * kRowBytes, 1 + tile.matrix, input,
                       tile.first + half * kOutputs / 2);
    }
  }

  template <class Machine>
  static GSD_HD void ask_rows(Machine& machine, const Share& share, int i) {
    const int stage = i % kStages, input = (share.begin + i % share.stages) * kTileInputs;
    machine.load_box("rows", there(stage), rows_at(stage), 0, input, share.first_row(i / share.stages));
  }

  template <class Machine>
  static GSD_HD void consume(Machine& machine, const RowsProduct& a, const RowsCut& cut, const Share& share) {
    const int consumer = machine.warp() * kLanes / kGroupThreads - 1, own = consumer * kOutputs / kConsumers * kRowBytes;
    machine.await_previous("group's sums");
    machine.release_next();
    int use = 0;
    GSD_ROLLED
    for (int tile = 0; tile < share.tiles; tile++) {
      float sums[kRowTiles][4];
      GSD_UNROLL_BY(kRowTiles)
      for (int j = 0; j < kRowTiles; j++) {
        GSD_UNROLL
        for (int i = 0; i < 4; i++) sums[j][i] = 0.0f;
      }
      GSD_ROLLED
      for (int i = 0; i < share.stages; i++, use++) {
        const int stage = use % kStages;
        machine.wait_barrier("stage there", there(stage), use / kStages & 1);
        machine.multiply_begin();
        GSD_UNROLL
        for (int step = 0; step < kTileInputs / 16; step++) {
          const int later = 32 * step;
          machine.template multiply_group<Element>(sums, weights_at(stage) + own + later, rows_at(stage) + later);
        }
        machine.multiply_commit();
        machine.template multiply_wait<1>("stage before multiplied");
        if (i > 0 && machine.lane() == 0) machine.arrive_barrier("stage before free", free((use - 1) % kStages));
      }
      machine.template multiply_wait<0>("all multiplied");
      if (machine.lane() == 0) machine.arrive_barrier("last stage free", free((use - 1) % kStages));
      if (cut.splits > 1) {
        add_splits(machine, a, cut, share, sums);
      } else {
        finish(machine, a, share, tile, sums);
      }
    }
  }

  // The outputs of a thread, see above, and the first of its rows.
  struct Place {
    RowsTile tile;
    int output, row;

    template <class Machine>
    GSD_HD Place(Machine& machine, const RowsProduct& a, const Share& share, int number)
        : tile(a, share.output_block(number), kOutputs) {
      const int warp = machine.warp() - kGroupThreads / kLanes, lane = machine.lane();
      output = paired(a) ? first_of_pair(a, tile, 8 * warp + lane / 4) : tile.first + 16 * warp + lane / 4;
      row = share.first_row(number) + 2 * (lane % 4);
    }
  };

  template <class Machine, int kTiles>
  static GSD_HD void end(Machine& machine, const RowsProduct& a, const Place& place, int later,
                         const float (&sums)[kTiles][4]) {
    if (a.end == RowsEnd::kTurn) {
      TurnedSums<Element, kTiles, 0>::finish(machine, a, place.tile, place.output, place.row + later, sums);
    } else {
      RowsSums<Element, kTiles>::finish(machine, a, place.tile, place.output, 8, place.row + later, sums);
    }
  }

  template <class Machine>
  static GSD_HD void finish(Machine& machine, const RowsProduct& a, const Share& share, int number,
                            const float (&sums)[kRowTiles][4]) {
    const Place place(machine, a, share, number);
    GSD_UNROLL_BY(kRowTiles / kPartTiles)
    for (int first = 0; first < kRowTiles; first += kPartTiles) {
      float part[kPartTiles][4];
      GSD_UNROLL
      for (int j = 0; j < kPartTiles; j++) {
        GSD_UNROLL
        for (int i = 0; i < 4; i++) part[j][i] = sums[first + j][i];
      }
      end(machine, a, place, 8 * first, part);
    }
  }

  template <class Machine>
  static GSD_HD void add_splits(Machine& machine, const RowsProduct& a, const RowsCut& cut, const Share& share,
                                const float (&sums)[kRowTiles][4]) {
    constexpr int kTileBytes = kConsumers * kGroupThreads * 16;
    const Place place(machine, a, share, 0);
    const int at = (machine.thread() - kGroupThreads) * 16;
    machine.sync_consumers("stages read");
    GSD_UNROLL_BY(kRowTiles)
    for (int j = 0; j < kRowTiles; j++) {
      Chunk own;
      GSD_UNROLL
      for (int i = 0; i < 4; i++) own.words[i] = float_bits(sums[j][i]);
      machine.write(j * kTileBytes + at, own);
    }
    machine.cluster_sync("partial sums written");
    GSD_ROLLED
    for (int j = machine.cluster_rank(); j < kRowTiles; j += cut.splits) {
      float sum[1][4];
      GSD_UNROLL_4
      for (int s = 0; s < cut.splits; s++) {
        const Chunk part = machine.read_cluster(s, j * kTileBytes + at);
        GSD_UNROLL
        for (int i = 0; i < 4; i++) {
          const float one = float_from_bits(part.words[i]);
          sum[0][i] = s == 0 ? one : sum[0][i] + one;
        }
      }
      end(machine, a, place, 8 * j, sum);
    }
    machine.cluster_sync("partial sums read");
  }
};

}  // namespace gsd
