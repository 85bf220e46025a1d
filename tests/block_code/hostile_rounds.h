// The algorithms on what nothing valid holds: any float, ids, parents, rows and counts. They are to stay inside of their
// storage, which AddressSanitizer sees, and to end. Every array is as large as it has to be and no larger.
#pragma once

#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "../../csrc/algorithms/commit.h"
#include "../../csrc/algorithms/corpus.h"
#include "../../csrc/algorithms/flatten.h"
#include "../../csrc/algorithms/history.h"
#include "../../csrc/algorithms/learn.h"
#include "../../csrc/algorithms/merge.h"
#include "../../csrc/algorithms/ngram.h"
#include "../../csrc/algorithms/select_rows.h"
#include "../../csrc/algorithms/step.h"
#include "../../csrc/algorithms/verify.h"
#include "fiber_group.h"

namespace gsd {

// Draws values of no meaning.
class Wild {
 public:
  explicit Wild(std::mt19937& random) : random_(random) {}

  int between(int low, int high) { return low + static_cast<int>(random_() % static_cast<unsigned>(high - low + 1)); }

  float score() {
    static const float kValues[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e-6f, 3.0f, 88.0f, 1e30f, 3.4e38f, -1e30f,
                                    -3.4e38f, 1e-40f, -1e-40f, -1.0f, -0.5f};
    const int value = between(0, 23);
    return value < 16 ? kValues[value] : 0.25f * static_cast<float>(between(-12, 12));
  }

  // Round 0 … n − 1, and far from it.
  int32_t id(int n) {
    static const int32_t kValues[] = {INT32_MIN, INT32_MIN + 1, -100, -2, -1, 1 << 16, 1 << 30, INT32_MAX};
    const int value = between(0, 31);
    return value < 8 ? kValues[value] : between(-1, n + 1);
  }

  // A length or depth.
  int32_t count(int n) { return between(0, 7) == 0 ? between(-1000, 1000000) : between(-1, n + 2); }

  std::vector<float> scores(int n) { return drawn<float>(n, [&] { return score(); }); }
  std::vector<int32_t> ids(int n, int below) { return drawn<int32_t>(n, [&] { return id(below); }); }
  std::vector<int32_t> counts(int n, int below) { return drawn<int32_t>(n, [&] { return count(below); }); }
  std::vector<char> flags(int n) { return drawn<char>(n, [&] { return static_cast<char>(between(0, 1)); }); }

 private:
  template <class T, class Draw>
  static std::vector<T> drawn(int n, const Draw& draw) {
    std::vector<T> values(static_cast<size_t>(n));
    for (T& value : values) value = draw();
    return values;
  }

  std::mt19937& random_;
};

// By one thread, or by a block of several: the latter must not wait for each other for ever either.
template <class Algorithm>
void run_wild(int threads, size_t arena_bytes, const Algorithm& algorithm) {
  std::vector<char> arena(arena_bytes, static_cast<char>(0xA5));
  if (threads == 1) {
    SerialGroup group;
    algorithm(group, arena.data());
  } else {
    run_block(threads, {}, [&](FiberGroup& group) { algorithm(group, arena.data()); });
  }
}

// What flatten leaves: every row after its parent, in order, and sees itself and what its parent sees.
inline bool rows_stand(const std::vector<int32_t>& parents, const std::vector<int32_t>& depths,
                       const std::vector<int32_t>& masks, const std::vector<float>& scores, int count, int nodes,
                       const std::vector<int32_t>& node_ids) {
  const int rows = static_cast<int>(parents.size()), words = words_for(rows);
  if (count < 1 || count > rows) return false;
  for (int i = 0; i < count; i++) {
    const int parent = parents[i];
    if (i == 0 ? parent != -1 : parent < 0 || parent >= i) return false;
    if (node_ids[i] < 0 || node_ids[i] >= nodes || depths[i] != (i == 0 ? 0 : depths[parent] + 1)) return false;
    if (i > 0 && !(scores[i] <= scores[i - 1])) return false;
    for (int w = 0; w < words; w++) {
      const uint32_t own = w == i / 32 ? 1u << i % 32 : 0u;
      const uint32_t above = i == 0 ? 0u : static_cast<uint32_t>(masks[parent * words + w]);
      if (static_cast<uint32_t>(masks[i * words + w]) != (own | above)) return false;
    }
  }
  return true;
}

inline bool wild_graph_stands(int threads, Wild& wild) {
  const int nodes = wild.between(1, 60), branch = wild.between(1, 6), width = wild.between(1, 8);
  const int frontier = wild.between(1, 8), words = wild.between(1, 3);
  auto token_ids = wild.ids(nodes, 9), parents = wild.ids(nodes, nodes), depths = wild.counts(nodes, 9);
  auto contexts = wild.ids(nodes * kContext, 9), masks = wild.ids(nodes * words, 9);
  auto targets = wild.ids(nodes * branch, nodes);
  auto scores = wild.scores(nodes), edges = wild.scores(nodes * branch), log_probs = wild.scores(width * branch);
  auto expanded = wild.flags(nodes);
  std::vector<int32_t> num_nodes{wild.id(nodes)}, num_merges{0};
  const auto expanding = wild.ids(width, nodes), tokens = wild.ids(width * branch, 9);
  std::vector<int32_t> next(frontier), next_tokens(frontier), next_depths(frontier), next_masks(frontier * words);

  const int rows = wild.between(1, 128);
  const FlattenSizes sizes{nodes, branch, rows, wild.between(0, rows - 1)};
  std::vector<int32_t> row_tokens(rows), row_parents(rows), row_depths(rows), row_masks(rows * words_for(rows));
  std::vector<int32_t> node_ids(rows), num_rows(1);
  std::vector<float> row_scores(rows);
  const auto stands = [&](const float* weighed) {
    const FlattenArgs args{token_ids.data(), targets.data(),    weighed,           row_tokens.data(), row_parents.data(),
                           row_depths.data(), row_masks.data(), node_ids.data(), row_scores.data(), num_rows.data()};
    run_wild(threads, FlattenArena::bytes(sizes),
             [&](auto& group, char* arena) { flatten_graph(group, args, sizes, arena); });
    return rows_stand(row_parents, row_depths, row_masks, row_scores, num_rows[0], nodes, node_ids);
  };
  if (!stands(edges.data())) return false;

  // Rows by predicted probabilities, which may be of no meaning either.
  const EdgeSizes edge_sizes{1, nodes, branch, wild.between(1, 9)};
  const auto accepted = wild.counts(1, 9), path = wild.ids(edge_sizes.path, nodes);
  const auto picked = wild.ids(edge_sizes.path, 9);
  const EdgeGraph graph{token_ids.data(), depths.data(), targets.data(), edges.data(), accepted.data()};
  std::vector<double> weights, covariance, prior, seconds;
  for (int i = 0; i < kEdgeFeatures; i++) weights.push_back(wild.score()), prior.push_back(wild.score());
  for (int i = 0; i < kEdgeFeatures * kEdgeFeatures; i++) covariance.push_back(wild.score());
  for (int i = 0; i < 8; i++) seconds.push_back(wild.score());
  std::vector<float> predicted(nodes * branch);
  predict_edges(graph, edge_sizes, weights.data(), 0, predicted.data());
  if (!stands(predicted.data())) return false;
  const int best = best_count(row_scores.data(), 1, rows, num_rows[0], seconds.data(), 8, wild.score());
  if (best < 1 || best > num_rows[0]) return false;
  const LogisticPosterior posterior{weights.data(), covariance.data(), prior.data()};
  update_edges(graph, edge_sizes, posterior, path.data(), picked.data(), wild.score());

  const MergeSizes merging{nodes, width, branch, frontier, words, wild.between(0, 4), wild.between(-1, kContext),
                           wild.score(), wild.score()};
  const MergeArgs args{token_ids.data(), parents.data(),  depths.data(), scores.data(), contexts.data(),
                       reinterpret_cast<bool*>(expanded.data()), masks.data(), targets.data(), edges.data(),
                       num_nodes.data(), num_merges.data(), expanding.data(), tokens.data(), log_probs.data(),
                       next.data(), next_tokens.data(), next_depths.data(), next_masks.data()};
  // Fibers run one after the other, so that two that write one place, as of a node that is there twice, are no race.
  run_wild(threads, MergeArena::bytes(merging),
           [&](auto& group, char* arena) { merge_level(group, args, merging, arena); });
  for (const int32_t node : next) {
    if (node < -1 || node >= nodes) return false;
  }
  return stands(edges.data());
}

inline bool wild_rows_stand(int threads, Wild& wild) {
  const int rows = wild.between(1, 70), path = wild.between(0, 9), ends = wild.between(0, 3);
  const VerifySizes sizes{rows, ends, path};
  const auto tokens = wild.ids(rows, 4), parents = wild.ids(rows, rows), depths = wild.ids(rows, path);
  const auto masks = wild.ids(rows * sizes.words(), 9), num_rows = wild.ids(1, rows), sampled = wild.ids(rows, 4);
  const auto eos = wild.ids(ends, 4), remaining = wild.counts(1, 9), nodes = wild.ids(rows, 30);
  const bool done = wild.between(0, 7) == 0;
  std::vector<int32_t> accepted(path + 1), num_accepted(1), next(1);
  const VerifyArgs args{tokens.data(), parents.data(), depths.data(),    masks.data(), num_rows.data(),     sampled.data(),
                        eos.data(),    remaining.data(), &done, accepted.data(), num_accepted.data(), next.data()};
  run_wild(threads, VerifyArena::bytes(sizes),
           [&](auto& group, char* arena) { verify_rows(group, args, sizes, arena); });
  if (num_accepted[0] < 0 || num_accepted[0] > path + 1) return false;

  // What follows, of a path of no meaning.
  const auto any_path = wild.ids(path + 1, rows), any_count = wild.counts(1, path);
  std::vector<int32_t> emitted(path + 1), path_nodes(path + 1), num_emitted(1);
  run_wild(threads, 0, [&](auto& group, char*) {
    walk_path(group,
              PathArgs{any_path.data(), any_count.data(), next.data(), tokens.data(), nodes.data(), emitted.data(),
                       path_nodes.data()},
              PathSizes{path + 1, rows});
  });
  const int length = wild.between(1, 40), graph_nodes = 30;
  std::vector<int64_t> text(static_cast<size_t>(length), 7), counts(3, 0);
  auto out_len = wild.counts(1, length), left = wild.counts(1, 9);
  const auto graph_parents = wild.ids(graph_nodes, graph_nodes);
  std::vector<int32_t> held(path + 1), few(1, 3), start = wild.counts(1, length), first(1);
  bool ended = false;
  run_wild(threads, 0, [&](auto& group, char*) {
    append_text(group,
                TextArgs{emitted.data(), any_count.data(), next.data(), eos.data(), text.data(), out_len.data(),
                         left.data(), &ended, held.data(), num_emitted.data(), counts.data(), path_nodes.data(),
                         graph_parents.data(), few.data(), few.data()},
                TextSizes{path + 1, path + 1, length, graph_nodes, ends});
  });
  const int width = wild.between(1, 40);
  auto cached = wild.counts(1, length);
  const auto end = wild.counts(1, length);
  std::vector<int32_t> base(1), ids(width), slots(width), row_depths(width), chain_masks(width * words_for(width));
  std::vector<int32_t> node_depths(width), places(rows), positions(rows), after(rows), fed(rows), feed_depths(rows);
  run_wild(threads, 0, [&](auto& group, char*) {
    chain_rows(group,
               ChainArgs{text.data(), end.data(), cached.data(), base.data(), ids.data(), slots.data(),
                         row_depths.data(), chain_masks.data(), node_depths.data()},
               ChainSizes{width, length});
  });
  const auto given_depths = wild.counts(rows, 9), kv_len = wild.counts(1, length);
  run_wild(threads, 0, [&](auto& group, char*) {
    place_rows(group,
               FeedArgs<int32_t>{tokens.data(), given_depths.data(), nullptr, kv_len.data(), start.data(), fed.data(),
                                 places.data(), positions.data(), feed_depths.data(), after.data(), nullptr},
               FeedSizes{rows, 0, 0, 1, 5});
  });
  for (const int32_t token : fed) {
    if (token < 0 || token >= 5) return false;
  }
  constexpr int kNodes = 5, kBranch = 2, kWords = 2;
  std::vector<int32_t> node_tokens(kNodes), node_parents(kNodes), depths_of(kNodes), contexts(kNodes * kContext);
  std::vector<int32_t> node_masks(kNodes * kWords), targets(kNodes * kBranch), num_nodes(1), num_merges(1);
  std::vector<float> scores(kNodes), log_probs(kNodes * kBranch);
  std::vector<char> expanded(kNodes);
  const auto any_length = wild.counts(1, length);
  run_wild(threads, 0, [&](auto& group, char*) {
    reset_to_root(group,
                  StartArgs{node_tokens.data(), node_parents.data(), depths_of.data(), scores.data(), contexts.data(),
                            reinterpret_cast<bool*>(expanded.data()), node_masks.data(), targets.data(),
                            log_probs.data(), num_nodes.data(), num_merges.data(), text.data(), any_length.data(),
                            start.data(), first.data()},
                  StartSizes{kNodes, kBranch, kWords, length});
  });
  return true;
}

inline bool wild_memory_stands(int threads, Wild& wild) {
  const int ways = 1 << wild.between(0, 3), rows = wild.between(1, 90), graph_nodes = wild.between(1, 9);
  const NgramSizes s{ways << wild.between(0, 3), ways, wild.between(1, 4), rows, 8, wild.between(1, 5)};
  // Keys of real contexts, some of them twice in a set.
  auto contexts = wild.ids(rows * s.context, 3), tokens = wild.ids(rows * s.branch, 9);
  std::vector<int64_t> keys(static_cast<size_t>(s.capacity));
  for (int64_t& key : keys) {
    ContextKeys made;
    key = wild.between(0, 3) == 0 ? 0 : made.next(wild.between(0, 2));
  }
  auto table_tokens = wild.ids(s.capacity * s.branch, 9);
  auto table_scores = wild.scores(s.capacity * s.branch), scores = wild.scores(rows * s.branch);
  const NgramTable table{keys.data(), table_tokens.data(), table_scores.data()};
  const auto valid = wild.flags(rows);
  const auto insert = [&](const NgramInsertArgs& args) {
    run_wild(threads, NgramArena::bytes(s), [&](auto& group, char* arena) { insert_rows(group, args, s, arena); });
  };
  insert({table, contexts.data(), tokens.data(), scores.data(), reinterpret_cast<const bool*>(valid.data()), {}});
  const auto row_tokens = wild.ids(rows, 3), parents = wild.ids(rows, rows), depths = wild.ids(rows, 9);
  const auto num_rows = wild.ids(1, rows), tail = wild.ids(s.context, 3);
  insert({table, nullptr, tokens.data(), scores.data(), nullptr,
          {row_tokens.data(), parents.data(), depths.data(), num_rows.data(), tail.data()}});

  const auto graph_tokens = wild.ids(graph_nodes, 3), graph_contexts = wild.ids(graph_nodes * s.context, 3);
  const auto graph_depths = wild.ids(graph_nodes, 9), nodes = wild.ids(rows, graph_nodes), first = wild.ids(1, 9);
  const auto sequence = wild.ids(1, 9);
  const int64_t seed = wild.id(9);
  std::vector<int32_t> matched(rows), found(rows * s.branch);
  std::vector<float> log_probs(rows * s.branch), mixed_scores(s.branch);
  const int room = wild.between(1, 200), hashes = 1 << wild.between(0, 4), added = wild.between(0, 20);
  auto text = wild.ids(room, 3), length = wild.counts(1, room), heads = wild.counts(hashes, room);
  auto previous = wild.counts(room, room), runners = wild.ids(4, 9), emitted = wild.counts(1, 9);
  auto runner_scores = wild.scores(4);
  const CopyIndex copies{text.data(), length.data(), heads.data(), previous.data(), room, hashes};
  const auto appended = wild.ids(added, 3), count = wild.counts(1, added), path = wild.ids(5, rows);
  FollowArgs follow{{table, nullptr, tokens.data(), scores.data(), nullptr,
                     {row_tokens.data(), parents.data(), depths.data(), num_rows.data(), tail.data()}},
                    copies, runners.data(), runner_scores.data(), emitted.data(), appended.data(), count.data(),
                    wild.between(0, 1) == 1 ? path.data() : nullptr, 4, added, 5};
  run_wild(threads, follow_bytes(follow, s), [&](auto& group, char* arena) { follow_step(group, follow, s, arena); });
  std::vector<double> weights;
  for (int i = 0; i < kHistoryWeights; i++) weights.push_back(wild.score());
  const auto graph_parents = wild.ids(graph_nodes, graph_nodes);
  const HistoryArgs known{table, wild.between(0, 1) == 1 ? table : NgramTable{}, copies, runners.data(),
                          runner_scores.data(), emitted.data(), weights.data(), graph_parents.data(), s, 4};
  const NgramRecallArgs asked{table, graph_tokens.data(), graph_contexts.data(), graph_depths.data(), nodes.data(),
                              first.data(), &seed, sequence.data(), found.data(), log_probs.data(), matched.data(),
                              graph_nodes, s.branch};
  const int at_once = min_int(rows, 3);
  run_wild(threads, at_once * HistoryArena::bytes(),
           [&](auto& group, char* arena) { recall_history(group, asked, known, s, 0, at_once, arena); });
  const int others = wild.between(0, 9);
  const auto other_tokens = wild.ids(others, 9);
  const auto other_scores = wild.scores(others), weight = wild.scores(1);
  std::vector<int32_t> mixed(s.branch);
  const MixSizes mixing{s.branch, others, 0};
  run_wild(threads, MixArena::bytes(mixing), [&](auto& group, char* arena) {
    mix_row(group, {tokens.data(), scores.data(), other_tokens.data(), other_scores.data(), weight.data(), nullptr,
                    mixed.data(), mixed_scores.data()}, mixing, arena);
  });
  return true;
}

inline bool wild_learning_stands(int threads, Wild& wild) {
  const int path = wild.between(1, 9), branch = wild.between(1, 4), width = wild.between(1, 5);
  const int entries = wild.between(1, 4);
  const auto nodes = wild.ids(path, 9), picked = wild.ids(path, 4), ids = wild.ids(width, 9);
  const auto tokens = wild.ids(width * branch, 4), index = wild.ids(width, entries);
  const auto scores = wild.scores(width * branch), start = wild.scores(entries);
  auto shares = wild.scores(entries), counts = wild.scores(entries), weights = wild.scores(entries);
  auto parts = wild.scores(path);
  std::vector<int32_t> entry(static_cast<size_t>(path));
  const auto sizes = std::make_unique<LearnSizes>(LearnSizes{1, path, branch, 1, entries, {width}});
  const auto args = std::make_unique<LearnArgs>();
  args->nodes = nodes.data(), args->picked = picked.data(), args->node_ids[0] = ids.data();
  args->tokens[0] = args->first_tokens[0] = tokens.data(), args->index[0] = index.data();
  args->log_probs[0] = args->first_log_probs[0] = scores.data(), args->start = start.data();
  args->shares = shares.data(), args->counts = counts.data(), args->weights = weights.data();
  args->parts = parts.data(), args->entry = entry.data();
  args->prior_count = wild.score(), args->memory = wild.score();
  run_wild(threads, 0, [&](auto& group, char*) { learn_all(group, *args, *sizes); });

  const int length = wild.between(1, 40), found = wild.between(1, 30), graph_nodes = wild.between(1, 9);
  const auto text = wild.ids(length, 3), order = wild.ids(found, length), following = wild.ids(found, 9);
  const auto graph_tokens = wild.ids(graph_nodes, 3), parents = wild.ids(graph_nodes, graph_nodes);
  const auto end = wild.counts(1, 20), begin = wild.counts(1, 20), frontier = wild.ids(3, graph_nodes);
  const std::vector<int64_t> before(20, 1);
  std::vector<int32_t> recalled(3 * branch), matched(3);
  std::vector<float> log_probs(3 * branch);
  const CorpusArgs corpus{{text.data(), order.data(), following.data(), length, found}, graph_tokens.data(),
                          parents.data(), before.data(), end.data(), begin.data(), frontier.data(), recalled.data(),
                          log_probs.data(), matched.data()};
  for (int64_t row = 0; row < 3; row++) corpus_recall_row(corpus, {graph_nodes, 3, branch, 9, 20}, row);
  return true;
}

// Rows that are accepted move inside of their head, or nowhere.
inline bool wild_commit_stands(Wild& wild) {
  const int batch = wild.between(1, 3), heads = wild.between(1, 2), slots = wild.between(1, 20), path = wild.between(1, 6);
  const auto rows = wild.ids(batch * path, slots), accepted = wild.ids(batch, path), kv_len = wild.ids(batch, slots);
  std::vector<int32_t> cache(static_cast<size_t>(batch * heads * slots)), staged(static_cast<size_t>(path));
  for (size_t i = 0; i < cache.size(); i++) cache[i] = static_cast<int32_t>(i);
  std::vector<int32_t> expected = cache;
  const auto args = std::make_unique<CommitArgs>();
  args->heads = heads, args->row_bytes = 4, args->slots = slots, args->path = path;
  args->batch_stride = 4 * heads * slots, args->head_stride = 4 * slots, args->slot_stride = 4;
  args->accepted_rows = rows.data(), args->num_accepted = accepted.data(), args->kv_len = kv_len.data();
  const auto slot = [&](int64_t at) { return at < slots; };
  for (int b = 0; b < batch; b++) {
    for (int head = 0; head < heads; head++) {
      const int first = (b * heads + head) * slots;
      for (int64_t i = 0; kv_len[b] >= 0 && i < path && i < accepted[b]; i++) {
        const int64_t to = kv_len[b] + i, from = int64_t{kv_len[b]} + max_int(rows[b * path + i], 0);
        if (slot(from) && slot(to)) expected[first + to] = cache[first + from];
      }
      commit_column(*args, reinterpret_cast<char*>(cache.data()), b, head, staged.data(), 1);
    }
    if (accepted_of(accepted[b], path) != min_int(max_int(accepted[b], 0), path)) return false;
  }
  return cache == expected;
}

inline bool wild_stands(int threads, std::mt19937& random) {
  Wild wild(random);
  return wild_graph_stands(threads, wild) && wild_rows_stand(threads, wild) && wild_memory_stands(threads, wild) &&
         wild_learning_stands(threads, wild) && wild_commit_stands(wild);
}

}  // namespace gsd
