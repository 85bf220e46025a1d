// start_graph, feed_rows, feed_chain, accepted_path and commit_text on CPU tensors: csrc/algorithms/step.h.
#include "../torch_ops/step.h"

#include "../torch_ops/registration.h"
#include "sequences.h"

namespace gsd {
namespace {

void check_start(const StartCall& call) {
  for (int64_t b = 0; b < call.batch; b++) {
    const int32_t end = call.args.first.out_len[b];
    STD_TORCH_CHECK(end >= 1 && end <= call.sizes.length, "out_len: expected 1 ... ", call.sizes.length, ", got ", end);
  }
}

void check_chain(const ChainCall& call) {
  for (int64_t b = 0; b < call.batch; b++) {
    const int32_t cached = call.args.first.cached[b], end = call.args.first.end[b];
    STD_TORCH_CHECK(cached >= 0 && cached <= end && end <= call.sizes.length, "end: expected ", cached, " ... ",
                    call.sizes.length, ", got ", end);
  }
}

void check_text(const TextCall& call) {
  for (int64_t b = 0; b < call.batch; b++) {
    const int32_t count = call.args.first.num_accepted[b], begin = call.args.first.out_len[b];
    STD_TORCH_CHECK(count >= 0 && count <= call.sizes.path, "num_accepted: ", count, " of ", call.sizes.path, " rows");
    STD_TORCH_CHECK(begin >= 0 && begin + count <= call.sizes.length, "tokens: position ", begin + count,
                    " is outside the text's ", call.sizes.length);
  }
}

template <class Integer>
using Feed = Op<prepare_feed<Integer>, &run_in_turn>;

}  // namespace
}  // namespace gsd

GSD_OPS(CPU, m) {
  using namespace gsd;
  Op<prepare_start, check_start, &run_in_turn>::add(m, "start_graph");
  OfWidth<Feed<int64_t>, Feed<int32_t>>::add(m, "feed_rows");
  Op<prepare_chain, check_chain, &run_in_turn>::add(m, "feed_chain");
  Op<prepare_path, &run_in_turn>::add(m, "accepted_path");
  Op<prepare_text, check_text, &run_in_turn>::add(m, "commit_text");
}
