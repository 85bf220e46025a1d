// The forward of rows but for its attention, of random problems on the machine of fibers, against double precision.
//
//     rows product|packed|between|alone ROUNDS SEED [--drop BARRIER | --hurry WAIT | --misplace-copy NAME |
//                                             --misplace-load NAME | --no-await NAME]
//
// product: products with all their ends. packed: packed matrices, against their dense ones. between: norms, turned heads, the embedding. alone: rows alone and among up to
// 128 others. Exit status: 0 right, 3 wrong, 4 divergent, 5 bank conflict, 6 a source that changes while it is copied.
#include <algorithm>
#include <random>

#include "../../csrc/algorithms/rows_product.h"
#include "../../csrc/algorithms/rows_turn.h"
#include "fiber_machine.h"

using namespace gsd;

namespace {

constexpr int kWrong = 3;
Faults faults;
MachineFaults machine_faults;

int between(std::mt19937& random, int low, int high) { return low + static_cast<int>(random() % (high - low + 1)); }

template <class Element>
std::vector<uint16_t> drawn(size_t size, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<uint16_t> values(size);
  for (uint16_t& value : values) value = Element::round(normal(random));
  return values;
}

std::vector<float> drawn_floats(size_t size, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(size);
  for (float& value : values) value = normal(random);
  return values;
}

template <class Element>
constexpr double unit() {  // half the distance from 1 to the next number
  return std::is_same_v<Element, Half> ? 0x1p-11 : 0x1p-8;
}

bool close(double got, double expected, double allowed, const char* what, int row, int column) {
  if (std::abs(got - expected) <= allowed) return true;
  fprintf(stderr, "%s of row %d, column %d: %g instead of %g\n", what, row, column, got, expected);
  return false;
}

// What the launch before writes: numbers that are not there before.
template <class T>
struct Awaited {
  std::vector<T> values, there;

  explicit Awaited(std::vector<T> numbers) : values(std::move(numbers)), there(values.size()) {
    std::fill_n(reinterpret_cast<unsigned char*>(there.data()), sizeof(T) * there.size(), 0xFF);  // NaN in every type
  }
  void arrive() { there = values; }
};

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
struct Problem {
  Shape shape;
  std::vector<uint16_t> x;
  std::vector<std::vector<uint16_t>> weights, biases;
  std::vector<float> before;       // [rows, width]
  std::vector<PackedRows> packed;  // of every matrix, or none

  Problem(const Shape& shape, std::mt19937& random)
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
  // One of its rows alone.
  Problem only(int row) const {
    Problem one = *this;
    one.shape.rows = 1;
    one.x.assign(x.begin() + row * shape.inputs, x.begin() + (row + 1) * shape.inputs);
    one.before.assign(before.begin() + row * width(), before.begin() + (row + 1) * width());
    return one;
  }
};

// Of one row: a number for every output. Half precision is widened.
using Result = std::vector<float>;

template <class Block, class Element>
Result multiplied(const Problem<Element>& p, RowsProduct a, int outputs, bool backwards) {
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
  // Of the next product every piece is asked for once; here it is this one.
  if (p.packed.empty()) a.ahead = rows_ahead(a);
  std::vector<int> asked(static_cast<size_t>(a.ahead.pieces()));
  const auto prefetched = [&](const void* from, int bytes) {
    for (int i = 0, size; i < a.ahead.pieces(); i++) {
      if (a.ahead.piece(i, size) == from && size == bytes) __atomic_fetch_add(&asked[i], 1, __ATOMIC_RELAXED);
    }
  };
  const RowsCut cut(a, outputs);
  const int splits = cut.splits, tiles = a.row_blocks() * cut.output_blocks;
  run_grid(
      Block::kWarps, tiles * splits, Block::kArenaBytes, faults, machine_faults,
      [&](FiberMachine& machine, int b) {  // the splits of a tile at the same time, or one by one from the last to the first
        const int tile = b / splits, split = backwards ? splits - 1 - b % splits : b % splits;
        Block::run(machine, a, cut, tile % a.row_blocks(), tile / a.row_blocks(), split);
      },
      backwards ? 1 : splits, &previous, prefetched);
  if (std::any_of(asked.begin(), asked.end(), [](int times) { return times != 1; })) {
    stop(kWrong, "a piece of the next weights is not asked for once", "the end");
  }
  for (const int32_t counter : counters) {
    if (counter != 0) stop(kWrong, "a counter is not set back", "the end");
  }
  if (!rounds) return out.there;
  Result result;
  for (const uint16_t value : gated) result.push_back(Element::widen(value));
  return result;
}

template <class Element, int kRows>
Result multiplied(const Problem<Element>& p, const RowsProduct& a, bool backwards) {
  if constexpr (std::is_same_v<Element, Half>) {
    using Packed = ProductBlock<Element, kRows, kTileOutputs, true>;
    if (!p.packed.empty()) return multiplied<Packed>(p, a, kTileOutputs, backwards);
  }
  return multiplied<ProductBlock<Element, kRows>>(p, a, kTileOutputs, backwards);
}

template <class Element>
Result multiplied(const Problem<Element>& p, bool backwards = false, bool wide = false) {
  RowsProduct a{};
  a.count = static_cast<int>(p.shape.outputs.size()), a.rows = p.shape.rows, a.inputs = p.shape.inputs;
  a.end = p.shape.end;
  for (int i = 0; i < a.count; i++) a.matrices[i].outputs = p.shape.outputs[i];  // what the cut follows from
  switch (a.tile_rows()) {
    case 16:
      return multiplied<Element, 16>(p, a, backwards);
    case 32:
      return multiplied<Element, 32>(p, a, backwards);
    default:
      return wide ? multiplied<ProductBlock<Element, 64, kWideOutputs>>(p, a, kWideOutputs, backwards)
                  : multiplied<Element, 64>(p, a, backwards);
  }
}

template <class Element>
bool right(const Problem<Element>& p, const Result& got) {
  const Shape& s = p.shape;
  const auto product = [&](int i, int row, int n, double& size) {
    const uint16_t *x = &p.x[static_cast<size_t>(row) * s.inputs],
                   *weight = &p.weights[i][static_cast<size_t>(n) * s.inputs];
    double sum = p.biases[i].empty() ? 0.0 : Element::widen(p.biases[i][n]);
    size = std::abs(sum);
    for (int k = 0; k < s.inputs; k++) {
      const double term = static_cast<double>(Element::widen(x[k])) * Element::widen(weight[k]);
      sum += term, size += std::abs(term);
    }
    return sum;
  };
  for (int row = 0; row < s.rows; row++) {
    for (int i = 0, column = 0; i < (s.end == RowsEnd::kGate ? 1 : static_cast<int>(s.outputs.size())); i++) {
      for (int n = 0; n < s.outputs[i]; n++, column++) {
        const size_t at = static_cast<size_t>(row) * p.width() + column;
        double size, up_size;
        double expected = product(i, row, n, size), allowed = 0x1p-21 * size;
        if (s.end == RowsEnd::kGate) {
          const double gate = expected, up = product(1, row, n, up_size), open = 1.0 / (1.0 + std::exp(-gate));
          expected = gate * open * up;
          allowed = unit<Element>() * std::abs(expected) + 0x1p-20 * (size * std::abs(up) + up_size * std::abs(gate)) +
                    0x1p-24;  // of subnormal numbers
        } else if (s.end == RowsEnd::kRound) {
          allowed += unit<Element>() * std::abs(expected) + 0x1p-24;
        } else if (s.end == RowsEnd::kAdd) {
          expected += p.before[at], allowed += 0x1p-23 * std::abs(expected);
        }
        if (!close(got[at], expected, allowed, "product", row, column)) return false;
      }
    }
  }
  return true;
}

// What the contract of rows_product.h makes of a problem, number by number: no tiles, no stages, no other rows.
template <class Element>
Result contracted(const Problem<Element>& p) {
  const Shape& s = p.shape;
  RowsProduct a{};
  a.count = static_cast<int>(s.outputs.size()), a.inputs = s.inputs, a.end = s.end;
  for (int i = 0; i < a.count; i++) a.matrices[i].outputs = s.outputs[i];
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
bool keeps_contract(const Problem<Element>& p, const Result& got) {
  const Result expected = contracted(p);
  for (size_t i = 0; i < got.size(); i++) {
    if (float_bits(got[i]) != float_bits(expected[i])) {
      fprintf(stderr, "number %zu has other bits than the contract's: %a, %a\n", i, got[i], expected[i]);
      return false;
    }
  }
  return true;
}

template <class Element>
bool same_alone(const Problem<Element>& p, const Result& got, int row) {
  const Result alone = multiplied(p.only(row), true);
  if (memcmp(alone.data(), &got[static_cast<size_t>(row) * p.width()], sizeof(float) * alone.size()) == 0) return true;
  fprintf(stderr, "row %d of %d differs from itself alone\n", row, p.shape.rows);
  return false;
}

Shape shape_of(int round, std::mt19937& random) {
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
bool product_round(int round, std::mt19937& random) {
  const Problem<Element> p(shape_of(round, random), random);
  const Result got = multiplied(p, false, round / 2 % 2 != 0);  // the most rows by wide tiles, forty not
  return right(p, got) && keeps_contract(p, got) && same_alone(p, got, between(random, 0, p.shape.rows - 1));
}

// In float16 alone, whose accesses are bfloat16's.
bool packed_round(int round, std::mt19937& random) {
  Shape shape = shape_of(round, random);
  if (round % 2 == 0) shape.inputs = (shape.inputs + 31) / 32 * 32;  // a whole number of Q8_0's blocks
  Problem<Half> p(shape, random);
  p.pack(random);
  const Result got = multiplied(p);
  p.packed.clear();
  const Result dense = multiplied(p);
  if (memcmp(got.data(), dense.data(), sizeof(float) * got.size()) == 0) return true;
  return fprintf(stderr, "packed matrices differ from their dense ones\n"), false;
}

// The first rows of 128 among more and more others.
template <class Element>
bool alone(std::mt19937& random) {
  const Problem<Element> all({128, 584, {10}, RowsEnd::kStore}, random);
  const Result alone = multiplied(all.only(0));
  for (const int rows : {2, 17, 33, 65, 128}) {
    Problem<Element> some = all;
    some.shape.rows = rows;
    some.x.resize(static_cast<size_t>(rows) * some.shape.inputs);
    some.before.resize(static_cast<size_t>(rows) * some.width());
    const Result got = multiplied(some, false, rows == 65);
    if (memcmp(alone.data(), got.data(), sizeof(float) * alone.size()) != 0) {
      return fprintf(stderr, "row 0 among %d differs from itself alone\n", rows), false;
    }
    if (rows == 17 && !keeps_contract(some, got)) return false;
    if (!same_alone(some, got, rows - 1)) return false;
  }
  return true;
}

template <class Element>
bool norm_is_right(std::mt19937& random) {
  RowsNorm a{};
  a.batch = between(random, 1, 2), a.rows = between(random, 1, 3), a.keep = between(random, 1, a.rows);
  a.hidden = 8 * between(random, 1, 300), a.eps = 1e-5f;
  const size_t kept = static_cast<size_t>(a.batch * a.keep) * a.hidden;
  Awaited<float> x(drawn_floats(static_cast<size_t>(a.batch * a.rows) * a.hidden, random));
  const std::vector<uint16_t> weight = drawn<Element>(a.hidden, random);
  std::vector<uint16_t> out(kept, 0xFFFF);
  std::vector<float> exact(kept, NAN), copy(kept, NAN);
  const bool all = random() % 2 == 0;
  a.x = x.there.data(), a.weight = weight.data(), a.out = out.data();
  a.exact = all ? exact.data() : nullptr, a.copy = all ? copy.data() : nullptr;
  Previous previous;
  previous.write = [&] { x.arrive(); };
  run_grid(
      kRowWarps, a.batch * a.keep, kNormArenaBytes, faults, machine_faults,
      [&](FiberMachine& machine, int b) { norm_row<Element>(machine, a, b); }, 1, &previous);
  for (int i = 0; i < a.batch * a.keep; i++) {
    const float* row = &x.values[static_cast<size_t>(i / a.keep * a.rows + a.rows - a.keep + i % a.keep) * a.hidden];
    double square = 0;
    for (int n = 0; n < a.hidden; n++) square += static_cast<double>(row[n]) * row[n];
    for (int n = 0; n < a.hidden; n++) {
      const size_t at = static_cast<size_t>(i) * a.hidden + n;
      const double expected = row[n] / std::sqrt(square / a.hidden + a.eps) * Element::widen(weight[n]);
      const double size = std::abs(expected);
      if (!close(Element::widen(out[at]), expected, 1.01 * unit<Element>() * size + 0x1p-24, "norm", i, n)) return false;
      if (all && !close(exact[at], expected, 0x1p-20 * size, "exact norm", i, n)) return false;
      if (all && copy[at] != row[n]) return fprintf(stderr, "copy of row %d\n", i), false;
    }
  }
  return true;
}

template <class Element>
bool embedding_is_right(std::mt19937& random) {
  RowsEmbed a{};
  a.rows = between(random, 2, 4), a.hidden = 8 * between(random, 1, 300), a.embedding.outputs = 5;
  const std::vector<uint16_t> embedding = drawn<Element>(5 * static_cast<size_t>(a.hidden), random);
  const PackedRows packed(5, a.hidden, random);
  std::vector<int32_t> drawn_tokens;
  for (int i = 0; i < a.rows; i++) drawn_tokens.push_back(between(random, -1, 5));
  Awaited<int32_t> tokens(drawn_tokens);
  std::vector<float> x(static_cast<size_t>(a.rows) * a.hidden, NAN);
  a.tokens = tokens.there.data(), a.embedding.weight = embedding.data(), a.x = x.data();
  packed.put(a.embedding);
  Previous previous;
  previous.write = [&] { tokens.arrive(); };
  run_grid(
      kRowWarps, a.rows, 0, faults, machine_faults,
      [&](FiberMachine& machine, int b) { embed_row<Element>(machine, a, b); }, 1, &previous);
  for (int i = 0; i < a.rows; i++) {
    const int token = std::clamp(tokens.values[i], 0, 4);
    for (int n = 0; n < a.hidden; n++) {
      const bool dense = packed.kind == RowsKind::kDense;
      const float expected = Element::widen(dense ? embedding[static_cast<size_t>(token) * a.hidden + n]
                                                  : Element::round(packed.at(token, n)));
      if (!close(x[static_cast<size_t>(i) * a.hidden + n], expected, 0, "embedding", i, n)) return false;
    }
  }
  return true;
}

template <class Element>
struct Turn {
  RowsTurn a{};
  std::vector<float> qkv, inv_freq;
  std::vector<uint16_t> q_norm, k_norm;
  std::vector<int32_t> positions, slots;

  explicit Turn(int head_dim, std::mt19937& random) {
    a.batch = between(random, 1, 2), a.rows = between(random, 1, 3), a.head_dim = head_dim, a.capacity = 7;
    a.kv_heads = between(random, 1, 2), a.heads = a.kv_heads * between(random, 1, 2);
    a.eps = 1e-6f, a.rope_scale = 1.25f;
    qkv = drawn_floats(static_cast<size_t>(count()) * heads() * head_dim, random);
    for (int i = 0; i < head_dim / 2; i++) inv_freq.push_back(std::pow(10000.0f, -2.0f * i / head_dim));
    if (random() % 2 == 0) q_norm = drawn<Element>(head_dim, random), k_norm = drawn<Element>(head_dim, random);
    for (int i = 0; i < count(); i++) {
      positions.push_back(between(random, 0, i % 2 == 0 ? 100 : 1000000));
      slots.push_back(i % a.rows * 2 + between(random, 0, 1));
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
    return a.rope_scale * (normed(d) * std::cos(angle) + (d < half ? -other : other) * std::sin(angle));
  }
};

template <class Element, int kHeadDim>
bool turn_is_right(std::mt19937& random) {
  Turn<Element> t(kHeadDim, random);
  RowsTurn& a = t.a;
  const size_t cache_size = static_cast<size_t>(a.batch) * a.kv_heads * a.capacity * kHeadDim;
  std::vector<uint16_t> q(static_cast<size_t>(t.count()) * a.heads * kHeadDim, 0xFFFF), k(cache_size, 0xFFFF), v = k;
  Awaited<float> qkv(t.qkv);
  a.qkv = qkv.there.data(), a.inv_freq = t.inv_freq.data(), a.q = q.data(), a.k_cache = k.data(), a.v_cache = v.data();
  a.q_norm = t.q_norm.empty() ? nullptr : t.q_norm.data(), a.k_norm = t.k_norm.empty() ? nullptr : t.k_norm.data();
  a.positions = t.positions.data(), a.slots = t.slots.data();
  const bool positions_first = random() % 2 == 0;  // caches stored [B, S, Hkv, D]
  a.k_slot = a.v_slot = positions_first ? kHeadDim * a.kv_heads : kHeadDim;
  a.k_head = a.v_head = positions_first ? kHeadDim : kHeadDim * a.capacity;
  a.k_batch = a.v_batch = static_cast<int64_t>(kHeadDim) * a.capacity * a.kv_heads;
  Previous previous;
  previous.write = [&] { qkv.arrive(); };
  run_grid(
      1, t.count() * t.heads(), 0, faults, machine_faults,
      [&](FiberMachine& machine, int b) {
        turn_head<Element, kHeadDim>(machine, a, b / t.heads(), b % t.heads());
      },
      1, &previous);
  size_t written = 0;
  const double most = Element::widen(Element::kExponent - 1);
  for (int row = 0; row < t.count(); row++) {
    const bool stored = t.slots[row] >= 0 && t.slots[row] < a.capacity;
    for (int head = 0; head < t.heads(); head++) {
      const bool query = head < a.heads, value = head >= a.heads + a.kv_heads;
      if (!query && !stored) continue;
      const uint16_t* got = query ? &q[(static_cast<size_t>(row) * a.heads + head) * kHeadDim]
                                  : &(value ? v : k)[row / a.rows * a.k_batch +
                                                     (head - a.heads) % a.kv_heads * a.k_head +
                                                     t.slots[row] * a.k_slot];
      written += query ? 0 : kHeadDim;
      for (int d = 0; d < kHeadDim; d++) {
        const double exact = t.exact(row, head, d);
        const double expected = query ? exact : std::isnan(exact) ? 0.0 : std::clamp(exact, -most, most);
        const double allowed = 1.01 * unit<Element>() * std::abs(expected) + 0x1p-18;
        if (!close(Element::widen(got[d]), expected, allowed, "head", row, head * kHeadDim + d)) return false;
      }
    }
  }
  const auto untouched = [](const std::vector<uint16_t>& cache) {
    return static_cast<size_t>(std::count(cache.begin(), cache.end(), 0xFFFF));
  };
  if (untouched(k) + untouched(v) + written == 2 * cache_size) return true;
  return fprintf(stderr, "the cache is written elsewhere\n"), false;
}

template <class Element>
bool round_is_right(const char* what, int round, std::mt19937& random) {
  if (strcmp(what, "product") == 0) return product_round<Element>(round, random);
  if (strcmp(what, "packed") == 0) return packed_round(round, random);
  if (strcmp(what, "alone") == 0) return alone<Element>(random);
  return norm_is_right<Element>(random) && embedding_is_right<Element>(random) &&
         turn_is_right<Element, 64>(random) && turn_is_right<Element, 128>(random);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  const int rounds = atoi(argv[2]);
  std::mt19937 random(static_cast<unsigned>(atoi(argv[3])));
  if (argc > 5 && strcmp(argv[4], "--drop") == 0) faults.dropped_barrier = argv[5];
  if (argc > 5 && strcmp(argv[4], "--hurry") == 0) machine_faults.hurried_wait = argv[5];
  if (argc > 5 && strcmp(argv[4], "--misplace-copy") == 0) machine_faults.misplaced_copy = argv[5];
  if (argc > 5 && strcmp(argv[4], "--misplace-load") == 0) machine_faults.misplaced_load = argv[5];
  if (argc > 5 && strcmp(argv[4], "--no-await") == 0) machine_faults.not_awaited = argv[5];
  for (int round = 0; round < rounds; round++) {
#ifdef GSD_ONE_TYPE
    const bool right = round_is_right<Half>(argv[1], round, random);
#else
    const bool right = round % 2 == 0 ? round_is_right<Half>(argv[1], round, random)
                                      : round_is_right<Bfloat16>(argv[1], round, random);
#endif
    if (!right) {
      fprintf(stderr, "round %d is wrong\n", round);
      return kWrong;
    }
  }
  return 0;
}
