// csrc/algorithms/history.h and recall_levels.h by one thread and by a block: a text that is followed, nodes that are
// asked about, levels that grow.
#pragma once

#include <random>
#include <vector>

#include "../../csrc/algorithms/recall_levels.h"
#include "fiber_group.h"
#include "learn_rounds.h"
#include "step_rounds.h"

namespace gsd {

// A text of few different tokens with its table, all that steps write.
struct Followed {
  static constexpr int kRoom = 300, kHashes = 16, kEntries = 64, kWays = 4, kBranch = 9, kRunnersUp = 8;

  Ints text = Ints(kRoom, -1), length{0}, heads = Ints(kHashes, 0), previous = Ints(kRoom, 0);
  std::vector<int64_t> keys = std::vector<int64_t>(kEntries, 0);
  Ints tokens = Ints(kEntries * kBranch, -1), runners = Ints(kRunnersUp, -1), emitted{1};
  Floats log_probs = Floats(kEntries * kBranch, 0.0f), runner_log_probs = Floats(kRunnersUp, -2.0f);

  NgramTable table() { return {keys.data(), tokens.data(), log_probs.data()}; }
  CopyIndex copies() { return {text.data(), length.data(), heads.data(), previous.data(), kRoom, kHashes}; }
  bool operator==(const Followed&) const = default;
};

struct Recalled {
  Ints tokens, matched;
  Floats log_probs;
  bool operator==(const Recalled&) const = default;
};

inline bool histories_agree(int threads, const Faults& faults, std::mt19937& random) {
  constexpr int kNodes = 12, kContextTokens = 8, kWanted = 5;
  const int vocab = 1 + static_cast<int>(random() % 5), rows = 1 + static_cast<int>(random() % 20);
  const NgramSizes s{Followed::kEntries, Followed::kWays, Followed::kBranch, rows, kContextTokens, 4};
  Followed expected, got;
  SerialGroup serial;
  const auto follow = [&](const Ints& added, const Ints& count, const NgramInsertArgs* seen, const Ints& path) {
    const auto args = [&](Followed& f) {
      FollowArgs a{{},          f.copies(),   f.runners.data(), f.runner_log_probs.data(), f.emitted.data(), added.data(),
                   count.data(), nullptr, Followed::kRunnersUp, static_cast<int>(added.size()), 1};
      if (seen != nullptr) a.seen = *seen, a.seen.table = f.table(), a.accepted_rows = path.data();
      return a;
    };
    const FollowArgs first = args(expected), second = args(got);
    std::vector<char> serial_arena(follow_bytes(first, s), '\xA5'), block_arena(serial_arena);
    follow_step(serial, first, s, serial_arena.data());
    run_block(threads, faults, [&](FiberGroup& group) { follow_step(group, second, s, block_arena.data()); });
    return expected == got;
  };
  if (!follow(drawn(random, 150, -1, vocab), drawn(random, 1, 130, 150), nullptr, {})) return false;
  Ints parents(static_cast<size_t>(rows), -1), depths(parents.size(), 0);
  for (size_t row = 1; row < parents.size(); row++) parents[row] = static_cast<int32_t>(random() % row);
  for (size_t row = 1; row < parents.size(); row++) depths[row] = depths[parents[row]] + 1;
  const Ints row_tokens = drawn(random, rows, 0, vocab), tail = drawn(random, kContextTokens, 0, vocab);
  const Ints num_rows{rows}, best = drawn(random, rows * s.branch, -1, vocab + 3), path = drawn(random, 1, 0, rows - 1);
  const Floats chances = drawn_floats(random, rows * s.branch);
  const NgramInsertArgs seen{{}, nullptr, best.data(), chances.data(), nullptr,
                             {row_tokens.data(), parents.data(), depths.data(), num_rows.data(), tail.data()}};
  for (int step = 0; step < 3; step++) {
    if (!follow(drawn(random, 9, 0, vocab), drawn(random, 1, 0, 9), &seen, path)) return false;
  }

  const Ints graph_tokens = drawn(random, kNodes, 0, vocab), contexts = drawn(random, kNodes * kContextTokens, 0, vocab);
  const Ints graph_depths = drawn(random, kNodes, 0, 5), nodes = drawn(random, rows, -1, kNodes - 1);
  Ints graph_parents = drawn(random, kNodes, -1, 1);
  graph_parents[0] = -1;
  graph_parents[1] = 0;
  std::vector<double> weights(kHistoryWeights);
  for (double& weight : weights) weight = 0.25 * static_cast<double>(random() % 9) - 1.0;
  const Ints first{17}, sequence{3};
  const int64_t seed = static_cast<int64_t>(random());
  const bool noisy = random() % 2 == 0, learned = random() % 2 == 0;
  Recalled answers{Ints(static_cast<size_t>(rows) * kWanted, -7), Ints(nodes.size(), -7),
                   Floats(static_cast<size_t>(rows) * kWanted, -7.0f)};
  Recalled block_answers = answers;
  const HistoryArgs known{expected.table(), learned ? expected.table() : NgramTable{}, expected.copies(),
                          expected.runners.data(), expected.runner_log_probs.data(), expected.emitted.data(),
                          weights.data(), graph_parents.data(), s, Followed::kRunnersUp};
  const auto asked = [&](Recalled& r) {
    return NgramRecallArgs{expected.table(), graph_tokens.data(), contexts.data(), graph_depths.data(), nodes.data(),
                           noisy ? first.data() : nullptr, noisy ? &seed : nullptr,
                           noisy ? sequence.data() : nullptr, r.tokens.data(), r.log_probs.data(), r.matched.data(),
                           kNodes, kWanted};
  };
  for (int row = 0; row < min_int(rows, 3); row++) {
    std::vector<char> serial_arena(HistoryArena::bytes(), '\xA5'), block_arena(serial_arena);
    recall_history(serial, asked(answers), known, s, row, 1, serial_arena.data());
    run_block(threads, faults, [&](FiberGroup& group) {
      recall_history(group, asked(block_answers), known, s, row, 1, block_arena.data());
    });
  }
  return answers == block_answers;
}

// A graph and what its levels found.
struct Grown {
  Ints token_ids, parents, depths, contexts, mask, edge_targets, counts{1, 0}, nodes, tokens, matched, next;
  Floats scores, edge_log_probs, log_probs;
  std::vector<char> expanded;

  explicit Grown(const LevelSizes& s)
      : token_ids(s.merge.capacity, 0),
        parents(token_ids.size(), -1),
        depths(token_ids.size(), 0),
        contexts(token_ids.size() * kContext, 0),
        mask(token_ids.size() * s.merge.words, 0),
        edge_targets(token_ids.size() * s.branch, -1),
        nodes(static_cast<size_t>(s.levels) * s.width, -7),
        tokens(nodes.size() * s.branch, -7),
        matched(nodes.size(), -7),
        next(static_cast<size_t>(s.width) * (3 + s.merge.words), -7),
        scores(token_ids.size(), 0.0f),
        edge_log_probs(edge_targets.size(), 0.0f),
        log_probs(tokens.size(), -7.0f),
        expanded(token_ids.size(), 0) {}

  MergeArgs merge(int width) {
    return {{token_ids.data(), parents.data(), depths.data(), scores.data(), contexts.data(),
             reinterpret_cast<bool*>(expanded.data()), mask.data(), edge_targets.data(), edge_log_probs.data(),
             &counts[0], &counts[1]},
            nullptr, nullptr, nullptr, next.data(), next.data() + width, next.data() + 2 * width, next.data() + 3 * width};
  }
  bool operator==(const Grown&) const = default;
};

inline bool levels_agree(int threads, const Faults& faults, std::mt19937& random) {
  const int vocab = 1 + static_cast<int>(random() % 3), levels = 1 + static_cast<int>(random() % 4);
  const int width = 1 + static_cast<int>(random() % 5), branch = 1 + static_cast<int>(random() % 4);
  const int given = 1 + static_cast<int>(random() % width), at_once = 1 + static_cast<int>(random() % width);
  const NgramSizes s{Followed::kEntries, Followed::kWays, Followed::kBranch, width, kContext, 4};
  const LevelSizes sizes{levels, width, branch, given, 1, s,
                         {1 + levels * width * branch, width, branch, width, words_for(levels * width), 0,
                          static_cast<int>(random() % 4) - 1, -INFINITY, random() % 2 == 0 ? -INFINITY : -3.0f}};
  SerialGroup serial;
  Followed text;
  const Ints read = drawn(random, 150, -1, vocab), counts{150};
  const FollowArgs follow{{}, text.copies(), text.runners.data(), text.runner_log_probs.data(), text.emitted.data(),
                          read.data(), counts.data(), nullptr, Followed::kRunnersUp, 150, 1};
  std::vector<char> memory(follow_bytes(follow, s));
  follow_step(serial, follow, s, memory.data());
  text.runners = drawn(random, Followed::kRunnersUp, -1, vocab);
  std::vector<double> weights(kHistoryWeights);
  for (double& weight : weights) weight = 0.25 * static_cast<double>(random() % 9) - 1.0;
  Ints frontier = drawn(random, given, -1, 0);
  frontier[0] = static_cast<int32_t>(random() % 8 == 0 ? -1 : 0);
  for (int w = 1; w < given; w++) frontier[w] = -1;
  Grown expected(sizes), got(sizes);
  expected.token_ids[0] = got.token_ids[0] = read.back();
  for (int i = 0; i < kContext; i++) expected.contexts[i] = got.contexts[i] = read[148 - i];
  const auto args = [&](Grown& g) {
    const NgramRecallArgs asked{text.table(), g.token_ids.data(), g.contexts.data(), g.depths.data(), nullptr, nullptr,
                                nullptr, nullptr, nullptr, nullptr, nullptr, sizes.merge.capacity, branch};
    const HistoryArgs known{text.table(), {}, text.copies(), text.runners.data(), text.runner_log_probs.data(),
                            text.emitted.data(), weights.data(), g.parents.data(), {}, Followed::kRunnersUp};
    return LevelsArgs{{asked, known}, g.merge(width), frontier.data(), g.nodes.data(), g.tokens.data(),
                      g.log_probs.data(), g.matched.data()};
  };
  LevelSizes block = sizes;
  block.at_once = at_once;
  std::vector<char> serial_arena(levels_bytes(sizes), '\xA5'), block_arena(levels_bytes(block), '\xA5');
  grow_levels(serial, args(expected), sizes, serial_arena.data());
  run_block(threads, faults, [&](FiberGroup& group) { grow_levels(group, args(got), block, block_arena.data()); });
  return expected == got;
}

}  // namespace gsd
