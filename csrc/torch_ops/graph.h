// A TokenGraph that an op takes whole: the tensors of gsd_kernels/graph.py, in the order of their fields.
#pragma once

#include "../algorithms/graph.h"
#include "common.h"

namespace gsd {

struct GraphTensors {
  GraphData data;  // of the first sequence
  int64_t batch, nodes, branch, words;

  static GraphTensors of(const Tensors& t) {
    STD_TORCH_CHECK(t.size() == 11, "graph: expected the 11 tensors of a TokenGraph, got ", t.size());
    GraphTensors g{};
    GraphData& d = g.data;
    d.token_ids = written<int32_t>("token_ids", t[0], {kAny, kAny});
    const int64_t batch = g.batch = t[0].size(0), nodes = g.nodes = t[0].size(1);
    d.parents = written<int32_t>("parents", t[1], {batch, nodes});
    d.depths = written<int32_t>("depths", t[2], {batch, nodes});
    d.scores = written<float>("scores", t[3], {batch, nodes});
    d.contexts = written<int32_t>("contexts", t[4], {batch, nodes, kContext});
    d.expanded = written<bool>("expanded", t[5], {batch, nodes});
    d.ancestor_mask = written<int32_t>("ancestor_mask", t[6], {batch, nodes, kAny});
    d.edge_targets = written<int32_t>("edge_targets", t[7], {batch, nodes, kAny});
    g.words = t[6].size(2), g.branch = t[7].size(2);
    d.edge_log_probs = written<float>("edge_log_probs", t[8], {batch, nodes, g.branch});
    d.num_nodes = written<int32_t>("num_nodes", t[9], {batch});
    d.num_merges = written<int32_t>("num_merges", t[10], {batch});
    return g;
  }
};

}  // namespace gsd
