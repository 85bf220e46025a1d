// csrc/algorithms/learn.h by one thread and by a block.
#pragma once

#include <random>
#include <vector>

#include "../../csrc/algorithms/learn.h"
#include "fiber_group.h"
#include "step_rounds.h"

namespace gsd {

using Floats = std::vector<float>;

inline Floats drawn_floats(std::mt19937& random, int count) {
  Floats values(static_cast<size_t>(count));
  for (float& value : values) value = -0.25f * static_cast<float>(random() % 12);
  return values;
}

struct Learned {
  Floats shares, counts, weights, parts;
  Ints entry;

  bool operator==(const Learned&) const = default;
};

// Few nodes and tokens, so that many are found and picked.
inline bool learning_agrees(int threads, const Faults& faults, std::mt19937& random) {
  constexpr int kBatch = 3, kPath = 9, kBranch = 3, kLevels = 4, kWidth = 5, kEntries = 4;
  constexpr int kNodes = kBatch * kPath, kAsked = kBatch * kWidth;
  const Ints nodes = drawn(random, kNodes, -2, 12), picked = drawn(random, kNodes, 0, 3);
  Ints ids[kLevels], tokens[kLevels], index[kLevels], first_tokens[kLevels];
  Floats log_probs[kLevels], first_log_probs[kLevels];
  LearnSizes sizes{kBatch, kPath, kBranch, kLevels, kEntries, {}};
  LearnArgs args{};
  for (int level = 0; level < kLevels; level++) {
    ids[level] = drawn(random, kAsked, -1, 12);
    tokens[level] = drawn(random, kAsked * kBranch, 0, 3);
    index[level] = drawn(random, kAsked, 0, kEntries - 1);
    first_tokens[level] = drawn(random, kAsked * kBranch, 0, 3);
    log_probs[level] = drawn_floats(random, kAsked * kBranch);
    first_log_probs[level] = drawn_floats(random, kAsked * kBranch);
    sizes.widths[level] = kWidth;
    args.node_ids[level] = ids[level].data();
    args.tokens[level] = tokens[level].data();
    args.log_probs[level] = log_probs[level].data();
    args.index[level] = level == 1 ? nullptr : index[level].data();
    args.first_tokens[level] = first_tokens[level].data();
    args.first_log_probs[level] = first_log_probs[level].data();
  }
  const Floats start(kEntries, 0.5f);
  Learned expected{Floats(kEntries, 5.0f), Floats(kEntries, 9.0f), Floats(kEntries, 0.6f), Floats(kNodes, -7.0f),
                   Ints(kNodes, -7)};
  Learned got = expected;
  const auto with = [&](Learned& tables) {
    LearnArgs a = args;
    a.nodes = nodes.data();
    a.picked = picked.data();
    a.start = start.data();
    a.shares = tables.shares.data();
    a.counts = tables.counts.data();
    a.weights = tables.weights.data();
    a.entry = tables.entry.data();
    a.parts = tables.parts.data();
    a.prior_count = 8.0f;
    a.memory = 40.0f;
    return a;
  };
  SerialGroup serial;
  learn_all(serial, with(expected), sizes);
  run_block(threads, faults, [&](FiberGroup& group) { learn_all(group, with(got), sizes); });
  return expected == got;
}

}  // namespace gsd
