// learn_source on CPU tensors: csrc/algorithms/learn.h run by one thread, as a step has few nodes to learn from.
#include "../torch_ops/learn.h"

#include "../torch_ops/op.h"
#include "../torch_ops/registration.h"

namespace gsd {
namespace {

void learn(const LearnCall& call) {
  SerialGroup group;
  learn_all(group, call.args, call.sizes);
}

}  // namespace
}  // namespace gsd

GSD_OPS(CPU, m) {
  gsd::Op<gsd::prepare_learn, gsd::learn>::add(m, "learn_source");
}
