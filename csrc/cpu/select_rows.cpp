// select_rows and update_edge_model on CPU tensors, csrc/algorithms/select_rows.h: few edges, one thread's work.
#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "../torch_ops/flatten.h"
#include "../torch_ops/registration.h"
#include "../torch_ops/select_rows.h"

namespace gsd {
namespace {

// The first `count` of R elements of every sequence.
template <class T>
void copy_first(const std::vector<T>& from, int64_t batch, int64_t rows, T* to, int64_t count) {
  for (int64_t b = 0; b < batch; b++) std::copy_n(from.data() + b * rows, count, to + b * count);
}

FlattenOutputs select_rows(const Tensor& token_ids, const Tensor& depths, const Tensor& edge_targets,
                           const Tensor& edge_log_probs, const Tensor& num_accepted, const Tensor& weights,
                           const MaybeTensor& seconds, double row_bonus, int64_t max_rows, int64_t max_path) {
  const EdgeCall call = prepare_edges(token_ids, depths, edge_targets, edge_log_probs, num_accepted);
  check("weights", weights, ScalarType::Double, {kEdgeFeatures});
  if (seconds.has_value()) {
    check("seconds", *seconds, ScalarType::Double, {kAny});
    STD_TORCH_CHECK(seconds->numel() > 0, "seconds: expected those of one row at least");
  }
  check_flatten(call.sizes.nodes, call.sizes.branch, max_rows, max_path);
  const int64_t batch = call.sizes.batch, words = words_for(static_cast<int>(max_rows));
  const FlattenSizes sizes{call.sizes.nodes, call.sizes.branch, static_cast<int>(max_rows),
                           static_cast<int>(max_path)};
  std::vector<float> predicted(batch * sizes.capacity * sizes.branch), scores(batch * max_rows);
  std::vector<int32_t> tokens(batch * max_rows), parents(batch * max_rows), row_depths(batch * max_rows),
      masks(batch * max_rows * words), nodes(batch * max_rows), num_rows(batch);
  std::vector<uint64_t> arena((FlattenArena::bytes(sizes) + 7) / 8);
  const FlattenArgs args{call.graph.token_ids, call.graph.targets, predicted.data(), tokens.data(),
                         parents.data(),       row_depths.data(),  masks.data(),    nodes.data(),
                         scores.data(),        num_rows.data()};
  for (int64_t b = 0; b < batch; b++) {
    predict_edges(call.graph, call.sizes, read<double>(weights), b, predicted.data());
    SerialGroup group;
    flatten_graph(group, args.at(sizes, b), sizes, reinterpret_cast<char*>(arena.data()));
  }
  int count = batch > 0 ? *std::max_element(num_rows.begin(), num_rows.end()) : 1;
  if (seconds.has_value()) {
    count = best_count(scores.data(), static_cast<int>(batch), sizes.rows, count, read<double>(*seconds),
                       static_cast<int>(seconds->numel()), row_bonus);
  }
  Fresh<7> rows(token_ids);
  const FlattenArgs kept = new_rows(&rows, nullptr, nullptr, nullptr, batch, count);
  copy_first(tokens, batch, max_rows, kept.token_ids, count);
  copy_first(parents, batch, max_rows, kept.parent_rows, count);
  copy_first(row_depths, batch, max_rows, kept.depths, count);
  copy_first(nodes, batch, max_rows, kept.node_ids, count);
  copy_first(scores, batch, max_rows, kept.scores, count);
  const int64_t kept_words = words_for(count);
  for (int64_t row = 0; row < batch * count; row++) {
    const int64_t from = (row / count * max_rows + row % count) * words;
    std::copy_n(masks.data() + from, kept_words, kept.ancestor_mask + row * kept_words);
  }
  for (int64_t b = 0; b < batch; b++) kept.num_rows[b] = std::min(num_rows[b], count);
  return rows.results();
}

std::tuple<Tensor, Tensor> update_edge_model(const Tensor& token_ids, const Tensor& depths, const Tensor& edge_targets,
                                             const Tensor& edge_log_probs, const Tensor& num_accepted,
                                             const Tensor& nodes, const Tensor& picked, const Tensor& weights,
                                             const Tensor& covariance, const Tensor& prior, double process_noise) {
  EdgeCall call = prepare_edges(token_ids, depths, edge_targets, edge_log_probs, num_accepted);
  check("nodes", nodes, ScalarType::Int, {call.sizes.batch, kAny});
  call.sizes.path = static_cast<int>(nodes.size(1));
  check("picked", picked, ScalarType::Int, {call.sizes.batch, call.sizes.path});
  STD_TORCH_CHECK(process_noise >= 0.0 && std::isfinite(process_noise), "process_noise: expected a finite number of at least 0");
  check("weights", weights, ScalarType::Double, {kEdgeFeatures});
  check("covariance", covariance, ScalarType::Double, {kEdgeFeatures, kEdgeFeatures});
  check("prior", prior, ScalarType::Double, {kEdgeFeatures});
  std::tuple<Tensor, Tensor> learned{torch::stable::new_empty(weights, {kEdgeFeatures}),
                                     torch::stable::new_empty(weights, {kEdgeFeatures, kEdgeFeatures})};
  const LogisticPosterior posterior{written<double>(std::get<0>(learned)), written<double>(std::get<1>(learned)),
                                    read<double>(prior)};
  std::copy_n(read<double>(weights), kEdgeFeatures, posterior.weights);
  std::copy_n(read<double>(covariance), kEdgeFeatures * kEdgeFeatures, posterior.covariance);
  update_edges(call.graph, call.sizes, posterior, read<int32_t>(nodes), read<int32_t>(picked), process_noise);
  return learned;
}

}  // namespace
}  // namespace gsd

GSD_OPS(CPU, m) {
  m.impl("select_rows", TORCH_BOX(&gsd::select_rows));
  m.impl("update_edge_model", TORCH_BOX(&gsd::update_edge_model));
}
