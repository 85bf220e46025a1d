// The forward of rows but for its attention, of random problems on the machine of fibers, against double precision.
//
//     rows product|packed|turned|between|alone ROUNDS SEED [--drop BARRIER | --hurry WAIT | --misplace-copy NAME |
//                                             --misplace-load NAME | --no-await NAME]
//
// product: products with all their ends but the next. turned: those that turn heads. packed: packed matrices, against
// their dense ones. between: norms, turned heads, the embedding, beside features. alone:
// rows alone and among up to 128 others. Exit status: 0 right, 3 wrong, 4 divergent, 5 bank conflict, 6 a source that changes while it is copied.
#include "../../csrc/algorithms/rows_pair.h"
#include "turn_problems.h"

using namespace gsd;

namespace {

Faults faults;
MachineFaults machine_faults;

template <class Block, class Element>
Result multiplied(const Problem<Element>& p, int outputs, bool backwards) {
  return with_memory(p, [&](RowsProduct& a, Previous& previous) {
    AskedAhead ahead(a);
    const RowsCut cut(a, outputs);
    const int splits = cut.splits, tiles = a.row_blocks() * cut.output_blocks;
    run_grid(
        Block::kWarps, tiles * splits, Block::kArenaBytes, faults, machine_faults,
        [&](FiberMachine& machine, int b) {  // a tile's splits at the same time, or one by one from the last to the first
          const int tile = b / splits, split = backwards ? splits - 1 - b % splits : b % splits;
          Block::run(machine, a, cut, tile % a.row_blocks(), tile / a.row_blocks(), split);
        },
        backwards ? 1 : splits, &previous, ahead.prefetched());
  });
}

template <class Element, int kRows>
Result multiplied(const Problem<Element>& p, bool backwards) {
  if constexpr (std::is_same_v<Element, Half>) {
    using Packed = ProductBlock<Element, kRows, kTileOutputs, true>;
    if (!p.packed.empty()) return multiplied<Packed>(p, kTileOutputs, backwards);
  }
  return multiplied<ProductBlock<Element, kRows>>(p, kTileOutputs, backwards);
}

template <class Element>
Result multiplied(const Problem<Element>& p, bool backwards = false, bool wide = false) {
  if (shaped(p).wide_heads()) {
    return shaped(p).tile_rows() == 32 ? multiplied<ProductBlock<Element, 32, kWideOutputs>>(p, kWideOutputs, backwards)
                                       : multiplied<ProductBlock<Element, 64, kWideOutputs>>(p, kWideOutputs, backwards);
  }
  switch (shaped(p).tile_rows()) {
    case 16:
      return multiplied<Element, 16>(p, backwards);
    case 32:
      return multiplied<Element, 32>(p, backwards);
    default:
      return wide ? multiplied<ProductBlock<Element, 64, kWideOutputs>>(p, kWideOutputs, backwards)
                  : multiplied<Element, 64>(p, backwards);
  }
}

template <class Element>
bool same_alone(const Problem<Element>& p, const Result& got, int row) {
  const Result alone = multiplied(p.only(row), true);
  if (memcmp(alone.data(), &got[static_cast<size_t>(row) * p.width()], sizeof(float) * alone.size()) == 0) return true;
  fprintf(stderr, "row %d of %d differs from itself alone\n", row, p.shape.rows);
  return false;
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
  RowsOnce& angles = a.once;
  angles.half = 8 * between(random, 1, 70), angles.rope_scale = 1.25f;
  std::vector<int32_t> positions;
  for (int i = 0; i < a.rows; i++) positions.push_back(between(random, 0, i % 2 == 0 ? 100 : 1000000));
  std::vector<float> inv_freq, turns(static_cast<size_t>(a.rows) * angles.half * 2, NAN);
  for (int i = 0; i < angles.half; i++) inv_freq.push_back(std::pow(10000.0f, -1.0f * i / angles.half));
  angles.positions = positions.data(), angles.inv_freq = inv_freq.data(), angles.turns = turns.data();
  a.tokens = tokens.there.data(), a.embedding.weight = embedding.data(), a.x = x.data();
  packed.put(a.embedding);
  Previous previous;
  previous.write = [&] { tokens.arrive(); };
  run_grid(
      kRowWarps, a.rows, 0, faults, machine_faults,
      [&](FiberMachine& machine, int b) { embed_row<Element>(machine, a, b); }, 1, &previous);
  for (int i = 0; i < a.rows; i++) {
    const int token = std::clamp(tokens.values[i], 0, 4);
    for (int n = 0; n < angles.half; n++) {
      const double angle = static_cast<float>(positions[i]) * inv_freq[n];
      const float* turn = &turns[2 * (static_cast<size_t>(i) * angles.half + n)];
      if (!close(turn[0], 1.25 * std::cos(angle), 0x1p-21, "cosine", i, n)) return false;
      if (!close(turn[1], 1.25 * std::sin(angle), 0x1p-21, "sine", i, n)) return false;
    }
    for (int n = 0; n < a.hidden; n++) {
      const bool dense = packed.kind == RowsKind::kDense;
      const float expected = Element::widen(dense ? embedding[static_cast<size_t>(token) * a.hidden + n]
                                                  : Element::round(packed.at(token, n)));
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
  turn_heads(t, a, faults, machine_faults);
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
  if (untouched(k) + untouched(v) + written == k.size() + v.size()) return true;
  return fprintf(stderr, "the cache is written elsewhere\n"), false;
}

template <class Element>
bool pair_is_right(std::mt19937& random) {
  RowsPair a{};
  a.rows = between(random, 2, 4), a.hidden = 8 * between(random, 1, 300), a.eps = 1e-5f, a.embedding.outputs = 5;
  a.feature_first = random() % 2 == 0, a.normed_residual = random() % 2 == 0;
  const size_t hidden = static_cast<size_t>(a.hidden), size = a.rows * hidden;
  const std::vector<uint16_t> embedding = drawn<Element>(5 * hidden, random);
  const std::vector<uint16_t> norms[] = {drawn<Element>(hidden, random), drawn<Element>(hidden, random)};
  const PackedRows packed(5, a.hidden, random);
  std::vector<int32_t> drawn_tokens;
  for (int i = 0; i < a.rows; i++) drawn_tokens.push_back(between(random, -1, 5));
  Awaited<int32_t> tokens(drawn_tokens);
  Awaited<uint16_t> features(drawn<Element>(size, random));
  std::vector<uint16_t> out(2 * size, 0xFFFF);
  std::vector<float> x(size, NAN);
  const bool begins = random() % 2 == 0;
  a.tokens = tokens.there.data(), a.features = features.there.data(), a.embedding.weight = embedding.data();
  a.token_norm = norms[0].data(), a.feature_norm = norms[1].data();
  a.out = out.data(), a.x = begins ? x.data() : nullptr;
  packed.put(a.embedding);
  Previous previous;
  previous.write = [&] { tokens.arrive(), features.arrive(); };
  run_grid(
      kRowWarps, a.rows, kNormArenaBytes, faults, machine_faults,
      [&](FiberMachine& machine, int b) { pair_row<Element>(machine, a, b); }, 1, &previous);
  for (int i = 0; i < a.rows; i++) {
    const size_t token = static_cast<size_t>(std::clamp(tokens.values[i], 0, 4));
    for (int part = 0; part < 2; part++) {
      std::vector<float> row;
      for (size_t n = 0; n < hidden; n++) {
        const bool dense = packed.kind == RowsKind::kDense;
        const uint16_t embedded = dense ? embedding[token * hidden + n]
                                        : Element::round(packed.at(static_cast<int>(token), static_cast<int>(n)));
        row.push_back(Element::widen(part == 0 ? embedded : features.values[i * hidden + n]));
      }
      double square = 0;
      for (const float value : row) square += static_cast<double>(value) * value;
      const size_t place = (2 * i + (a.feature_first ? 1 - part : part)) * hidden;
      for (size_t n = 0; n < hidden; n++) {
        const double normed = row[n] / std::sqrt(square / a.hidden + a.eps) * Element::widen(norms[part][n]);
        const double allowed = 1.01 * unit<Element>() * std::abs(normed) + 0x1p-24;
        const int column = static_cast<int>(n);
        if (!close(Element::widen(out[place + n]), normed, allowed, "pair", i, column)) return false;
        if (part == 0 || !begins) continue;
        const double first = a.normed_residual ? normed : row[n];
        if (!close(x[i * hidden + n], first, 0x1p-20 * std::abs(first), "residual", i, column)) return false;
      }
    }
  }
  return true;
}

template <class Element>
bool round_is_right(const char* what, int round, std::mt19937& random) {
  if (strcmp(what, "product") == 0) return product_round<Element>(round, random);
  if (strcmp(what, "packed") == 0) return packed_round(round, random);
  if (strcmp(what, "alone") == 0) return alone<Element>(random);
  if (strcmp(what, "turned") == 0) {
    constexpr int kRows[] = {3, 40, 20, 66};
    const int inputs = round % 4 < 2 ? between(random, 33, 45) : between(random, 1, round % 4 == 2 ? 8 : 20);
    return turned_is_right<Element>(round % 3 == 0 ? 64 : 128, kRows[round / 2 % 4] + between(random, -2, 2), 8 * inputs,
                                    round % 8 < 6, random,
                                    [&](const Problem<Element>& p) { multiplied(p, round % 5 == 4); });
  }
  return norm_is_right<Element>(random) && embedding_is_right<Element>(random) && pair_is_right<Element>(random) &&
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
