// What limits how far back rows see, in every attention that takes it.
#pragma once

#include "arguments.h"

namespace gsd {

// Whether anything does. Raises unless it is one limit, of at least one position, and the depths that it goes by are there.
inline bool limits_sight(const Arguments& in) {
  const bool chunk = in.has('c'), window = in.has('w');
  if (!chunk && !window) return false;
  STD_TORCH_CHECK(!(chunk && window), "chunk: expected none beside a sliding window");
  const char* name = chunk ? "chunk" : "sliding_window";
  STD_TORCH_CHECK(in.has("row_depths") && in.has("node_depths"), name, ": needs row_depths and node_depths");
  const int64_t size = in[chunk ? 'c' : 'w'];
  STD_TORCH_CHECK(size >= 1, name, ": expected at least 1, got ", size);
  return true;
}

}  // namespace gsd
