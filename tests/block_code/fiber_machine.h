// The warp machine of csrc/algorithms/attention_tiles.h as fibers, one a lane. What the PTX ISA says of each instruction
// is done literally:
//   ldmatrix, mma   move and multiply by the documented fragment layouts; lanes get each other's operands, and the sum
//                   that tensor cores of 9.0 and newer make of them (dot_add), bit for bit;
//   cp.async        nothing arrives before wait_group says so, and from the copy on the old contents are gone; the source
//                   may not change on the way;
//   griddepcontrol  what the launch before writes is there from wait on and not earlier (Previous);
//   shuffles        every lane of the warp takes part, at the same place, or the run ends as divergent.
// Warp-wide instructions order no memory, so they are hidden from ThreadSanitizer: only the block's barriers count.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <functional>
#include <type_traits>

#include "../../csrc/algorithms/path_end.h"
#include "../../csrc/algorithms/rows_product.h"
#include "../../csrc/algorithms/rows_turn.h"
#include "fibers.h"

#if defined(__SANITIZE_THREAD__)
extern "C" {
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
void AnnotateIgnoreSyncBegin(const char*, int);
void AnnotateIgnoreSyncEnd(const char*, int);
}
#endif

namespace gsd {

// What a tensor core of compute capability 9.0 or newer makes of 16 products and a sum, as mma.m16n8k16 and as wgmma, by
// the model of MMA-Sim (arXiv 2511.10909, compared with the hardware there bit for bit): products exact, every term cut off
// 25 bits below the largest exponent among them, the terms added exactly, the sum rounded towards zero.
constexpr int kSumBits = 25, kNoExponent = -126;  // of a zero

struct Factor {
  float value;
  int exponent;  // of the significand as it is stored: that of subnormal numbers is the smallest one
};

template <class Element>
Factor factor(uint16_t bits) {
  const float value = Element::widen(bits);
  return {value, max_int(static_cast<int>(float_bits(value) >> 23 & 255) - 127, std::is_same_v<Element, Half> ? -14 : -126)};
}

// Of what makes every number of the tests' tensor cores and of a contract: optimised in every build.
#define GSD_ARITHMETIC __attribute__((optimize("O2"), no_sanitize("thread", "address", "undefined")))

GSD_ARITHMETIC inline float dot_add(
    float sum, const Factor* const (&a)[16], const Factor* const (&b)[16]) {
  double terms[17], plain = sum;
  terms[16] = sum;
  int highest = sum == 0.0f ? kNoExponent : static_cast<int>(__builtin_bit_cast(uint32_t, sum) >> 23 & 255) - 127;
  if (highest < -126) highest = -126;
  for (int k = 0; k < 16; k++) {
    terms[k] = static_cast<double>(a[k]->value) * b[k]->value;
    plain += terms[k];
    const int exponent = terms[k] == 0.0 ? kNoExponent : a[k]->exponent + b[k]->exponent;
    if (exponent > highest) highest = exponent;
  }
  if (!__builtin_isfinite(plain)) return plain == plain ? static_cast<float>(plain) : __builtin_bit_cast(float, 0x7FFFFFFFu);
  const auto power = [](int exponent) { return __builtin_bit_cast(double, static_cast<uint64_t>(exponent + 1023) << 52); };
  const double scale = power(kSumBits - highest);
  int64_t total = 0;
  for (const double term : terms) total += static_cast<int64_t>(term * scale);
  const double exact = static_cast<double>(total) * power(highest - kSumBits);
  const float nearest = static_cast<float>(exact);
  const double size = exact < 0 ? -exact : exact, got = nearest < 0 ? -nearest : nearest;
  if (got <= size || size >= 0x1p128) return nearest;
  return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, nearest) - 1);  // towards zero, from infinity too
}

// Accesses and synchronisation of its scope do not exist for ThreadSanitizer.
struct Hidden {
#if defined(__SANITIZE_THREAD__)
  Hidden() {
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Hidden() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
  }
#else
  Hidden() {}
#endif
};

constexpr int kWrong = 3, kDivergent = 4, kBankConflict = 5, kChangedSource = 6, kNotAwaited = 7;

// The launch before: writes when a block first waits for it.
struct Previous {
  std::atomic<bool> done = false;
  std::function<void()> write;
};

[[noreturn]] inline void stop(int status, const char* what, const char* where) {
  fprintf(stderr, "%s at %s\n", what, where);
  _Exit(status);
}

struct FiberWarp {
  struct Posted {
    const char* where;
    std::array<int, 4> at;
    Factor left[4][2], right[4][4][2];  // by register, the low half first
    float value;
    bool predicate;
  };
  Barrier barrier{kLanes};
  Barriers syncs{kLanes};  // which order memory
  Posted posted[2][kLanes];  // in turn: nobody is two instructions ahead of anybody
};

struct FiberMachineBlock {
  FiberBlock group;
  Previous* previous = nullptr;
  std::atomic<bool> awaited = false;  // by the block that runs
  std::vector<FiberWarp> warps;
  std::vector<char> arena;
  std::vector<char> votes[2];

  FiberMachineBlock(int warps, size_t arena_bytes) : group(kLanes * warps), warps(warps), arena(arena_bytes) {
    for (auto& v : votes) v.resize(kLanes * warps);
    poison();
  }
  void poison() { std::fill(arena.begin(), arena.end(), static_cast<char>(0xA5)); }
};

// What needs no other thread.
struct FiberValues {
  void publish(float* at, const float (&values)[4]) const { memcpy(at, values, sizeof values); }
  void collect(const float* at, float (&values)[4]) const { memcpy(values, at, sizeof values); }
  bool arrive(int32_t* counter, int blocks) const {
    Fibers::here().yield(true);
    if (__atomic_fetch_add(counter, 1, __ATOMIC_ACQ_REL) != blocks - 1) return false;
    __atomic_store_n(counter, 0, __ATOMIC_RELAXED);
    return true;
  }
  float exp2(float x) const { return std::exp2(x); }
  float log2(float x) const { return std::log2(x); }
  float divide(float a, float b) const { return a / b; }
  float inverse_root(float x) const { return 1.0f / std::sqrt(x); }
  float max(float a, float b) const { return std::fmax(a, b); }
  float times(float a, float b) const { return a * b; }
  float fma(float a, float b, float c) const { return std::fma(a, b, c); }
  void store(float* at, float first, float second) const { at[0] = first, at[1] = second; }
  template <size_t n>
  void load(const float* at, float (&values)[n]) const {
    memcpy(values, at, sizeof values);
  }
};

class FiberMachine : public FiberValues {
 public:
  FiberMachine(FiberMachineBlock* block, int thread) : block(block), group{&block->group, thread} {}

  int thread() const { return group.rank(); }
  int lane() const { return thread() % kLanes; }
  int warp() const { return thread() / kLanes; }

  void sync(const char* name) const { group.sync(name); }
  void sync_warp(const char* name) {
    if (!faulty("drop", name)) block->warps[warp()].syncs.each[sync_turn ^= 1].arrive_and_wait();
  }

  bool any(const char* name, bool predicate) {
    std::vector<char>& votes = block->votes[vote_turn];
    vote_turn ^= 1;
    {
      Hidden hidden;
      __atomic_store_n(&votes[thread()], predicate, __ATOMIC_RELAXED);
    }
    group.sync(name);
    Hidden hidden;
    bool found = false;
    for (char& vote : votes) found |= __atomic_load_n(&vote, __ATOMIC_RELAXED) != 0;
    return found;
  }

  void copy(const char* name, int at, const void* from, bool inside) {
    if (faulty("misplace-copy", name)) at ^= at >> 4 & 16;
    write(at, {{0xA5A5A5A5u, 0xA5A5A5A5u, 0xA5A5A5A5u, 0xA5A5A5A5u}});  // a memset is none to ThreadSanitizer
    waiting.push_back({at, inside ? from : nullptr, {}});
    if (inside) memcpy(&waiting.back().seen, from, sizeof(Chunk));
  }
  void commit() {
    groups.push_back(std::move(waiting));
    waiting.clear();
  }
  template <int kNewer>
  void wait(const char* name) {
    if (faulty("hurry", name)) return;
    while (groups.size() > kNewer) {
      for (const Copy& copy : groups.front()) {
        if (copy.from != nullptr) {
          if (memcmp(copy.from, &copy.seen, sizeof(Chunk)) != 0) stop(kChangedSource, "changed source", name);
          memcpy(shared(copy.at), copy.from, sizeof(Chunk));
        } else {
          write(copy.at, {});
        }
      }
      groups.pop_front();
    }
  }

  void await_previous(const char* name) const {
    Previous* const previous = block->previous;
    block->awaited.store(true, std::memory_order_relaxed);
    if (previous == nullptr || faulty("no-await", name)) return;
    if (!previous->done.exchange(true, std::memory_order_relaxed)) previous->write(), release(previous);
    acquire(previous);
  }
  void release_next() const {}
  void prefetch(const void*, int) const {}

  Chunk read(int at) const {
    Chunk chunk;
    memcpy(&chunk, shared(at), sizeof chunk);
    return chunk;
  }
  void write(int at, const Chunk& chunk) const { memcpy(shared(at), &chunk, sizeof chunk); }

  // Lane l gives the address of row l % 8 of matrix l / 8. Register i of lane l: row l / 4 of matrix i, elements
  // 2 (l % 4) and the next; transposed: column l / 4, rows 2 (l % 4) and the next.
  template <bool kTransposed, int kLoads>
  void load_matrices(const char* name, uint32_t (&matrices)[kLoads][4], const int (&at)[kLoads]) {
    int rows[kLoads][kLanes];
    exchange(name, [&](FiberWarp::Posted& mine) { std::copy(at, at + kLoads, mine.at.begin()); },
             [&](const FiberWarp::Posted* all) {
               for (int i = 0; i < kLoads; i++) {
                 for (int l = 0; l < kLanes; l++) rows[i][l] = all[l].at[i];
               }
             });
    for (int i = 0; i < kLoads; i++) {
      check_banks(name, rows[i]);
      for (int matrix = 0; matrix < 4; matrix++) {
        const int* row = rows[i] + 8 * matrix;
        const int own = lane() / 4, pair = 2 * (lane() % 4);
        const uint32_t first = kTransposed ? element(name, row[pair], own) : element(name, row[own], pair);
        const uint32_t second = kTransposed ? element(name, row[pair + 1], own) : element(name, row[own], pair + 1);
        matrices[i][matrix] = first | second << 16;
      }
    }
  }

  // mma.m16n8k16. First operand, row r and column c of 16 × 16: lane 4 (r % 8) + c % 8 / 2, register r / 8 + 2 (c / 8).
  // Second, row r and column c of 16 × 8: lane 4 c + r % 8 / 2, register r / 8. Even columns (rows) in the low half.
  template <class Element, int kTiles, int kLoads>
  void multiply(float (&sums)[kTiles][4], int first, const uint32_t (&left)[4], const uint32_t (&right)[kLoads][4]) {
    exchange("mma",
             [&](FiberWarp::Posted& mine) {
               widen<Element>(left, mine.left);
               for (int i = 0; i < kLoads; i++) widen<Element>(right[i], mine.right[i]);
             },
             [&](const FiberWarp::Posted* all) { add_products(sums + first, 2 * kLoads, lane(), all); });
  }

  float shuffle_xor(float value, int mask) { return shuffle(value, lane() ^ mask); }
  float shuffle(float value, int from) {
    float result = 0;
    exchange("shuffle", [&](FiberWarp::Posted& mine) { mine.value = value; },
             [&](const FiberWarp::Posted* all) { result = all[from].value; });
    return result;
  }
  uint32_t ballot(bool predicate) {
    uint32_t bits = 0;
    exchange("ballot", [&](FiberWarp::Posted& mine) { mine.predicate = predicate; },
             [&](const FiberWarp::Posted* all) {
               for (int l = 0; l < kLanes; l++) bits |= static_cast<uint32_t>(all[l].predicate) << l;
             });
    return bits;
  }

 private:
  GSD_ARITHMETIC static void add_products(float (*sums)[4], int tiles, int lane, const FiberWarp::Posted* all) {
    for (int j = 0; j < tiles; j++) {
      for (int e = 0; e < 4; e++) {
        const int row = lane / 4 + 8 * (e / 2), column = 2 * (lane % 4) + e % 2;
        const Factor *a[16], *b[16];
        for (int k = 0; k < 16; k++) {
          a[k] = &all[4 * (row % 8) + k % 8 / 2].left[row / 8 + 2 * (k / 8)][k % 2];
          b[k] = &all[4 * column + k % 8 / 2].right[j / 2][2 * (j % 2) + k / 8][k % 2];
        }
        sums[j][e] = dot_add(sums[j][e], a, b);
      }
    }
  }

  struct Copy {
    int at;
    const void* from;
    Chunk seen;
  };

  template <class Element>
  static void widen(const uint32_t (&words)[4], Factor (&values)[4][2]) {
    for (int i = 0; i < 4; i++) {
      values[i][0] = factor<Element>(static_cast<uint16_t>(words[i]));
      values[i][1] = factor<Element>(static_cast<uint16_t>(words[i] >> 16));
    }
  }

  char* shared(int at) const { return block->arena.data() + at; }

  uint32_t element(const char* name, int row, int index) const {
    if (faulty("misplace-load", name)) row ^= row >> 4 & 16;
    uint16_t bits;
    memcpy(&bits, shared(row + 2 * index), sizeof bits);
    return bits;
  }

  // The eight rows of a matrix are fetched together: 16 bytes from each eighth of the banks, or it takes longer.
  static void check_banks(const char* name, const int* rows) {
    for (int matrix = 0; matrix < 4; matrix++) {
      unsigned used = 0;
      for (int i = 0; i < 8; i++) {
        const int at = rows[8 * matrix + i];
        if (at % 16 != 0) stop(kBankConflict, "misaligned row", name);
        used |= 1u << at / 16 % 8;
      }
      if (used != 0xFF) stop(kBankConflict, "bank conflict", name);
    }
  }

  // Every lane fills its own record and then uses everybody's.
  template <class Fill, class Use>
  void exchange(const char* where, const Fill& fill, const Use& use) {
    Hidden hidden;
    FiberWarp& own = block->warps[warp()];
    FiberWarp::Posted* all = own.posted[turn];
    turn ^= 1;
    all[lane()].where = where;
    fill(all[lane()]);
    own.barrier.arrive_and_wait();
    if (strcmp(all[(lane() + 1) % kLanes].where, where) != 0) stop(kDivergent, "divergent lanes", where);
    use(all);
  }

  FiberMachineBlock* block;
  FiberGroup group;
  int turn = 0, vote_turn = 0, sync_turn = 0;
  std::vector<Copy> waiting;
  std::deque<std::vector<Copy>> groups;
};

// Runs body(machine, b) for the blocks 0 … blocks − 1, so many at a time: one of every `together`, one after the other.
template <class Body>
void run_grid(int warps, int blocks, size_t arena_bytes, const Body& body, int together = 1, Previous* previous = nullptr) {
  std::deque<FiberMachineBlock> places;
  for (int i = 0; i < together; i++) places.emplace_back(warps, arena_bytes).previous = previous;
  const int threads = kLanes * warps;
  Fibers::here().run(together * threads, [&](int i) {
    FiberMachineBlock& block = places[static_cast<size_t>(i / threads)];
    const int thread = i % threads;
    for (int b = i / threads; b < blocks; b += together) {
      FiberMachine machine(&block, thread);  // copies that nobody waited for end with their block
      body(machine, b);
      machine.sync("block done");
      if (thread == 0) block.poison();
      // Where blocks end that did not wait, the launch after may begin before the one before is over.
      if (thread == 0 && previous != nullptr && !block.awaited.exchange(false, std::memory_order_relaxed)) {
        stop(kNotAwaited, "a block ended without waiting for the launch before", "the end");
      }
      machine.sync("next block");
    }
  });
}

// The launches of csrc/cuda as grids of blocks: `run(warps, blocks, arena bytes, body)` runs body(machine, b) for each.

template <class Block, class Run>
void run_product(const RowsProduct& a, int outputs, const Run& run) {
  const RowsCut cut(a, outputs);
  const int rows = a.row_blocks(), tiles = rows * cut.output_blocks;
  run(Block::kWarps, tiles * cut.splits, Block::kArenaBytes, [&](FiberMachine& m, int b) {
    Block::run(m, a, cut, b % rows, b % tiles / rows, b / tiles);
  });
}

template <class Element, int kRows, class Run>
void run_product(const RowsProduct& a, bool wide, const Run& run) {
  if constexpr (kRows > 16) {
    if (wide) return run_product<ProductBlock<Element, kRows, kWideOutputs>>(a, kWideOutputs, run);
  }
  a.packed() ? run_product<ProductBlock<Element, kRows, kTileOutputs, true>>(a, kTileOutputs, run)
             : run_product<ProductBlock<Element, kRows>>(a, kTileOutputs, run);
}

// Blocks of 64 rows as wide as a launch would make them, or not: the bits may not tell.
template <class Element, class Run>
void run_product(const RowsProduct& a, bool wide, const Run& run) {
  const bool heads = a.wide_heads(), either = !a.packed() && a.end != RowsEnd::kTurn;
  switch (a.tile_rows()) {
    case 16:
      return run_product<Element, 16>(a, false, run);
    case 32:
      return run_product<Element, 32>(a, heads, run);
    default:
      return run_product<Element, kMostTileRows>(a, heads || (wide && either), run);
  }
}

template <class Element, class Run>
void run_turn(const RowsTurn& a, const Run& run) {
  const int heads = a.heads + 2 * a.kv_heads;
  run(1, a.batch * a.rows * heads, 0, [&](FiberMachine& m, int b) {
    a.head_dim == 64 ? turn_head<Element, 64>(m, a, b / heads, b % heads)
                     : turn_head<Element, 128>(m, a, b / heads, b % heads);
  });
}

template <class Element, int kHeadDim, int kWarps, class Run>
void run_prefix(const PathAttentionArgs& a, const PathAttentionSizes& s, const Run& run) {
  using Prefix = PathPrefix<Element, kHeadDim, kWarps>;
  const int heads = s.batch * s.kv_heads, rows = Prefix::Tiles::kRows, parts = (s.query_rows() + rows - 1) / rows;
  run(kWarps, parts * heads * s.splits(), Prefix::Tiles::kArenaBytes, [&](FiberMachine& m, int b) {
    Prefix::run(m, a, s, b % parts, b / parts % heads, b / parts / heads);
  });
}

template <class Element, int kHeadDim, class Run>
void run_prefix(const PathAttentionArgs& a, const PathAttentionSizes& s, const Run& run) {
  s.query_rows() <= 16 ? run_prefix<Element, kHeadDim, 1>(a, s, run) : run_prefix<Element, kHeadDim, 4>(a, s, run);
}

template <class Element, int kHeadDim, class Run>
void run_end(const PathAttentionArgs& a, const PathAttentionSizes& s, const Run& run) {
  using End = PathEnd<Element, kHeadDim>;
  const int blocks = End::blocks(s);
  run(End::kWarps, blocks * s.batch * s.kv_heads, End::kArenaBytes,
      [&](FiberMachine& m, int b) { End::run(m, a, s, b % blocks, b / blocks); });
}

}  // namespace gsd
