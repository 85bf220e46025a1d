// Random products and heads that they turn: what they should be, and the memory that they are run in.
#pragma once

#include "../../csrc/algorithms/rows_product.h"
#include "problems.h"

namespace gsd {

struct Shape {
  int rows, inputs;
  std::vector<int> outputs;
  RowsEnd end;
};

template <class Element>
struct Product {
  Shape shape;
  std::vector<uint16_t> x;
  std::vector<std::vector<uint16_t>> weights, biases;
  std::vector<float> before;       // [rows, width]
  const RowsTurn* turn = nullptr;  // kTurn

  Product(const Shape& shape, std::mt19937& random)
      : shape(shape), x(drawn<Element>(static_cast<size_t>(shape.rows) * shape.inputs, random)) {
    for (const int outputs : shape.outputs) {
      weights.push_back(drawn<Element>(static_cast<size_t>(outputs) * shape.inputs, random));
      if (shape.end == RowsEnd::kGate) {  // so that some gates are neither open nor shut
        for (uint16_t& weight : weights.back()) weight = Element::round(0.1f * Element::widen(weight));
      }
      biases.push_back(random() % 2 == 0 ? std::vector<uint16_t>() : drawn<Element>(outputs, random));
    }
    before = drawn_floats(static_cast<size_t>(shape.rows) * width(), random);
  }

  int width() const {
    int sum = 0;
    for (const int outputs : shape.outputs) sum += outputs;
    return shape.end == RowsEnd::kGate ? shape.outputs[0] : sum;
  }
  // The first of its rows.
  Product first(int rows) const {
    Product some = *this;
    some.shape.rows = rows;
    some.x.resize(static_cast<size_t>(rows) * shape.inputs), some.before.resize(static_cast<size_t>(rows) * width());
    return some;
  }
};

// Of one row: a number for every output. Half precision is widened.
using Result = std::vector<float>;

// A product without memory: what its cut follows from.
template <class Element>
RowsProduct shaped(const Product<Element>& p) {
  RowsProduct a{};
  a.count = static_cast<int>(p.shape.outputs.size()), a.rows = p.shape.rows, a.inputs = p.shape.inputs;
  a.end = p.shape.end;
  if (p.turn != nullptr) a.turn = *p.turn;
  for (int i = 0; i < a.count; i++) a.matrices[i].outputs = p.shape.outputs[i];
  return a;
}

// Memory for a product, which `run(a, previous)` multiplies; what the launch before writes is not there yet.
template <class Element, class Run>
Result with_memory(const Product<Element>& p, const Run& run) {
  RowsProduct a = shaped(p);
  const size_t size = p.before.size();
  const RowsScratch scratch = rows_product_scratch(a);
  std::vector<float> partials(static_cast<size_t>(scratch.partials), NAN);
  std::vector<int32_t> counters(static_cast<size_t>(scratch.counters), 0);
  const bool rounds = a.end == RowsEnd::kGate || a.end == RowsEnd::kRound;
  std::vector<uint16_t> gated(rounds ? size : 0, 0xFFFF);
  Awaited<uint16_t> x(p.x);
  Awaited<float> out(a.end == RowsEnd::kAdd ? p.before : std::vector<float>(size, NAN));
  Previous previous;
  previous.write = [&] { x.arrive(), out.arrive(); };
  a.x = x.there.data(), a.partials = partials.data(), a.counters = counters.data(), a.rounded = gated.data();
  a.out_stride = p.width();
  int column = 0;
  for (int i = 0; i < a.count; i++) {
    a.matrices[i] = {p.weights[i].data(), p.biases[i].empty() ? nullptr : p.biases[i].data(),
                     out.there.data() + column, p.shape.outputs[i]};
    column += p.shape.outputs[i];
  }
  run(a, previous);
  for (const int32_t counter : counters) {
    if (counter != 0) stop(kWrong, "a counter is not set back", "the end");
  }
  if (!rounds) return out.there;
  Result result;
  for (const uint16_t value : gated) result.push_back(Element::widen(value));
  return result;
}

// An output: chains of fused dot-adds, a split each, which are added in their order.
GSD_ARITHMETIC inline float split_sum(const Factor* weight, const Factor* x, int inputs, int split_inputs) {
  float sum = 0.0f;
  for (int first = 0; first < inputs; first += split_inputs) {
    float part = 0.0f;
    for (int k = first; k < first + split_inputs && k < inputs; k += 16) {
      const Factor *left[16], *right[16];
      for (int j = 0; j < 16; j++) left[j] = weight + k + j, right[j] = x + k + j;
      part = dot_add(part, left, right);
    }
    sum = first == 0 ? part : sum + part;
  }
  return sum;
}

// What the contract of rows_product.h makes of a problem, number by number: no tiles, no stages, no other rows.
template <class Element>
Result contracted(const Product<Element>& p) {
  const Shape& s = p.shape;
  const RowsProduct a = shaped(p);
  const int split_inputs = a.split_stages() * kTileInputs;
  const size_t chained = static_cast<size_t>((s.inputs + 15) / 16 * 16);
  const auto factors = [&](const std::vector<uint16_t>& values) {
    std::vector<Factor> made(values.size() / s.inputs * chained);
    for (size_t i = 0; i < values.size(); i++) made[i / s.inputs * chained + i % s.inputs] = factor<Element>(values[i]);
    return made;
  };
  const std::vector<Factor> x = factors(p.x);
  std::vector<std::vector<Factor>> weights;
  for (const std::vector<uint16_t>& each : p.weights) weights.push_back(factors(each));
  const auto product = [&](int i, int row, int n) {
    const float sum = split_sum(&weights[i][n * chained], &x[row * chained], s.inputs, split_inputs);
    return sum + (p.biases[i].empty() ? 0.0f : Element::widen(p.biases[i][n]));
  };
  Result result;
  for (int row = 0; row < s.rows; row++) {
    for (int i = 0; i < (s.end == RowsEnd::kGate ? 1 : a.count); i++) {
      for (int n = 0; n < s.outputs[i]; n++) {
        float value = product(i, row, n);
        if (s.end == RowsEnd::kGate) {
          const float up = product(1, row, n), decay = std::exp2((value < 0.0f ? value : -value) * kLog2E);
          value = value * ((value < 0.0f ? decay : 1.0f) / (1.0f + decay)) * up;
        }
        if (s.end == RowsEnd::kAdd) value = p.before[result.size()] + value;
        const bool rounds = s.end == RowsEnd::kGate || s.end == RowsEnd::kRound;
        result.push_back(rounds ? Element::widen(Element::round(value)) : value);
      }
    }
  }
  return result;
}

template <class Element>
bool keeps_contract(const Product<Element>& p, const Result& got) {
  const Result expected = contracted(p);
  for (size_t i = 0; i < got.size(); i++) {
    if (float_bits(got[i]) != float_bits(expected[i])) {
      fprintf(stderr, "number %zu has other bits than the contract's: %a, %a\n", i, got[i], expected[i]);
      return false;
    }
  }
  return true;
}

inline Shape shape_of(int round, std::mt19937& random) {
  constexpr int kRows[] = {3, 20, 40, 66};
  Shape s{};
  s.rows = kRows[round / 2 % 4] + between(random, -2, 2);
  s.end = static_cast<RowsEnd>((round / 2 + round / 8) % 4);
  s.inputs = 8 * (round % 3 == 2 ? between(random, 65, 90) : between(random, 1, 60));  // up to 3 splits
  const int count = s.end == RowsEnd::kGate ? 2 : s.end == RowsEnd::kRound || round % 4 == 1 ? 1 : 3;
  for (int i = 0; i < count; i++) {
    s.outputs.push_back(s.end == RowsEnd::kGate && i > 0 ? s.outputs[0] : between(random, 1, count == 1 ? 150 : 70));
  }
  return s;
}

template <class Element>
struct Turn {
  RowsTurn a{};
  std::vector<float> qkv, inv_freq, turns;
  std::vector<uint16_t> q_norm, k_norm;
  std::vector<int32_t> positions, slots;

  const float rope_scale = 1.25f;

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

// Whether every query, and every key and value with a slot, is what double precision makes of it, and the cache as it was
// elsewhere.
template <class Element>
bool heads_are_turned(const Turn<Element>& t, const RowsTurn& a, const TurnedHeads<Element>& heads) {
  const double most = Element::widen(Element::kExponent - 1);
  size_t written = 0;
  for (int row = 0; row < t.count(); row++) {
    const bool stored = t.slots[row] >= 0 && t.slots[row] < a.capacity;
    for (int head = 0; head < t.heads(); head++) {
      const bool query = head < a.heads, value = head >= a.heads + a.kv_heads;
      if (!query && !stored) continue;
      const uint16_t* got = query ? &heads.q[(static_cast<size_t>(row) * a.heads + head) * a.head_dim]
                                  : &(value ? heads.v : heads.k)[row / a.rows * a.k_batch + (head - a.heads) % a.kv_heads * a.k_head +
                                                                 t.slots[row] * a.k_slot];
      written += query ? 0 : a.head_dim;
      for (int d = 0; d < a.head_dim; d++) {
        const double exact = t.exact(row, head, d), found = Element::widen(got[d]);
        const double expected = query ? exact : std::isnan(exact) ? 0.0 : std::clamp(exact, -most, most);
        if (std::isfinite(expected) && !close(found, expected, 1.01 * unit<Element>() * std::abs(expected) + 0x1p-18, "head", row, d)) return false;
      }
    }
  }
  const auto untouched = static_cast<size_t>(std::count(heads.k.begin(), heads.k.end(), 0xFFFF) + std::count(heads.v.begin(), heads.v.end(), 0xFFFF));
  return untouched + written == heads.k.size() + heads.v.size();
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
  turn_heads(t, a);
  TurnedHeads<Element> got(t, a, positions_first);
  p.shape.end = RowsEnd::kTurn, p.turn = &a;
  multiplied(p);
  if (got == expected) return true;
  return fprintf(stderr, "%d rows of heads of %d are not what a launch of their own makes of them\n", rows, head_dim), false;
}

}  // namespace gsd
