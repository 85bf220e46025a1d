// What rows.cu offers to the glue: one kernel each, launched on a stream; no torch types. Every function returns a
// cudaError_t as int and neither allocates nor reads from the device, so it can be captured in a CUDA graph.
#pragma once

#include "../algorithms/rows_pair.h"

namespace gsd {

struct RowsLaunch {
  void* stream;
  bool bfloat16;  // what products read, norms' weights and caches; otherwise float16
  bool overlap;   // from compute capability 9.0 on, begin while the kernel before ends (programmatic dependent launch)
  bool group;     // products of many rows by groups of warps, where there is code for it (rows_group.cu)
};

// The embedding, or the pairs, come first: they wait for everything before, and so do the products' weights.

int launch_rows(const RowsEmbed& args, const RowsLaunch& how);
int launch_rows(const RowsPair& args, const RowsLaunch& how);
int launch_rows(const RowsNorm& args, const RowsLaunch& how);
int launch_rows(const RowsProduct& args, const RowsLaunch& how);
// By groups of warps; `taken` is false, and nothing launched, where the library or the GPU has no code for it.
int launch_rows_group(const RowsProduct& args, const RowsLaunch& how, bool& taken);
int launch_rows(const RowsTurn& args, const RowsLaunch& how);

}  // namespace gsd
