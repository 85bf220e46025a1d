// Attention of rows over the committed prefix and then their own ancestors, in the order of the text.
//
// A row's visible positions are one list: the prefix behind the left padding, then the ancestors by depth. It is reduced
// in blocks counted from the first position of the text, one position after the other, or two after two from there. So
// the bits do not depend on where the tree's rows lie, on what was committed already, on padding, on other rows, or on
// threads.
#pragma once

#include <vector>

#include "../torch_ops/cache.h"
#include "products.h"
#include "team.h"

namespace gsd {

// The ancestors of every row of a graph, by depth. The first of them may continue the prefix, slot by slot, as all of a
// prompt's do: these are counted, and the others listed.
struct Paths {
  std::vector<int32_t> chain;        // [batch · rows]
  std::vector<int32_t> nodes;        // slots behind the prefix
  std::vector<int32_t> node_depths;  // of each of them
  std::vector<size_t> begin;         // [batch · rows + 1]
  int64_t slots = 0;                 // behind the prefix, up to the last that is listed

  Paths(const int32_t* mask, const int32_t* depths, int64_t batch, int64_t rows, int64_t words, int64_t most_depths,
        const int32_t* kv_len, const int32_t* kv_start, int64_t capacity);
};

struct PathAttention {
  int64_t batch, heads, kv_heads, head_dim;
  int64_t graph_rows, rows;  // of a sequence; its last `rows` of them attend
  const float* q;            // [batch · rows, q_stride]
  int64_t q_stride;
  CacheTensor keys, values;
  Element element;         // of keys and values
  const Paths* paths;
  const int32_t *kv_len, *kv_start;  // [batch]
  const int32_t* positions;          // [batch, graph_rows], in the text
  int64_t window;                    // 0: none
  float scale;
  float* out;  // [batch · rows, out_stride]
  int64_t out_stride;
};

// Shared out among the team.
void attend_paths(Team& team, const PathAttention& a, const RowKernel& kernel);

}  // namespace gsd
