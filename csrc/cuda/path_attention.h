// The attention of decoder_rows on a GPU: what path_attention.cu offers to the glue. Every function returns a
// cudaError_t as int and neither allocates nor synchronises, so it can be captured in a CUDA graph.
#pragma once

#include "../algorithms/path_attention.h"
#include "rows.h"

namespace gsd {

// Once a layer, two launches, in float16 or bfloat16 with head_dim 64 or 128 on compute capability 8.0 and newer. Keys
// and values of the rows are in the cache already. Batch · kv heads may not exceed 65,535.
int launch_rows(const PathAttentionArgs& args, const PathAttentionSizes& sizes, const RowsLaunch& how);

}  // namespace gsd
