#include "team.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace gsd {
namespace {

constexpr int kPatience = 2000;  // looks at what may change, some 50 µs, before the processor is offered to others

void wait_a_little(int& looks) {
  if (looks++ >= kPatience) return std::this_thread::yield();
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

}  // namespace

void Team::hand_out() {
  pieces_ = (n_ + piece_ - 1) / piece_;
  unfinished_.store(pieces_, std::memory_order_relaxed);
  for (int64_t thread = 0; thread < size(); thread++) {
    const int64_t count = first_piece(thread + 1) - first_piece(thread);
    queues_[static_cast<size_t>(thread)].word.store(static_cast<uint64_t>(count) << 32, std::memory_order_release);
  }
  take(0);
  for (int looks = 0; unfinished_.load(std::memory_order_acquire) > 0;) wait_a_little(looks);
  if (!failed_) return;
  has_failed_.clear();
  std::rethrow_exception(std::exchange(failed_, nullptr));
}

void Team::help(int64_t thread) {
  for (int looks = 0; !over_.load(std::memory_order_acquire);) {
    if (take(thread)) looks = 0;
    else wait_a_little(looks);
  }
}

// The thread's own pieces, then what others have left. Whether there was any.
bool Team::take(int64_t thread) {
  bool any = false;
  for (int64_t i = 0; i < size(); i++) {
    while (take_from(thread, (thread + i) % size())) any = true;
  }
  return any;
}

bool Team::take_from(int64_t thread, int64_t owner) {
  std::atomic<uint64_t>& word = queues_[static_cast<size_t>(owner)].word;
  const auto left = [](uint64_t seen) { return (seen & 0xFFFFFFFFu) < seen >> 32; };
  if (!left(word.load(std::memory_order_relaxed))) return false;
  const uint64_t taken = word.fetch_add(1, std::memory_order_acquire);
  if (!left(taken)) return false;
  // From here to its end this piece keeps the work from being replaced by the next.
  const int64_t begin = (first_piece(owner) + static_cast<int64_t>(taken & 0xFFFFFFFFu)) * piece_;
  try {
    work_(context_, thread, begin, std::min(n_, begin + piece_));
  } catch (...) {
    if (!has_failed_.test_and_set()) failed_ = std::current_exception();
  }
  unfinished_.fetch_sub(1, std::memory_order_release);
  return true;
}

}  // namespace gsd
