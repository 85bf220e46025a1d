// The graphs of select_rows and update_edge_model.
#pragma once

#include "../algorithms/select_rows.h"
#include "common.h"

namespace gsd {

struct EdgeCall {
  EdgeSizes sizes;
  EdgeGraph graph;
};

inline EdgeCall prepare_edges(const Tensor& token_ids, const Tensor& depths, const Tensor& edge_targets,
                             const Tensor& edge_log_probs, const Tensor& num_accepted) {
  check("token_ids", token_ids, ScalarType::Int, {kAny, kAny});
  const int64_t batch = token_ids.size(0), nodes = token_ids.size(1);
  check("edge_targets", edge_targets, ScalarType::Int, {batch, nodes, kAny});
  const int64_t branch = edge_targets.size(2);
  return {{static_cast<int>(batch), static_cast<int>(nodes), static_cast<int>(branch), 0},
          {read<int32_t>(token_ids), read<int32_t>("depths", depths, {batch, nodes}), read<int32_t>(edge_targets),
           read<float>("edge_log_probs", edge_log_probs, {batch, nodes, branch}),
           read<int32_t>("num_accepted", num_accepted, {batch})}};
}

}  // namespace gsd
