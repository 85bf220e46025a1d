// start_graph, feed_rows, feed_chain, accepted_path and commit_text on CPU tensors: csrc/algorithms/step.h run by a
// group of one thread, one sequence after the other. There is too little to do to wake another thread.
#include "../torch_ops/registration.h"
#include "../torch_ops/step.h"

#include "../torch_ops/op.h"

namespace gsd {
namespace {

void start_graph(const StartCall& call) {
  SerialGroup group;
  for (int64_t b = 0; b < call.batch; b++) {
    const StartArgs args = call.args.at(call.sizes, b);
    STD_TORCH_CHECK(*args.out_len >= 1 && *args.out_len <= call.sizes.length, "out_len: expected 1 ... ",
                    call.sizes.length, ", got ", *args.out_len);
    reset_to_root(group, args, call.sizes);
  }
}

template <class Integer>
void feed(const FeedCall<Integer>& call) {
  SerialGroup group;
  for (int64_t b = 0; b < call.batch; b++) place_rows(group, call.args.at(call.sizes, b), call.sizes);
}

using FeedRows = OfWidth<Op<prepare_feed<int64_t>, feed<int64_t>>,
                         Op<prepare_feed<int32_t>, feed<int32_t>>>;

void feed_chain(const ChainCall& call) {
  SerialGroup group;
  for (int64_t b = 0; b < call.batch; b++) {
    const ChainArgs args = call.args.at(call.sizes, b);
    STD_TORCH_CHECK(*args.cached >= 0 && *args.cached <= *args.end && *args.end <= call.sizes.length,
                    "end: expected ", *args.cached, " ... ", call.sizes.length, ", got ", *args.end);
    chain_rows(group, args, call.sizes);
  }
}

void accepted_path(const PathCall& call) {
  SerialGroup group;
  for (int64_t b = 0; b < call.batch; b++) walk_path(group, call.args.at(call.sizes, b), call.sizes);
}

void commit_text(const TextCall& call) {
  for (int64_t b = 0; b < call.batch; b++) {
    const TextArgs args = call.args.at(call.sizes, b);
    const int32_t count = *args.num_accepted;
    STD_TORCH_CHECK(count >= 0 && count <= call.sizes.path, "num_accepted: ", count, " of ", call.sizes.path, " rows");
    STD_TORCH_CHECK(*args.out_len >= 0 && *args.out_len + count <= call.sizes.length, "tokens: position ",
                    *args.out_len + count, " is outside the text's ", call.sizes.length);
  }
  SerialGroup group;
  for (int64_t b = 0; b < call.batch; b++) append_text(group, call.args.at(call.sizes, b), call.sizes);
}

}  // namespace
}  // namespace gsd

GSD_OPS(CPU, m) {
  gsd::Op<gsd::prepare_start, gsd::start_graph>::add(m, "start_graph");
  gsd::FeedRows::add(m, "feed_rows");
  gsd::Op<gsd::prepare_chain, gsd::feed_chain>::add(m, "feed_chain");
  gsd::Op<gsd::prepare_path, gsd::accepted_path>::add(m, "accepted_path");
  gsd::Op<gsd::prepare_text, gsd::commit_text>::add(m, "commit_text");
}
