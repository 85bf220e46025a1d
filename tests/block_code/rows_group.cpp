// The product of groups of warps, of random problems on the machine of fibers: held to the contract bit for bit.
#include "../../csrc/algorithms/rows_group_product.h"
#include "row_problems.h"
#include "warpgroup_machine.h"

using namespace gsd;

namespace {

bool clustered = true;

template <class Element, int kRows, int kStages = group_stages(kRows)>
Result multiplied(const Product<Element>& p, int multiprocessors) {
  using Group = GroupProduct<Element, kRows, kStages>;
  return with_memory(p, [&](RowsProduct& a, Previous& previous) {
    const GroupLaunch launch(a, Group::kOutputs, kRows, multiprocessors);
    run_clusters(
        launch.blocks, launch.cut.splits, clustered, Group::kArenaBytes, Group::kBarriers, launch.sources, previous, [&](GroupMachine& machine, int b) { Group::run(machine, a, launch.cut, b, launch.blocks); });
  });
}

// With fewer stages than on a GPU every one is used again soon.
template <class Element>
Result multiplied(const Product<Element>& p, int multiprocessors, bool few_stages = false) {
  switch (shaped(p).group_rows()) {
    case 64:
      return few_stages ? multiplied<Element, 64, 2>(p, multiprocessors) : multiplied<Element, 64>(p, multiprocessors);
    case 128:
      return multiplied<Element, 128>(p, multiprocessors);
    default:
      return multiplied<Element, 256>(p, multiprocessors);
  }
}

// In turn with splits, in a cluster and not, and without: several tiles a block. Gates lie before ups and behind them.
template <class Element>
bool random_round(int round, std::mt19937& random) {
  Shape s{};
  s.end = static_cast<RowsEnd>(round / 2 % 4);
  s.rows = round % 7 == 6 ? between(random, 65, 80) : between(random, 33, 64);
  const bool splits = round % 2 == 0;
  const int count = s.end == RowsEnd::kGate ? 2 : s.end == RowsEnd::kRound || round % 4 < 2 ? 1 : 3;
  s.inputs = 8 * (splits ? between(random, 65, 100) : between(random, 1, 32));
  for (int i = 0; i < count; i++) {
    const bool same = s.end == RowsEnd::kGate && i > 0;
    const int outputs = between(random, 1, splits ? 300 / count : 520 / count);
    s.outputs.push_back(same ? s.outputs[0] : s.end == RowsEnd::kGate ? (outputs + 7) / 8 * 8 : outputs);
  }
  Product<Element> p(s, random);
  const bool ups_before = (round + round / 8) % 2 != 0;
  if (s.end == RowsEnd::kGate && (p.weights[1].data() < p.weights[0].data()) != ups_before) {
    std::swap(p.weights[0], p.weights[1]);
  }
  clustered = round % 4 == 0;
  return keeps_contract(p, multiplied(p, 1 + round / 2 % 2, round % 3 < 2));
}

template <class Element>
bool turned_round(int round, std::mt19937& random) {
  clustered = round / 4 % 2 == 0;
  return turned_is_right<Element>(round % 2 == 0 ? 128 : 64, between(random, 33, 64),
                                  8 * (round / 2 % 2 == 0 ? between(random, 33, 45) : between(random, 1, 20)), false, random,
                                  [&](const Product<Element>& p) { multiplied(p, 1 + round / 2 % 2, round % 3 < 2); });
}

const Listed listed({{"group", by_turns<random_round<One>, random_round<Other>>},
                     {"group turned", by_turns<turned_round<One>, turned_round<Other>>}});

}  // namespace
