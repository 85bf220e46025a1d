// A block's threads as fibers of one operating-system thread, which take turns where they wait, in an order drawn anew
// for every block. A barrier costs some nanoseconds instead of microseconds. ThreadSanitizer takes each for a thread, and
// orders two of them by nothing but what barriers say: it sees every race, whatever the turns were.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "../../csrc/algorithms/group.h"

#if defined(__SANITIZE_THREAD__)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#endif

namespace gsd {

// Of what changes stacks or decides who runs: no part of what is looked at.
#define GSD_UNSEEN __attribute__((no_sanitize("thread", "address", "undefined")))

// To ThreadSanitizer, all that was done before a release at an address comes before what follows an acquire there.
inline void acquire([[maybe_unused]] void* at) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(at);
#endif
}
inline void release([[maybe_unused]] void* at) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(at);
#endif
}

class Fibers {
 public:
  static Fibers& here() {
    static Fibers fibers;
    return fibers;
  }

  // Runs body(0) … body(count - 1) until all have ended.
  void run(int count, std::function<void(int)> body) {
    while (static_cast<int>(all.size()) < count) all.push_back(std::make_unique<Fiber>());
    std::vector<Fiber*> order;
    for (int i = 0; i < count; i++) order.push_back(all[static_cast<size_t>(i)].get()), order.back()->number = i;
    std::shuffle(order.begin(), order.end(), random);
    for (size_t i = 0; i < order.size(); i++) order[i]->next = order[(i + 1) % order.size()];
    work = std::move(body);
    release(this);
    if (count > 0) start(order.back(), count);
    acquire(&left);
  }

  // Lets the others go on. `progress`: whether the caller did anything since it last asked.
  GSD_UNSEEN void yield(bool progress) {
    idle = progress ? 0 : idle + 1;
    if (idle > 2 * left) {
      fprintf(stderr, "every thread waits for another\n");
      _Exit(4);
    }
    Fiber* const own = current;
    previous = own, current = own->next;
    if (current == own) return;
    if (__builtin_setjmp(own->place) == 0) enter();
  }

 private:
  static constexpr size_t kStackBytes = 256 * 1024;

  struct Fiber {
    std::unique_ptr<char[]> stack{new char[kStackBytes]};
    ucontext_t begin{};
    void* place[5];
    bool begun = false;
    int number = 0;
    Fiber* next = nullptr;  // of those that have not ended
#if defined(__SANITIZE_THREAD__)
    void* seen = __tsan_create_fiber(0);
    ~Fiber() { __tsan_destroy_fiber(seen); }
#endif
  };

  GSD_UNSEEN __attribute__((noinline)) void start(Fiber* last, int count) {
#if defined(__SANITIZE_THREAD__)
    outside_seen = __tsan_get_current_fiber();
#endif
    left = count, idle = 0, previous = last, current = last->next;
    if (__builtin_setjmp(outside) == 0) enter();
  }

  [[noreturn]] GSD_UNSEEN __attribute__((noinline)) void enter() {
    Fiber* const fiber = current;
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(fiber->seen, 1);  // 1: which orders nothing
#endif
    if (fiber->begun) __builtin_longjmp(fiber->place, 1);
    fiber->begun = true;
    getcontext(&fiber->begin);
    fiber->begin.uc_stack.ss_sp = fiber->stack.get();
    fiber->begin.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber->begin, &Fibers::main, 0);
    setcontext(&fiber->begin);
    abort();
  }

  [[noreturn]] GSD_UNSEEN __attribute__((noinline)) void leave() {
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(outside_seen, 1);
#endif
    __builtin_longjmp(outside, 1);
  }

  GSD_UNSEEN static void main() {
    Fibers& fibers = here();
    for (;;) {
      Fiber* const own = fibers.current;
      acquire(&fibers);
      fibers.work(own->number);
      release(&fibers.left);
      fibers.end(own);
    }
  }

  // Until there is new work.
  GSD_UNSEEN __attribute__((noinline)) void end(Fiber* own) {
    idle = 0, previous->next = current = own->next;
    if (__builtin_setjmp(own->place) != 0) return;
    if (--left == 0) leave();
    enter();
  }

  std::vector<std::unique_ptr<Fiber>> all;
  std::function<void(int)> work;
  std::mt19937 random{1};
  Fiber *previous = nullptr, *current = nullptr;
  int left = 0, idle = 0;
  void* outside[5];
#if defined(__SANITIZE_THREAD__)
  void* outside_seen = nullptr;
#endif
};

class Barrier {
 public:
  explicit Barrier(int threads) : threads(threads) {}
  Barrier(const Barrier&) = delete;

  GSD_UNSEEN void arrive_and_wait() {
    release(this);
    const int own = generation;
    if (++arrived == threads) {
      arrived = 0, generation++;
    } else {
      for (bool progress = true; generation == own; progress = false) Fibers::here().yield(progress);
    }
    acquire(this);
  }

 private:
  int threads, arrived = 0, generation = 0;
};

// One CUDA thread block as fibers, so that sanitizers see what the block code does.

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
