// csrc/algorithms/learn.h, and recall and calibration of ngram.h, by one thread and by a block.
#pragma once

#include <random>
#include <vector>

#include "../../csrc/algorithms/learn.h"
#include "../../csrc/algorithms/ngram.h"
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
  Floats shares, counts, weights, hits, claimed, log_ratio, parts;
  Ints places;

  bool operator==(const Learned&) const = default;
};

// Few nodes and tokens, so that many are found and picked.
inline bool learning_agrees(int threads, const Faults& faults, std::mt19937& random) {
  constexpr int kBatch = 3, kPath = 9, kBranch = 3, kLevels = 4, kWidth = 5, kEntries = 4, kRanks = 6;
  constexpr int kNodes = kBatch * kPath, kCells = kEntries * kRanks, kAsked = kBatch * kWidth;
  const Ints nodes = drawn(random, kNodes, -2, 12), picked = drawn(random, kNodes, 0, 3);
  Ints ids[kLevels], tokens[kLevels], index[kLevels], first_tokens[kLevels];
  Floats log_probs[kLevels], first_log_probs[kLevels];
  LearnSizes sizes{kBatch, kPath, kBranch, kLevels, kEntries, kRanks, {}};
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
    args.first_tokens[level] = level == 2 ? nullptr : first_tokens[level].data();
    args.first_log_probs[level] = level == 2 ? nullptr : first_log_probs[level].data();
  }
  const Floats start(kEntries, 0.5f), prior(kCells, 4.0f);
  Learned expected{Floats(kEntries, 5.0f), Floats(kEntries, 9.0f), Floats(kEntries, 0.6f), Floats(kCells, 5.0f),
                   Floats(kCells, 9.0f),   Floats(kCells, -7.0f),  Floats(kNodes, -7.0f),  Ints(kNodes, -7)};
  Learned got = expected;
  const auto with = [&](Learned& tables) {
    LearnArgs a = args;
    a.nodes = nodes.data();
    a.picked = picked.data();
    a.start = start.data();
    a.shares = tables.shares.data();
    a.counts = tables.counts.data();
    a.weights = tables.weights.data();
    a.prior = prior.data();
    a.hits = tables.hits.data();
    a.claimed = tables.claimed.data();
    a.log_ratio = tables.log_ratio.data();
    a.places = tables.places.data();
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

// A table filled from a tree's rows, then asked about nodes of a graph.
inline bool recollections_agree(int threads, const Faults& faults, std::mt19937& random) {
  constexpr int kNodes = 12;
  const NgramSizes s{32, 4, 3, 1 + static_cast<int>(random() % 90), 8, 3};
  Ints parents(static_cast<size_t>(s.rows), -1), depths(parents.size(), 0);
  for (size_t row = 1; row < parents.size(); row++) {
    parents[row] = static_cast<int32_t>(random() % row);
    depths[row] = depths[parents[row]] + 1;
  }
  const Ints rows = drawn(random, s.rows, 0, 2), tail = drawn(random, s.context, 0, 2);
  const Ints num_rows = drawn(random, 1, 1, s.rows), tokens = drawn(random, s.rows * s.branch, -1, 90);
  const Floats log_probs = drawn_floats(random, s.rows * s.branch);
  struct Table {
    std::vector<int64_t> keys = std::vector<int64_t>(32, 0);
    Ints tokens = Ints(32 * 3, -1);
    Floats log_probs = Floats(32 * 3, 0.0f);
    bool operator==(const Table&) const = default;
  } expected, got;
  const auto filled = [&](Table& t) {
    const NgramTree tree{rows.data(), parents.data(), depths.data(), num_rows.data(), tail.data()};
    return NgramInsertArgs{{t.keys.data(), t.tokens.data(), t.log_probs.data()}, nullptr, tokens.data(),
                           log_probs.data(), nullptr, tree};
  };
  std::vector<char> serial_arena(NgramArena::bytes(s)), block_arena(NgramArena::bytes(s));
  SerialGroup serial;
  insert_rows(serial, filled(expected), s, serial_arena.data());
  run_block(threads, faults, [&](FiberGroup& group) { insert_rows(group, filled(got), s, block_arena.data()); });
  if (!(expected == got)) return false;

  const Ints graph_tokens = drawn(random, kNodes, 0, 2), contexts = drawn(random, kNodes * s.context, 0, 2);
  const Ints graph_depths = drawn(random, kNodes, 0, 5), nodes = drawn(random, s.rows, -1, kNodes - 1);
  const Ints first{17}, sequence{3};
  const int64_t seed = static_cast<int64_t>(random());
  const bool noisy = random() % 2 == 0;
  struct Answers {
    Ints tokens, matched;
    Floats log_probs;
    bool operator==(const Answers&) const = default;
  } answers{Ints(tokens.size(), -7), Ints(nodes.size(), -7), Floats(tokens.size(), -7.0f)}, block_answers = answers;
  const auto asked = [&](Answers& a) {
    return NgramRecallArgs{{expected.keys.data(), expected.tokens.data(), expected.log_probs.data()},
                           graph_tokens.data(), contexts.data(), graph_depths.data(), nodes.data(),
                           noisy ? first.data() : nullptr, noisy ? &seed : nullptr,
                           noisy ? sequence.data() : nullptr, a.tokens.data(), a.log_probs.data(), a.matched.data(),
                           kNodes, 2};
  };
  recall_nodes(serial, asked(answers), s);
  run_block(threads, faults, [&](FiberGroup& group) { recall_nodes(group, asked(block_answers), s); });
  return answers == block_answers;
}

}  // namespace gsd
