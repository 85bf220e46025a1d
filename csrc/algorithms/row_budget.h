// The rows of a graph that are worth their time: how likely the tokens of its edges are right, by a logistic model that
// learns from every step; the rows in that order; and how many of them bring the most tokens a second.
// gsd_kernels/ops/row_budget/reference.py is the specification.
#pragma once

#include <cmath>
#include <cstdint>

namespace gsd {

constexpr int kOddsFeatures = 7;  // FEATURES of gsd_kernels/ops/row_budget/records.py

// B sequences, N nodes, K edges a node, P accepted nodes.
struct OddsSizes {
  int batch, nodes, branch, path;
};

struct OddsGraph {
  const int32_t* token_ids;     // [B, N]
  const int32_t* depths;        // [B, N]
  const int32_t* targets;       // [B, N, K], −1 for none
  const float* log_probs;       // [B, N, K]
  const int32_t* num_accepted;  // [B], rows of the step before
};

struct OddsBelief {
  double* weights;             // [F]
  double* covariance;          // [F, F]
  const double* prior;         // [F], variances before anything was seen
};

// What is left of a node's probability, as its edges are gone through in order.
struct OddsNode {
  double left = 1.0;  // to the tokens of other edges, as the sources say
  int seen = 0;
};

constexpr double kLeastLeft = 1e-3, kLeastShare = 0.01, kLeastLogProb = -30.0;

// Logarithm of the tokens that a sequence's last step brought.
inline double brought_before(const OddsGraph& g, int64_t b) {
  return std::log(g.num_accepted[b] > 1 ? static_cast<double>(g.num_accepted[b]) : 1.0);
}

// Features of one edge, and the node as the next edge finds it.
inline void odds_features(double log_prob, int depth, double before, OddsNode* node, double* x) {
  const double clipped = log_prob > kLeastLogProb ? (log_prob < 0.0 ? log_prob : 0.0) : kLeastLogProb;  // NaN: least
  const double prob = std::exp(clipped);
  const double most = 1.0 - kLeastShare;
  double share = prob / node->left;
  share = share < kLeastShare ? kLeastShare : share > most ? most : share;
  const double logit = std::log(share / (1.0 - share));
  const double other = node->seen > 0 ? 1.0 : 0.0, first = depth == 0 ? 1.0 : 0.0;
  const double features[kOddsFeatures] = {1.0, logit, other, other * logit, first, first * before, (1.0 - first) * before};
  for (int i = 0; i < kOddsFeatures; i++) x[i] = features[i];
  node->left = node->left - prob > kLeastLeft ? node->left - prob : kLeastLeft;
  node->seen++;
}

inline double odds_of(const double* weights, const double* x) {
  double z = 0.0;
  for (int i = 0; i < kOddsFeatures; i++) z += weights[i] * x[i];
  return 1.0 / (1.0 + std::exp(-z));
}

// Logarithms of the odds of every edge of one sequence; 0 where there is none.
inline void weigh_edges(const OddsGraph& g, const OddsSizes& s, const double* weights, int64_t b, float* log_odds) {
  constexpr double kLeast = 1e-30;
  const double before = brought_before(g, b);
  for (int node = 0; node < s.nodes; node++) {
    const int64_t from = (b * s.nodes + node) * s.branch;
    OddsNode state;
    double open = 1.0;  // that no edge so far is right
    for (int k = 0; k < s.branch; k++) {
      log_odds[from + k] = 0.0f;
      if (g.targets[from + k] < 0) continue;
      double x[kOddsFeatures];
      odds_features(g.log_probs[from + k], g.depths[b * s.nodes + node], before, &state, x);
      const double right = odds_of(weights, x), taken = open * right;
      log_odds[from + k] = static_cast<float>(std::log(taken > kLeast ? taken : kLeast));
      open *= 1.0 - right;
    }
  }
}

// How many rows of every sequence have the most tokens a second; the fewest of equals.
//
// scores: of rows, [B, R], logarithms of odds; seconds: of a step with 1 ... `known` rows; teaches: tokens that a row
// brings to later steps.
inline int best_count(const float* scores, int batch, int rows, int count, const double* seconds, int known,
                      double teaches) {
  double most = 0.0, tokens = 0.0;
  const int last = count < known ? count : known;
  for (int n = 1; n <= last; n++) {
    double odds = 0.0;
    for (int b = 0; b < batch; b++) odds += std::exp(static_cast<double>(scores[b * rows + n - 1]));
    tokens += odds / batch + teaches;
    if (tokens > most * seconds[n - 1]) {
      most = tokens / seconds[n - 1];
      count = n;
    }
  }
  return count;
}

// One observation: a step of the Kalman filter of a logistic regression.
inline void learn_edge(const OddsBelief& m, const double* x, double right, double drift) {
  constexpr int f = kOddsFeatures;
  double spread[f], variance = 0.0;
  for (int i = 0; i < f; i++) {
    double& own = m.covariance[i * f + i];
    own += drift * m.prior[i];
    if (own > m.prior[i]) {  // nothing grows less certain than it was
      const double shrink = std::sqrt(m.prior[i] / own);
      for (int j = 0; j < f; j++) {
        m.covariance[i * f + j] *= shrink;
        m.covariance[j * f + i] *= shrink;
      }
    }
  }
  for (int i = 0; i < f; i++) {
    spread[i] = 0.0;
    for (int j = 0; j < f; j++) spread[i] += m.covariance[i * f + j] * x[j];
    variance += x[i] * spread[i];
  }
  const double expected = odds_of(m.weights, x), slope = expected * (1.0 - expected);
  const double scale = 1.0 / (1.0 + slope * variance);
  for (int i = 0; i < f; i++) {
    m.weights[i] += spread[i] * scale * (right - expected);
    for (int j = 0; j < f; j++) m.covariance[i * f + j] -= spread[i] * spread[j] * slope * scale;
  }
}

// From the edges of accepted nodes, up to the right one.
inline void learn_edges(const OddsGraph& g, const OddsSizes& s, const OddsBelief& m, const int32_t* nodes,
                        const int32_t* picked, double drift) {
  for (int64_t at = 0; at < static_cast<int64_t>(s.batch) * s.path; at++) {
    const int64_t b = at / s.path, node = nodes[at];
    if (node < 0 || node >= s.nodes) continue;
    const int64_t from = (b * s.nodes + node) * s.branch;
    const double before = brought_before(g, b);
    OddsNode state;
    for (int k = 0; k < s.branch; k++) {
      const int32_t target = g.targets[from + k];
      if (target < 0 || target >= s.nodes) continue;
      double x[kOddsFeatures];
      odds_features(g.log_probs[from + k], g.depths[b * s.nodes + node], before, &state, x);
      const bool right = g.token_ids[b * s.nodes + target] == picked[at];
      learn_edge(m, x, right ? 1.0 : 0.0, drift);
      if (right) break;
    }
  }
}

}  // namespace gsd
