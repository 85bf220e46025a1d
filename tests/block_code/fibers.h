// A block's threads as fibers of one operating-system thread, which take turns where they wait. A barrier costs some
// nanoseconds instead of microseconds, so whole models run; sanitizers see nothing of it. Chosen by GSD_FIBERS.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace gsd {

class Fibers {
 public:
  static Fibers& here() {
    static Fibers fibers;
    return fibers;
  }

  void add(std::function<void()> body) { fibers.push_back(std::make_unique<Fiber>(std::move(body))); }

  // Until all have ended.
  void run() {
    if (fibers.empty()) return;
    left = fibers.size(), current = 0, idle = 0;
    if (_setjmp(outside) == 0) enter();
    fibers.clear();
  }

  // Lets the others go on. `progress`: whether the caller did anything since it last asked.
  void yield(bool progress) {
    idle = progress ? 0 : idle + 1;
    if (idle > 1000 * fibers.size()) {
      fprintf(stderr, "every thread waits for another\n");
      _Exit(4);
    }
    Fiber& own = *fibers[current];
    if (_setjmp(own.place) == 0) next();
  }

 private:
  static constexpr size_t kStackBytes = 256 * 1024;

  struct Fiber {
    std::function<void()> body;
    std::unique_ptr<char[]> stack{new char[kStackBytes]};
    ucontext_t begin{};
    jmp_buf place;
    bool begun = false, ended = false;

    explicit Fiber(std::function<void()> body) : body(std::move(body)) {}
  };

  [[noreturn]] void next() {
    do current = (current + 1) % fibers.size();
    while (fibers[current]->ended);
    enter();
  }

  [[noreturn]] void enter() {
    Fiber& fiber = *fibers[current];
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    getcontext(&fiber.begin);
    fiber.begin.uc_stack.ss_sp = fiber.stack.get();
    fiber.begin.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber.begin, &Fibers::body, 0);
    setcontext(&fiber.begin);
    abort();
  }

  static void body() {
    Fibers& all = here();
    Fiber& own = *all.fibers[all.current];
    own.body();
    own.ended = true, all.idle = 0;
    if (--all.left == 0) _longjmp(all.outside, 1);
    all.next();
  }

  std::vector<std::unique_ptr<Fiber>> fibers;
  size_t current = 0, left = 0, idle = 0;
  jmp_buf outside;
};

class Barrier {
 public:
  explicit Barrier(int threads) : threads(threads) {}
  Barrier(const Barrier&) = delete;

  void arrive_and_wait() {
    const int own = generation;
    if (++arrived == threads) {
      arrived = 0, generation++;
      return;
    }
    for (bool progress = true; generation == own; progress = false) Fibers::here().yield(progress);
  }

 private:
  int threads, arrived = 0, generation = 0;
};

// As std::thread, but nothing runs before the first join().
class Thread {
 public:
  explicit Thread(std::function<void()> body) { Fibers::here().add(std::move(body)); }
  void join() { Fibers::here().run(); }
};

}  // namespace gsd
