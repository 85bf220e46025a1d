// The warpgroup machine of csrc/algorithms/rows_group_product.h as fibers: one a thread, and one for everything that the
// hardware does beside them: what brings boxes, and each group's tensor cores. Those take what they were asked for at a
// time that is drawn, in the order that the PTX ISA promises and no better:
//   mbarrier    phases of arrivals and bytes; whoever waits for a phase sees what came before its arrivals;
//   TMA         a box's place is poisoned from the moment it is asked for, the box comes later, in any order among boxes;
//   wgmma       operands are read, and sums changed, at any time up to the wait that names their group;
//   clusters    blocks run together; their shared memory is gone when they have ended;
//   proxies     a barrier that was not published is not known to those who bring boxes.
// ThreadSanitizer takes every one of these for a thread, and orders two by nothing but these rules.
#pragma once

#include <memory>

#include "../../csrc/cuda/rows_boxes.h"
#include "fiber_machine.h"

namespace gsd {

constexpr int kUnpublished = 8, kUnfenced = 9, kMisused = 10;

// Numbers for delays and for what comes first.
GSD_UNSEEN inline uint32_t drawn_delay() {
  static uint32_t state = 0x9E3779B9u;
  state ^= state << 13, state ^= state >> 17, state ^= state << 5;
  return state;
}

class PhaseBarrier {
 public:
  GSD_UNSEEN void init(int arrivals) { expected = left = arrivals, published = false, phase = 0, bytes = 0; }
  GSD_UNSEEN void publish() { published = expected > 0; }
  GSD_UNSEEN void check(const char* name) const {
    if (!published) stop(kUnpublished, "a barrier that is not known there", name);
  }
  GSD_UNSEEN void expect(int more) { bytes += more, arrive(); }
  GSD_UNSEEN void arrive() {
    release(&seen[phase & 1]);
    if (--left < 0) stop(kMisused, "more arrivals than expected", "a barrier");
    settle();
  }
  GSD_UNSEEN void came(int of) { release(&seen[phase & 1]), bytes -= of, settle(); }
  GSD_UNSEEN void wait(int parity) {
    if (expected == 0) stop(kMisused, "a barrier that is not there yet", "a wait");
    for (bool progress = true; (phase & 1) == parity; progress = false) Fibers::here().yield(progress);
    acquire(&seen[parity]);
  }

 private:
  GSD_UNSEEN void settle() {
    if (left == 0 && bytes == 0) phase++, left = expected;
  }
  int expected = 0, left = 0, bytes = 0, phase = 0;
  bool published = false;
  char seen[2];
};

struct GroupBlock {
  static constexpr int kGroups = 3, kGroupThreads = 4 * kLanes, kThreads = kGroups * kGroupThreads, kMost = 64;

  struct Box {
    const RowsBoxes* of;
    int barrier, at, corner[RowsBoxes::kDimensions];

    int bytes() const { return static_cast<int>(2 * of->box[0] * of->box[1] * of->box[2] * of->box[3] * of->box[4]); }
  };
  struct Multiply {
    int posted = 0, weights = 0, rows = 0, tiles = 0;
    bool half = false;
    std::array<float*, kGroupThreads> sums;
  };
  struct Group {  // its tensor core
    std::array<Multiply, kMost> asked;  // in turn
    int64_t done = 0;
    char posted, finished[kMost];
  };

  std::vector<char> arena;
  std::vector<PhaseBarrier> barriers;
  std::array<RowsBoxes, 1 + kMaxMatrices> sources;
  Barriers all{kThreads}, consumers{kThreads - kGroupThreads};
  Barriers* cluster = nullptr;
  std::vector<std::unique_ptr<GroupBlock>>* blocks = nullptr;
  int rank = 0, running = kThreads;
  Previous* previous = nullptr;
  bool awaited = false, clustered = true;
  std::atomic<bool> voted = false;
  std::vector<Box> boxes;
  char asked;
  std::array<Group, kGroups> groups;

  GroupBlock(size_t bytes, int barriers) : arena(bytes, static_cast<char>(0xA5)), barriers(static_cast<size_t>(barriers)) {}

  // What brings boxes, until the block's threads have ended.
  void bring_boxes() {
    for (bool waiting = true; waiting;) {
      Box box;
      {
        Hidden hidden;
        waiting = running > 0 || !boxes.empty();
        if (boxes.empty() || drawn_delay() % 3 == 0) {
          Fibers::here().yield(!boxes.empty());
          continue;
        }
        const size_t one = drawn_delay() % boxes.size();
        box = boxes[one];
        boxes.erase(boxes.begin() + static_cast<std::ptrdiff_t>(one));
      }
      acquire(&asked);
      barriers[static_cast<size_t>(box.barrier)].check("a box");
      bring(box);
      barriers[static_cast<size_t>(box.barrier)].came(box.bytes());
    }
  }

  void multiply(int number) {
    Group& group = groups[static_cast<size_t>(number)];
    for (bool waiting = true; waiting;) {
      Multiply* next = nullptr;
      int64_t turn = 0;
      {
        Hidden hidden;
        turn = group.done;
        next = &group.asked[static_cast<size_t>(turn % kMost)];
        waiting = running > 0;
        if (next->posted < kGroupThreads || drawn_delay() % 4 == 0) {
          Fibers::here().yield(next->posted == kGroupThreads);
          continue;
        }
      }
      acquire(&group.posted);
      next->half ? multiply<Half>(*next) : multiply<Bfloat16>(*next);
      release(&group.finished[turn % kMost]);
      Hidden hidden;
      next->posted = 0;
      group.done++;
    }
  }

 private:
  void bring(const Box& box) {
    const RowsBoxes& of = *box.of;
    for (int n = 0; n < box.bytes() / 2; n++) {
      uint64_t rest = static_cast<uint64_t>(n), from = 0;
      bool inside = true;
      for (uint32_t d = 0; d < of.kDimensions; d++) {
        const uint64_t place = static_cast<uint64_t>(box.corner[d]) + rest % of.box[d];
        inside &= place < of.sizes[d], from += place * (d == 0 ? 2 : of.bytes[d - 1]), rest /= of.box[d];
      }
      const uint16_t value = inside ? *reinterpret_cast<const uint16_t*>(reinterpret_cast<uintptr_t>(of.from) + from) : 0;
      memcpy(&arena[static_cast<size_t>(exchanged(box.at + 2 * n))], &value, 2);
    }
  }

  // Chunks of 16 bytes are exchanged by the three bits above the row's 128 bytes, wherever it lies.
  static int exchanged(int at) { return at ^ (at >> 7 & 7) << 4; }

  // Number k of a row of an operand: its address is counted on from the first row's, and exchanged as a whole.
  template <class Element>
  std::vector<Factor> operand(int at, int rows) const {
    std::vector<Factor> found;
    for (int r = 0; r < rows; r++) {
      for (int k = 0; k < 16; k++) {
        uint16_t bits;
        memcpy(&bits, &arena[static_cast<size_t>(exchanged(at + 128 * r + 2 * k))], 2);
        found.push_back(factor<Element>(bits));
      }
    }
    return found;
  }

  template <class Element>
  void multiply(const Multiply& m) const {
    const std::vector<Factor> weights = operand<Element>(m.weights, 64), rows = operand<Element>(m.rows, 8 * m.tiles);
    for (int thread = 0; thread < kGroupThreads; thread++) {
      const int lane = thread % kLanes, first = thread / kLanes * 16 + lane / 4;
      for (int e = 0; e < 4 * m.tiles; e++) {
        const int output = first + 8 * (e % 4 / 2), row = 8 * (e / 4) + 2 * (lane % 4) + e % 2;
        const Factor *a[16], *b[16];
        for (int k = 0; k < 16; k++) a[k] = &weights[16 * output + k], b[k] = &rows[16 * row + k];
        float& sum = m.sums[static_cast<size_t>(thread)][e];
        sum = dot_add(sum, a, b);
      }
    }
  }
};

class GroupMachine : public FiberValues {
 public:
  GroupMachine(GroupBlock* block, int number) : memory(block->arena.data()), block(block), number(number) {}

  char* const memory;

  int thread() const { return number; }
  int lane() const { return number % kLanes; }
  int warp() const { return number / kLanes; }

  void sync(const char* name) const { meet(name, block->all); }
  void sync_consumers(const char* name) const { meet(name, block->consumers); }
  void cluster_sync(const char* name) const { meet(name, *block->cluster); }
  bool any(const char* name, bool predicate) const {  // once a block
    if (predicate) block->voted.store(true, std::memory_order_relaxed);
    meet(name, block->all);
    return block->voted.load(std::memory_order_relaxed);
  }
  int cluster_blocks() const { return block->clustered ? static_cast<int>(block->blocks->size()) : 1; }
  float* cluster_memory(int other) const {
    return reinterpret_cast<float*>((*block->blocks)[static_cast<size_t>(other)]->arena.data());
  }

  void init_barrier(int b, int arrivals) const {
    Fibers::here().yield(true);
    barrier(b).init(arrivals);
  }
  void publish_barriers(const char* name) const {
    if (faulty("no-publish", name)) return;
    for (PhaseBarrier& each : block->barriers) each.publish();
  }
  void expect(int b, int bytes) const { barrier(b).expect(bytes); }
  void arrive_barrier(const char* name, int b) const {
    delay();
    if (!faulty("no-arrival", name)) barrier(b).arrive();
  }
  void wait_barrier(const char* name, int b, int parity) const {
    delay();
    if (faulty("parity", name)) parity ^= 1;
    if (!faulty("no-wait", name)) barrier(b).wait(parity);
  }
  void prefetch_map(int) const {}
  void prefetch(const void*, int) const {}
  void load_box(const char* name, int b, int at, int map, int input, int row, int eight, int head) const {
    const GroupBlock::Box box{&block->sources[static_cast<size_t>(map)], b, at, {input, row, 0, eight, head}};
    if (at % 1024 != 0 || input % 8 != 0) stop(kMisused, "misaligned box", name);
    for (const uint64_t bytes : box.of->bytes) {
      if (bytes == 0 || bytes % 16 != 0) stop(kMisused, "a map that no driver makes", name);
    }
    memset(&block->arena[static_cast<size_t>(at)], 0xA5, static_cast<size_t>(box.bytes()));
    release(&block->asked);
    Hidden hidden;
    block->boxes.push_back(box);
  }

  void multiply_begin() { begun = true; }
  template <class Element, int kTiles>
  void multiply_group(float (&sums)[kTiles][4], int weights, int rows) {
    delay();
    if (!begun) stop(kUnfenced, "sums that no fence orders", "wgmma");
    release(&group().posted);
    Hidden hidden;
    GroupBlock::Multiply& m = group().asked[static_cast<size_t>(posted % GroupBlock::kMost)];
    if (posted - group().done >= GroupBlock::kMost) stop(kMisused, "too many on their way", "wgmma");
    if (m.posted > 0 && (m.weights != weights || m.rows != rows)) stop(kDivergent, "divergent threads", "wgmma");
    m.weights = weights, m.rows = rows, m.tiles = kTiles, m.half = std::is_same_v<Element, Half>;
    m.sums[static_cast<size_t>(number % GroupBlock::kGroupThreads)] = &sums[0][0];
    m.posted++, posted++;
  }
  void multiply_commit() {
    begun = false;
    committed.push_back(posted);
  }
  template <int kNewer>
  void multiply_wait(const char* name) {
    delay();
    if (faulty("no-multiply-wait", name) || committed.size() <= kNewer) return;
    const int64_t until = committed[committed.size() - 1 - kNewer];
    wait_done(until);
    if (until > 0) acquire(&group().finished[(until - 1) % GroupBlock::kMost]);
  }

  template <int kCount>
  void fewer_registers() const {}
  template <int kCount>
  void more_registers() const {}

  void await_previous(const char* name) {
    set_awaited();
    Previous* const previous = block->previous;
    if (faulty("no-await", name)) return;
    delay();
    awaited = true;
    if (!previous->done.exchange(true, std::memory_order_relaxed)) previous->write(), release(previous);
    acquire(previous);
  }
  // Not before the one before is over: the next would have to wait for more than this one.
  void release_next() const {
    if (!awaited) stop(kMisused, "released before it waited", "a launch");
  }

 private:
  PhaseBarrier& barrier(int b) const { return block->barriers[static_cast<size_t>(b)]; }
  GroupBlock::Group& group() const { return block->groups[static_cast<size_t>(number / GroupBlock::kGroupThreads)]; }
  GSD_UNSEEN void wait_done(int64_t until) const {
    for (bool progress = true; group().done < until; progress = false) Fibers::here().yield(progress);
  }
  GSD_UNSEEN void set_awaited() const { block->awaited = true; }
  GSD_UNSEEN static void delay() {
    if (drawn_delay() % 8 == 0) Fibers::here().yield(true);
  }
  void meet(const char* name, Barriers& of) const {
    if (faulty("drop", name)) return;
    int& turn = &of == &block->all ? turns[0] : &of == &block->consumers ? turns[1] : turns[2];
    of.each[turn ^= 1].arrive_and_wait();
  }

  GroupBlock* block;
  int number;
  bool begun = false, awaited = false;
  int64_t posted = 0;
  std::vector<int64_t> committed;
  mutable int turns[3] = {};
};

// A product's launch: its cut, its blocks, and where boxes come from.
struct GroupLaunch {
  RowsCut cut;
  int blocks;
  std::array<RowsBoxes, 1 + kMaxMatrices> sources{};

  GroupLaunch(const RowsProduct& a, int outputs, int rows, int multiprocessors) : cut(a, outputs) {
    const int tiles = cut.output_blocks * ((a.rows + rows - 1) / rows);
    blocks = cut.splits > 1 ? tiles * cut.splits : min_int(tiles, multiprocessors);
    sources[0] = RowsBoxes::rows(a.x, a.inputs, a.rows, rows);
    for (int i = 0; i < (a.end == RowsEnd::kGate ? 1 : a.count); i++) sources[1 + i] = RowsBoxes::weights(a, i);
  }
};

// Runs body(machine, b) for the blocks 0 … blocks − 1, so many together, which are a cluster or not.
template <class Body>
void run_clusters(int blocks, int cluster, bool clustered, size_t arena_bytes, int barriers,
                  const std::array<RowsBoxes, 1 + kMaxMatrices>& sources, Previous& previous, const Body& body) {
  constexpr int kFibers = GroupBlock::kThreads + GroupBlock::kGroups;
  for (int first = 0; first < blocks; first += cluster) {
    Barriers together(cluster * GroupBlock::kThreads);
    std::vector<std::unique_ptr<GroupBlock>> places;
    for (int i = 0; i < cluster; i++) {
      places.push_back(std::make_unique<GroupBlock>(arena_bytes, barriers));
      GroupBlock& block = *places.back();
      block.sources = sources, block.previous = &previous;
      block.cluster = &together, block.blocks = &places, block.rank = i;
      block.clustered = clustered && cluster > 1;
    }
    Fibers::here().run(cluster * kFibers, [&](int i) {
      GroupBlock& block = *places[static_cast<size_t>(i / kFibers)];
      const int number = i % kFibers;
      if (number == GroupBlock::kThreads) return block.bring_boxes();
      if (number > GroupBlock::kThreads) return block.multiply(number - GroupBlock::kThreads);
      {
        GroupMachine machine(&block, number);
        if (!(faulty("early-end", "block") && first == 0 && block.rank == 0)) body(machine, first + block.rank);
      }
      Hidden hidden;
      if (--block.running > 0) return;
      std::fill(block.arena.begin(), block.arena.end(), static_cast<char>(0xA5));
      // Where blocks end that did not wait, the launch after may begin before the one before is over.
      if (!block.awaited) stop(kNotAwaited, "a block ended without waiting for the launch before", "the end");
    });
  }
}

}  // namespace gsd
