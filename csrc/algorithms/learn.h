// Interpolation weights of a draft source, from what the target picked after the nodes that it was asked about.
// gsd_kernels/ops/learn/reference.py is the specification; sums go over sequences and places in order, whatever the
// number of threads.
#pragma once

#include <cmath>

#include "group.h"

namespace gsd {

constexpr int kMostLevels = 64;  // MAX_LEVELS of gsd_kernels/ops/learn/api.py

// B sequences, P accepted nodes, K candidates; tables of `entries` by index.
struct LearnSizes {
  int batch, path, branch, levels, entries;

  GSD_HD int nodes() const { return batch * path; }
};

// The W nodes of a level that the source was asked about.
struct LearnLevel {
  const int32_t* node_ids;       // [B, W], −1 for padding
  const int32_t* tokens;         // [B, W, K], the source's candidates
  const float* log_probs;        // [B, W, K]
  const int32_t* index;          // [B, W]; null: 0
  const int32_t* first_tokens;   // [B, W, K], what it was mixed with
  const float* first_log_probs;  // [B, W, K]
};

struct LearnArgs {
  const int32_t* nodes;     // [B, P], −2 beyond the path
  const int32_t* picked;    // [B, P]
  const float* start;       // [entries], prior weights
  float* shares;            // [entries]
  float* counts;            // [entries]
  float* weights;           // [entries]
  int32_t* entry;           // [B, P], working memory
  float* parts;             // [B, P], working memory
  float prior_count, memory;
  LearnLevel levels[kMostLevels];
  int widths[kMostLevels];
};

// Of all sequences.
template <>
struct Each<LearnArgs> {
  LearnArgs first;
};

// A table that sinks back to its prior by how much was observed.
GSD_HD float remembered(float value, float prior, float added, float observed, float memory) {
  return (value - prior) * expf(-observed / memory) + prior + added;
}

GSD_HD float probability_of(const int32_t* tokens, const float* log_probs, int branch, int32_t token) {
  float prob = 0.0f;
  for (int k = 0; k < branch; k++) prob += tokens[k] == token ? expf(log_probs[k]) : 0.0f;
  return prob;
}

// What candidates leave to a token that is none of them: half of what it could be at most, for they are the likeliest.
GSD_HD float unnamed_probability(const float* log_probs, int branch) {
  float sum = 0.0f, least = 1.0f;
  for (int k = 0; k < branch; k++) {
    const float prob = expf(log_probs[k]);
    sum += prob;
    least = fminf(least, prob);
  }
  return 0.5f * fminf(fmaxf(1.0f - sum, 0.0f), least);
}

// The index of node `at`, asked about at `row` [B, W] of a level, and what part of the mixture at its pick was this
// source's; −1 where neither had said it.
GSD_HD void weigh_node(const LearnArgs& a, const LearnSizes& s, int at, const LearnLevel& level, int64_t row) {
  const int given = level.index != nullptr ? level.index[row] : 0;
  const int entry = min_int(max_int(given, 0), s.entries - 1);
  const int64_t from = row * s.branch;
  const float weight = a.weights[entry];
  const float* mine = level.log_probs + from;
  const float* before = level.first_log_probs + from;
  float other = probability_of(level.tokens + from, mine, s.branch, a.picked[at]);
  float first = probability_of(level.first_tokens + from, before, s.branch, a.picked[at]);
  if (!(weight * other + (1.0f - weight) * first > 0.0f)) return;
  if (!(other > 0.0f)) other = unnamed_probability(mine, s.branch);
  if (!(first > 0.0f)) first = unnamed_probability(before, s.branch);
  a.entry[at] = entry;
  a.parts[at] = weight * other / (weight * other + (1.0f - weight) * first);
}

GSD_HD void find_node(const LearnArgs& a, const LearnSizes& s, int at) {
  a.entry[at] = -1;
  a.parts[at] = 0.0f;
  for (int i = 0; i < s.levels; i++) {
    const LearnLevel& level = a.levels[i];
    const int64_t begin = static_cast<int64_t>(at / s.path) * a.widths[i];
    for (int64_t row = begin; row < begin + a.widths[i]; row++) {
      if (level.node_ids[row] == a.nodes[at]) return weigh_node(a, s, at, level, row);
    }
  }
}

GSD_HD void learn_weight(const LearnArgs& a, const LearnSizes& s, int entry) {
  float counted = 0.0f, share = 0.0f;
  for (int at = 0; at < s.nodes(); at++) {
    if (a.entry[at] != entry) continue;
    counted += 1.0f;
    share += a.parts[at];
  }
  const float prior = a.prior_count * a.start[entry];
  a.shares[entry] = remembered(a.shares[entry], prior, share, counted, a.memory);
  a.counts[entry] = remembered(a.counts[entry], a.prior_count, counted, counted, a.memory);
  a.weights[entry] = a.shares[entry] / a.counts[entry];
}

template <class Group>
GSD_HD void learn_all(Group& group, const LearnArgs& a, const LearnSizes& s) {
  for (int at = group.rank(); at < s.nodes(); at += group.size()) find_node(a, s, at);
  group.sync("learn: nodes found");
  for (int entry = group.rank(); entry < s.entries; entry += group.size()) learn_weight(a, s, entry);
}

GSD_GROUP_WORK(LearnArgs, 0, learn_all(group, all.first, s))

}  // namespace gsd
