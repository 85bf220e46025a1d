// What limits how far back rows see, in every attention that takes it.
#pragma once

#include <optional>

#include "common.h"

namespace gsd {

// Raises unless there is one limit, of at least one position, and the depths that it goes by.
inline void check_sight(std::optional<int64_t> sliding_window, std::optional<int64_t> chunk, bool depths) {
  STD_TORCH_CHECK(!(sliding_window && chunk), "chunk: expected none beside a sliding window");
  const char* name = chunk ? "chunk" : "sliding_window";
  STD_TORCH_CHECK(depths, name, ": needs row_depths and node_depths");
  const int64_t size = chunk ? *chunk : *sliding_window;
  STD_TORCH_CHECK(size >= 1, name, ": expected at least 1, got ", size);
}

}  // namespace gsd
