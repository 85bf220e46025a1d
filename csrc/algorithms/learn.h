// Statistics of a draft source, from what the target picked after the nodes that it was asked about.
// gsd_kernels/ops/learn/reference.py is the specification; sums go over sequences and places in order, whatever the
// number of threads.
#pragma once

#include <cmath>

#include "group.h"

namespace gsd {

constexpr int kMostLevels = 64;  // MAX_LEVELS of gsd_kernels/ops/learn/api.py

// B sequences, P accepted nodes, K candidates; tables of `entries` by index, and of `ranks` columns.
struct LearnSizes {
  int batch, path, branch, levels, entries, ranks;
  int widths[kMostLevels];  // W of each level

  GSD_HD int nodes() const { return batch * path; }
};

struct LearnArgs {
  const int32_t* nodes;                            // [B, P], −2 beyond the path
  const int32_t* picked;                           // [B, P]
  const int32_t* node_ids[kMostLevels];            // [B, W] each
  const int32_t* tokens[kMostLevels];              // [B, W, K], the source's candidates
  const float* log_probs[kMostLevels];             // [B, W, K]
  const int32_t* index[kMostLevels];               // [B, W]; null: 0
  const int32_t* first_tokens[kMostLevels];        // [B, W, K], what it was mixed with; null: nothing
  const float* first_log_probs[kMostLevels];       // [B, W, K]
  const float* start;                              // [entries], prior interpolation weights
  float* shares;                                   // [entries]
  float* counts;                                   // [entries]
  float* weights;                                  // [entries]
  const float* prior;                              // [entries, ranks]; null: no reliability, and so the next three
  float* hits;                                     // [entries, ranks]
  float* claimed;                                  // [entries, ranks]
  float* log_ratio;                                // [entries, ranks]
  int32_t* places;                                 // [B, P], working memory
  float* parts;                                    // [B, P], working memory
  float prior_count, memory;
};

constexpr int kMostWidth = 1 << 16;

// A table that sinks back to its prior by how much was observed.
GSD_HD float remembered(float value, float prior, float added, float observed, float memory) {
  return (value - prior) * expf(-observed / memory) + prior + added;
}

struct LearnPlace {
  int level;
  int64_t row;  // of [B, W]
  int entry;    // its index
};

GSD_HD LearnPlace place_of(const LearnArgs& a, const LearnSizes& s, int at) {
  const int level = a.places[at] / kMostWidth;
  const int64_t row = static_cast<int64_t>(at / s.path) * s.widths[level] + a.places[at] % kMostWidth;
  const int entry = a.index[level] != nullptr ? a.index[level][row] : 0;
  return {level, row, min_int(max_int(entry, 0), s.entries - 1)};
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

// Where node `at` was asked about, and what part of the mixture at its pick was this source's; −1 for none.
GSD_HD void find_node(const LearnArgs& a, const LearnSizes& s, int at) {
  a.places[at] = -1;
  a.parts[at] = -1.0f;
  const int64_t b = at / s.path;
  for (int level = 0; level < s.levels && a.places[at] < 0; level++) {
    const int32_t* ids = a.node_ids[level] + b * s.widths[level];
    for (int w = 0; w < s.widths[level] && a.places[at] < 0; w++) {
      if (ids[w] == a.nodes[at]) a.places[at] = level * kMostWidth + w;
    }
  }
  if (a.places[at] < 0) return;
  const LearnPlace place = place_of(a, s, at);
  if (a.first_tokens[place.level] == nullptr) return;
  const int64_t from = place.row * s.branch;
  const float weight = a.weights[place.entry];
  const float* mine = a.log_probs[place.level] + from;
  const float* before = a.first_log_probs[place.level] + from;
  float other = probability_of(a.tokens[place.level] + from, mine, s.branch, a.picked[at]);
  float first = probability_of(a.first_tokens[place.level] + from, before, s.branch, a.picked[at]);
  if (!(weight * other + (1.0f - weight) * first > 0.0f)) return;
  if (!(other > 0.0f)) other = unnamed_probability(mine, s.branch);
  if (!(first > 0.0f)) first = unnamed_probability(before, s.branch);
  a.parts[at] = weight * other / (weight * other + (1.0f - weight) * first);
}

GSD_HD void learn_weight(const LearnArgs& a, const LearnSizes& s, int entry) {
  float counted = 0.0f, share = 0.0f;
  for (int at = 0; at < s.nodes(); at++) {
    if (a.parts[at] < 0.0f || place_of(a, s, at).entry != entry) continue;
    counted += 1.0f;
    share += a.parts[at];
  }
  const float prior = a.prior_count * a.start[entry];
  a.shares[entry] = remembered(a.shares[entry], prior, share, counted, a.memory);
  a.counts[entry] = remembered(a.counts[entry], a.prior_count, counted, counted, a.memory);
  a.weights[entry] = a.shares[entry] / a.counts[entry];
}

GSD_HD void learn_ratio(const LearnArgs& a, const LearnSizes& s, int cell) {
  const int entry = cell / s.ranks, rank = cell % s.ranks;
  float claims = 0.0f, hits = 0.0f;
  for (int at = 0; at < s.nodes() && entry > 0 && rank < s.branch; at++) {
    if (a.places[at] < 0) continue;
    const LearnPlace place = place_of(a, s, at);
    const int64_t candidate = place.row * s.branch + rank;
    if (place.entry != entry || !(a.log_probs[place.level][candidate] > negative_infinity())) continue;
    claims += expf(a.log_probs[place.level][candidate]);
    hits += a.tokens[place.level][candidate] == a.picked[at] ? 1.0f : 0.0f;
  }
  a.claimed[cell] = remembered(a.claimed[cell], a.prior_count, claims, claims, a.memory);
  a.hits[cell] = remembered(a.hits[cell], a.prior[cell], hits, claims, a.memory);
  a.log_ratio[cell] = logf(a.hits[cell] / a.claimed[cell]);
}

template <class Group>
GSD_HD void learn_all(Group& group, const LearnArgs& a, const LearnSizes& s) {
  for (int at = group.rank(); at < s.nodes(); at += group.size()) find_node(a, s, at);
  group.sync("learn: nodes found");
  for (int entry = group.rank(); entry < s.entries; entry += group.size()) learn_weight(a, s, entry);
  if (a.prior == nullptr) return;
  for (int cell = group.rank(); cell < s.entries * s.ranks; cell += group.size()) learn_ratio(a, s, cell);
}

}  // namespace gsd
