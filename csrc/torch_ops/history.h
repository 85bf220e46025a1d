// The texts, graphs and results of the ops over a History of gsd_kernels/ops/history/records.py, and of recall_levels; the
// proposals and tables of learn_source.
#pragma once

#include "../algorithms/learn.h"
#include "../algorithms/recall_levels.h"
#include "graph_ops.h"
#include "ngram.h"

namespace gsd {

inline CopySizes copy_sizes(const Arguments& in) {
  constexpr int64_t kMost = 1 << 30;
  const int64_t hashes = in['H'];
  STD_TORCH_CHECK(in['S'] < kMost, "text: too long, ", in['S']);
  STD_TORCH_CHECK(hashes >= 1 && hashes < kMost && (hashes & (hashes - 1)) == 0,
                  "heads: expected a power of two of hashes, got ", hashes);
  STD_TORCH_CHECK(in['G'] <= kRemembered, "runners: expected at most ", kRemembered, ", got ", in['G']);
  return {in.size('S'), in.size('H'), in.size('G')};
}

// Of `wanted` candidates of each of `rows` nodes.
inline HistorySizes recall_sizes(const Arguments& in, int64_t rows, int64_t wanted) {
  STD_TORCH_CHECK(in['N'] >= 1, "token_ids: expected at least one node");
  const NgramSizes sizes = ngram_sizes(in['C'], in['w'], in['T'], rows, in['X'], in['m']);
  STD_TORCH_CHECK(wanted >= 0 && wanted <= sizes.branch, "branch: expected at most ", sizes.branch, ", got ", wanted);
  NgramSizes learned{};
  if (in.has("learned_keys")) learned = ngram_sizes(in['D'], in['o'], in['E'], 1, kContext + 1, in['n']);
  in.together("first_pick", 3);
  return {sizes, learned, copy_sizes(in), in.size('N'), narrow(wanted)};
}

// A node in place of a sequence.
inline auto prepare_history(Arguments& in) {
  return Call{recall_sizes(in, in['R'], in['k']), in.each<HistoryRecall>(), in['B'] * in['R']};
}

inline auto prepare_follow(Arguments& in) {
  FollowSizes sizes{{}, copy_sizes(in), in.size('P'), in.size('A')};
  if (in.has("accepted_rows")) {
    static_cast<NgramSizes&>(sizes) = ngram_sizes(in);
    STD_TORCH_CHECK(sizes.path >= 1 && sizes.rows >= 1, "accepted_rows: expected at least one row");
  }
  return Call{sizes, in.each<FollowArgs>(), in['B']};
}

using LevelsCall = Call<LevelSizes, LevelsArgs>;

template <int at_once>
LevelsCall prepare_levels(Arguments& in) {
  constexpr int64_t kMost = 1 << 15;
  const int64_t given = in['I'], width = in['F'], levels = in['v'], level = in['l'];
  STD_TORCH_CHECK(given >= 1 && given <= width && width < kMost, "width: expected at least the frontier's ", given,
                  " nodes, below ", kMost, ", got ", width);
  STD_TORCH_CHECK(levels >= 1 && levels < kMost && level >= 0 && level < kMost,
                  "levels: expected at least 1 from 0 on, got ", levels, " from ", level);
  in.set('X', kContext), in.set('P', levels * width);
  const LevelSizes sizes{narrow(levels), narrow(width), in.size('K'), narrow(given), min_int(narrow(width), at_once),
                         recall_sizes(in, width, in['K']), merge_sizes(in, width)};
  return {sizes, in.each<LevelsArgs>(), in['B']};
}

// All sequences in place of one.
inline auto prepare_learn(Arguments& in) {
  static const Line line("node_ids[B,W] tokens[B,W,K] log_probs[B,W,K] index?[B,W] first_tokens[B,W,K] first_log_probs[B,W,K]");
  const size_t parts = line.entries.size(), levels = in.list("asked").size() / parts;
  STD_TORCH_CHECK(levels >= 1 && levels <= kMostLevels && levels * parts == in.list("asked").size(), "asked: expected ",
                  parts, " tensors of each of 1 ... ", kMostLevels, " levels");
  STD_TORCH_CHECK(in['E'] >= 1, "start: expected at least one entry");
  Call<LearnSizes, LearnArgs> call{{}, {}, 1};
  LearnArgs& a = call.args.first;
  for (size_t i = 0; i < levels; i++) {
    Tensors some;
    for (size_t part = 0; part < parts; part++) some.push_back(in.list("asked")[part * levels + i]);
    Arguments level(line, in, "BK", some.data());
    a.levels[i] = level.fill<LearnLevel>();
    a.widths[i] = level.size('W');
    in.set('K', level['K']);
  }
  call.sizes = {in.size('B'), in.size('P'), in.size('K'), narrow(levels), in.size('E')};
  a.nodes = in.next(), a.picked = in.next(), a.start = in.next();
  a.shares = in.next(), a.counts = in.next(), a.weights = in.next();
  a.entry = in.scratch<int32_t>(call.sizes.nodes()), a.parts = in.scratch<float>(call.sizes.nodes());
  a.prior_count = static_cast<float>(in.real('c')), a.memory = static_cast<float>(in.real('m'));
  return call;
}

}  // namespace gsd
