// csrc/algorithms/step.h by one thread and by a block, on random texts.
#pragma once

#include <random>
#include <vector>

#include "../../csrc/algorithms/step.h"
#include "fiber_group.h"

namespace gsd {

using Ints = std::vector<int32_t>;

inline Ints drawn(std::mt19937& random, int count, int low, int high) {
  Ints values(static_cast<size_t>(count));
  for (int32_t& value : values) value = low + static_cast<int32_t>(random() % static_cast<unsigned>(high - low + 1));
  return values;
}

// A text, a graph of any content, and all that the five algorithms write.
struct StepState {
  static constexpr int kNodes = 40, kBranch = 3, kWords = 2, kLength = 90, kRows = 37;

  std::vector<int64_t> tokens, counts{5, 6, 7}, places = std::vector<int64_t>(kRows, -7), positions = places,
                                                ids = places;
  Ints token_ids, parents, depths, contexts, mask, targets, num_nodes{3}, num_merges{1}, first{-7};
  std::vector<float> scores = std::vector<float>(kNodes, -7.0f), log_probs = std::vector<float>(kNodes * kBranch, -7.0f);
  std::vector<char> expanded = std::vector<char>(kNodes, 1);
  Ints row_depths = Ints(kRows, -7), after = row_depths, node_depths = Ints(kRows + 3, -7);
  Ints cached, base{-7}, chain_tokens = row_depths, slots = row_depths, chain_depths = row_depths,
               chain_nodes = row_depths, chain_mask = Ints(kRows * 2, -7);
  Ints out_len, remaining, emitted = row_depths, num_emitted{-7}, path_tokens = row_depths, path_nodes = row_depths;
  bool done = false;

  explicit StepState(std::mt19937& random)
      : token_ids(drawn(random, kNodes, 0, 50)),
        parents(drawn(random, kNodes, 0, 3)),
        depths(token_ids),
        contexts(drawn(random, kNodes * kContext, 0, 50)),
        mask(drawn(random, kNodes * kWords, 0, 50)),
        targets(drawn(random, kNodes * kBranch, 0, 50)),
        cached(drawn(random, 1, 0, 20)),
        out_len(drawn(random, 1, 21, kLength - kRows)),
        remaining(drawn(random, 1, 1, 60)) {
    for (const int32_t token : drawn(random, kLength, 0, 50)) tokens.push_back(token);
  }

  bool operator==(const StepState&) const = default;
};

struct StepInputs {
  Ints rows, depths, path, row_nodes, accepted, next, eos, start;

  explicit StepInputs(std::mt19937& random)
      : rows(drawn(random, StepState::kRows, 0, 60)),
        depths(drawn(random, StepState::kRows, 1, 6)),
        path(drawn(random, StepState::kRows, 0, StepState::kRows - 1)),
        row_nodes(drawn(random, StepState::kRows, 0, StepState::kNodes - 1)),
        accepted(drawn(random, 1, 0, StepState::kRows)),
        next(drawn(random, 1, 0, 2)),
        eos{1, 4},
        start(drawn(random, 1, 0, 9)) {
    for (size_t p = static_cast<size_t>(accepted[0]); p < path.size(); p++) path[p] = -1;
  }
};

template <class Group>
void take_step(Group& group, StepState& s, const StepInputs& in) {
  constexpr int kRows = StepState::kRows;
  walk_path(group,
            PathArgs{in.path.data(), in.accepted.data(), in.next.data(), in.rows.data(), in.row_nodes.data(),
                     s.path_tokens.data(), s.path_nodes.data()},
            {kRows, kRows});
  group.sync("between the step's ops");
  append_text(group,
              TextArgs{s.path_tokens.data(), in.accepted.data(), in.next.data(), in.eos.data(), s.tokens.data(),
                       s.out_len.data(), s.remaining.data(), &s.done, s.emitted.data(), s.num_emitted.data(),
                       s.counts.data(), s.path_nodes.data(), s.parents.data(), s.num_nodes.data(),
                       s.num_merges.data()},
              {kRows, kRows, StepState::kLength, StepState::kNodes, 2});
  group.sync("between the step's ops");
  reset_to_root(group,
                StartArgs{s.token_ids.data(), s.parents.data(), s.depths.data(), s.scores.data(), s.contexts.data(),
                          reinterpret_cast<bool*>(s.expanded.data()), s.mask.data(), s.targets.data(),
                          s.log_probs.data(), s.num_nodes.data(), s.num_merges.data(), s.tokens.data(),
                          s.out_len.data(), in.start.data(), s.first.data()},
                {StepState::kNodes, StepState::kBranch, StepState::kWords, StepState::kLength});
  place_rows(group,
             FeedArgs<int64_t>{in.rows.data(), in.depths.data(), nullptr, s.out_len.data(), in.start.data(),
                               s.ids.data(), s.places.data(), s.positions.data(), s.row_depths.data(),
                               s.after.data(), s.node_depths.data()},
             {kRows, kRows + 3, 2, 1, 50});
  chain_rows(group,
             ChainArgs{s.tokens.data(), s.out_len.data(), s.cached.data(), s.base.data(), s.chain_tokens.data(),
                       s.slots.data(), s.chain_depths.data(), s.chain_mask.data(), s.chain_nodes.data()},
             {kRows, StepState::kLength});
}

inline bool steps_agree(int threads, const Faults& faults, std::mt19937& random) {
  StepState expected(random);
  const StepInputs inputs(random);
  StepState got = expected;
  SerialGroup serial;
  take_step(serial, expected, inputs);
  run_block(threads, faults, [&](FiberGroup& group) { take_step(group, got, inputs); });
  return expected == got;
}

}  // namespace gsd
