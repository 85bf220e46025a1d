// One block of a RowsProduct of many rows: 128 outputs of 64, 128 or 256 rows, whose weights it reads once.
//
// Three groups of four warps (warpgroups). One thread of the first, the producer, asks for stages of 64 inputs (issues TMA
// loads): a box (TMA tile) of weights and one of rows, up to kStages ahead. The other two, the consumers, multiply 64 outputs
// each (wgmma), whose sums stay in registers. No barrier of the whole block stands between them: a stage has one that says
// that its boxes are there (full barrier), and one that it was multiplied (empty barrier).
//
// The bits are those of rows_product.h: a chain of instructions of 16 inputs a split, the splits added in their order
// (split-K without atomics). Where the GPU holds all blocks of a launch as clusters, the splits of a tile are one, and each
// block adds its share of the tile from the others' shared memory (DSMEM). Elsewhere the last of a tile's blocks to arrive
// adds them in memory, as in rows_product.h. Without splits a block takes one tile after the other (persistent kernel), and
// the stages of the next arrive while it writes (epilogue).
//
// A thread has outputs lane / 4 and lane / 4 + 8 of the 16 of its warp. Of gate and up a warp's first eight are one, the
// others what goes with them, so both are in one thread; the two halves of a head (RoPE) likewise. The maps
// of boxes (cuda/rows_boxes.h) interleave them on the way to shared memory.
//
// Written over a *warpgroup machine*, a warp machine (attention.h) that has besides:
//   init_barrier(b, arrivals), publish_barriers   barriers by phases (mbarrier), then known to those that bring boxes
//   expect(b, bytes), load_box(name, b, at, map, input, row, eight, head)   an arrival that waits for so many bytes; a
//                               box of map 0 (the rows) or 1 + i (matrix i), in rows of 128 bytes whose chunks are exchanged by the row's
//                               low bits (128B swizzle); zeros outside. It arrives at any time, and its barrier counts the
//                               bytes. prefetch_map(map) has the map (tensor map, descriptor) at hand
//   wait_barrier(name, b, parity), arrive_barrier(name, b)   until the phase of that parity is over; one arrival
//   multiply_begin, multiply_group<Element>(sums, weights, rows), multiply_commit, multiply_wait<n>(name)
//                               64 outputs × all rows × 16 inputs, read from shared memory at any time up to the wait
//                               that leaves at most n newer groups on their way
//   fewer_registers<n>, more_registers<n>, sync_consumers(name)
//   cluster_blocks (1: no cluster), cluster_sync(name), cluster_memory(block)   shared memory of one of them
// CudaWarpgroupMachine (cuda/warpgroup_machine.h) is PTX of 9.0a; GroupMachine (tests/block_code) is fibers.
#pragma once

#include "rows_heads.h"

namespace gsd {

// Stages that lie in shared memory, 192 KiB of it.
constexpr int group_stages(int rows) { return rows == 256 ? 4 : rows == 128 ? 6 : 8; }

// Whether outputs have two parts, of which boxes have eight in turn: gates and ups, or halves of heads that turn.
GSD_HD bool outputs_paired(const RowsProduct& a) { return a.end == RowsEnd::kGate || a.end == RowsEnd::kTurn; }
// Whether ups come first: what lies first in memory does, since a map's strides are positive.
GSD_HD bool ups_first(const RowsProduct& a) {
  return a.end == RowsEnd::kGate && a.matrices[1].weight < a.matrices[0].weight;
}

template <class Element, int kRows, int kStages = group_stages(kRows)>
struct GroupProduct {
  static constexpr int kOutputs = kWideOutputs, kConsumers = 2;
  static constexpr int kGroupThreads = 4 * kLanes, kThreads = (1 + kConsumers) * kGroupThreads;
  static constexpr int kRowBytes = 2 * kTileInputs;
  static constexpr int kWeightBytes = kOutputs * kRowBytes, kStageBytes = kWeightBytes + kRows * kRowBytes;
  static constexpr int kArenaBytes = kStages * kStageBytes;
  static constexpr int kBarriers = 2 * kStages;
  static constexpr int kRowTiles = kRows / 8, kPartTiles = 4;  // of eight rows; so many leave together
  static constexpr int kTileFloats = kConsumers * kGroupThreads * 4;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(kGroupThreads * (kProducerRegisters + kConsumers * kConsumerRegisters) <= 65536, "of a multiprocessor");
  static_assert(4 * kRowTiles * kTileFloats <= kArenaBytes && kRowTiles % kPartTiles == 0, "sums are exchanged there");

  // `block` of `blocks`: with splits, those of a tile lie side by side.
  template <class Machine>
  static GSD_HD void run(Machine& machine, const RowsProduct& a, const RowsCut& cut, int block, int blocks) {
    if (machine.thread() == 0) {
      GSD_ROLLED
      for (int stage = 0; stage < kStages; stage++) {
        machine.init_barrier(stage, 1);
        machine.init_barrier(free(stage), kConsumers * kGroupThreads / kLanes);
      }
      machine.publish_barriers("barriers");
    }
    machine.sync("barriers known");
    const Share share(a, cut, block, blocks);
    if (machine.warp() * kLanes < kGroupThreads) {
      machine.template fewer_registers<kProducerRegisters>();
      if (machine.thread() == 0) produce(machine, a, share);
      if (machine.warp() == 0) fetch_ahead(machine, a.ahead, block * kLanes + machine.lane(), blocks * kLanes);
      if (cut.splits == 1) return;
      if (machine.cluster_blocks() > 1) {
        machine.cluster_sync("partial sums written");
        machine.cluster_sync("partial sums read");
      } else {
        machine.sync("partial sums published");
        machine.any("last split known", false);
      }
    } else {
      machine.template more_registers<kConsumerRegisters>();
      consume(machine, a, cut, share);
    }
  }

 private:
  // What a block works on: tiles, each over `stages` stages from `begin` on. Row blocks vary fastest: the weights of a tile
  // are in the second-level cache for the next.
  struct Share {
    int tiles, begin, stages, split;
    int row_blocks, row_block, output_block, more_rows, more_outputs;  // of the tile, and from it to the next

    GSD_HD Share(const RowsProduct& a, const RowsCut& cut, int block, int blocks) : split(block % cut.splits) {
      const int first = block / cut.splits, step = blocks / cut.splits;
      row_blocks = (a.rows + kRows - 1) / kRows;
      tiles = (row_blocks * cut.output_blocks - first + step - 1) / step;
      begin = split * cut.split_stages, stages = min_int(cut.split_stages, cut.stages - begin);
      row_block = first % row_blocks, output_block = first / row_blocks;
      more_rows = step % row_blocks, more_outputs = step / row_blocks;
    }
    GSD_HD void next() {
      row_block += more_rows, output_block += more_outputs;
      if (row_block >= row_blocks) row_block -= row_blocks, output_block++;
    }
  };

  // Stages are used in turn. Who waits for the phase before the first does not wait.
  struct Ring {
    int stage = 0, parity = 0;

    GSD_HD void next() {
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
  };

  // A stage's first barrier (full) has its number.
  static GSD_HD int free(int stage) { return kStages + stage; }
  static GSD_HD int weights_at(int stage) { return stage * kStageBytes; }
  static GSD_HD int rows_at(int stage) { return stage * kStageBytes + kWeightBytes; }

  // Asks for the boxes of a tile, stage by stage.
  struct Boxes {
    int map, row, output, eight, head;

    GSD_HD Boxes(const RowsProduct& a, const Share& share) : row(share.row_block * kRows) {
      const RowsTile tile(a, share.output_block, kOutputs);
      map = 1 + tile.matrix;
      output = outputs_paired(a) ? 0 : tile.first;
      eight = a.end == RowsEnd::kGate ? tile.first / 8 : 0;
      head = a.end == RowsEnd::kTurn ? tile.first >> a.turn.head_bits() : 0;
    }
    template <class Machine>
    GSD_HD void ask_weights(Machine& machine, int stage, int input) const {
      machine.expect(stage, kStageBytes);
      machine.load_box("weights", stage, weights_at(stage), map, input, output, eight, head);
    }
    template <class Machine>
    GSD_HD void ask_rows(Machine& machine, int stage, int input) const {
      machine.load_box("rows", stage, rows_at(stage), 0, input, row, 0, 0);
    }
  };

  template <class Machine>
  static GSD_HD void produce(Machine& machine, const RowsProduct& a, Share share) {
    Boxes boxes(a, share);
    machine.prefetch_map(boxes.map);
    machine.prefetch_map(0);
    const int early = min_int(share.stages, kStages), first = share.begin * kTileInputs;
    GSD_ROLLED
    for (int i = 0; i < early; i++) boxes.ask_weights(machine, i, first + i * kTileInputs);  // which depend on no launch
    machine.await_previous("group's rows");
    machine.release_next();
    Ring ring;
    GSD_ROLLED
    for (int i = 0; i < early; i++, ring.next()) boxes.ask_rows(machine, i, first + i * kTileInputs);
    int input = first + early * kTileInputs;
    const int end = first + share.stages * kTileInputs;
    for (int tile = 1;; tile++) {
      GSD_ROLLED
      for (; input < end; input += kTileInputs, ring.next()) {
        machine.wait_barrier("stage free", free(ring.stage), ring.parity ^ 1);
        boxes.ask_weights(machine, ring.stage, input);
        boxes.ask_rows(machine, ring.stage, input);
      }
      if (tile == share.tiles) return;
      share.next();
      boxes = Boxes(a, share), input = first;
    }
  }

  template <class Machine>
  static GSD_HD void consume(Machine& machine, const RowsProduct& a, const RowsCut& cut, Share share) {
    const int consumer = machine.warp() * kLanes / kGroupThreads - 1, own = consumer * kOutputs / kConsumers * kRowBytes;
    machine.await_previous("group's sums");
    machine.release_next();
    Ring ring;
    GSD_ROLLED
    for (int tile = 0; tile < share.tiles; tile++, share.next()) {
      float sums[kRowTiles][4] = {};
      int before = 0;
      GSD_ROLLED
      for (int i = 0; i < share.stages; i++, ring.next()) {
        machine.wait_barrier("stage there", ring.stage, ring.parity);
        machine.multiply_begin();
        GSD_UNROLL
        for (int step = 0; step < kTileInputs / 16; step++) {
          const int later = 32 * step, weights = weights_at(ring.stage) + own + later, rows = rows_at(ring.stage) + later;
          machine.template multiply_group<Element>(sums, weights, rows);
        }
        machine.multiply_commit();
        machine.template multiply_wait<1>("stage before multiplied");
        if (i > 0 && machine.lane() == 0) machine.arrive_barrier("stage before free", free(before));
        before = ring.stage;
      }
      machine.template multiply_wait<0>("all multiplied");
      if (machine.lane() == 0) machine.arrive_barrier("last stage free", free(before));
      finish(machine, a, cut, share, sums);
    }
  }

  // Adds splits, and puts the sums where they belong.
  template <class Machine>
  static GSD_HD void finish(Machine& machine, const RowsProduct& a, const RowsCut& cut, const Share& share,
                            float (&sums)[kRowTiles][4]) {
    const int thread = machine.thread() - kGroupThreads, lane = machine.lane(), first_row = share.row_block * kRows;
    int first = 0, last = min_int((a.rows - first_row + 7) / 8, kRowTiles);
    const bool cluster = machine.cluster_blocks() > 1;
    const auto sums_of = [&](int split) {
      const int64_t tile = int64_t{share.output_block * cut.splits + split} * ((a.rows + 7) / 8) + first_row / 8;
      return (cluster ? machine.cluster_memory(split) : a.partials + tile * kTileFloats) + 4 * thread;
    };
    if (cut.splits > 1) {
      if (cluster) machine.sync_consumers("stages read");
      float* const own = cluster ? reinterpret_cast<float*>(machine.memory) + 4 * thread : sums_of(share.split);
      GSD_UNROLL_BY(kRowTiles)
      for (int j = 0; j < kRowTiles; j++) {
        if (j < last) machine.publish(own + j * kTileFloats, sums[j]);
      }
    }
    if (cluster) {
      machine.cluster_sync("partial sums written");
      const int each = (last + cut.splits - 1) / cut.splits;
      first = share.split * each, last = min_int(first + each, last);
    } else if (cut.splits > 1) {
      machine.sync("partial sums published");
      int32_t* const counter = a.counters + share.output_block * share.row_blocks + share.row_block;
      if (!machine.any("last split known", thread == 0 && machine.arrive(counter, cut.splits))) return;
    }
    const RowsTile tile(a, share.output_block, kOutputs);
    const int pair = (outputs_paired(a) ? 8 : 16) * (thread / kLanes) + lane / 4, rows = min_int(a.rows, first_row + 8 * last);
    const int output = tile.first + pair + (a.end == RowsEnd::kTurn ? pair & -(a.turn.head_dim / 2) : 0);
    GSD_ROLLED
    for (int j = first; j < last; j += kPartTiles) {
      float part[kPartTiles][4];
      if (cut.splits == 1) {  // from the first registers, into which the others move up
        GSD_UNROLL_BY(kRowTiles)
        for (int t = 0; t < kRowTiles; t++) {
          GSD_UNROLL
          for (int i = 0; i < 4; i++) {
            if (t < kPartTiles) part[t][i] = sums[t][i];
            if (t + kPartTiles < kRowTiles) sums[t][i] = sums[t + kPartTiles][i];
          }
        }
      }
      GSD_UNROLL_BY(2)
      for (int s = 0; s < cut.splits && cut.splits > 1; s++) {
        GSD_UNROLL
        for (int t = 0; t < kPartTiles; t++) {
          if (j + t >= last) continue;
          float one[4];
          machine.load(sums_of(s) + (j + t) * kTileFloats, one);
          GSD_UNROLL
          for (int i = 0; i < 4; i++) part[t][i] = s == 0 ? one[i] : part[t][i] + one[i];
        }
      }
      const int row = first_row + 8 * j + 2 * (lane % 4);
      if (a.end == RowsEnd::kTurn) {
        TurnedSums<Element, kPartTiles, 0>::finish(machine, a, tile, output, row, rows, part);
        continue;
      }
      GSD_UNROLL
      for (int i = 0; i < 2 * kPartTiles; i++) {
        float &one = part[i / 2][i % 2], &other = part[i / 2][2 + i % 2];
        const float kept = one;
        if (ups_first(a)) one = other, other = kept;
      }
      RowsSums<Element, kPartTiles>::finish(machine, a, tile, output, 8, row, rows, part);
    }
    if (cluster) machine.cluster_sync("partial sums read");
  }
};

}  // namespace gsd
