// Heads of queries, keys and values: normed (Qwen3), turned by their position (RoPE), rounded, and put where they are read.
//
// Two numbers half a head apart turn together: a pair. What becomes of it is the same arithmetic, rounded as the source
// says, in the product that computed it and in a launch of its own (rows_turn.h). So is the order in which the squares of a
// head are added: eight neighbouring pairs by halves, then the eights from the first on.
#pragma once

#include "rows_tiles.h"

namespace gsd {

// NaN becomes 0, infinities the largest values: what overflows in one row must not reach those that do not see it.
// `changed` is set where it would not be finite in the cache.
template <class Element>
GSD_HD float finite(float x, bool& changed) {
  const float most = Element::widen(Element::kExponent - 1);
  const float infinite = most + (most - Element::widen(Element::kExponent - 2)) / 2.0f;  // the least that rounds to it
  changed |= !(x > -infinite && x < infinite);
  return x > most ? most : x < -most ? -most : x == x ? x : 0.0f;
}

template <class Machine>
GSD_HD float square_of_pair(Machine& machine, float x, float y) {
  return machine.fma(x, x, machine.times(y, y));
}

// What a head is multiplied by, beside its weights.
template <class Machine>
GSD_HD float norm_of_head(Machine& machine, const RowsTurn& a, float squares) {
  return machine.inverse_root(squares / static_cast<float>(a.head_dim) + a.eps);
}

// One of the heads of queries, keys and values, in this order.
struct RowsHead {
  bool query, value;
  int own;               // among the queries', the keys' or the values'
  const uint16_t* norm;  // [head_dim] or null

  GSD_HD RowsHead(const RowsTurn& a, int number)
      : query(number < a.heads), value(number >= a.heads + a.kv_heads),
        own(query ? number : number - a.heads - (value ? a.kv_heads : 0)),
        norm(query ? a.q_norm : value ? nullptr : a.k_norm) {}

  // Numbers `pair` and half a head later. `changed` is set where a key or value is not finite in the cache.
  template <class Element, class Machine>
  GSD_HD void turn(Machine& machine, const RowsTurn& a, int row, int pair, float by, float& x, float& y,
                   bool& changed) const {
    const int half = a.head_dim / 2;
    if (norm != nullptr) x = x * by * Element::widen(norm[pair]), y = y * by * Element::widen(norm[pair + half]);
    if (!value) {
      float angle[2];  // its cosine and sine
      machine.load(a.turns + 2 * (static_cast<int64_t>(row) * half + pair), angle);
      const float first = machine.fma(x, angle[0], -machine.times(y, angle[1]));
      y = machine.fma(y, angle[0], machine.times(x, angle[1])), x = first;
    }
    if (!query) x = finite<Element>(x, changed), y = finite<Element>(y, changed);
  }

  // Where the row's head is stored, of sequence `batch`; null: nowhere.
  GSD_HD uint16_t* place(const RowsTurn& a, int row, int64_t batch) const {
    if (query) return a.q + (static_cast<int64_t>(row) * a.heads + own) * a.head_dim;
    const int64_t slot = a.slots[row];
    if (slot < 0 || slot >= a.capacity) return nullptr;
    return value ? a.v_cache + batch * a.v_batch + own * a.v_head + slot * a.v_slot
                 : a.k_cache + batch * a.k_batch + own * a.k_head + slot * a.k_slot;
  }

  GSD_HD void mark(const RowsTurn& a, int row, bool changed) const {
    if (changed && a.spoiled != nullptr) a.spoiled[row] = float_from_bits(0x7FC00000);
  }
};

// A thread's sums, as RowsSums, of a product that turns heads: `output` is the first number of a pair. With kWarps the
// warps of a block have a whole head, eight pairs each, and norm it; with 0 there are no norms.
template <class Element, int kRowTiles, int kWarps>
struct TurnedSums {
  template <class Machine>
  static GSD_HD void finish(Machine& machine, const RowsProduct& a, const RowsTile& tile, int output, int row,
                            int rows, const float (&own)[kRowTiles][4]) {
    const RowsTurn& t = a.turn;
    const int before = tile.matrix == 0 ? 0 : t.heads + (tile.matrix - 1) * t.kv_heads, half = t.head_dim / 2;
    const RowsHead head(t, before + (output >> t.head_bits()));
    const int pair = output & (t.head_dim - 1);
    const uint16_t* biases = tile.of(a).bias;
    const bool inside = output < tile.outputs, biased = inside && biases != nullptr;
    const float bias[2] = {biased ? Element::widen(biases[output]) : 0.0f,
                           biased ? Element::widen(biases[output + half]) : 0.0f};
    float by[2 * kRowTiles] = {};
    if constexpr (kWarps > 0) {
      if (head.norm != nullptr) norm(machine, t, bias, own, by);
    }
    int batch = row / t.rows, next = (batch + 1) * t.rows;  // the first row of the sequence behind
    GSD_UNROLL
    for (int j = 0; j < 2 * kRowTiles; j++) {
      const int of = row + 8 * (j / 2) + j % 2;
      if (!inside || of >= rows) continue;
      GSD_ROLLED
      for (; of >= next; next += t.rows) batch++;
      float x = own[j / 2][j % 2] + bias[0], y = own[j / 2][2 + j % 2] + bias[1];
      bool changed = false;
      head.template turn<Element>(machine, t, of, pair, by[j], x, y, changed);
      uint16_t* const to = head.place(t, of, batch);
      if (to == nullptr) continue;
      to[pair] = static_cast<uint16_t>(Element::pack(x, 0.0f));
      to[pair + half] = static_cast<uint16_t>(Element::pack(y, 0.0f));
      head.mark(t, of, changed);
    }
  }

 private:
  template <class Machine>
  static GSD_HD void norm(Machine& machine, const RowsTurn& t, const float (&bias)[2], const float (&own)[kRowTiles][4],
                          float (&by)[2 * kRowTiles]) {
    const int lane = machine.lane(), first = 2 * (lane % 4);
    machine.sync("last stage multiplied");
    GSD_UNROLL
    for (int j = 0; j < 2 * kRowTiles; j++) {
      float sum = square_of_pair(machine, own[j / 2][j % 2] + bias[0], own[j / 2][2 + j % 2] + bias[1]);
      GSD_UNROLL
      for (int step = 4; step < kLanes; step *= 2) sum += machine.shuffle_xor(sum, step);
      const int local = first + 8 * (j / 2) + j % 2;
      if (lane / 4 == 0) machine.write(16 * (local * kWarps + machine.warp()), {{float_bits(sum), 0, 0, 0}});
    }
    machine.sync("squares of heads written");
    GSD_UNROLL
    for (int j = 0; j < 2 * kRowTiles; j++) {
      const int local = first + 8 * (j / 2) + j % 2;
      float squares = 0.0f;
      GSD_UNROLL
      for (int w = 0; w < kWarps; w++) squares += float_from_bits(machine.read(16 * (local * kWarps + w)).words[0]);
      by[j] = norm_of_head(machine, t, squares);
    }
  }
};

}  // namespace gsd
