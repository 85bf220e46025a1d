// The attention of decoder_rows on a GPU: what path_attention.cu offers to the glue. Every function returns a
// cudaError_t as int and neither allocates nor synchronises, so it can be captured in a CUDA graph.
#pragma once

#include <cstddef>

#include "../algorithms/path_attention.h"

namespace gsd {

// Once a forward, one launch: which slots each row sees, for all layers.
int launch_ancestors(const AncestorListArgs& args, void* stream);

// Bytes of PathAttentionArgs.scratch, aligned to 16. Layers share them, one after the other.
inline size_t path_attention_scratch(const PathAttentionSizes& sizes) {
  return static_cast<size_t>(path_scratch_floats(sizes)) * sizeof(float);
}

// Once a layer, two launches, in float16 or bfloat16 with head_dim 64 or 128 on compute capability 8.0 and newer. Keys
// and values of the rows are in the cache already. Batch · kv heads may not exceed 65,535.
int launch_path_attention(const PathAttentionArgs& args, const PathAttentionSizes& sizes, bool bfloat16, void* stream);

}  // namespace gsd
