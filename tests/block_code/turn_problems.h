// Heads to be turned: random ones, what they should be, and the memory that they are put in.
#pragma once

#include "grid_launches.h"
#include "row_problems.h"

namespace gsd {

template <class Element>
struct Turn {
  RowsTurn a{};
  std::vector<float> qkv, inv_freq, turns;
  std::vector<uint16_t> q_norm, k_norm;
  std::vector<int32_t> positions, slots;

  const float rope_scale = 1.25f;

  explicit Turn(int head_dim, std::mt19937& random) : Turn(head_dim, between(random, 1, 2), between(random, 1, 3), random) {}
  Turn(int head_dim, int batch, int rows, std::mt19937& random) {
    a.batch = batch, a.rows = rows, a.head_dim = head_dim, a.capacity = 2 * rows + 1;
    a.kv_heads = between(random, 1, 2), a.heads = a.kv_heads * between(random, 1, 2);
    a.eps = 1e-6f;
    qkv = drawn_floats(static_cast<size_t>(count()) * heads() * head_dim, random);
    for (int i = 0; i < head_dim / 2; i++) inv_freq.push_back(std::pow(10000.0f, -2.0f * i / head_dim));
    if (random() % 2 == 0) q_norm = drawn<Element>(head_dim, random), k_norm = drawn<Element>(head_dim, random);
    for (int i = 0; i < count(); i++) {
      positions.push_back(between(random, 0, i % 2 == 0 ? 100 : 1000000));
      slots.push_back(i % a.rows * 2 + between(random, 0, 1));
    }
    for (int i = 0; i < count() * head_dim / 2; i++) {
      float cosine, sine;
      cosine_and_sine(static_cast<float>(positions[2 * i / head_dim]) * inv_freq[i % (head_dim / 2)], cosine, sine);
      turns.push_back(cosine * rope_scale), turns.push_back(sine * rope_scale);
    }
    if (random() % 4 == 0) slots[0] = random() % 2 == 0 ? -1 : a.capacity;
    qkv[qkv.size() - 1] = NAN, qkv[qkv.size() - 2] = 1e30f, qkv[qkv.size() - 3] = -INFINITY;  // of a value
  }
  int count() const { return a.batch * a.rows; }
  int heads() const { return a.heads + 2 * a.kv_heads; }

  double exact(int row, int head, int d) const {
    const int half = a.head_dim / 2;
    const float* x = &qkv[(static_cast<size_t>(row) * heads() + head) * a.head_dim];
    if (head >= a.heads + a.kv_heads) return x[d];
    const std::vector<uint16_t>& norm = head < a.heads ? q_norm : k_norm;
    double square = 0;
    for (int i = 0; i < a.head_dim; i++) square += static_cast<double>(x[i]) * x[i];
    const auto normed = [&](int i) {
      return norm.empty() ? x[i] : x[i] / std::sqrt(square / a.head_dim + a.eps) * Element::widen(norm[i]);
    };
    const double angle = static_cast<float>(positions[row]) * inv_freq[d % half];  // rounded, as the reference's
    const double other = normed((d + half) % a.head_dim);
    return rope_scale * (normed(d) * std::cos(angle) + (d < half ? -other : other) * std::sin(angle));
  }
};

// Where heads are put; nothing is there before.
template <class Element>
struct TurnedHeads {
  std::vector<uint16_t> q, k, v;
  std::vector<float> spoiled;

  TurnedHeads(const Turn<Element>& t, RowsTurn& a, bool positions_first)
      : q(static_cast<size_t>(t.count()) * a.heads * a.head_dim, 0xFFFF),
        k(static_cast<size_t>(a.batch) * a.kv_heads * a.capacity * a.head_dim, 0xFFFF), v(k), spoiled(t.count(), 0.0f) {
    a.turns = t.turns.data(), a.slots = t.slots.data();
    a.q_norm = t.q_norm.empty() ? nullptr : t.q_norm.data(), a.k_norm = t.k_norm.empty() ? nullptr : t.k_norm.data();
    a.q = q.data(), a.k_cache = k.data(), a.v_cache = v.data();
#if !defined(__SANITIZE_THREAD__)  // several threads put the same number there
    a.spoiled = spoiled.data();
#endif
    a.k_slot = a.v_slot = positions_first ? a.head_dim * a.kv_heads : a.head_dim;  // caches stored [B, S, Hkv, D], or not
    a.k_head = a.v_head = positions_first ? a.head_dim : a.head_dim * a.capacity;
    a.k_batch = a.v_batch = static_cast<int64_t>(a.head_dim) * a.capacity * a.kv_heads;
  }
  bool operator==(const TurnedHeads& other) const {
    return q == other.q && k == other.k && v == other.v &&
           memcmp(spoiled.data(), other.spoiled.data(), sizeof(float) * spoiled.size()) == 0;
  }
};

// A launch of its own, of heads in memory.
template <class Element>
void turn_heads(const Turn<Element>& t, const RowsTurn& a) {
  Awaited<float> qkv(t.qkv);
  RowsTurn given = a;
  given.qkv = qkv.there.data();
  run_turn<Element>(given, after([&] { qkv.arrive(); }));
}

// Whether a product that turns the heads which it computes has the bits of the contract's product and a launch that turns
// them. `multiplied(p)` runs the problem. Some keys and values overflow, or are no numbers.
template <class Element, class Multiplied>
bool turned_is_right(int head_dim, int rows, int inputs, bool norms, std::mt19937& random, const Multiplied& multiplied) {
  Turn<Element> t(head_dim, rows % 2 == 0 ? 2 : 1, rows % 2 == 0 ? rows / 2 : rows, random);
  t.q_norm = t.k_norm = {};
  if (norms) t.q_norm = drawn<Element>(head_dim, random), t.k_norm = drawn<Element>(head_dim, random);
  RowsTurn& a = t.a;
  Product<Element> p({rows, inputs, {a.heads * head_dim, a.kv_heads * head_dim, a.kv_heads * head_dim}, RowsEnd::kStore},
                     random);
  p.x[random() % p.x.size()] = Element::round(random() % 2 == 0 ? INFINITY : NAN);
  t.qkv = contracted(p);
  const bool positions_first = random() % 2 == 0;
  TurnedHeads<Element> expected(t, a, positions_first);
  const Fault fault = std::exchange(planted, {});
  turn_heads(t, a), planted = fault;
  TurnedHeads<Element> got(t, a, positions_first);
  p.shape.end = RowsEnd::kTurn, p.turn = &a;
  multiplied(p);
  if (got == expected) return true;
  return fprintf(stderr, "%d rows of heads of %d are not what a launch of their own makes of them\n", rows, head_dim), false;
}

}  // namespace gsd
