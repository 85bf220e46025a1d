// The block code over thread groups on random problems: by a group of one thread, which the Python tests hold against the
// reference, and by a block of several. Every byte that they leave is compared.
//
//     pick THREADS VOCAB BRANCH SEED POSITION SEQUENCE TEMPERATURE TOP_K TOP_P MIN_P < logits
//                                                   draft_candidates of one float32 row, one pair a line
#include <algorithm>
#include <cstdio>

#include "../../csrc/algorithms/commit.h"
#include "../../csrc/algorithms/flatten.h"
#include "../../csrc/algorithms/learn.h"
#include "../../csrc/algorithms/recall_levels.h"
#include "../../csrc/algorithms/sampling.h"
#include "../../csrc/algorithms/select_rows.h"
#include "../../csrc/algorithms/step.h"
#include "../../csrc/algorithms/verify.h"
#include "problems.h"

using namespace gsd;

namespace {

// One random problem. Every array lies in memory of exactly its size, so that AddressSanitizer sees the first byte beyond.
// A wild problem has values of no meaning: what runs is to stay inside of its memory, and to end.
class Case {
 public:
  const int threads;
  const bool wild;

  Case(int threads, bool wild, std::mt19937& random) : threads(threads), wild(wild), random(random) {}

  int between(int low, int high) { return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1)); }
  bool once_in(int times) { return between(1, times) == 1; }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[random() % values.size()];
  }

  // Ids, parents, rows; wild: round the limits, and far from them.
  int32_t id(int low, int high) {
    if (!wild) return between(low, high);
    if (once_in(4)) return one_of({INT32_MIN, INT32_MIN + 1, -100, -2, -1, 1 << 16, 1 << 30, INT32_MAX});
    return between(low - 1, high + 2);
  }
  // A length or depth.
  int32_t count(int low, int high) {
    if (!wild) return between(low, high);
    return once_in(8) ? between(-1000, 1000000) : between(low - 1, high + 2);
  }
  // A log-probability on a coarse grid, so that ties are common.
  float score() {
    if (wild && !once_in(3)) {
      return one_of({NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e-6f, 3.0f, 88.0f, 1e30f, 3.4e38f, -1e30f, -3.4e38f, 1e-40f,
                     -1e-40f, -1.0f, -0.5f});
    }
    return once_in(12) ? -INFINITY : -0.25f * static_cast<float>(between(0, 11));
  }
  int32_t* ids(int n, int low, int high) { return made<int32_t>(n, [&] { return id(low, high); }); }
  int32_t* counts(int n, int low, int high) { return made<int32_t>(n, [&] { return count(low, high); }); }
  float* scores(int n) { return made<float>(n, [&] { return score(); }); }
  bool* flags(int n) { return made<bool>(n, [&] { return !once_in(8); }); }

  template <class T, class Value>
  T* made(int n, const Value& value) {
    blocks.push_back({std::make_unique<char[]>(sizeof(T) * static_cast<size_t>(n)), sizeof(T) * static_cast<size_t>(n),
                      std::is_same_v<T, float>});
    T* const values = reinterpret_cast<T*>(blocks.back().memory.get());
    for (int i = 0; i < n; i++) values[i] = static_cast<T>(value());
    return values;
  }
  template <class T>
  T* filled(int n, T value) {
    return made<T>(n, [&] { return value; });
  }
  // An output or working memory: poisoned, as a GPU's is.
  template <class T>
  T* out(int n) {
    T poison;
    memset(&poison, 0xA5, sizeof poison);
    return filled(n, poison);
  }
  // In a wild problem ids, or scores, of no meaning in the place of some of an array's.
  template <class T>
  void spoil(T* values, int n, int high) {
    for (int i = 0; wild && i < n; i++) {
      if (once_in(2)) continue;
      if constexpr (std::is_same_v<T, float>) {
        values[i] = score();
      } else {
        values[i] = id(0, high);
      }
    }
  }

  // Runs algorithm(group, arena) by one thread and by a block; whether both leave the same everywhere, floats within
  // `tolerance`. `bytes`: of the arena, or of that for so many threads. A wild problem is run by a block alone.
  template <class Bytes, class Algorithm>
  bool agrees(const Bytes& bytes, const Algorithm& algorithm, float tolerance = 0.0f) {
    if (wild && threads > 1) return in_a_block(bytes, algorithm), true;
    const std::vector<std::vector<char>> before = contents();
    alone(bytes, algorithm);
    if (wild) return true;
    const std::vector<std::vector<char>> expected = contents();
    for (size_t i = 0; i < blocks.size(); i++) std::copy(before[i].begin(), before[i].end(), blocks[i].memory.get());
    in_a_block(bytes, algorithm);
    for (size_t i = 0; i < blocks.size(); i++) {
      if (std::equal(expected[i].begin(), expected[i].end(), blocks[i].memory.get())) continue;
      if (tolerance == 0.0f || !blocks[i].floats) return false;
      const float* const got = reinterpret_cast<const float*>(blocks[i].memory.get());
      const float* const wanted = reinterpret_cast<const float*>(expected[i].data());
      for (size_t n = 0; n < blocks[i].bytes / sizeof(float); n++) {
        if (got[n] != wanted[n] && !(fabsf(got[n] - wanted[n]) < tolerance)) return false;
      }
    }
    return true;
  }

  template <class Bytes, class Algorithm>
  void in_a_block(const Bytes& bytes, const Algorithm& algorithm) {
    std::vector<char> arena = arena_of(bytes, threads);
    run_block(threads, [&](FiberGroup& group) { algorithm(group, arena.data()); });
  }

 private:
  struct Block {
    std::unique_ptr<char[]> memory;
    size_t bytes;
    bool floats;
  };

  template <class Bytes>
  static std::vector<char> arena_of(const Bytes& bytes, int threads) {
    constexpr char kPoison = static_cast<char>(0xA5);
    if constexpr (std::is_invocable_v<Bytes, int>) return std::vector<char>(bytes(threads), kPoison);
    else return std::vector<char>(static_cast<size_t>(bytes), kPoison);
  }
  template <class Bytes, class Algorithm>
  void alone(const Bytes& bytes, const Algorithm& algorithm) {
    SerialGroup group;
    std::vector<char> arena = arena_of(bytes, 1);
    algorithm(group, arena.data());
  }
  std::vector<std::vector<char>> contents() const {
    std::vector<std::vector<char>> found;
    for (const Block& block : blocks) found.emplace_back(block.memory.get(), block.memory.get() + block.bytes);
    return found;
  }

  std::mt19937& random;
  std::vector<Block> blocks;
};

GraphData empty_graph(Case& c, int nodes, int branch, int words) {
  return {c.filled(nodes, 0),           c.filled(nodes, -1),           c.counts(nodes, 0, 0),
          c.filled(nodes, 0.0f),        c.filled(nodes * kContext, -1), c.filled(nodes, false),
          c.filled(nodes * words, 0),   c.filled(nodes * branch, -1),  c.filled(nodes * branch, 0.0f),
          c.filled(1, 1),               c.filled(1, 0)};
}

// Levels are merged, the graph flattened, rows verified.
bool graph(Case& c) {
  const int depth = c.between(1, 5), width = c.between(1, 12), branch = c.between(1, 8), vocab = c.between(2, 10);
  const int nodes = 1 + branch + (depth - 1) * width * branch, words = words_for(depth * width);
  const int merge_context = c.between(-1, 2);
  const GraphData g = empty_graph(c, nodes, branch, words);
  for (int32_t* ids : {g.token_ids, g.parents}) c.spoil(ids, nodes, nodes);
  c.spoil(g.contexts, nodes * kContext, 9), c.spoil(g.ancestor_mask, nodes * words, 9);
  c.spoil(g.edge_targets, nodes * branch, nodes), c.spoil(g.num_nodes, 1, nodes);
  c.spoil(g.scores, nodes, 0), c.spoil(g.edge_log_probs, nodes * branch, 0);
  int32_t* frontier = c.filled(1, 0);
  int expanding = 1;
  for (int level = 0; level < depth; level++) {
    const float least = c.wild ? c.score() : -INFINITY;
    const MergeSizes sizes{nodes, expanding, branch, width, words, level, merge_context, least, least};
    const MergeArgs args{g, frontier, c.ids(expanding * branch, 0, vocab - 1), c.scores(expanding * branch),
                         c.out<int32_t>(width), c.out<int32_t>(width), c.out<int32_t>(width),
                         c.out<int32_t>(width * words)};
    const auto merge = [&](auto& group, char* arena) { merge_level(group, args, sizes, arena); };
    if (!c.agrees(MergeArena::bytes(sizes), merge)) return false;
    frontier = args.next_ids, expanding = width;
    if (std::any_of(frontier, frontier + width, [&](int32_t node) { return node < -1 || node >= nodes; })) return false;
    c.spoil(frontier, width, nodes);
  }

  const int rows = c.between(2, 128), max_path = c.between(0, rows - 1);
  const FlattenSizes sizes{nodes, branch, rows, max_path};
  const FlattenArgs flat{g.token_ids, g.edge_targets, g.edge_log_probs, c.out<int32_t>(rows), c.out<int32_t>(rows),
                         c.out<int32_t>(rows), c.out<int32_t>(rows * words_for(rows)), c.out<int32_t>(rows),
                         c.out<float>(rows), c.out<int32_t>(1)};
  const auto flattened = [&](const FlattenArgs& args) {
    const auto flatten = [&](auto& group, char* arena) { flatten_graph(group, args, sizes, arena); };
    return c.agrees(FlattenArena::bytes(sizes), flatten);
  };
  // By predicted probabilities, then as they were claimed.
  const EdgeSizes edge_sizes{1, nodes, branch, c.between(1, 9)};
  const EdgeGraph edges{g.token_ids, g.depths, g.edge_targets, g.edge_log_probs, c.counts(1, 0, 9)};
  const auto doubles = [&](int n) { return c.made<double>(n, [&] { return c.score(); }); };
  const LogisticPosterior posterior{doubles(kEdgeFeatures), doubles(kEdgeFeatures * kEdgeFeatures), doubles(kEdgeFeatures)};
  FlattenArgs predicted = flat;
  float* const log_probs = c.out<float>(nodes * branch);
  predict_edges(edges, edge_sizes, posterior.weights, 0, log_probs), predicted.edge_log_probs = log_probs;
  if (!flattened(predicted)) return false;
  const int best = best_count(flat.scores, 1, rows, *flat.num_rows, doubles(8), 8, c.score());
  if (best < 1 || best > *flat.num_rows) return false;
  update_edges(edges, edge_sizes, posterior, c.ids(edge_sizes.path, 0, nodes - 1), c.ids(edge_sizes.path, 0, vocab), 0.5);
  if (!flattened(flat)) return false;

  // The target agrees with most drafted tokens.
  int32_t* const sampled = c.ids(rows, 0, vocab - 1);
  for (int row = 1; row < *flat.num_rows; row++) {
    if (!c.once_in(4)) sampled[flat.parent_rows[row]] = flat.token_ids[row];
  }
  for (int32_t* ids : {flat.token_ids, flat.parent_rows, flat.depths}) c.spoil(ids, rows, rows);
  c.spoil(flat.ancestor_mask, rows * words_for(rows), 9), c.spoil(flat.num_rows, 1, rows);
  const VerifySizes verifying{rows, 1, max_path};
  const VerifyArgs args{flat.token_ids, flat.parent_rows, flat.depths, flat.ancestor_mask, flat.num_rows, sampled,
                        c.filled(1, 0), c.counts(1, 1, 12), c.filled(1, c.once_in(8)), c.out<int32_t>(max_path + 1),
                        c.out<int32_t>(1), c.out<int32_t>(1)};
  const auto verify = [&](auto& group, char* arena) { verify_rows(group, args, verifying, arena); };
  return c.agrees(VerifyArena::bytes(verifying), verify) && *args.num_accepted >= 0 && *args.num_accepted <= max_path + 1;
}

// Only the sum over the vocabulary depends on how many threads there are.
bool picks(Case& c) {
  const PickSizes s{c.between(1, 300), c.between(0, 6)};
  const auto* logits = c.made<float>(s.vocab, [&] { return 0.01f * static_cast<float>(c.between(0, 999)); });
  const Warpers warpers{c.one_of({0.0f, 0.7f, 1.0f}), c.one_of({0.0f, 5.0f, 40.0f}), c.one_of({1.0f, 0.9f, 0.3f}),
                        c.one_of({0.0f, 0.05f})};
  const PickArgs<FloatLogit<float>> args{reinterpret_cast<const FloatLogit<float>*>(logits), c.out<float>(s.vocab),
                                    c.out<int32_t>(s.branch), c.out<float>(s.branch), warpers,
                                    noise_stream(c.between(0, 1 << 30), 17, 3)};
  const auto pick = [&](auto& group, char* arena) { pick_tokens(group, args, s, arena); };
  return c.agrees([](int threads) { return PickArena::bytes(threads); }, pick, 1e-5f);
}

NgramTable empty_table(Case& c, int entries, int branch) {
  return {c.filled(entries, int64_t{0}), c.filled(entries * branch, -1), c.filled(entries * branch, 0.0f)};
}

// Few different tokens, so that contexts come again; small tables, so that sets overflow; now and then several chunks.
bool memory(Case& c) {
  const int ways = 1 << c.between(0, 3), rows = c.once_in(4) ? 150 : c.between(1, 40), vocab = c.between(0, 11);
  const NgramSizes s{ways << c.between(0, 5), ways, c.between(1, 4), rows, 5, c.between(1, 5)};
  const NgramTable table = empty_table(c, s.capacity, s.branch);
  const auto draw = [&] { return c.made<int32_t>(rows * s.context, [&] { return c.once_in(12) ? -1 : c.id(0, vocab); }); };
  for (int call = 0; call < 2; call++) {
    const NgramInsertArgs args{table, draw(), c.ids(rows * s.branch, 0, 1 << 30), c.scores(rows * s.branch),
                               c.flags(rows)};
    const auto insert = [&](auto& group, char* arena) { insert_rows(group, args, {}, s, arena); };
    if (!c.agrees(NgramArena::bytes(s), insert)) return false;
    if (c.wild) {  // keys of real contexts, some of them twice in a set
      for (int i = 0; i < s.capacity; i++) table.keys[i] = c.once_in(4) ? 0 : ContextKeys().next(c.between(0, 2));
    }
  }
  const NgramLookupArgs args{table, draw(), c.out<int32_t>(rows * s.branch), c.out<float>(rows * s.branch),
                             c.out<int32_t>(rows)};
  return c.agrees(0, [&](auto& group, char*) { look_up_rows(group, args, s); });
}

bool mixture(Case& c) {
  const MixSizes s{c.between(1, 20), c.between(0, 19), 0};
  const auto distinct = [&](int n) {
    int next = 0;
    return c.made<int32_t>(n, [&] { return next += 2, c.once_in(6) ? -1 : c.wild ? c.id(0, 9) : next + c.between(0, 1); });
  };
  const MixArgs args{distinct(s.branch), c.scores(s.branch), distinct(s.others), c.scores(s.others),
                     c.filled(1, c.wild ? c.score() : 0.25f * static_cast<float>(c.between(0, 4))), nullptr,
                     c.out<int32_t>(s.branch), c.out<float>(s.branch)};
  return c.agrees(MixArena::bytes(s), [&](auto& group, char* arena) { mix_row(group, args, s, arena); });
}

// All that lies between the larger algorithms of a step, on a graph of any content.
bool step(Case& c) {
  constexpr int kNodes = 40, kBranch = 3, kWords = 2, kLength = 90, kRows = 37, kVocab = 50;
  const GraphData g = empty_graph(c, kNodes, kBranch, kWords);
  for (int i = 0; i < kNodes; i++) g.parents[i] = c.id(0, 3), g.token_ids[i] = c.id(0, kVocab);
  int32_t *const path = c.ids(kRows, 0, kRows - 1), *const accepted = c.counts(1, 0, kRows), *const next = c.ids(1, 0, 2);
  for (int p = std::max(*accepted, 0); p < kRows; p++) path[p] = -1;
  int64_t* const tokens = c.made<int64_t>(kLength, [&] { return c.between(0, kVocab); });
  int32_t *const rows = c.ids(kRows, 0, 60), *const out_len = c.counts(1, 21, kLength - kRows);
  int32_t *const start = c.counts(1, 0, 9), *const emitted = c.out<int32_t>(kRows), *const nodes = c.out<int32_t>(kRows);
  const PathArgs walked{path, accepted, next, rows, c.ids(kRows, 0, kNodes - 1), emitted, nodes};
  const TextArgs text{emitted, accepted, next, c.ids(2, 1, 4), tokens, out_len, c.counts(1, 1, 60), c.filled(1, false),
                      c.out<int32_t>(kRows), c.out<int32_t>(1), c.filled(3, int64_t{5}), nodes, g.parents, g.num_nodes,
                      g.num_merges};
  const StartArgs started{g, tokens, out_len, start, c.out<int32_t>(1)};
  const FeedArgs<int64_t> fed{rows, c.counts(kRows, 1, 6), nullptr, out_len, start, c.out<int32_t>(kRows + 3),
                              c.out<int64_t>(kRows), c.out<int64_t>(kRows), c.out<int64_t>(kRows), c.out<int32_t>(kRows),
                              c.out<int32_t>(kRows)};
  const ChainArgs chain{tokens, out_len, c.counts(1, 0, 20), c.out<int32_t>(1), c.out<int32_t>(kRows), c.out<int32_t>(kRows),
                        c.out<int32_t>(kRows), c.out<int32_t>(kRows * words_for(kRows)), c.out<int32_t>(kRows)};
  const bool agreed = c.agrees(0, [&](auto& group, char*) {
    walk_path(group, walked, {kRows, kRows});
    group.sync("between the step's ops");
    append_text(group, text, {kRows, kLength, kNodes, 2});
    group.sync("between the step's ops");
    reset_to_root(group, started, {kNodes, kBranch, kWords, kLength});
    place_rows(group, fed, {kRows, kRows + 3, 2, 1, kVocab});
    chain_rows(group, chain, {kRows, kLength});
  });
  return agreed && std::all_of(fed.ids, fed.ids + kRows, [](int64_t token) { return token >= 0 && token < kVocab; });
}

// Few nodes and tokens, so that many are found and picked.
bool learning(Case& c) {
  constexpr int kBatch = 3, kPath = 9, kBranch = 3, kLevels = 4, kWidth = 5, kEntries = 4, kAsked = kBatch * kWidth;
  const LearnSizes sizes{kBatch, kPath, kBranch, kLevels, kEntries};
  LearnArgs a{};
  for (LearnLevel* level = a.levels; level < a.levels + kLevels; level++) {
    level->node_ids = c.ids(kAsked, -1, 12);
    level->tokens = c.ids(kAsked * kBranch, 0, 3), level->first_tokens = c.ids(kAsked * kBranch, 0, 3);
    level->log_probs = c.scores(kAsked * kBranch), level->first_log_probs = c.scores(kAsked * kBranch);
    level->index = level == a.levels + 1 ? nullptr : c.ids(kAsked, 0, kEntries - 1);
  }
  std::fill_n(a.widths, kLevels, kWidth);
  a.nodes = c.ids(sizes.nodes(), -2, 12), a.picked = c.ids(sizes.nodes(), 0, 3), a.start = c.filled(kEntries, 0.5f);
  a.shares = c.filled(kEntries, 5.0f), a.counts = c.filled(kEntries, 9.0f), a.weights = c.filled(kEntries, 0.6f);
  for (float* table : {a.shares, a.counts, a.weights}) c.spoil(table, kEntries, 0);
  a.entry = c.out<int32_t>(sizes.nodes()), a.parts = c.out<float>(sizes.nodes());
  a.prior_count = c.wild ? c.score() : 8.0f, a.memory = c.wild ? c.score() : 40.0f;
  return c.agrees(0, [&](auto& group, char*) { learn_all(group, a, sizes); });
}

// A text of few different tokens with its table, which steps add to.
struct Followed {
  static constexpr int kRoom = 300, kHashes = 16, kEntries = 64, kWays = 4, kBranch = 9, kRunnersUp = 8;
  Case& c;
  const int vocab;
  NgramTable table = empty_table(c, kEntries, kBranch);
  int32_t *runners = c.filled(kRunnersUp, -1), *emitted = c.filled(1, 1);
  float* runner_log_probs = c.filled(kRunnersUp, -2.0f);
  CopyIndex copies{c.filled(kRoom, -1), c.filled(1, 0), c.filled(kHashes, 0), c.filled(kRoom, 0), runners,
                   runner_log_probs, emitted};
  static constexpr CopySizes kCopied{kRoom, kHashes, kRunnersUp};

  // Whether `given` more tokens, of which as many count as `count` says, leave the same.
  bool agrees(int given, int least, const NgramSizes& s, const NgramTree& tree = {}, const int32_t* path = nullptr,
              const int32_t* seen = nullptr, const float* log_probs = nullptr) {
    const FollowArgs args{table, copies, c.ids(given, -1, vocab), c.counts(1, least, given), tree, path, seen, log_probs};
    const FollowSizes sizes{s, kCopied, given, 1};
    return c.agrees(follow_bytes(s), [&](auto& group, char* arena) { follow_step(group, args, sizes, arena); });
  }
  void spoil() {
    c.spoil(copies.text, kRoom, 3), c.spoil(copies.heads, kHashes, kRoom), c.spoil(copies.previous, kRoom, kRoom);
    c.spoil(table.tokens, kEntries * kBranch, 9), c.spoil(table.log_probs, kEntries * kBranch, 0);
    c.spoil(runners, kRunnersUp, 9), c.spoil(runner_log_probs, kRunnersUp, 0);
    if (c.wild) *copies.length = c.count(0, kRoom), *emitted = c.count(0, 9);
  }
  HistoryArgs known() {
    const double* weights =
        c.made<double>(kHistoryWeights, [&] { return c.wild ? c.score() : 0.25 * c.between(0, 8) - 1.0; });
    return {table, copies, weights, c.once_in(2) ? table : NgramTable{}};
  }
};

bool history(Case& c) {
  constexpr int kNodes = 12, kTail = 8, kWanted = 5;
  Followed text{c, c.between(1, 5)};
  const int vocab = text.vocab, rows = c.between(1, 20);
  const NgramSizes s{Followed::kEntries, Followed::kWays, Followed::kBranch, rows, kTail, 4};
  if (!text.agrees(150, 130, s)) return false;
  int32_t *const parents = c.filled(rows, -1), *const depths = c.filled(rows, 0);
  for (int row = 1; row < rows; row++) parents[row] = c.between(0, row - 1), depths[row] = depths[parents[row]] + 1;
  c.spoil(parents, rows, rows), c.spoil(depths, rows, 9), text.spoil();
  const NgramTree tree{c.ids(rows, 0, vocab), parents, depths, c.ids(1, rows, rows), c.ids(kTail, 0, vocab)};
  int32_t* const seen = c.ids(rows * s.branch, -1, vocab + 3);
  float* const log_probs = c.scores(rows * s.branch);
  for (int step = 0; step < 3; step++) {
    if (!text.agrees(9, 0, s, tree, c.ids(1, 0, rows - 1), seen, log_probs)) return false;
  }
  int32_t* const graph_parents = c.ids(kNodes, -1, 1);
  if (!c.wild) graph_parents[0] = -1, graph_parents[1] = 0;
  text.spoil();
  const bool noisy = c.once_in(2);
  const HistoryRecall asked{text.known(), c.ids(kNodes, 0, vocab), graph_parents, c.ids(kNodes * kTail, 0, vocab),
                            c.ids(kNodes, 0, 5), c.ids(rows, -1, kNodes - 1),
                            {noisy ? c.ids(1, 1, 20) : nullptr, noisy ? c.filled(1, int64_t{12345}) : nullptr,
                             noisy ? c.ids(1, 0, 9) : nullptr},
                            c.out<int32_t>(rows * kWanted), c.out<float>(rows * kWanted), c.out<int32_t>(rows)};
  const HistorySizes sizes{s, s, Followed::kCopied, kNodes, kWanted};
  for (int row = 0; row < std::min(rows, 3); row++) {
    const auto recall = [&](auto& group, char* arena) { recall_history(group, asked, sizes, row, 1, arena); };
    if (!c.agrees(HistoryArena::bytes(), recall)) return false;
  }
  return true;
}

bool levels(Case& c) {
  const int levels = c.between(1, 4), width = c.between(1, 5), branch = c.between(1, 4), given = c.between(1, width);
  const NgramSizes s{Followed::kEntries, Followed::kWays, Followed::kBranch, width, kContext, 4};
  const int nodes = 1 + levels * width * branch, words = words_for(levels * width), at_once = c.between(1, width);
  const MergeSizes merging{nodes, width, branch, width, words, 0, c.between(-1, 2), -INFINITY, c.once_in(2) ? -INFINITY : -3.0f};
  Followed text{c, c.between(1, 3)};
  if (!text.agrees(150, 150, s)) return false;
  for (int i = 0; i < Followed::kRunnersUp; i++) text.runners[i] = c.id(-1, text.vocab);
  int32_t* const frontier = c.filled(given, -1);
  if (!c.once_in(8)) frontier[0] = 0;
  const GraphData g = empty_graph(c, nodes, branch, words);
  const int length = std::clamp(*text.copies.length, kContext + 1, Followed::kRoom);
  g.token_ids[0] = text.copies.text[length - 1];
  for (int i = 0; i < kContext; i++) g.contexts[i] = text.copies.text[length - 2 - i];
  text.spoil(), c.spoil(frontier, given, nodes);
  const LevelsArgs args{text.known(), g, frontier, {}, c.out<int32_t>(levels * width),
                        c.out<int32_t>(levels * width * branch), c.out<float>(levels * width * branch),
                        c.out<int32_t>(levels * width)};
  const HistorySizes recall{s, {}, Followed::kCopied, nodes, branch};
  const auto sizes = [&](int threads) { return LevelSizes{levels, width, branch, given, threads > 1 ? at_once : 1, recall, merging}; };
  return c.agrees([&](int threads) { return LevelsArena::bytes(sizes(threads)); },
                  [&](auto& group, char* arena) { grow_levels(group, args, sizes(group.size()), arena); });
}

// Rows that are accepted move inside of their head, or nowhere.
bool commit(Case& c) {
  const int batch = c.between(1, 3), heads = c.between(1, 2), slots = c.between(1, 20), path = c.between(1, 6);
  int32_t next = 0;
  int32_t *const cache = c.made<int32_t>(batch * heads * slots, [&] { return next++; }), *const staged = c.out<int32_t>(path);
  std::vector<int32_t> expected(cache, cache + next);
  const int32_t *const rows = c.ids(batch * path, 0, slots), *const count = c.ids(batch, 0, path), *const kv_len = c.ids(batch, 0, slots);
  const CommitArgs args{{}, 0, path, {4 * heads * slots, 4 * slots, 4, heads, slots, 4}, rows, count, kv_len};
  for (int b = 0; b < batch; b++) {
    for (int head = 0; head < heads; head++) {
      const int first = (b * heads + head) * slots;
      for (int64_t i = 0; kv_len[b] >= 0 && i < path && i < count[b]; i++) {
        const int64_t to = kv_len[b] + i, from = int64_t{kv_len[b]} + max_int(rows[b * path + i], 0);
        if (from < slots && to < slots) expected[first + to] = cache[first + from];
      }
      commit_column(args, reinterpret_cast<char*>(cache), b, head, staged, 1);
    }
    if (accepted_of(count[b], path) != std::clamp(count[b], 0, path)) return false;
  }
  return std::equal(expected.begin(), expected.end(), cache);
}

// All of them, by so many threads.
template <int kThreads, bool kWild>
bool all(int, std::mt19937& random) {
  constexpr bool (*kAll[])(Case&) = {graph, picks, memory, mixture, step, learning, history, levels, commit};
  Case c(kThreads, kWild, random);
  for (const auto right : kAll) {
    if (!right(c)) return false;
  }
  return true;
}

void pick_from_input(char** argv) {
  std::mt19937 random;
  Case c(atoi(argv[0]), false, random);
  const PickSizes s{atoi(argv[1]), atoi(argv[2]), atoi(argv[2]) != 0};
  const Warpers warpers{strtof(argv[6], nullptr), strtof(argv[7], nullptr), strtof(argv[8], nullptr),
                        strtof(argv[9], nullptr)};
  FloatLogit<float>* const logits = c.out<FloatLogit<float>>(s.vocab);
  if (fread(logits, sizeof(FloatLogit<float>), static_cast<size_t>(s.vocab), stdin) != static_cast<size_t>(s.vocab)) _Exit(2);
  const PickArgs<FloatLogit<float>> args{logits, c.out<float>(s.vocab), c.out<int32_t>(s.branch), c.out<float>(s.branch), warpers,
                                    noise_stream(atoll(argv[3]), atoi(argv[4]), atoi(argv[5]))};
  c.in_a_block(PickArena::bytes(c.threads), [&](auto& group, char* arena) { pick_tokens(group, args, s, arena); });
  for (int k = 0; k < s.branch; k++) printf("%d %.9g\n", args.tokens[k], static_cast<double>(args.log_probs[k]));
  for (int i = 0; s.branch == 0 && i < s.vocab; i++) printf("%d %.9g\n", i, static_cast<double>(args.scores[i]));
}

const Listed listed({{"8 threads", all<8, false>},
                     {"32 threads", all<32, false>},
                     {"wild 1", all<1, true>},
                     {"wild 8", all<8, true>}});

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  if (strcmp(argv[1], "pick") == 0) return pick_from_input(argv + 2), 0;
  if (argc < 4) return 2;
  if (argc > 5) planted = {argv[4], argv[5]};
  std::mt19937 random(static_cast<unsigned>(atoi(argv[3])));
  for (const Problem& problem : all_problems) {
    if (strcmp(argv[1], problem.name) != 0) continue;
    for (int round = 0; round < atoi(argv[2]); round++) {
      if (!problem.right(round, random)) return fprintf(stderr, "round %d is wrong\n", round), kWrong;
    }
    return 0;
  }
  return 2;
}
