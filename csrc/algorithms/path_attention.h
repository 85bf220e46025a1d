// Attention of rows over the committed prefix and then their own ancestors, in the order of the text.
//
// A row's visible positions are one list: the prefix behind the left padding, then the ancestors by depth. Tiles and
// splits are cut at fixed places of that list, whatever the slot a position lies in, so the bits of a row's output
// follow from what it sees alone: not from other rows, their number, the batch, padding, the cache's capacity, nor
// from how many of its ancestors are committed. docs/kernels.md has the reasons.
#pragma once

#include "attention.h"

namespace gsd {

constexpr int kFirstSplitPositions = 256, kSplitsPerSize = 16;

// A split has 256 positions; behind every 16 splits they are twice as long: parallel where the text is short, few where
// it is long. The cut follows from the position only.
GSD_HD int64_t path_split_begin(int split) {
  const int64_t size = int64_t{1} << split / kSplitsPerSize;
  return kFirstSplitPositions * (kSplitsPerSize * (size - 1) + split % kSplitsPerSize * size);
}

GSD_HD int path_split_of(int position) {
  int split = 0;
  while (path_split_begin(split + kSplitsPerSize) <= position) split += kSplitsPerSize;
  while (path_split_begin(split + 1) <= position) split++;
  return split;
}

// The ancestors of every row, sorted once for all layers.
struct AncestorListArgs {
  const int32_t* mask;    // [B, R, words], contiguous: bit n of a row is set if it sees node n
  const int32_t* depths;  // [B, nodes], contiguous; those of a row's ancestors are 0, 1, …
  const int32_t* kv_len;  // [B]
  int32_t* slots;         // [B, R, width()]: cache slots of the ancestors by depth; behind the last unchanged
  int32_t* lengths;       // [B, R]: ancestors of the row
  int batch, rows, words, nodes, capacity;

  GSD_HD int width() const { return min_int(32 * words, nodes); }
};

struct PathAttentionSizes {
  int batch, kv_heads, group, rows, head_dim, capacity;  // B, Hkv, Hq / Hkv, R, D, S

  GSD_HD int query_rows() const { return group * rows; }  // M: heads of a row are neighbours
  GSD_HD int splits() const { return capacity > 0 ? path_split_of(capacity - 1) + 1 : 1; }
  // Rows of partial results: [B · Hkv, splits, M].
  GSD_HD int64_t partials() const {
    return static_cast<int64_t>(batch) * kv_heads * splits() * static_cast<int64_t>(query_rows());
  }
};

struct PathAttentionArgs {
  const uint16_t* q;         // [B · R, q_row], head h at h · D; rows begin at multiples of 16 bytes
  const uint16_t* k;         // [B, Hkv, S, D], likewise
  const uint16_t* v;         // [B, Hkv, S, D], likewise
  const int32_t* slots;      // [B, R, path], of AncestorListArgs
  const int32_t* lengths;    // [B, R]
  const int32_t* kv_len;     // [B]
  const int32_t* kv_start;   // [B], null: 0
  const int32_t* positions;  // [B, R], of the rows in the text; read with a window only
  float* scratch;            // path_scratch_floats(), 16-byte aligned; need not be cleared
  uint16_t* out;             // [B · R, out_row], head h at h · D; rows begin at multiples of 8 bytes
  int64_t q_row, out_row, k_batch, k_head, v_batch, v_head;  // strides in elements
  int k_slot, v_slot;
  int path;     // width() of the ancestor lists
  int window;   // positions that a row sees, its own included; 0: all
  float scale;  // of the scores; holds log2(e)
};

// A partial result: D outputs that are not divided yet, four parts of the sum of weights, the highest score.
GSD_HD int64_t path_scratch_floats(const PathAttentionSizes& s) { return s.partials() * (s.head_dim + 5); }

}  // namespace gsd
