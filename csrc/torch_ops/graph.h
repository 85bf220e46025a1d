// A TokenGraph that an op takes whole: the tensors of gsd_kernels/graph.py, in the order of their fields, which is that
// of GraphData. contexts: kContext tokens each.
#pragma once

#include "../algorithms/graph.h"
#include "op.h"

#define GSD_GRAPH                                                                                                      \
  "graph{ token_ids[B,N] parents[B,N] depths[B,N] scores[B,N] contexts[B,N,8] expanded[B,N] ancestor_mask[B,N,L] "     \
  "edge_targets[B,N,K] edge_log_probs[B,N,K] num_nodes[B] num_merges[B] } "

static_assert(gsd::kContext == 8);
