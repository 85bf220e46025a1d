// history_recall and history_append on CPU tensors: csrc/algorithms/history.h run by a group of one thread a sequence.
#include "../torch_ops/history.h"

#include "../torch_ops/op.h"
#include "../torch_ops/registration.h"
#include "sequences.h"

namespace gsd {
namespace {

void answer(const HistoryCall& call) {
  const NgramRecallCall& recall = call.asked.recall;
  for_each_sequence(recall.batch, 0, [&](int64_t b, char*) {
    SerialGroup group;
    call.asked.answer(group, recall.args.at(recall.sizes, b), b);
  });
}

void append(const CopyCall& call) {
  for_each_sequence(call.batch, 0, [&](int64_t b, char*) {
    CopyIndex index = call.index.at(b);
    for (int64_t i = 0; i < call.given && i < call.counts[b]; i++) index.append(call.tokens[b * call.given + i]);
  });
}

}  // namespace
}  // namespace gsd

GSD_OPS(CPU, m) {
  m.impl("history_recall", TORCH_BOX((&gsd::Op<gsd::prepare_history, gsd::answer>::call)));
  m.impl("history_append", TORCH_BOX((&gsd::Op<gsd::prepare_copies, gsd::append>::call)));
}
