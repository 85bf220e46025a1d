// learn_source on CPU tensors: csrc/algorithms/learn.h run by one thread, as a step has few nodes to learn from.
#include "../torch_ops/learn.h"

namespace gsd {
namespace {

void learn_source(const Tensor& nodes, const Tensor& picked, const std::vector<Tensor>& node_ids,
                  const std::vector<Tensor>& tokens, const std::vector<Tensor>& log_probs,
                  const std::vector<Tensor>& index, const std::vector<Tensor>& first_tokens,
                  const std::vector<Tensor>& first_log_probs, const Tensor& start, const Tensor& shares,
                  const Tensor& counts, const Tensor& weights, const std::optional<Tensor>& prior,
                  const std::optional<Tensor>& hits, const std::optional<Tensor>& claimed,
                  const std::optional<Tensor>& log_ratio, double prior_count, double memory) {
  const LearnCall call =
      prepare_learn(nodes, picked, node_ids, tokens, log_probs, index, first_tokens, first_log_probs, start, shares,
                    counts, weights, prior, hits, claimed, log_ratio, prior_count, memory);
  SerialGroup group;
  learn_all(group, call.args, call.sizes);
}

}  // namespace
}  // namespace gsd

STABLE_TORCH_LIBRARY_IMPL(gsd_kernels, CPU, m) { m.impl("learn_source", TORCH_BOX(&gsd::learn_source)); }
