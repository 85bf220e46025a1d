// The proposals and tables of learn_source.
#pragma once

#include "../algorithms/learn.h"
#include "common.h"

namespace gsd {

struct LearnCall {
  LearnSizes sizes{};
  LearnArgs args{};
  Tensor entry, parts;  // working memory
};

inline LearnCall prepare_learn(const Tensor& nodes, const Tensor& picked, const Tensors& node_ids,
                               const Tensors& tokens, const Tensors& log_probs,
                               const Tensors& index, const Tensors& first_tokens,
                               const Tensors& first_log_probs, const Tensor& start, const Tensor& shares,
                               const Tensor& counts, const Tensor& weights, double prior_count, double memory) {
  const int32_t* path_nodes = read<int32_t>("nodes", nodes, {kAny, kAny});
  const int64_t batch = nodes.size(0), path = nodes.size(1), entries = start.numel();
  const size_t levels = node_ids.size();
  STD_TORCH_CHECK(levels >= 1 && levels <= kMostLevels && tokens.size() == levels && log_probs.size() == levels &&
                      index.size() == levels && first_tokens.size() == levels && first_log_probs.size() == levels,
                  "node_ids: expected 1 ... ", kMostLevels, " levels, and as many of all that belongs to them, got ",
                  levels);
  STD_TORCH_CHECK(entries >= 1, "start: expected at least one entry");
  check("tokens", tokens[0], ScalarType::Int, {batch, kAny, kAny});
  const int64_t branch = tokens[0].size(2);
  LearnCall call{{}, {}, fresh<int32_t>(nodes, {batch, path}), fresh<float>(nodes, {batch, path})};
  LearnSizes& s = call.sizes;
  LearnArgs& a = call.args;
  s.batch = narrow(batch);
  s.path = narrow(path);
  s.branch = narrow(branch);
  s.levels = narrow(levels);
  s.entries = narrow(entries);
  for (size_t i = 0; i < levels; i++) {
    a.node_ids[i] = read<int32_t>("node_ids", node_ids[i], {batch, kAny});
    const int64_t width = node_ids[i].size(1);
    s.widths[i] = narrow(width);
    a.tokens[i] = read<int32_t>("tokens", tokens[i], {batch, width, branch});
    a.log_probs[i] = read<float>("log_probs", log_probs[i], {batch, width, branch});
    if (index[i].dim() == 2) a.index[i] = read<int32_t>("index", index[i], {batch, width});  // else there is none
    a.first_tokens[i] = read<int32_t>("first_tokens", first_tokens[i], {batch, width, branch});
    a.first_log_probs[i] = read<float>("first_log_probs", first_log_probs[i], {batch, width, branch});
  }
  a.nodes = path_nodes;
  a.picked = read<int32_t>("picked", picked, {batch, path});
  a.start = read<float>("start", start, {kAny});
  a.shares = written<float>("shares", shares, {entries});
  a.counts = written<float>("counts", counts, {entries});
  a.weights = written<float>("weights", weights, {entries});
  a.entry = written<int32_t>(call.entry);
  a.parts = written<float>(call.parts);
  a.prior_count = static_cast<float>(prior_count);
  a.memory = static_cast<float>(memory);
  return call;
}

}  // namespace gsd
