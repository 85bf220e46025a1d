// Sequences shared out among threads, each run by a group of one thread with an arena of its own.
#pragma once

#include <vector>

#include "../algorithms/group.h"
#include "../torch_ops/op.h"

namespace gsd {

template <class Sizes, class Args>
void run_some(const Call<Sizes, Args>& call, int64_t begin, int64_t end) {
  std::vector<uint64_t> arena((GroupWork<Args>::bytes(call.sizes) + 7) / 8);
  SerialGroup group;
  for (int64_t b = begin; b < end; b++) {
    GroupWork<Args>::run(group, call.args, call.sizes, narrow(b), reinterpret_cast<char*>(arena.data()));
  }
}

// One behind the other: where there is too little to do to wake another thread, or all add to one number.
inline constexpr struct InTurn {
  template <class Sizes, class Args>
  void operator()(const Call<Sizes, Args>& call) const {
    run_some(call, 0, call.batch);
  }
} run_in_turn;

// By threads that take at least so many. A sequence costs microseconds, so a few of them make a thread worth waking.
inline constexpr struct Shared {
  template <class Sizes, class Args>
  void operator()(const Call<Sizes, Args>& call, int64_t at_least = 8) const {
    torch::stable::parallel_for(0, call.batch, at_least,
                                [&](int64_t begin, int64_t end) { run_some(call, begin, end); });
  }
} run_sequences;

}  // namespace gsd
