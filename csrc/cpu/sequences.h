// Sequences shared out among threads, each run by a group of one thread with an arena of its own.
#pragma once

#include <vector>

#include "../torch_ops/common.h"

namespace gsd {

// A sequence costs microseconds, so a few of them make a thread worth waking.
constexpr int64_t kSequencesPerThread = 8;

template <class Work>  // Work(sequence, arena)
void for_each_sequence(int64_t batch, size_t arena_size, const Work& work) {
  torch::stable::parallel_for(0, batch, kSequencesPerThread, [&](int64_t begin, int64_t end) {
    std::vector<uint64_t> arena((arena_size + 7) / 8);
    for (int64_t b = begin; b < end; b++) work(b, reinterpret_cast<char*>(arena.data()));
  });
}

}  // namespace gsd
