// history_recall and history_append on CPU tensors: csrc/algorithms/history.h run by a group of one thread a sequence.
#include "../torch_ops/history.h"

#include "../torch_ops/op.h"
#include "../torch_ops/registration.h"
#include "sequences.h"

namespace gsd {
namespace {

void answer(const HistoryCall& call) {
  const NgramSizes& sizes = call.sizes;
  for_each_sequence(call.batch, HistoryArena::bytes(), [&](int64_t b, char* arena) {
    SerialGroup group;
    const HistoryRecall mine = call.args.at(sizes, b);
    for (int row = 0; row < sizes.rows; row++) recall_history(group, mine.asked, mine.history, sizes, row, 1, arena);
  });
}

void follow(const FollowCall& call) {
  for_each_sequence(call.batch, follow_bytes(call.args, call.sizes), [&](int64_t b, char* arena) {
    SerialGroup group;
    follow_step(group, call.args.at(call.sizes, b), call.sizes, arena);
  });
}

}  // namespace
}  // namespace gsd

GSD_OPS(CPU, m) {
  gsd::Op<gsd::prepare_history, gsd::answer>::add(m, "history_recall");
  gsd::Op<gsd::prepare_follow, gsd::follow>::add(m, "history_append");
}
