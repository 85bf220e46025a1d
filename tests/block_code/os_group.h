// One CUDA thread block as T operating-system threads, so that sanitizers see what the block code does.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "../../csrc/algorithms/group.h"
#if defined(GSD_FIBERS)
#include "fibers.h"
#endif

namespace gsd {

// Faults that a test injects, to see that they are caught.
struct Faults {
  const char* dropped_barrier = "";  // a name passed to sync()
  const char* plain_atomic = "";     // "atomic_or", "atomic_add" or "atomic_add64"
};

#if !defined(GSD_FIBERS)
using Thread = std::thread;

// Its threads sleep; those of std::barrier ask for the processor again and again, which takes more of it than the work.
class Barrier {
 public:
  explicit Barrier(int threads) { pthread_barrier_init(&barrier, nullptr, static_cast<unsigned>(threads)); }
  ~Barrier() { pthread_barrier_destroy(&barrier); }
  Barrier(const Barrier&) = delete;

  void arrive_and_wait() { pthread_barrier_wait(&barrier); }

 private:
  pthread_barrier_t barrier;
};
#endif

// Two in turn. For ThreadSanitizer a thread that wakes late comes after all that others did before they arrived at the
// same barrier once more, which would order what a dropped barrier leaves unordered.
struct Barriers {
  Barrier each[2];

  explicit Barriers(int threads) : each{Barrier(threads), Barrier(threads)} {}
};

struct OsBlock {
  int threads;
  Faults faults;
  Barriers barriers;
  std::vector<std::atomic<const char*>> waiting_at;

  OsBlock(int threads, Faults faults) : threads(threads), faults(faults), barriers(threads), waiting_at(threads) {}
};

struct OsGroup {
  OsBlock* block;
  int thread;
  mutable int turn = 0;

  int rank() const { return thread; }
  int size() const { return block->threads; }

  void sync(const char* name) const {
    if (strcmp(name, block->faults.dropped_barrier) == 0) return;
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

// Threads that run one body after another: to make them takes longer than most bodies, under ThreadSanitizer above all.
class Crew {
 public:
  explicit Crew(int threads) : begin(threads + 1), end(threads + 1) {
    for (int t = 0; t < threads; t++) {
      running.emplace_back([this, t] {
        for (;;) {
          begin.arrive_and_wait();
          if (!work) return;
          work(t);
          end.arrive_and_wait();
        }
      });
    }
  }
  ~Crew() { start({}), join(); }

  void run(std::function<void(int)> body) {
    start(std::move(body));
    end.arrive_and_wait();
  }

 private:
  void start(std::function<void(int)> body) {
    work = std::move(body);
    begin.arrive_and_wait();
  }
  void join() {
    for (std::thread& thread : running) thread.join();
  }

  Barrier begin, end;
  std::function<void(int)> work;
  std::vector<std::thread> running;
};

// Of all blocks: those of a program have one size.
inline Crew& crew_of(int threads) {
  static Crew crew(threads);
  return crew;
}

// Runs body(group) on every thread of the block.
template <class Body>
void run_block(int threads, const Faults& faults, const Body& body) {
  OsBlock block(threads, faults);
  crew_of(threads).run([&](int t) {
    OsGroup group{&block, t};
    body(group);
  });
}

}  // namespace gsd
