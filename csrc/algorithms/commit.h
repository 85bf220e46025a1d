// Moving accepted rows to the end of the prefix. A thread owns one column of a head: the same few bytes of every row.
// Columns do not touch each other, so "read all sources before any write" needs no barrier: a thread reads its column of
// all accepted rows into memory of its own (all loads are in flight together) and then writes.
#pragma once

#include "group.h"

namespace gsd {

// Of one layer's keys or values, [B, Hkv, S, D] with any strides and unit last dimension, in bytes.
struct CacheShape {
  int64_t batch_stride, head_stride, slot_stride;
  int64_t heads, slots, row_bytes;
};

// Keys and values of all layers that share a shape (which those of a LLaMA do).
constexpr int kMaxCaches = 384;
struct CommitArgs {
  char* caches[kMaxCaches];
  int num_caches, path;  // path: P of accepted_rows [B, P]
  CacheShape shape;
  const int32_t* accepted_rows;  // [B, P]
  const int32_t* num_accepted;   // [B]
  const int32_t* kv_len;         // [B], before the step
};

// How many rows a sequence accepts: none beyond its path.
GSD_HD int accepted_of(int num_accepted, int path) { return max_int(min_int(num_accepted, path), 0); }

// A column of a cache head, `item` of heads · columns. Row i is kept at staged[i · step] in between. A row whose source or
// place is no slot of the cache stays where it is.
template <class Vector>
GSD_HD void commit_column(const CommitArgs& a, char* cache, int64_t b, int item, Vector* staged, int step) {
  const int columns = static_cast<int>(a.shape.row_bytes / static_cast<int64_t>(sizeof(Vector)));
  const int head = item / columns, column = item % columns, kv_len = a.kv_len[b];
  const int slots = static_cast<int>(a.shape.slots);
  char* const first = cache + b * a.shape.batch_stride + head * a.shape.head_stride + column * static_cast<int64_t>(sizeof(Vector));
  const int32_t* rows = a.accepted_rows + b * a.path;
  // Behind the last slot there are no places.
  const int count = kv_len < 0 ? 0 : accepted_of(a.num_accepted[b], min_int(a.path, slots - kv_len));
  const auto source = [&](int i) { return static_cast<int64_t>(kv_len) + max_int(rows[i], 0); };
  GSD_UNROLL_4
  for (int i = 0; i < count; i++) {
    if (source(i) < slots) staged[i * step] = *reinterpret_cast<const Vector*>(first + source(i) * a.shape.slot_stride);
  }
  GSD_UNROLL_4
  for (int i = 0; i < count; i++) {
    if (source(i) < slots) *reinterpret_cast<Vector*>(first + (kv_len + i) * a.shape.slot_stride) = staged[i * step];
  }
}

}  // namespace gsd
