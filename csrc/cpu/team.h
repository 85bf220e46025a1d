// The threads of one call, that share out one piece of work after another.
//
// They are torch's, asked for once a call instead of once a product. Work is cut into pieces that a thread takes when it
// is free: one that the system has given to another process delays nobody but for the piece it has begun.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <vector>

#include "../torch_ops/common.h"

namespace gsd {

class Team {
 public:
  // Calls body(team) on this thread, on which it shares out work; meanwhile the others help, unless `alone`.
  template <class Body>
  static void run(bool alone, const Body& body) {
    Team team(alone ? 1 : static_cast<int64_t>(torch::stable::get_num_threads()));
    if (team.size() == 1) return body(team);
    std::exception_ptr failed;
    torch::stable::parallel_for(0, team.size(), 1, [&](int64_t thread, int64_t) {
      if (thread > 0) return team.help(thread);
      try {
        body(team);
      } catch (...) {
        failed = std::current_exception();
      }
      team.over_.store(true, std::memory_order_release);
    });
    if (failed) std::rethrow_exception(failed);
  }

  int64_t size() const { return static_cast<int64_t>(queues_.size()); }

  // work(thread, begin, end) over 0 … n − 1, in pieces of `piece`; back when all of it is done.
  template <class Work>
  void share(int64_t n, int64_t piece, const Work& work) {
    if (n <= 0) return;
    if (size() == 1 || n <= piece) return work(0, 0, n);
    n_ = n, piece_ = piece, context_ = &work;
    work_ = [](const void* context, int64_t thread, int64_t begin, int64_t end) {
      (*static_cast<const Work*>(context))(thread, begin, end);
    };
    hand_out();
  }

 private:
  // Pieces that a thread takes first, one behind the other in memory: how many in the upper half of the word, and how
  // many are taken in the lower. So whoever adds one learns from the old value alone whether a piece is his.
  struct alignas(64) Queue {
    std::atomic<uint64_t> word{0};
  };

  explicit Team(int64_t threads) : queues_(static_cast<size_t>(threads)) {}

  int64_t first_piece(int64_t thread) const { return pieces_ * thread / size(); }
  void hand_out();
  void help(int64_t thread);
  bool take(int64_t thread);
  bool take_from(int64_t thread, int64_t owner);

  std::vector<Queue> queues_;
  int64_t n_ = 0, piece_ = 0, pieces_ = 0;
  const void* context_ = nullptr;
  void (*work_)(const void*, int64_t, int64_t, int64_t) = nullptr;
  alignas(64) std::atomic<int64_t> unfinished_{0};
  std::atomic<bool> over_{false};
  std::atomic_flag has_failed_ = ATOMIC_FLAG_INIT;
  std::exception_ptr failed_;
};

}  // namespace gsd
