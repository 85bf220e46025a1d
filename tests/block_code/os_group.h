// One CUDA thread block as T operating-system threads, so that sanitizers see what the block code does.
#pragma once

#include <atomic>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "../../csrc/algorithms/group.h"

namespace gsd {

// Faults that a test injects, to see that they are caught.
struct Faults {
  const char* dropped_barrier = "";  // a name passed to sync()
  const char* plain_atomic = "";     // "atomic_or", "atomic_add" or "atomic_add64"
};

struct OsBlock {
  int threads;
  Faults faults;
  std::barrier<> barrier;
  std::vector<std::atomic<const char*>> waiting_at;

  OsBlock(int threads, Faults faults) : threads(threads), faults(faults), barrier(threads), waiting_at(threads) {}
};

struct OsGroup {
  OsBlock* block;
  int thread;

  int rank() const { return thread; }
  int size() const { return block->threads; }

  void sync(const char* name) const {
    if (strcmp(name, block->faults.dropped_barrier) == 0) return;
#ifdef GSD_CHECK_DIVERGENCE
    // Not in the ThreadSanitizer build: a second barrier would order what the first one must.
    block->waiting_at[thread].store(name, std::memory_order_relaxed);
    block->barrier.arrive_and_wait();
    const char* other = block->waiting_at[(thread + 1) % block->threads].load(std::memory_order_relaxed);
    if (strcmp(other, name) != 0) {
      fprintf(stderr, "divergent barrier: %s and %s\n", name, other);
      _Exit(4);
    }
#endif
    block->barrier.arrive_and_wait();
  }

  void atomic_or(uint32_t* word, uint32_t bits) const {
    if (strcmp(block->faults.plain_atomic, "atomic_or") == 0) {
      *word |= bits;
    } else {
      __atomic_fetch_or(word, bits, __ATOMIC_RELAXED);
    }
  }

  int32_t atomic_add(int32_t* counter, int32_t value) const {
    if (strcmp(block->faults.plain_atomic, "atomic_add") == 0) return (*counter += value) - value;
    return __atomic_fetch_add(counter, value, __ATOMIC_RELAXED);
  }

  void atomic_add64(uint64_t* counter, uint64_t value) const {
    if (strcmp(block->faults.plain_atomic, "atomic_add64") == 0) {
      *counter += value;
    } else {
      __atomic_fetch_add(counter, value, __ATOMIC_RELAXED);
    }
  }
};

// Runs body(group) on every thread of the block.
template <class Body>
void run_block(int threads, const Faults& faults, const Body& body) {
  OsBlock block(threads, faults);
  std::vector<std::thread> running;
  for (int t = 0; t < threads; t++) {
    running.emplace_back([&block, &body, t] {
      OsGroup group{&block, t};
      body(group);
    });
  }
  for (std::thread& thread : running) thread.join();
}

}  // namespace gsd
