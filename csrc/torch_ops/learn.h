// The proposals and tables of learn_source.
#pragma once

#include <optional>
#include <vector>

#include "../algorithms/learn.h"
#include "common.h"

namespace gsd {

struct LearnCall {
  LearnSizes sizes{};
  LearnArgs args{};
  Tensor places, parts;  // working memory
};

inline LearnCall prepare_learn(const Tensor& nodes, const Tensor& picked, const std::vector<Tensor>& node_ids,
                               const std::vector<Tensor>& tokens, const std::vector<Tensor>& log_probs,
                               const std::vector<Tensor>& index, const std::vector<Tensor>& first_tokens,
                               const std::vector<Tensor>& first_log_probs, const Tensor& start, const Tensor& shares,
                               const Tensor& counts, const Tensor& weights, const std::optional<Tensor>& prior,
                               const std::optional<Tensor>& hits, const std::optional<Tensor>& claimed,
                               const std::optional<Tensor>& log_ratio, double prior_count, double memory) {
  check("nodes", nodes, ScalarType::Int, {kAny, kAny});
  const int64_t batch = nodes.size(0), path = nodes.size(1), entries = start.numel();
  const size_t levels = node_ids.size();
  STD_TORCH_CHECK(levels >= 1 && levels <= kMostLevels && tokens.size() == levels && log_probs.size() == levels &&
                      index.size() == levels && first_tokens.size() == levels && first_log_probs.size() == levels,
                  "node_ids: expected 1 ... ", kMostLevels, " levels, and as many of all that belongs to them, got ",
                  levels);
  STD_TORCH_CHECK(entries >= 1, "start: expected at least one entry");
  check("tokens", tokens[0], ScalarType::Int, {batch, kAny, kAny});
  const int64_t branch = tokens[0].size(2);
  LearnCall call{{}, {}, new_int32(nodes, {batch, path}), torch::stable::new_empty(start, {batch, path})};
  LearnSizes& s = call.sizes;
  LearnArgs& a = call.args;
  s.batch = static_cast<int>(batch);
  s.path = static_cast<int>(path);
  s.branch = static_cast<int>(branch);
  s.levels = static_cast<int>(levels);
  s.entries = static_cast<int>(entries);
  for (size_t i = 0; i < levels; i++) {
    check("node_ids", node_ids[i], ScalarType::Int, {batch, kAny});
    const int64_t width = node_ids[i].size(1);
    STD_TORCH_CHECK(width < kMostWidth, "node_ids: too many nodes, ", width);
    s.widths[i] = static_cast<int>(width);
    a.node_ids[i] = read<int32_t>(node_ids[i]);
    a.tokens[i] = read<int32_t>("tokens", tokens[i], {batch, width, branch});
    a.log_probs[i] = read<float>("log_probs", log_probs[i], {batch, width, branch});
    if (index[i].dim() == 2) a.index[i] = read<int32_t>("index", index[i], {batch, width});  // else there is none
    if (first_tokens[i].dim() == 3) {
      a.first_tokens[i] = read<int32_t>("first_tokens", first_tokens[i], {batch, width, branch});
      a.first_log_probs[i] = read<float>("first_log_probs", first_log_probs[i], {batch, width, branch});
    }
  }
  a.nodes = read<int32_t>(nodes);
  a.picked = read<int32_t>("picked", picked, {batch, path});
  a.start = read<float>("start", start, {kAny});
  a.shares = written<float>("shares", shares, {entries});
  a.counts = written<float>("counts", counts, {entries});
  a.weights = written<float>("weights", weights, {entries});
  STD_TORCH_CHECK(prior.has_value() == hits.has_value() && prior.has_value() == claimed.has_value() &&
                      prior.has_value() == log_ratio.has_value(),
                  "prior, hits, claimed, log_ratio: expected all or none");
  if (prior) {
    check("prior", *prior, ScalarType::Float, {entries, kAny});
    const int64_t ranks = prior->size(1);
    STD_TORCH_CHECK(ranks >= branch, "prior: expected at least ", branch, " ranks, got ", ranks);
    s.ranks = static_cast<int>(ranks);
    a.prior = read<float>(*prior);
    a.hits = written<float>("hits", hits, {entries, ranks});
    a.claimed = written<float>("claimed", claimed, {entries, ranks});
    a.log_ratio = written<float>("log_ratio", log_ratio, {entries, ranks});
  }
  a.places = written<int32_t>(call.places);
  a.parts = written<float>(call.parts);
  a.prior_count = static_cast<float>(prior_count);
  a.memory = static_cast<float>(memory);
  return call;
}

}  // namespace gsd
