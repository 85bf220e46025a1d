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
  const int32_t* tokens = read<int32_t>("token_ids", token_ids, {kAny, kAny});
  const int64_t batch = token_ids.size(0), nodes = token_ids.size(1);
  const int32_t* targets = read<int32_t>("edge_targets", edge_targets, {batch, nodes, kAny});
  const int64_t branch = edge_targets.size(2);
  return {{narrow(batch), narrow(nodes), narrow(branch), 0},
          {tokens, read<int32_t>("depths", depths, {batch, nodes}), targets,
           read<float>("edge_log_probs", edge_log_probs, {batch, nodes, branch}),
           read<int32_t>("num_accepted", num_accepted, {batch})}};
}

}  // namespace gsd
