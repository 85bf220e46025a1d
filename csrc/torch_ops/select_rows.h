// The graphs of select_rows and update_edge_model; kEdgeFeatures weights.
#pragma once

#include "../algorithms/select_rows.h"
#include "flatten.h"

namespace gsd {

#define GSD_EDGES "token_ids[B,N] depths[B,N] edge_targets[B,N,K] edge_log_probs[B,N,K] num_accepted[B] "

inline constexpr char kSelectRows[] =
    GSD_EDGES "weights[7] seconds?[S] row_bonus=b max_rows=R max_path=D " GSD_ROWS;
inline constexpr char kUpdateEdges[] =
    GSD_EDGES "nodes[B,P] picked[B,P] weights[7] covariance[7,7] prior[7] process_noise=q -> [7] [7,7]";

static_assert(kEdgeFeatures == 7);

}  // namespace gsd
