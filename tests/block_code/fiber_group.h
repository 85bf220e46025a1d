// One CUDA thread block as T fibers, so that sanitizers see what the block code does.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../../csrc/algorithms/group.h"
#include "fibers.h"

namespace gsd {

// The fault that a test plants, to see that it is caught: a kind, and the name in the source of what it is about.
struct Fault {
  const char *kind = "", *name = "";
};
inline Fault planted;

inline bool faulty(const char* kind, const char* name) {
  return strcmp(kind, planted.kind) == 0 && strcmp(name, planted.name) == 0;
}

// Two in turn. For ThreadSanitizer a thread that wakes late comes after all that others did before they arrived at the
// same barrier once more, which would order what a dropped barrier leaves unordered.
struct Barriers {
  Barrier each[2];

  explicit Barriers(int threads) : each{Barrier(threads), Barrier(threads)} {}
};

struct FiberBlock {
  int threads;
  Barriers barriers;
  std::vector<std::atomic<const char*>> waiting_at;

  explicit FiberBlock(int threads) : threads(threads), barriers(threads), waiting_at(threads) {}
};

struct FiberGroup {
  FiberBlock* block;
  int thread;
  mutable int turn = 0;

  int rank() const { return thread; }
  int size() const { return block->threads; }

  void sync(const char* name) const {
    if (faulty("drop", name)) return;
#ifdef GSD_CHECK_DIVERGENCE
    // Not in the ThreadSanitizer build: a second barrier would order what the first one must.
    block->waiting_at[thread].store(name, std::memory_order_relaxed);
    wait();
    const char* other = block->waiting_at[(thread + 1) % block->threads].load(std::memory_order_relaxed);
    if (strcmp(other, name) != 0) {
      fprintf(stderr, "divergent barrier: %s and %s\n", name, other);
      _Exit(4);
    }
#endif
    wait();
  }

  void wait() const { block->barriers.each[turn ^= 1].arrive_and_wait(); }

  // Before it anything may have happened.
  void atomic_or(uint32_t* word, uint32_t bits) const {
    Fibers::here().yield(true);
    if (faulty("plain", "atomic_or")) {
      *word |= bits;
    } else {
      __atomic_fetch_or(word, bits, __ATOMIC_RELAXED);
    }
  }

  int32_t atomic_add(int32_t* counter, int32_t value) const {
    Fibers::here().yield(true);
    if (faulty("plain", "atomic_add")) return (*counter += value) - value;
    return __atomic_fetch_add(counter, value, __ATOMIC_RELAXED);
  }

  void atomic_add64(uint64_t* counter, uint64_t value) const {
    Fibers::here().yield(true);
    if (faulty("plain", "atomic_add64")) {
      *counter += value;
    } else {
      __atomic_fetch_add(counter, value, __ATOMIC_RELAXED);
    }
  }
};

// Runs body(group) on every thread of the block.
template <class Body>
void run_block(int threads, const Body& body) {
  FiberBlock block(threads);
  Fibers::here().run(threads, [&](int t) {
    FiberGroup group{&block, t};
    body(group);
  });
}

}  // namespace gsd
