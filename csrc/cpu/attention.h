// DAG-masked attention of graph rows on the CPU: the prefix as dense blocks, a row's ancestors one by one.
//
// A row's ancestors are a handful of the graph's nodes, so looking them up by their bits beats masking, and what the
// other nodes' slots hold (NaN included) never enters the arithmetic. Every row is computed by itself in a fixed order:
// its output does not depend on the other rows, nor on the number of threads.
#pragma once

#include "model_math.h"

namespace gsd {

struct RowAttention {
  int64_t batch, heads, kv_heads, rows, head_dim, value_dim, words, slots;
  const char *q, *k, *v;
  int64_t q_batch, q_head, q_row, k_batch, k_head, k_slot, v_batch, v_head, v_slot;  // strides in elements
  Element element;        // of q and out
  Element cache_element;  // of k and v
  const int32_t* mask;  // [batch, rows, words]
  const int32_t* kv_len;
  const int32_t* kv_start;                  // or null
  const int32_t *row_depths, *node_depths;  // with a window or chunks: [batch, rows], [batch, node_depths_batch]
  int64_t node_depths_batch;
  float scale;
  float softcap;  // 0: none
  int64_t window;      // 0: none
  int64_t chunk;       // 0: none
  const float* sinks;  // [heads], natural logarithms, or null
  char* out;       // [batch, rows, heads, value_dim]
  float* lse;      // [batch, heads, rows], or null
};

// Shared out among threads.
void attend_rows(const RowAttention& a);

}  // namespace gsd
