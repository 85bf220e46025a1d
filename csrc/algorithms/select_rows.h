// The rows of a graph with the most expected tokens a second: probabilities of its edges, by a logistic model that
// learns from every step; the rows in that order; and the number of them that maximises throughput.
// gsd_kernels/ops/select_rows/reference.py is the specification.
#pragma once

#include <cmath>
#include <cstdint>

namespace gsd {

constexpr int kEdgeFeatures = 7;  // FEATURES of gsd_kernels/ops/select_rows/records.py

// B sequences, N nodes, K edges a node, P accepted nodes.
struct EdgeSizes {
  int batch, nodes, branch, path;
};

struct EdgeGraph {
  const int32_t* token_ids;     // [B, N]
  const int32_t* depths;        // [B, N]
  const int32_t* targets;       // [B, N, K], −1 for none
  const float* log_probs;       // [B, N, K]
  const int32_t* num_accepted;  // [B], tokens that the step before emitted
};

struct LogisticPosterior {
  double* weights;      // [F], means
  double* covariance;   // [F, F]
  const double* prior;  // [F], variances before any observation
};

// State of a node while its edges are visited, best first.
struct SiblingState {
  double left = 1.0;  // probability that the sources leave to the edges not yet visited
  int seen = 0;       // edges visited
};

constexpr double kLeastLeft = 1e-3, kLeastShare = 0.01, kLeastLogProb = -30.0;

// Logarithm of the number of tokens that a sequence's last step emitted, at least 1.
inline double log_accepted_before(const EdgeGraph& g, int64_t b) {
  return std::log(g.num_accepted[b] > 1 ? static_cast<double>(g.num_accepted[b]) : 1.0);
}

// Features of one edge; updates the state of its node for the next edge.
inline void edge_features(double log_prob, int depth, double before, SiblingState* node, double* x) {
  const double clipped = log_prob > kLeastLogProb ? (log_prob < 0.0 ? log_prob : 0.0) : kLeastLogProb;  // NaN: least
  const double prob = std::exp(clipped);
  const double most = 1.0 - kLeastShare;
  double share = prob / node->left;
  share = share < kLeastShare ? kLeastShare : share > most ? most : share;
  const double logit = std::log(share / (1.0 - share));
  const double other = node->seen > 0 ? 1.0 : 0.0, first = depth == 0 ? 1.0 : 0.0;
  const double features[kEdgeFeatures] = {1.0,   logit,          other,                 other * logit,
                                          first, first * before, (1.0 - first) * before};
  for (int i = 0; i < kEdgeFeatures; i++) x[i] = features[i];
  node->left = node->left - prob > kLeastLeft ? node->left - prob : kLeastLeft;
  node->seen++;
}

// Probability that an edge's token is right, given that its node is accepted and no better sibling is right.
inline double predict_edge(const double* weights, const double* x) {
  double z = 0.0;
  for (int i = 0; i < kEdgeFeatures; i++) z += weights[i] * x[i];
  return 1.0 / (1.0 + std::exp(-z));
}

// Log-probabilities of every edge of one sequence given its node, by stick-breaking over siblings; 0 for no edge.
inline void predict_edges(const EdgeGraph& g, const EdgeSizes& s, const double* weights, int64_t b, float* predicted) {
  constexpr double kLeast = 1e-30;
  const double before = log_accepted_before(g, b);
  for (int node = 0; node < s.nodes; node++) {
    const int64_t from = (b * s.nodes + node) * s.branch;
    SiblingState state;
    double open = 1.0;  // probability that no better sibling is right
    for (int k = 0; k < s.branch; k++) {
      predicted[from + k] = 0.0f;
      if (g.targets[from + k] < 0) continue;
      double x[kEdgeFeatures];
      edge_features(g.log_probs[from + k], g.depths[b * s.nodes + node], before, &state, x);
      const double right = predict_edge(weights, x), taken = open * right;
      predicted[from + k] = static_cast<float>(std::log(taken > kLeast ? taken : kLeast));
      open *= 1.0 - right;
    }
  }
}

// Number of rows of every sequence with the most expected tokens a second; of equal numbers the fewest.
//
// scores: [B, R], log-probabilities of rows; seconds: of a step with 1 ... `known` rows; row_bonus: expected tokens of
// later steps that one more forwarded row is worth.
inline int best_count(const float* scores, int batch, int rows, int count, const double* seconds, int known,
                      double row_bonus) {
  double most = 0.0, tokens = 0.0;
  const int last = count < known ? count : known;
  for (int n = 1; n <= last; n++) {
    double accepted = 0.0;
    for (int b = 0; b < batch; b++) accepted += std::exp(static_cast<double>(scores[b * rows + n - 1]));
    tokens += accepted / batch + row_bonus;
    if (tokens > most * seconds[n - 1]) {
      most = tokens / seconds[n - 1];
      count = n;
    }
  }
  return count;
}

// One observation: an update of the extended Kalman filter of a logistic regression. process_noise: share of its prior
// variance by which every weight's variance grows first.
inline void update_edge(const LogisticPosterior& m, const double* x, double right, double process_noise) {
  constexpr int f = kEdgeFeatures;
  double spread[f], variance = 0.0;
  for (int i = 0; i < f; i++) {
    double& own = m.covariance[i * f + i];
    own += process_noise * m.prior[i];
    if (own > m.prior[i]) {  // no variance exceeds its prior
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
  const double expected = predict_edge(m.weights, x), slope = expected * (1.0 - expected);
  const double scale = 1.0 / (1.0 + slope * variance);
  for (int i = 0; i < f; i++) {
    m.weights[i] += spread[i] * scale * (right - expected);
    for (int j = 0; j < f; j++) m.covariance[i * f + j] -= spread[i] * spread[j] * slope * scale;
  }
}

// One observation for each edge of an accepted node, best first, up to the right one.
inline void update_edges(const EdgeGraph& g, const EdgeSizes& s, const LogisticPosterior& m, const int32_t* nodes,
                        const int32_t* picked, double process_noise) {
  for (int64_t at = 0; at < static_cast<int64_t>(s.batch) * s.path; at++) {
    const int64_t b = at / s.path, node = nodes[at];
    if (node < 0 || node >= s.nodes) continue;
    const int64_t from = (b * s.nodes + node) * s.branch;
    const double before = log_accepted_before(g, b);
    SiblingState state;
    for (int k = 0; k < s.branch; k++) {
      const int32_t target = g.targets[from + k];
      if (target < 0 || target >= s.nodes) continue;
      double x[kEdgeFeatures];
      edge_features(g.log_probs[from + k], g.depths[b * s.nodes + node], before, &state, x);
      const bool right = g.token_ids[b * s.nodes + target] == picked[at];
      update_edge(m, x, right ? 1.0 : 0.0, process_noise);
      if (right) break;
    }
  }
}

}  // namespace gsd
