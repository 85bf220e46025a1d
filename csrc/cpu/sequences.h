// Sequences shared out among threads, each run by a group of one thread with an arena of its own.
#pragma once

#include <vector>

#include "../algorithms/group.h"
#include "../torch_ops/op.h"

namespace gsd {

template <class Call>
void run_some(const Call& call, int64_t begin, int64_t end) {
  using Work = GroupWork<std::decay_t<decltype(call.args)>>;
  std::vector<uint64_t> arena((Work::bytes(call.sizes) + 7) / 8);
  SerialGroup group;
  for (int64_t b = begin; b < end; b++) {
    Work::run(group, call.args.at(call.sizes, b), call.sizes, reinterpret_cast<char*>(arena.data()));
  }
}

// One behind the other: where there is too little to do to wake another thread, or all add to one number.
template <class Call>
void run_in_turn(const Call& call) {
  run_some(call, 0, call.batch);
}

// By threads that take at least so many.
template <class Call>
void run_by(int64_t at_least, const Call& call) {
  torch::stable::parallel_for(0, call.batch, at_least,
                              [&](int64_t begin, int64_t end) { run_some(call, begin, end); });
}

// A sequence costs microseconds, so a few of them make a thread worth waking.
template <class Call>
void run_sequences(const Call& call) {
  constexpr int64_t kSequencesPerThread = 8;
  run_by(kSequencesPerThread, call);
}

}  // namespace gsd
