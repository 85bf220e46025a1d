// recall_levels on CPU tensors: csrc/algorithms/recall_levels.h run by a group of one thread a sequence.
#include "../torch_ops/recall_levels.h"

#include <algorithm>

#include "../torch_ops/op.h"
#include "../torch_ops/registration.h"
#include "sequences.h"

namespace gsd {
namespace {

void grow(const LevelsCall& call) {
  const LevelSizes& sizes = call.sizes;
  const LevelsArgs& args = call.args;
  for (int64_t i = 0; i < call.batch * sizes.given; i++) {
    STD_TORCH_CHECK(args.frontier[i] < sizes.merge.capacity, "frontier: node ", args.frontier[i], " of ",
                    sizes.merge.capacity);
  }
  for_each_sequence(call.batch, levels_bytes(sizes), [&](int64_t b, char* arena) {
    SerialGroup group;
    grow_levels(group, args.at(sizes, b), sizes, arena);
  });
  const int32_t needed = *std::max_element(args.merge.num_nodes, args.merge.num_nodes + call.batch);
  STD_TORCH_CHECK(needed <= sizes.merge.capacity, "recall_levels: the levels need ", needed,
                  " nodes, the graph holds ", sizes.merge.capacity);
}

}  // namespace
}  // namespace gsd

GSD_OPS(CPU, m) {
  gsd::Op<gsd::prepare_levels, gsd::grow>::add(m, "recall_levels");
}
