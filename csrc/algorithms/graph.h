// The storage of a token graph, as gsd_kernels/graph.py describes it.
#pragma once

#include "group.h"

namespace gsd {

constexpr int kContext = 8;  // MAX_CONTEXT of gsd_kernels/config.py

// N nodes, K candidates after each, L mask words, C tokens of context.
struct GraphData {
  int32_t* token_ids;      // [N]
  int32_t* parents;        // [N]
  int32_t* depths;         // [N]
  float* scores;           // [N]
  int32_t* contexts;       // [N, C], nearest token first
  bool* expanded;          // [N]
  int32_t* ancestor_mask;  // [N, L]
  int32_t* edge_targets;   // [N, K]
  float* edge_log_probs;   // [N, K]
  int32_t* num_nodes;      // [1]
  int32_t* num_merges;     // [1]
};

}  // namespace gsd
