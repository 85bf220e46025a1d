// select_rows and update_edge_model on CPU tensors, csrc/algorithms/select_rows.h: few edges, one thread's work.
#include <algorithm>
#include <cmath>
#include <vector>

#include "../algorithms/select_rows.h"
#include "../torch_ops/graph_ops.h"
#include "../torch_ops/registration.h"

namespace gsd {
namespace {

// The first `count` of R elements of every sequence.
template <class T>
void copy_first(const std::vector<T>& from, int64_t batch, int64_t rows, T* to, int64_t count) {
  for (int64_t b = 0; b < batch; b++) std::copy_n(from.data() + b * rows, count, to + b * count);
}

// As many rows as pay, at most R.
void select_rows(Arguments& in) {
  const FlattenSizes sizes = flatten_sizes(in);
  const EdgeSizes edges{in.size('B'), in.size('N'), in.size('K'), 0};
  const EdgeGraph graph = in.fill<EdgeGraph>();
  const double* const weights = in.next();
  const double* const seconds = in.next();
  STD_TORCH_CHECK(!in.has("seconds") || in['S'] > 0, "seconds: expected those of one row at least");
  const int64_t batch = in['B'], max_rows = in['R'], words = words_for(sizes.rows);
  std::vector<float> predicted(batch * sizes.capacity * sizes.branch), scores(batch * max_rows);
  std::vector<int32_t> tokens(batch * max_rows), parents(batch * max_rows), row_depths(batch * max_rows),
      masks(batch * max_rows * words), nodes(batch * max_rows), num_rows(batch);
  std::vector<uint64_t> arena((FlattenArena::bytes(sizes) + 7) / 8);
  for (int64_t b = 0; b < batch; b++) {
    predict_edges(graph, edges, weights, b, predicted.data());
    const int64_t node = b * sizes.capacity, edge = node * sizes.branch, row = b * max_rows;
    const FlattenArgs args{&graph.token_ids[node], &graph.targets[edge], &predicted[edge], &tokens[row], &parents[row],
                           &row_depths[row], &masks[row * words], &nodes[row], &scores[row], &num_rows[b]};
    SerialGroup group;
    flatten_graph(group, args, sizes, reinterpret_cast<char*>(arena.data()));
  }
  int count = batch > 0 ? *std::max_element(num_rows.begin(), num_rows.end()) : 1;
  if (seconds != nullptr) {
    count = best_count(scores.data(), in.size('B'), sizes.rows, count, seconds, in.size('S'), in.real('b'));
  }
  in.set('R', count);
  const FlattenArgs kept{nullptr,   nullptr,   nullptr,   in.next(), in.next(),
                         in.next(), in.next(), in.next(), in.next(), in.next()};
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
}

void update_edge_model(Arguments& in) {
  const double process_noise = in.real('q');
  STD_TORCH_CHECK(process_noise >= 0.0 && std::isfinite(process_noise),
                  "process_noise: expected a finite number of at least 0");
  const EdgeSizes sizes{in.size('B'), in.size('N'), in.size('K'), in.size('P')};
  const EdgeGraph graph = in.fill<EdgeGraph>();
  const int32_t *nodes = in.next(), *picked = in.next();
  const double *weights = in.next(), *covariance = in.next(), *prior = in.next();
  const LogisticPosterior posterior{in.next(), in.next(), prior};
  std::copy_n(weights, kEdgeFeatures, posterior.weights);
  std::copy_n(covariance, kEdgeFeatures * kEdgeFeatures, posterior.covariance);
  update_edges(graph, sizes, posterior, nodes, picked, process_noise);
}

}  // namespace
}  // namespace gsd

GSD_OPS(CPU, m) {
  gsd::Op<gsd::select_rows>::add(m, "select_rows");
  gsd::Op<gsd::update_edge_model>::add(m, "update_edge_model");
}
