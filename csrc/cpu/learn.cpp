// learn_source on CPU tensors: csrc/algorithms/learn.h run by one thread, as a step has few nodes to learn from.
#include "../torch_ops/learn.h"

#include "../torch_ops/op.h"

namespace gsd {
namespace {

void learn(const LearnCall& call) {
  SerialGroup group;
  learn_all(group, call.args, call.sizes);
}

}  // namespace
}  // namespace gsd

STABLE_TORCH_LIBRARY_IMPL(gsd_kernels, CPU, m) {
  m.impl("learn_source", TORCH_BOX((&gsd::Op<gsd::prepare_learn, gsd::learn>::call)));
}
