// Attention of rows over the committed prefix and then their own ancestors, in the order of the text.
//
// A row's visible positions are one list: the prefix behind the left padding, then the ancestors by depth. It is reduced
// in blocks counted from the first position of the text, one position after the other, or two after two from there. So
// the bits do not depend on where the tree's rows lie, on what was committed already, on padding, on other rows, or on
// threads.
#pragma once

#include <algorithm>
#include <vector>

#include "../torch_ops/cache.h"
#include "products.h"
#include "team.h"

namespace gsd {

// The ancestors of every row of a graph, by depth. The first of them may continue the prefix, slot by slot, as all of a
// prompt's do: these are counted, and the others listed. What is counted is multiplied by 0 for rows beside that do not
// see it, so none is where slots that a row does not see may hold anything.
struct Paths {
  std::vector<int32_t> chain;        // [batch · rows]
  std::vector<int32_t> nodes;        // slots behind the prefix
  std::vector<int32_t> node_depths;  // of each of them, where depths are given
  std::vector<size_t> begin;         // [batch · rows + 1]
  int64_t slots = 0;                 // behind the prefix, up to the last that is listed
  bool finite;                       // whether every slot up to the last that is seen holds finite numbers

  // depths: [batch, most_depths], of caches that are finite; null: slots may hold anything, nodes are ordered by slot.
  Paths(const int32_t* mask, const int32_t* depths, int64_t batch, int64_t rows, int64_t words, int64_t most_depths,
        const int32_t* kv_len, const int32_t* kv_start, int64_t capacity);
};

// First position of the text that a window or a chunk (0: none) leaves to a row at `position`.
inline int64_t oldest_seen(int64_t position, int64_t window, int64_t chunk) {
  return std::max<int64_t>(0, position - (chunk > 0 ? position % chunk : window - 1));
}

struct PathAttention {
  int64_t batch, heads, kv_heads, head_dim, value_dim;
  int64_t graph_rows, rows;  // of a sequence; its last `rows` of them attend
  const char* q;             // [batch, heads, rows, head_dim]
  int64_t q_batch, q_head, q_row;  // strides in elements
  Element element;                 // of q and out
  CacheTensor keys, values;
  Element cache_element;
  const Paths* paths;
  const int32_t *kv_len, *kv_start;  // [batch]
  const int32_t* positions;          // [batch, graph_rows], in the text, with a window or chunks
  int64_t window;                    // 0: none
  int64_t chunk;                     // 0: none
  float scale;
  float softcap;       // 0: none
  const float* sinks;  // [heads], natural logarithms, or null
  char* out;           // [batch, rows, heads, value_dim]
  float* lse;          // [batch, heads, rows], or null
};

// Shared out among the team.
void attend_paths(Team& team, const PathAttention& a, const RowKernel& kernel);

}  // namespace gsd
