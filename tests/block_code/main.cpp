// Drafts random graphs, flattens and verifies them, fills n-gram tables and reads them, and so on, once by a group of one thread (which the Python tests hold against
// the reference) and once by a block of T threads, and compares every byte.
//
//     block_code THREADS ROUNDS SEED [--drop BARRIER | --plain ATOMIC | --diverge]
//     block_code --wild THREADS ROUNDS SEED         the same on values of no meaning
//     block_code --arena DEPTH WIDTH BRANCH ROWS LENGTHS WAYS    prints the shared memory of the kernels in bytes
//     block_code --pick THREADS VOCAB BRANCH SEED POSITION SEQUENCE TEMPERATURE TOP_K TOP_P MIN_P < logits
//                                                   prints draft_candidates of one float32 row, one pair a line
//
// Exit status: 0 equal, 3 different, 4 divergent barriers; sanitizers have their own.
#include <cmath>
#include <cstdio>
#include <random>

#include "../../csrc/algorithms/flatten.h"
#include "../../csrc/algorithms/merge.h"
#include "../../csrc/algorithms/verify.h"
#include "../../csrc/algorithms/ngram.h"
#include "../../csrc/algorithms/sampling.h"
#include "history_rounds.h"
#include "hostile_rounds.h"
#include "learn_rounds.h"
#include "fiber_group.h"
#include "step_rounds.h"

using namespace gsd;

namespace {

constexpr int32_t kPoison = 0xA5;

// Exactly as large as asked, so that AddressSanitizer sees the first byte beyond; poisoned, as shared memory is.
struct Arena {
  std::vector<char> memory;
  explicit Arena(size_t bytes) : memory(bytes, static_cast<char>(kPoison)) {}
  char* data() { return memory.data(); }
};

template <class T>
std::vector<T> poisoned(size_t n) {
  std::vector<T> v(n);
  memset(v.data(), kPoison, n * sizeof(T));
  return v;
}

struct Problem {
  int depth, width, branch, merge_context, vocab, rows, max_path;

  int capacity() const { return 1 + branch + (depth - 1) * width * branch; }
  int words() const { return words_for(depth * width); }
};

struct Graph {
  std::vector<int32_t> token_ids, parents, depths, contexts, ancestor_mask, edge_targets, counts;
  std::vector<float> scores, edge_log_probs;
  std::vector<char> expanded;

  explicit Graph(const Problem& p)
      : token_ids(p.capacity(), 0),
        parents(p.capacity(), -1),
        depths(p.capacity(), 0),
        contexts(p.capacity() * kContext, -1),
        ancestor_mask(p.capacity() * p.words(), 0),
        edge_targets(p.capacity() * p.branch, -1),
        counts{1, 0},
        scores(p.capacity(), 0.0f),
        edge_log_probs(p.capacity() * p.branch, 0.0f),
        expanded(p.capacity(), 0) {}

  bool operator==(const Graph&) const = default;
};

struct Level {
  std::vector<int32_t> frontier, tokens;
  std::vector<float> log_probs;
};

struct Next {
  std::vector<int32_t> ids, tokens, depths, mask;

  explicit Next(const Problem& p)
      : ids(poisoned<int32_t>(p.width)),
        tokens(poisoned<int32_t>(p.width)),
        depths(poisoned<int32_t>(p.width)),
        mask(poisoned<int32_t>(p.width * p.words())) {}

  bool operator==(const Next&) const = default;
};

struct Unrolled {
  std::vector<int32_t> token_ids, parent_rows, depths, mask, node_ids, num_rows;
  std::vector<float> scores;

  explicit Unrolled(const Problem& p)
      : token_ids(poisoned<int32_t>(p.rows)),
        parent_rows(poisoned<int32_t>(p.rows)),
        depths(poisoned<int32_t>(p.rows)),
        mask(poisoned<int32_t>(p.rows * words_for(p.rows))),
        node_ids(poisoned<int32_t>(p.rows)),
        num_rows(poisoned<int32_t>(1)),
        scores(poisoned<float>(p.rows)) {}

  bool operator==(const Unrolled&) const = default;
};

struct Accepted {
  std::vector<int32_t> rows, counts;

  explicit Accepted(const Problem& p) : rows(poisoned<int32_t>(p.max_path + 1)), counts(poisoned<int32_t>(2)) {}

  bool operator==(const Accepted&) const = default;
};

MergeSizes merge_sizes(const Problem& p, int level, int expanding) {
  return {p.capacity(), expanding, p.branch, p.width, p.words(), level, p.merge_context, -INFINITY, -INFINITY};
}

MergeArgs merge_args(Graph& g, const Level& level, Next& next) {
  return {g.token_ids.data(),
          g.parents.data(),
          g.depths.data(),
          g.scores.data(),
          g.contexts.data(),
          reinterpret_cast<bool*>(g.expanded.data()),
          g.ancestor_mask.data(),
          g.edge_targets.data(),
          g.edge_log_probs.data(),
          &g.counts[0],
          &g.counts[1],
          level.frontier.data(),
          level.tokens.data(),
          level.log_probs.data(),
          next.ids.data(),
          next.tokens.data(),
          next.depths.data(),
          next.mask.data()};
}

FlattenArgs flatten_args(const Graph& g, Unrolled& u) {
  return {g.token_ids.data(),   g.edge_targets.data(), g.edge_log_probs.data(), u.token_ids.data(),
          u.parent_rows.data(), u.depths.data(),       u.mask.data(),           u.node_ids.data(),
          u.scores.data(),      u.num_rows.data()};
}

VerifyArgs verify_args(const Unrolled& u, const std::vector<int32_t>& sampled, const int32_t* eos,
                       const int32_t* remaining, const bool* done, Accepted& a) {
  return {u.token_ids.data(), u.parent_rows.data(), u.depths.data(), u.mask.data(), u.num_rows.data(), sampled.data(),
          eos,                remaining,            done,            a.rows.data(), &a.counts[0],      &a.counts[1]};
}

// Log-probabilities on a coarse grid, so that ties are common.
Level draft(const Problem& p, const std::vector<int32_t>& frontier, std::mt19937& random) {
  Level level{frontier, {}, {}};
  for (size_t i = 0; i < frontier.size() * p.branch; i++) {
    level.tokens.push_back(static_cast<int32_t>(random() % p.vocab));
    level.log_probs.push_back(random() % 12 == 0 ? -INFINITY : -0.25f * static_cast<float>(random() % 12));
  }
  return level;
}

struct Picked {
  std::vector<int32_t> tokens;
  std::vector<float> log_probs, scores;

  Picked(const PickSizes& s)
      : tokens(poisoned<int32_t>(std::max(1, s.branch))),
        log_probs(poisoned<float>(std::max(1, s.branch))),
        scores(poisoned<float>(s.vocab)) {}
};

template <class Group>
void pick(Group& group, const std::vector<Float32Logit>& logits, const Warpers& warpers, const NoiseStream& noise,
          const PickSizes& sizes, Picked& out, char* arena) {
  const PickArgs<Float32Logit> args{logits.data(),        out.scores.data(), out.tokens.data(),
                                    out.log_probs.data(), warpers,           noise};
  pick_tokens(group, args, sizes, arena);
}

// Only the sum over the vocabulary depends on how many threads there are.
bool picks_agree(int threads, const Faults& faults, std::mt19937& random) {
  const PickSizes sizes{1 + static_cast<int>(random() % 300), static_cast<int>(random() % 7)};
  std::vector<Float32Logit> logits(sizes.vocab);
  for (Float32Logit& logit : logits) logit.bits = 0.01f * static_cast<float>(random() % 1000);
  const auto one_of = [&](std::initializer_list<float> values) { return values.begin()[random() % values.size()]; };
  const Warpers warpers{one_of({0.0f, 0.7f, 1.0f}), one_of({0.0f, 5.0f, 40.0f}), one_of({1.0f, 0.9f, 0.3f}),
                        one_of({0.0f, 0.05f})};
  const NoiseStream noise = noise_stream(static_cast<int64_t>(random()), 17, 3);
  Picked expected(sizes), got(sizes);
  SerialGroup serial;
  Arena serial_arena(PickArena::bytes(1)), block_arena(PickArena::bytes(threads));
  pick(serial, logits, warpers, noise, sizes, expected, serial_arena.data());
  run_block(threads, faults, [&](FiberGroup& group) {
    pick(group, logits, warpers, noise, sizes, got, block_arena.data());
  });
  const auto close = [](float a, float b) { return a == b || fabsf(a - b) < 1e-5f; };
  for (int k = 0; k < sizes.branch; k++) {
    if (expected.tokens[k] != got.tokens[k] || !close(expected.log_probs[k], got.log_probs[k])) return false;
  }
  for (int i = 0; sizes.branch == 0 && i < sizes.vocab; i++) {
    if (!close(expected.scores[i], got.scores[i])) return false;
  }
  return true;
}

void pick_from_input(char** argv) {
  const int threads = atoi(argv[0]);
  const PickSizes sizes{atoi(argv[1]), atoi(argv[2]), atoi(argv[2]) != 0};
  const NoiseStream noise = noise_stream(atoll(argv[3]), atoi(argv[4]), atoi(argv[5]));
  const Warpers warpers{strtof(argv[6], nullptr), strtof(argv[7], nullptr), strtof(argv[8], nullptr),
                        strtof(argv[9], nullptr)};
  std::vector<Float32Logit> logits(sizes.vocab);
  if (fread(logits.data(), sizeof(Float32Logit), logits.size(), stdin) != logits.size()) _Exit(2);
  Picked out(sizes);
  Arena arena(PickArena::bytes(threads));
  run_block(threads, {}, [&](FiberGroup& group) { pick(group, logits, warpers, noise, sizes, out, arena.data()); });
  for (int k = 0; k < sizes.branch; k++) printf("%d %.9g\n", out.tokens[k], static_cast<double>(out.log_probs[k]));
  for (int i = 0; sizes.branch == 0 && i < sizes.vocab; i++) printf("%d %.9g\n", i, static_cast<double>(out.scores[i]));
}

struct Memory {
  std::vector<int64_t> keys;
  std::vector<int32_t> tokens;
  std::vector<float> log_probs;

  explicit Memory(const NgramSizes& s)
      : keys(s.capacity, 0), tokens(s.capacity * s.branch, -1), log_probs(s.capacity * s.branch, 0.0f) {}

  NgramTable table() { return {keys.data(), tokens.data(), log_probs.data()}; }
  bool operator==(const Memory&) const = default;
};

struct Remembered {
  std::vector<int32_t> tokens, matched;
  std::vector<float> log_probs;

  explicit Remembered(const NgramSizes& s)
      : tokens(poisoned<int32_t>(s.rows * s.branch)),
        matched(poisoned<int32_t>(s.rows)),
        log_probs(poisoned<float>(s.rows * s.branch)) {}

  bool operator==(const Remembered&) const = default;
};

// Few different tokens, so that contexts come again; small tables, so that sets overflow; now and then several chunks.
bool memories_agree(int threads, const Faults& faults, std::mt19937& random) {
  const int ways = 1 << random() % 4, rows = random() % 4 == 0 ? 150 : 1 + static_cast<int>(random() % 40);
  const NgramSizes s{ways << random() % 6, ways, 1 + static_cast<int>(random() % 4), rows, 5,
                     1 + static_cast<int>(random() % 5)};
  const int vocab = 1 + static_cast<int>(random() % 12);
  Memory expected(s), got(s);
  SerialGroup serial;
  std::vector<int32_t> contexts(s.rows * s.context), tokens(s.rows * s.branch);
  std::vector<float> log_probs(s.rows * s.branch);
  std::vector<char> valid(s.rows);
  const auto draw = [&] {
    for (int32_t& token : contexts) token = random() % 12 == 0 ? -1 : static_cast<int32_t>(random() % vocab);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random());
    for (float& log_prob : log_probs) log_prob = -static_cast<float>(random() % 1000);
    for (char& taken : valid) taken = random() % 8 != 0;
  };
  for (int call = 0; call < 2; call++) {
    draw();
    const auto args = [&](Memory& memory) {
      return NgramInsertArgs{memory.table(), contexts.data(), tokens.data(), log_probs.data(),
                             reinterpret_cast<const bool*>(valid.data()), {}};
    };
    Arena serial_arena(NgramArena::bytes(s)), block_arena(NgramArena::bytes(s));
    insert_rows(serial, args(expected), s, serial_arena.data());
    run_block(threads, faults, [&](FiberGroup& group) { insert_rows(group, args(got), s, block_arena.data()); });
    if (!(expected == got)) return false;
  }
  draw();
  Remembered answers(s), block_answers(s);
  const auto args = [&](Remembered& r) {
    return NgramLookupArgs{expected.table(), contexts.data(), r.tokens.data(), r.log_probs.data(), r.matched.data()};
  };
  look_up_rows(serial, args(answers), s);
  run_block(threads, faults, [&](FiberGroup& group) { look_up_rows(group, args(block_answers), s); });
  return answers == block_answers;
}

bool mixtures_agree(int threads, const Faults& faults, std::mt19937& random) {
  const MixSizes s{1 + static_cast<int>(random() % 20), static_cast<int>(random() % 20), 0};
  const auto draw = [&](int count, std::vector<int32_t>& tokens, std::vector<float>& log_probs) {
    for (int i = 0; i < count; i++) {
      tokens.push_back(random() % 6 == 0 ? -1 : 2 * i + static_cast<int32_t>(random() % 2));  // distinct
      log_probs.push_back(-0.5f * static_cast<float>(random() % 12));
    }
  };
  std::vector<int32_t> tokens, other_tokens, expected(poisoned<int32_t>(s.branch)), got(expected);
  std::vector<float> log_probs, other_log_probs, expected_log_probs(poisoned<float>(s.branch));
  std::vector<float> got_log_probs(expected_log_probs);
  draw(s.branch, tokens, log_probs);
  draw(s.others, other_tokens, other_log_probs);
  const float weight = 0.25f * static_cast<float>(random() % 5);
  const auto args = [&](std::vector<int32_t>& mixed, std::vector<float>& mixed_log_probs) {
    return MixArgs{tokens.data(), log_probs.data(), other_tokens.data(), other_log_probs.data(),
                   &weight,       nullptr,          mixed.data(),     mixed_log_probs.data()};
  };
  SerialGroup serial;
  Arena serial_arena(MixArena::bytes(s)), block_arena(MixArena::bytes(s));
  mix_row(serial, args(expected, expected_log_probs), s, serial_arena.data());
  run_block(threads, faults, [&](FiberGroup& group) { mix_row(group, args(got, got_log_probs), s, block_arena.data()); });
  return expected == got && expected_log_probs == got_log_probs;
}

bool round_agrees(const Problem& p, int threads, const Faults& faults, std::mt19937& random) {
  Graph serial_graph(p), block_graph(p);
  const SerialGroup serial;
  std::vector<int32_t> frontier{0};
  for (int depth = 0; depth < p.depth; depth++) {
    const Level level = draft(p, frontier, random);
    const MergeSizes sizes = merge_sizes(p, depth, static_cast<int>(frontier.size()));
    Next expected(p), got(p);
    Arena serial_arena(MergeArena::bytes(sizes)), block_arena(MergeArena::bytes(sizes));
    merge_level(serial, merge_args(serial_graph, level, expected), sizes, serial_arena.data());
    run_block(threads, faults, [&](FiberGroup& group) {
      merge_level(group, merge_args(block_graph, level, got), sizes, block_arena.data());
    });
    if (!(expected == got) || !(serial_graph == block_graph)) return false;
    frontier = expected.ids;
  }

  const FlattenSizes sizes{p.capacity(), p.branch, p.rows, p.max_path};
  Unrolled expected(p), got(p);
  Arena serial_arena(FlattenArena::bytes(sizes)), block_arena(FlattenArena::bytes(sizes));
  flatten_graph(serial, flatten_args(serial_graph, expected), sizes, serial_arena.data());
  run_block(threads, faults, [&](FiberGroup& group) {
    flatten_graph(group, flatten_args(serial_graph, got), sizes, block_arena.data());
  });
  if (!(expected == got)) return false;

  // The target agrees with most drafted tokens.
  std::vector<int32_t> sampled(p.rows);
  for (int32_t& token : sampled) token = static_cast<int32_t>(random() % p.vocab);
  for (int row = 1; row < expected.num_rows[0]; row++) {
    if (random() % 4 != 0) sampled[expected.parent_rows[row]] = expected.token_ids[row];
  }
  const int32_t eos[] = {0}, remaining = 1 + static_cast<int32_t>(random() % 12);
  const bool done = random() % 8 == 0;
  const VerifySizes verify_sizes{p.rows, 1, p.max_path};
  Accepted accepted(p), block_accepted(p);
  Arena serial_verify(VerifyArena::bytes(verify_sizes)), block_verify(VerifyArena::bytes(verify_sizes));
  verify_rows(serial, verify_args(expected, sampled, eos, &remaining, &done, accepted), verify_sizes,
              serial_verify.data());
  run_block(threads, faults, [&](FiberGroup& group) {
    verify_rows(group, verify_args(expected, sampled, eos, &remaining, &done, block_accepted), verify_sizes,
                block_verify.data());
  });
  return accepted == block_accepted;
}

int between(std::mt19937& random, int low, int high) { return low + static_cast<int>(random() % (high - low + 1)); }

}  // namespace

int main(int argc, char** argv) {
  if (argc == 8 && strcmp(argv[1], "--arena") == 0) {
    const Problem p{atoi(argv[2]), atoi(argv[3]), atoi(argv[4]), 1, 0, atoi(argv[5]), atoi(argv[5]) - 1};
    printf("merge_kernel %zu\n", MergeArena::bytes(merge_sizes(p, 1, p.width)));
    printf("flatten_kernel %zu\n", FlattenArena::bytes({p.capacity(), p.branch, p.rows, p.max_path}));
    printf("pick_kernel %zu\n", PickArena::bytes(kPickThreads));
    const NgramSizes memory{1 << 15, atoi(argv[7]), p.branch, p.rows, kMostLengths, atoi(argv[6])};
    printf("ngram_insert_kernel %zu\n", NgramArena::bytes(memory));
    printf("history_append_kernel %zu\n", follow_bytes({.accepted_rows = &kPoison, .path = 1}, memory));
    printf("history_recall_kernel %zu\n", HistoryArena::bytes());
    const int levels = p.depth;
    const MergeSizes merge = merge_sizes(p, 0, p.width);
    printf("recall_levels_kernel %zu\n",
           levels_bytes({levels, p.width, p.branch, 1, min_int(p.width, 12), memory, merge}));
    printf("mix_kernel %zu\n", MixArena::bytes({p.branch, p.branch, 0}));
    printf("verify_kernel %zu\n", VerifyArena::bytes({p.rows, 1, p.max_path}));
    return 0;
  }
  if (argc == 12 && strcmp(argv[1], "--pick") == 0) {
    pick_from_input(argv + 2);
    return 0;
  }
  if (argc == 5 && strcmp(argv[1], "--wild") == 0) {
    std::mt19937 random(static_cast<unsigned>(atoi(argv[4])));
    for (int round = 0; round < atoi(argv[3]); round++) {
      if (!wild_stands(atoi(argv[2]), random)) {
        fprintf(stderr, "wild round %d does not stand\n", round);
        return 3;
      }
    }
    return 0;
  }
  if (argc < 4) return 2;
  const int threads = atoi(argv[1]), rounds = atoi(argv[2]);
  std::mt19937 random(static_cast<unsigned>(atoi(argv[3])));
  Faults faults;
  if (argc > 5 && strcmp(argv[4], "--drop") == 0) faults.dropped_barrier = argv[5];
  if (argc > 5 && strcmp(argv[4], "--plain") == 0) faults.plain_atomic = argv[5];
  if (argc > 4 && strcmp(argv[4], "--diverge") == 0) {
    run_block(threads, faults, [](FiberGroup& group) { group.sync(group.rank() % 2 == 0 ? "even" : "odd"); });
  }
  for (int round = 0; round < rounds; round++) {
    Problem p{};
    p.depth = between(random, 1, 5);
    p.width = between(random, 1, 12);
    p.branch = between(random, 1, 8);
    p.merge_context = between(random, -1, 2);
    p.vocab = between(random, 2, 10);
    p.rows = between(random, 2, 70);
    p.max_path = between(random, 1, p.rows - 1);
    if (!round_agrees(p, threads, faults, random) || !picks_agree(threads, faults, random) ||
        !memories_agree(threads, faults, random) || !mixtures_agree(threads, faults, random) ||
        !steps_agree(threads, faults, random) || !learning_agrees(threads, faults, random) ||
        !histories_agree(threads, faults, random) || !levels_agree(threads, faults, random)) {
      fprintf(stderr, "round %d differs\n", round);
      return 3;
    }
  }
  return 0;
}
