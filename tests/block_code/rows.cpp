// The forward of rows but for its attention, of random problems on the machine of fibers: products by the bits of their
// contract, what lies between them against double precision.
#include "../../csrc/algorithms/rows_pair.h"
#include "turn_problems.h"

using namespace gsd;

namespace {

// A tile's splits at the same time, or one by one from the last to the first.
template <class Element>
Result multiplied(const Product<Element>& p, bool backwards = false, bool wide = false) {
  return with_memory(p, [&](RowsProduct& a, Previous& previous) {
    AskedAhead ahead(a);
    const int splits = a.splits();
    run_product<Element>(a, wide, [&](int warps, int blocks, size_t arena, const auto& body) {
      const auto in_order = [&](FiberMachine& machine, int b) {
        const int split = backwards ? splits - 1 - b % splits : b % splits;
        body(machine, split * (blocks / splits) + b / splits);
      };
      run_grid(warps, blocks, arena, in_order, backwards ? 1 : splits, &previous, ahead.prefetched());
    });
  });
}

// The most rows by wide tiles, forty not; splits at the same time, or from the last to the first.
template <class Element>
bool product_round(int round, std::mt19937& random) {
  const Product<Element> p(shape_of(round, random), random);
  return keeps_contract(p, multiplied(p, round / 2 % 3 == 2, round / 2 % 2 != 0));
}

// In float16 alone, whose accesses are bfloat16's: the bits of the dense matrices.
bool packed_round(int round, std::mt19937& random) {
  Shape shape = shape_of(round, random);
  if (round % 2 == 0) shape.inputs = (shape.inputs + 31) / 32 * 32;  // a whole number of Q8_0's blocks
  Product<Half> p(shape, random);
  p.pack(random);
  return keeps_contract(p, multiplied(p));
}

template <class Element>
bool many_round(std::mt19937& random) {
  const Product<Element> all({128, 584, {10}, RowsEnd::kStore}, random);
  return companies_are_right(all, {1, 2, 17, 33, 65, 128}, [](const auto& some) { return multiplied(some, some.shape.rows % 2 != 0); });
}

// A row over the root of its mean square, times weights.
template <class Element, class Row>
std::vector<double> exact_norm(const Row& row, float eps, const std::vector<uint16_t>& weight) {
  double square = 0;
  for (size_t n = 0; n < weight.size(); n++) square += static_cast<double>(row[n]) * row[n];
  std::vector<double> normed;
  for (size_t n = 0; n < weight.size(); n++) {
    normed.push_back(row[n] / std::sqrt(square / static_cast<double>(weight.size()) + eps) * Element::widen(weight[n]));
  }
  return normed;
}

// Whether a number is another one, rounded once.
template <class Element>
bool rounded(uint16_t got, double expected, const char* what, int row, int column, double least = 0x1p-24) {
  return close(Element::widen(got), expected, 1.01 * unit<Element>() * std::abs(expected) + least, what, row, column);
}

// Five embeddings, dense or packed, and tokens some of which lie outside.
template <class Element>
struct Embeddings {
  std::vector<uint16_t> dense;
  PackedRows packed;
  int hidden;
  Awaited<int32_t> tokens;

  Embeddings(int rows, int hidden, std::mt19937& random)
      : dense(drawn<Element>(5 * static_cast<size_t>(hidden), random)), packed(5, hidden, random), hidden(hidden),
        tokens(drawn_tokens(rows, random)) {}
  uint16_t at(int row, int n) const {
    const int token = std::clamp(tokens.values[row], 0, 4);
    return packed.kind == RowsKind::kDense ? dense[static_cast<size_t>(token) * hidden + n]
                                           : Element::round(packed.at(token, n));
  }
  void put(RowsMatrix& matrix) const { matrix.outputs = 5, matrix.weight = dense.data(), packed.put(matrix); }

 private:
  static std::vector<int32_t> drawn_tokens(int rows, std::mt19937& random) {
    std::vector<int32_t> tokens;
    for (int i = 0; i < rows; i++) tokens.push_back(between(random, -1, 5));
    return tokens;
  }
};

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
  after([&] { x.arrive(); })(kRowWarps, a.batch * a.keep, kNormArenaBytes, [&](FiberMachine& machine, int b) { norm_row<Element>(machine, a, b); });
  for (int i = 0; i < a.batch * a.keep; i++) {
    const float* row = &x.values[static_cast<size_t>(i / a.keep * a.rows + a.rows - a.keep + i % a.keep) * a.hidden];
    const std::vector<double> normed = exact_norm<Element>(row, a.eps, weight);
    for (int n = 0; n < a.hidden; n++) {
      const size_t at = static_cast<size_t>(i) * a.hidden + n;
      if (!rounded<Element>(out[at], normed[n], "norm", i, n)) return false;
      if (all && !close(exact[at], normed[n], 0x1p-20 * std::abs(normed[n]), "exact norm", i, n)) return false;
      if (all && copy[at] != row[n]) return fprintf(stderr, "copy of row %d\n", i), false;
    }
  }
  return true;
}

template <class Element>
bool embedding_is_right(std::mt19937& random) {
  RowsEmbed a{};
  a.rows = between(random, 2, 4), a.hidden = 8 * between(random, 1, 300);
  Embeddings<Element> embeddings(a.rows, a.hidden, random);
  std::vector<float> x(static_cast<size_t>(a.rows) * a.hidden, NAN);
  RowsOnce& angles = a.once;
  angles.half = 8 * between(random, 1, 70), angles.rope_scale = 1.25f;
  std::vector<int32_t> positions;
  for (int i = 0; i < a.rows; i++) positions.push_back(between(random, 0, i % 2 == 0 ? 100 : 1000000));
  std::vector<float> inv_freq, turns(static_cast<size_t>(a.rows) * angles.half * 2, NAN);
  for (int i = 0; i < angles.half; i++) inv_freq.push_back(std::pow(10000.0f, -1.0f * i / angles.half));
  angles.positions = positions.data(), angles.inv_freq = inv_freq.data(), angles.turns = turns.data();
  a.tokens = embeddings.tokens.there.data(), a.x = x.data();
  embeddings.put(a.embedding);
  after([&] { embeddings.tokens.arrive(); })(kRowWarps, a.rows, 0, [&](FiberMachine& machine, int b) { embed_row<Element>(machine, a, b); });
  for (int i = 0; i < a.rows; i++) {
    for (int n = 0; n < angles.half; n++) {
      const double angle = static_cast<float>(positions[i]) * inv_freq[n];
      const float* turn = &turns[2 * (static_cast<size_t>(i) * angles.half + n)];
      if (!close(turn[0], 1.25 * std::cos(angle), 0x1p-21, "cosine", i, n)) return false;
      if (!close(turn[1], 1.25 * std::sin(angle), 0x1p-21, "sine", i, n)) return false;
    }
    for (int n = 0; n < a.hidden; n++) {
      const float expected = Element::widen(embeddings.at(i, n));
      if (!close(x[static_cast<size_t>(i) * a.hidden + n], expected, 0, "embedding", i, n)) return false;
    }
  }
  return true;
}

template <class Element, int kHeadDim>
bool turn_is_right(std::mt19937& random) {
  Turn<Element> t(kHeadDim, random);
  RowsTurn& a = t.a;
  const TurnedHeads<Element> heads(t, a, random() % 2 == 0);
  const auto& [q, k, v, spoiled] = heads;
  turn_heads(t, a);
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
        if (!rounded<Element>(got[d], expected, "head", row, head * kHeadDim + d, 0x1p-18)) return false;
      }
    }
  }
  const auto untouched = [](const std::vector<uint16_t>& cache) {
    return static_cast<size_t>(std::count(cache.begin(), cache.end(), 0xFFFF));
  };
  if (untouched(k) + untouched(v) + written == k.size() + v.size()) return true;
  return fprintf(stderr, "the cache is written elsewhere\n"), false;
}

template <class Element>
bool pair_is_right(std::mt19937& random) {
  RowsPair a{};
  a.rows = between(random, 2, 4), a.hidden = 8 * between(random, 1, 300), a.eps = 1e-5f;
  a.feature_first = random() % 2 == 0, a.normed_residual = random() % 2 == 0;
  const size_t hidden = static_cast<size_t>(a.hidden), size = a.rows * hidden;
  Embeddings<Element> embeddings(a.rows, a.hidden, random);
  const std::vector<uint16_t> norms[] = {drawn<Element>(hidden, random), drawn<Element>(hidden, random)};
  Awaited<uint16_t> features(drawn<Element>(size, random));
  std::vector<uint16_t> out(2 * size, 0xFFFF);
  std::vector<float> x(size, NAN);
  const bool begins = random() % 2 == 0;
  a.tokens = embeddings.tokens.there.data(), a.features = features.there.data();
  a.token_norm = norms[0].data(), a.feature_norm = norms[1].data();
  a.out = out.data(), a.x = begins ? x.data() : nullptr;
  embeddings.put(a.embedding);
  after([&] { embeddings.tokens.arrive(), features.arrive(); })(kRowWarps, a.rows, kNormArenaBytes, [&](FiberMachine& machine, int b) { pair_row<Element>(machine, a, b); });
  for (int i = 0; i < a.rows; i++) {
    for (int part = 0; part < 2; part++) {
      std::vector<float> row;
      for (size_t n = 0; n < hidden; n++) {
        row.push_back(Element::widen(part == 0 ? embeddings.at(i, static_cast<int>(n)) : features.values[i * hidden + n]));
      }
      const std::vector<double> normed = exact_norm<Element>(row, a.eps, norms[part]);
      const size_t place = (2 * i + (a.feature_first ? 1 - part : part)) * hidden;
      for (size_t n = 0; n < hidden; n++) {
        const int column = static_cast<int>(n);
        if (!rounded<Element>(out[place + n], normed[n], "pair", i, column)) return false;
        if (part == 0 || !begins) continue;
        const double first = a.normed_residual ? normed[n] : row[n];
        if (!close(x[i * hidden + n], first, 0x1p-20 * std::abs(first), "residual", i, column)) return false;
      }
    }
  }
  return true;
}

template <class Element>
bool turned_round(int round, std::mt19937& random) {
  constexpr int kRows[] = {3, 40, 20, 66};
  const int inputs = round % 4 < 2 ? between(random, 33, 45) : between(random, 1, round % 4 == 2 ? 8 : 20);
  return turned_is_right<Element>(round % 3 == 0 ? 64 : 128, kRows[round / 2 % 4] + between(random, -2, 2), 8 * inputs,
                                  round % 8 < 6, random,
                                  [&](const Product<Element>& p) { multiplied(p, round % 5 == 4); });
}

template <class Element>
bool between_round(std::mt19937& random) {
  return norm_is_right<Element>(random) && embedding_is_right<Element>(random) && pair_is_right<Element>(random) &&
         turn_is_right<Element, 64>(random) && turn_is_right<Element, 128>(random);
}

const Listed listed({
    {"product", [](int round, std::mt19937& random) {
       return round % 2 == 0 ? product_round<Half>(round, random) : product_round<Other>(round, random);
     }},
    {"packed", packed_round},
    {"many", [](int round, std::mt19937& random) { return round % 2 == 0 ? many_round<Half>(random) : many_round<Other>(random); }},
    {"turned", [](int round, std::mt19937& random) {
       return round % 2 == 0 ? turned_round<Half>(round, random) : turned_round<Other>(round, random);
     }},
    {"between",
     [](int round, std::mt19937& random) { return round % 2 == 0 ? between_round<Half>(random) : between_round<Other>(random); }},
});

}  // namespace
