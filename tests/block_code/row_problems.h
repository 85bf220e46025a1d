// Random products, what they should be, and the memory that they are run in.
#pragma once

#include "../../csrc/algorithms/rows_product.h"
#include "problems.h"

namespace gsd {

// A random packed matrix, or a dense one where it has no rows.
struct PackedRows {
  RowsKind kind = RowsKind::kDense;
  int inputs = 0, groups = 0;
  size_t row_bytes = 0;
  std::vector<uint8_t> rows;
  std::vector<float> scales;

  PackedRows(int outputs, int inputs, std::mt19937& random) : inputs(inputs) {
    constexpr RowsKind kKinds[] = {RowsKind::kDense, RowsKind::kQ8_0, RowsKind::kInt8,
                                   RowsKind::kUint8, RowsKind::kInt4, RowsKind::kInt4Offset};
    do kind = kKinds[random() % 6];
    while (kind == RowsKind::kQ8_0 && inputs % 32 != 0);
    if (kind == RowsKind::kDense) return;
    const size_t codes = static_cast<size_t>(halves() ? inputs / 2 : inputs);
    row_bytes = kind == RowsKind::kQ8_0 ? codes / 32 * 34 : codes;
    for (size_t i = 0; i < static_cast<size_t>(outputs) * row_bytes; i++) rows.push_back(static_cast<uint8_t>(random()));
    if (kind != RowsKind::kQ8_0) {
      do groups = between(random, 1, inputs / 8);
      while (inputs % (8 * groups) != 0);
      scales = drawn_floats(static_cast<size_t>(outputs * groups * beside()), random);
      if (kind == RowsKind::kUint8 || kind == RowsKind::kInt4) {
        for (size_t i = 1; i < scales.size(); i += 2) scales[i] = static_cast<float>(random() % 16);
      }
    }
    for (size_t at = 0; kind == RowsKind::kQ8_0 && at < rows.size(); at += 34) {
      const uint16_t scale = Half::round(static_cast<float>(random() % 100) * 0x1p-12f);
      memcpy(&rows[at], &scale, sizeof scale);
    }
  }
  bool halves() const { return kind == RowsKind::kInt4 || kind == RowsKind::kInt4Offset; }
  int beside() const { return kind == RowsKind::kInt8 ? 1 : 2; }

  float at(int n, int k) const {
    const uint8_t* row = &rows[static_cast<size_t>(n) * row_bytes];
    if (kind == RowsKind::kQ8_0) {
      const uint8_t* block = row + k / 32 * 34;
      return static_cast<float>(static_cast<int8_t>(block[2 + k % 32])) *
             float_from_half(static_cast<uint16_t>(block[0] | block[1] << 8));
    }
    const float* of = &scales[static_cast<size_t>((n * groups + k / (inputs / groups)) * beside())];
    if (kind == RowsKind::kInt8) return static_cast<float>(static_cast<int8_t>(row[k])) * of[0];
    const float code = halves() ? static_cast<float>(row[k / 2] >> k % 2 * 4 & 15) : row[k];
    return kind == RowsKind::kInt4Offset ? (code - 8.0f) * of[0] + of[1] : (code - of[1]) * of[0];
  }
  void put(RowsMatrix& m) const {
    if (kind == RowsKind::kDense) return;
    m.weight = reinterpret_cast<const uint16_t*>(rows.data()), m.kind = kind;
    m.groups = groups, m.scales = scales.data();
  }
};

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
  std::vector<PackedRows> packed;  // of every matrix, or none
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

  // The same with packed matrices, whose dense ones `weights` are.
  void pack(std::mt19937& random) {
    for (size_t i = 0; i < weights.size(); i++) {
      packed.emplace_back(shape.outputs[i], shape.inputs, random);
      for (size_t j = 0; packed[i].kind != RowsKind::kDense && j < weights[i].size(); j++) {
        const int n = static_cast<int>(j) / shape.inputs, k = static_cast<int>(j) % shape.inputs;
        weights[i][j] = Element::round(packed[i].at(n, k));
      }
    }
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
    if (!p.packed.empty()) p.packed[i].put(a.matrices[i]);
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

// Of what comes ahead every piece is asked for once; here it is of the product itself.
struct AskedAhead {
  RowsAhead& ahead;
  std::vector<int> asked;

  explicit AskedAhead(RowsProduct& a) : ahead(a.ahead = rows_ahead(a, 24 << 20)), asked(static_cast<size_t>(ahead.pieces())) {}
  std::function<void(const void*, int)> prefetched() {
    return [this](const void* from, int bytes) {
      for (int i = 0, size; i < ahead.pieces(); i++) {
        if (ahead.piece(i, size) == from && size == bytes) __atomic_fetch_add(&asked[i], 1, __ATOMIC_RELAXED);
      }
    };
  }
  ~AskedAhead() {
    if (std::any_of(asked.begin(), asked.end(), [](int times) { return times != 1; })) {
      stop(kWrong, "a piece of the next weights is not asked for once", "the end");
    }
  }
};

// What the contract of rows_product.h makes of a problem, number by number: no tiles, no stages, no other rows.
template <class Element>
Result contracted(const Product<Element>& p) {
  const Shape& s = p.shape;
  const RowsProduct a = shaped(p);
  const int split_inputs = a.split_stages() * kTileInputs;
  const auto factors = [&](const uint16_t* values) {
    std::vector<Factor> made(static_cast<size_t>((s.inputs + 15) / 16 * 16));
    for (int k = 0; k < s.inputs; k++) made[k] = factor<Element>(values[k]);
    return made;
  };
  const auto product = [&](int i, int row, int n) {
    const std::vector<Factor> x = factors(&p.x[static_cast<size_t>(row) * s.inputs]),
                              weight = factors(&p.weights[i][static_cast<size_t>(n) * s.inputs]);
    float sum = 0.0f;
    for (int first = 0; first < s.inputs; first += split_inputs) {
      float part = 0.0f;
      for (int k = first; k < std::min(first + split_inputs, s.inputs); k += 16) {
        const Factor *left[16], *right[16];
        for (int j = 0; j < 16; j++) left[j] = &weight[k + j], right[j] = &x[k + j];
        part = dot_add(part, left, right);
      }
      sum = first == 0 ? part : sum + part;
    }
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

// The first rows of many, in companies of these sizes: the contract's bits, and the same in each.
template <class Element, class Multiplied>
bool companies_are_right(const Product<Element>& all, std::initializer_list<int> sizes, const Multiplied& multiplied) {
  Result before;
  for (const int rows : sizes) {
    const Product<Element> some = all.first(rows);
    const Result got = multiplied(some);
    const auto both = static_cast<std::ptrdiff_t>(std::min(got.size(), before.size()));
    if (!keeps_contract(some, got) || !std::equal(got.begin(), got.begin() + both, before.begin())) {
      return fprintf(stderr, "%d rows\n", rows), false;
    }
    before = got;
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

}  // namespace gsd
