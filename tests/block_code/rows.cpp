// The forward of rows but for its attention, of random problems on the machine of fibers: products by the bits of their
// contract, heads that they turn, and what lies between them.
#include "../../csrc/algorithms/rows_pair.h"
#include "row_problems.h"

using namespace gsd;

namespace {

// A tile's splits at the same time, or one by one from the last to the first.
template <class Element>
Result multiplied(const Product<Element>& p, bool backwards = false, bool wide = false) {
  return with_memory(p, [&](RowsProduct& a, Previous& previous) {
    const int splits = a.splits();
    run_product<Element>(a, wide, [&](int warps, int blocks, size_t arena, const auto& body) {
      const auto in_order = [&](FiberMachine& machine, int b) {
        const int split = backwards ? splits - 1 - b % splits : b % splits;
        body(machine, split * (blocks / splits) + b / splits);
      };
      run_grid(warps, blocks, arena, in_order, backwards ? 1 : splits, &previous);
    });
  });
}

// The most rows by wide tiles, forty not; splits at the same time, or from the last to the first.
template <class Element>
bool product_round(int round, std::mt19937& random) {
  const Product<Element> p(shape_of(round, random), random);
  return keeps_contract(p, multiplied(p, round / 2 % 3 == 2, round / 2 % 2 != 0));
}

// The first rows of many, in companies of several sizes: the contract's bits, and the same in each.
template <class Element>
bool many_round(int, std::mt19937& random) {
  const Product<Element> all({128, 584, {10}, RowsEnd::kStore}, random);
  Result before;
  for (const int rows : {1, 2, 17, 33, 65, 128}) {
    const Product<Element> some = all.first(rows);
    const Result got = multiplied(some, rows % 2 != 0);
    if (!keeps_contract(some, got) || !std::equal(before.begin(), before.end(), got.begin())) return false;
    before = got;
  }
  return true;
}

// What lies between products: what the launch before writes is awaited, and all there is is written. The numbers are those of
// the operators, which run it all (rows_op.cpp).
template <class Element>
bool between_is_written(int, std::mt19937& random) {
  const int rows = between(random, 2, 4), hidden = 8 * between(random, 1, 300), half = 8;
  const size_t size = static_cast<size_t>(rows) * hidden;
  Awaited<float> x(drawn_floats(size, random));
  Awaited<uint16_t> features(drawn<Element>(size, random));
  std::vector<int32_t> ids, positions;
  for (int i = 0; i < rows; i++) ids.push_back(between(random, -1, 5)), positions.push_back(between(random, 0, 1000000));
  Awaited<int32_t> tokens(ids);
  const std::vector<uint16_t> table = drawn<Element>(5 * static_cast<size_t>(hidden), random), weight = drawn<Element>(hidden, random);
  const std::vector<float> inv_freq(half, 0.1f);
  std::vector<uint16_t> normed(size, 0xFFFF), paired(2 * size, 0xFFFF);
  std::vector<float> exact(size, NAN), copied(size, NAN), embedded(size, NAN), begun(size, NAN), turns(2u * rows * half, NAN);
  const auto ran = [&](size_t arena, const auto& body) {
    after([&] { x.arrive(), features.arrive(), tokens.arrive(); })(kRowWarps, rows, arena, body);
    x.leave(), features.leave(), tokens.leave();
  };
  RowsNorm norm{};
  norm.batch = 1, norm.rows = norm.keep = rows, norm.hidden = hidden, norm.eps = 1e-5f, norm.x = x.there.data();
  norm.weight = weight.data(), norm.out = normed.data(), norm.exact = exact.data(), norm.copy = copied.data();
  ran(kNormArenaBytes, [&](FiberMachine& machine, int b) { norm_row<Element>(machine, norm, b); });
  RowsEmbed embed{};
  embed.rows = rows, embed.hidden = hidden, embed.tokens = tokens.there.data(), embed.x = embedded.data();
  embed.embedding.outputs = 5, embed.embedding.weight = table.data();
  embed.once.half = half, embed.once.rope_scale = 1.25f, embed.once.positions = positions.data();
  embed.once.inv_freq = inv_freq.data(), embed.once.turns = turns.data();
  ran(0, [&](FiberMachine& machine, int b) { embed_row<Element>(machine, embed, b); });
  RowsPair pair{};
  pair.rows = rows, pair.hidden = hidden, pair.eps = 1e-5f, pair.tokens = tokens.there.data(), pair.features = features.there.data();
  pair.token_norm = pair.feature_norm = weight.data(), pair.out = paired.data(), pair.x = begun.data();
  pair.embedding = embed.embedding;
  ran(kNormArenaBytes, [&](FiberMachine& machine, int b) { pair_row<Element>(machine, pair, b); });
  const auto finite = [](float value) { return std::isfinite(value); };
  const auto written = [](uint16_t bits) { return std::isfinite(Element::widen(bits)); };
  Turn<Element> turn(random() % 2 == 0 ? 64 : 128, 1, rows, random);
  const TurnedHeads<Element> heads(turn, turn.a, random() % 2 == 0);
  turn_heads(turn, turn.a);
  for (size_t i = 0; i < size; i++) {
    if (embedded[i] != Element::widen(table[static_cast<size_t>(std::clamp(ids[i / hidden], 0, 4)) * hidden + i % hidden])) return false;
  }
  bool right = heads_are_turned(turn, turn.a, heads) && copied == x.values && std::all_of(normed.begin(), normed.end(), written) && std::all_of(paired.begin(), paired.end(), written);
  for (const auto& numbers : {exact, embedded, begun, turns}) right = right && std::all_of(numbers.begin(), numbers.end(), finite);
  return right;
}

template <class Element>
bool turned_round(int round, std::mt19937& random) {
  constexpr int kRows[] = {3, 40, 20, 66};
  const int inputs = round % 4 < 2 ? between(random, 33, 45) : between(random, 1, round % 4 == 2 ? 8 : 20);
  return turned_is_right<Element>(round % 3 == 0 ? 64 : 128, kRows[round / 2 % 4] + between(random, -2, 2), 8 * inputs,
                                  round % 8 < 6, random,
                                  [&](const Product<Element>& p) { multiplied(p, round % 5 == 4); });
}

const Listed listed({{"product", by_turns<product_round<One>, product_round<Other>>},
                     {"many", by_turns<many_round<One>, many_round<Other>>},
                     {"turned", by_turns<turned_round<One>, turned_round<Other>>},
                     {"between", by_turns<between_is_written<One>, between_is_written<Other>>}});

}  // namespace
