// paying_rows and learn_edge_odds on CPU tensors: csrc/algorithms/row_budget.h, whose few edges are one thread's work.
#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "../torch_ops/flatten.h"
#include "../torch_ops/row_budget.h"

namespace gsd {
namespace {

// The first `count` of R elements of every sequence.
template <class T>
void keep(const std::vector<T>& from, int64_t batch, int64_t rows, const Tensor& to, int64_t count) {
  for (int64_t b = 0; b < batch; b++) std::copy_n(from.data() + b * rows, count, written<T>(to) + b * count);
}

FlattenOutputs paying_rows(const Tensor& token_ids, const Tensor& depths, const Tensor& edge_targets,
                           const Tensor& edge_log_probs, const Tensor& num_accepted, const Tensor& weights,
                           const std::optional<Tensor>& seconds, double teaches, int64_t max_rows, int64_t max_path) {
  const OddsCall call = prepare_odds(token_ids, depths, edge_targets, edge_log_probs, num_accepted);
  check("weights", weights, ScalarType::Double, {kOddsFeatures});
  if (seconds.has_value()) check("seconds", *seconds, ScalarType::Double, {kAny});
  check_flatten(call.sizes.nodes, call.sizes.branch, max_rows, max_path);
  const int64_t batch = call.sizes.batch, words = words_for(static_cast<int>(max_rows));
  const FlattenSizes sizes{call.sizes.nodes, call.sizes.branch, static_cast<int>(max_rows),
                           static_cast<int>(max_path)};
  std::vector<float> log_odds(batch * sizes.capacity * sizes.branch), scores(batch * max_rows);
  std::vector<int32_t> tokens(batch * max_rows), parents(batch * max_rows), row_depths(batch * max_rows),
      masks(batch * max_rows * words), nodes(batch * max_rows), num_rows(batch);
  std::vector<uint64_t> arena((FlattenArena::bytes(sizes) + 7) / 8);
  const FlattenArgs args{call.graph.token_ids, call.graph.targets, log_odds.data(), tokens.data(),
                         parents.data(),       row_depths.data(),  masks.data(),    nodes.data(),
                         scores.data(),        num_rows.data()};
  for (int64_t b = 0; b < batch; b++) {
    weigh_edges(call.graph, call.sizes, read<double>(weights), b, log_odds.data());
    SerialGroup group;
    flatten_graph(group, args.at(sizes, b), sizes, reinterpret_cast<char*>(arena.data()));
  }
  int count = batch > 0 ? *std::max_element(num_rows.begin(), num_rows.end()) : 1;
  if (seconds.has_value()) {
    count = best_count(scores.data(), static_cast<int>(batch), sizes.rows, count, read<double>(*seconds),
                       static_cast<int>(seconds->numel()), teaches);
  }
  FlattenOutputs rows = new_rows(token_ids, edge_log_probs, batch, count);
  keep(tokens, batch, max_rows, std::get<0>(rows), count);
  keep(parents, batch, max_rows, std::get<1>(rows), count);
  keep(row_depths, batch, max_rows, std::get<2>(rows), count);
  keep(nodes, batch, max_rows, std::get<4>(rows), count);
  keep(scores, batch, max_rows, std::get<5>(rows), count);
  const int64_t kept_words = words_for(count);
  for (int64_t row = 0; row < batch * count; row++) {
    const int64_t from = (row / count * max_rows + row % count) * words;
    std::copy_n(masks.data() + from, kept_words, written<int32_t>(std::get<3>(rows)) + row * kept_words);
  }
  for (int64_t b = 0; b < batch; b++) written<int32_t>(std::get<6>(rows))[b] = std::min(num_rows[b], count);
  return rows;
}

std::tuple<Tensor, Tensor> learn_edge_odds(const Tensor& token_ids, const Tensor& depths, const Tensor& edge_targets,
                                           const Tensor& edge_log_probs, const Tensor& num_accepted,
                                           const Tensor& nodes, const Tensor& picked, const Tensor& weights,
                                           const Tensor& covariance, const Tensor& prior, double drift) {
  OddsCall call = prepare_odds(token_ids, depths, edge_targets, edge_log_probs, num_accepted);
  check("nodes", nodes, ScalarType::Int, {call.sizes.batch, kAny});
  call.sizes.path = static_cast<int>(nodes.size(1));
  check("picked", picked, ScalarType::Int, {call.sizes.batch, call.sizes.path});
  check("weights", weights, ScalarType::Double, {kOddsFeatures});
  check("covariance", covariance, ScalarType::Double, {kOddsFeatures, kOddsFeatures});
  check("prior", prior, ScalarType::Double, {kOddsFeatures});
  std::tuple<Tensor, Tensor> learned{torch::stable::new_empty(weights, {kOddsFeatures}),
                                     torch::stable::new_empty(weights, {kOddsFeatures, kOddsFeatures})};
  const OddsBelief belief{written<double>(std::get<0>(learned)), written<double>(std::get<1>(learned)),
                          read<double>(prior)};
  std::copy_n(read<double>(weights), kOddsFeatures, belief.weights);
  std::copy_n(read<double>(covariance), kOddsFeatures * kOddsFeatures, belief.covariance);
  learn_edges(call.graph, call.sizes, belief, read<int32_t>(nodes), read<int32_t>(picked), drift);
  return learned;
}

}  // namespace
}  // namespace gsd

STABLE_TORCH_LIBRARY_IMPL(gsd_kernels, CPU, m) {
  m.impl("paying_rows", TORCH_BOX(&gsd::paying_rows));
  m.impl("learn_edge_odds", TORCH_BOX(&gsd::learn_edge_odds));
}
