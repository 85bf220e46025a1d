// What lies between the products: norms, heads turned by their position (RoPE), the cache's new slots, the embedding.
//
// One block a row or one warp a head, whose sums have one order: rows do not know of each other.
#pragma once

#include "attention.h"
#include "rows_heads.h"
#include "rows_packed.h"

namespace gsd {

constexpr int kRowThreads = 256;  // of a block that has a row; a sum's order follows from it
constexpr int kRowWarps = kRowThreads / kLanes;
constexpr int kNormArenaBytes = kRowWarps * 16;

// Eight numbers at multiples of 16 bytes.
template <class Element>
GSD_HD void widen_chunk(const Chunk& chunk, float (&to)[8]) {
  GSD_UNROLL
  for (int i = 0; i < 8; i++) to[i] = Element::widen(static_cast<uint16_t>(chunk.words[i / 2] >> i % 2 * 16));
}

template <class Machine>
GSD_HD void load_eight(Machine& machine, const float* from, float (&to)[8]) {
  float low[4], high[4];
  machine.load(from, low);
  machine.load(from + 4, high);
  GSD_UNROLL
  for (int i = 0; i < 4; i++) to[i] = low[i], to[4 + i] = high[i];
}

template <class Machine>
GSD_HD void store_eight(Machine& machine, float* to, const float (&from)[8]) {
  GSD_UNROLL
  for (int i = 0; i < 8; i += 2) machine.store(to + i, from[i], from[i + 1]);
}

GSD_HD void add_squares(const float (&value)[8], float& sum) {
  GSD_UNROLL
  for (int j = 0; j < 8; j++) sum += value[j] * value[j];
}

// Of a thread's sums of squares, of one or two rows of `a`, what the rows are multiplied by. All of a block take part.
template <int kCount, class Machine, class Args>
GSD_HD void norms_of_row(Machine& machine, const Args& a, float (&sums)[kCount]) {
  Chunk own{};
  GSD_UNROLL
  for (int i = 0; i < kCount; i++) own.words[i] = float_bits(sum_of_lanes(machine, sums[i]));
  if (machine.lane() == 0) machine.write(16 * machine.warp(), own);
  machine.sync("squares added");
  GSD_UNROLL
  for (int i = 0; i < kCount; i++) {
    float total = 0.0f;
    GSD_UNROLL
    for (int w = 0; w < kRowWarps; w++) total += float_from_bits(machine.read(16 * w).words[i]);
    sums[i] = machine.inverse_root(total / static_cast<float>(a.hidden) + a.eps);
  }
}

// Eight numbers times what their row is multiplied by and a norm's weights, rounded to `out`, or `mark` if that is NaN;
// `value` is left unrounded.
template <class Element>
GSD_HD void store_normed(const uint16_t* norm, float by, float (&value)[8], uint16_t* out, float mark = 0.0f) {
  float weight[8];
  widen_chunk<Element>(*reinterpret_cast<const Chunk*>(norm), weight);
  Chunk rounded;
  GSD_UNROLL
  for (int j = 0; j < 8; j++) value[j] = value[j] * by * weight[j];
  GSD_UNROLL
  for (int j = 0; j < 4; j++) {
    rounded.words[j] = mark == mark ? Element::pack(value[2 * j], value[2 * j + 1]) : Element::pack(mark, mark);
  }
  *reinterpret_cast<Chunk*>(out) = rounded;
}

// One block: x / sqrt(mean(x²) + eps) · weight for kept row `kept` of batch · keep.
template <class Element, class Machine>
GSD_HD void norm_row(Machine& machine, const RowsNorm& a, int kept) {
  machine.await_previous("norm");
  machine.release_next();
  const int row = kept / a.keep * a.rows + a.rows - a.keep + kept % a.keep;
  const float* x = a.x + static_cast<int64_t>(row) * a.hidden;
  const int64_t start = static_cast<int64_t>(kept) * a.hidden;
  const float mark = a.marks != nullptr ? a.marks[row] : 0.0f;
  float value[8], by[1] = {0.0f};
  for (int i = 8 * machine.thread(); i < a.hidden; i += 8 * kRowThreads) {
    load_eight(machine, x + i, value);
    add_squares(value, by[0]);
  }
  norms_of_row(machine, a, by);
  for (int i = 8 * machine.thread(); i < a.hidden; i += 8 * kRowThreads) {
    load_eight(machine, x + i, value);
    if (a.copy != nullptr) store_eight(machine, a.copy + start + i, value);
    store_normed<Element>(a.weight + i, by[0], value, a.out + start + i, mark);
    if (a.exact != nullptr) store_eight(machine, a.exact + start + i, value);
  }
}

// Reduced by multiples of π/2 in double precision, so that long texts lose nothing; polynomials from Cephes (relative
// error 1e-7). The compiler's own reduces large angles in an array on the stack.
GSD_HD void cosine_and_sine(float angle, float& cosine, float& sine) {
  const double turns = angle * 0.63661977236758134;
  const int64_t quarter = static_cast<int64_t>(turns + (turns < 0.0 ? -0.5 : 0.5));
  const float x = static_cast<float>(angle - static_cast<double>(quarter) * 1.57079632679489662), square = x * x;
  const float s = x + x * square * (-1.6666654611e-1f + square * (8.3321608736e-3f - square * 1.9515295891e-4f));
  const float c = 1.0f - 0.5f * square + square * square *
                  (4.166664568298827e-2f + square * (-1.388731625493765e-3f + square * 2.443315711809948e-5f));
  const bool swapped = (quarter & 1) != 0;
  cosine = swapped ? s : c, sine = swapped ? c : s;
  if (((quarter + 1) & 2) != 0) cosine = -cosine;
  if ((quarter & 2) != 0) sine = -sine;
}

// One warp: head 0 … heads + 2 kv_heads − 1 of one row, where the product has left it in memory. A lane has kOwn neighbours
// of the first half, and those of the second half that turn with them.
template <class Element, int kHeadDim, class Machine>
GSD_HD void turn_head(Machine& machine, const RowsTurn& a, int row, int number) {
  constexpr int kHalf = kHeadDim / 2, kOwn = kHalf / kLanes;
  machine.await_previous("heads");
  machine.release_next();
  const int lane = machine.lane(), first = kOwn * lane;
  const float* from = a.qkv + (static_cast<int64_t>(row) * (a.heads + 2 * a.kv_heads) + number) * kHeadDim;
  float x[2][kOwn];
  GSD_UNROLL
  for (int i = 0; i < 2 * kOwn; i++) x[i / kOwn][i % kOwn] = from[i / kOwn * kHalf + first + i % kOwn];

  const RowsHead head(a, number);
  float by = 1.0f;
  if (head.norm != nullptr) {
    float sum = 0.0f, squares = 0.0f;
    GSD_UNROLL
    for (int i = 0; i < kOwn; i++) sum += square_of_pair(machine, x[0][i], x[1][i]);
    GSD_UNROLL
    for (int step = 1; step < 8 / kOwn; step *= 2) sum += machine.shuffle_xor(sum, step);
    GSD_UNROLL
    for (int eight = 0; eight < kHalf / 8; eight++) squares += machine.shuffle(sum, 8 / kOwn * eight);
    by = norm_of_head(machine, a, squares);
  }
  bool changed = false;
  GSD_UNROLL
  for (int i = 0; i < kOwn; i++) {
    head.template turn<Element>(machine, a, row, first + i, by, x[0][i], x[1][i], changed);
  }
  uint16_t* const to = head.place(a, row, row / a.rows);
  if (to == nullptr) return;
  GSD_UNROLL
  for (int i = 0; i < 2 * kOwn; i++) {
    to[i / kOwn * kHalf + first + i % kOwn] = static_cast<uint16_t>(Element::pack(x[i / kOwn][i % kOwn], 0.0f));
  }
  head.mark(a, row, changed);  // by any lane that met one
}

// One block: what the row's heads turn by, and its ancestors.
template <class Machine>
GSD_HD void store_once(Machine& machine, const RowsOnce& a, int row) {
  for (int i = machine.thread(); i < a.half; i += kRowThreads) {
    float cosine, sine;
    cosine_and_sine(static_cast<float>(a.positions[row]) * a.inv_freq[i], cosine, sine);
    machine.store(a.turns + 2 * (static_cast<int64_t>(row) * a.half + i), cosine * a.rope_scale, sine * a.rope_scale);
  }
  if (a.ancestors.slots == nullptr) return;
  if (machine.thread() == 0) count_ancestors(a.ancestors, row);
  for (int node = machine.thread(); node < a.ancestors.width(); node += kRowThreads) list_ancestor(a.ancestors, row, node);
}

// One block: a token's row of the embedding, and what all layers read of the row.
template <class Element, class Machine>
GSD_HD void embed_row(Machine& machine, const RowsEmbed& a, int row) {
  machine.await_previous("embedding");
  machine.release_next();
  const RowsMatrix& m = a.embedding;
  store_once(machine, a.once, row);
  const int token = clamped(a.tokens[row], m.outputs - 1);
  float value[8];
  with_format(m.kind, [&](auto format) {
    using Format = decltype(format);
    for (int i = 8 * machine.thread(); i < a.hidden; i += 8 * kRowThreads) {
      widen_chunk<Element>(chunk_of<Element, Format>(machine, Format::load(m, a.hidden, token, i)), value);
      store_eight(machine, a.x + static_cast<int64_t>(row) * a.hidden + i, value);
    }
  });
}

}  // namespace gsd
