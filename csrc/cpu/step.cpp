// start_graph, feed_rows, feed_chain, accepted_path and commit_text on CPU tensors: csrc/algorithms/step.h run by a
// group of one thread, one sequence after the other. There is too little to do to wake another thread.
#include "../torch_ops/step.h"

namespace gsd {
namespace {

Tensor start_graph(const std::vector<Tensor>& graph, const Tensor& tokens, const Tensor& out_len,
                   const Tensor& kv_start) {
  const StartCall call = prepare_start(GraphTensors::of(graph), tokens, out_len, kv_start);
  SerialGroup group;
  for (int64_t b = 0; b < call.batch; b++) {
    const StartArgs args = call.args.at(call.sizes, b);
    STD_TORCH_CHECK(*args.out_len >= 1 && *args.out_len <= call.sizes.length, "out_len: expected 1 ... ",
                    call.sizes.length, ", got ", *args.out_len);
    reset_to_root(group, args, call.sizes);
  }
  return call.first_pick;
}

template <class Integer>
FeedOutputs feed(const Tensor& token_ids, const Tensor& depths, const std::optional<Tensor>& slots,
                 const Tensor& kv_len, const Tensor& kv_start, const std::optional<Tensor>& node_depths,
                 int64_t first_slot, int64_t shift, int64_t vocab) {
  const auto call =
      prepare_feed<Integer>(token_ids, depths, slots, kv_len, kv_start, node_depths, first_slot, shift, vocab);
  SerialGroup group;
  for (int64_t b = 0; b < call.batch; b++) place_rows(group, call.args.at(call.sizes, b), call.sizes);
  return call.outputs;
}

FeedOutputs feed_rows(const Tensor& token_ids, const Tensor& depths, const std::optional<Tensor>& slots,
                      const Tensor& kv_len, const Tensor& kv_start, const std::optional<Tensor>& node_depths,
                      int64_t first_slot, int64_t shift, int64_t vocab, bool wide) {
  return wide ? feed<int64_t>(token_ids, depths, slots, kv_len, kv_start, node_depths, first_slot, shift, vocab)
              : feed<int32_t>(token_ids, depths, slots, kv_len, kv_start, node_depths, first_slot, shift, vocab);
}

ChainOutputs feed_chain(const Tensor& tokens, const Tensor& end, const Tensor& cached, int64_t width) {
  const ChainCall call = prepare_chain(tokens, end, cached, width);
  SerialGroup group;
  for (int64_t b = 0; b < call.batch; b++) {
    const ChainArgs args = call.args.at(call.sizes, b);
    STD_TORCH_CHECK(*args.cached >= 0 && *args.cached <= *args.end && *args.end <= call.sizes.length,
                    "end: expected ", *args.cached, " ... ", call.sizes.length, ", got ", *args.end);
    chain_rows(group, args, call.sizes);
  }
  return call.outputs;
}

PathOutputs accepted_path(const Tensor& accepted_rows, const Tensor& num_accepted, const Tensor& next_token,
                          const Tensor& token_ids, const Tensor& node_ids) {
  const PathCall call = prepare_path(accepted_rows, num_accepted, next_token, token_ids, node_ids);
  SerialGroup group;
  for (int64_t b = 0; b < call.batch; b++) walk_path(group, call.args.at(call.sizes, b), call.sizes);
  return call.outputs;
}

void commit_text(const Tensor& new_tokens, const Tensor& num_accepted, const Tensor& next_token,
                 const Tensor& eos_ids, const Tensor& tokens, const Tensor& out_len, const Tensor& remaining,
                 const Tensor& done, const Tensor& emitted, const Tensor& num_emitted, const Tensor& counts,
                 const std::optional<Tensor>& nodes, const std::optional<Tensor>& parents,
                 const std::optional<Tensor>& num_nodes, const std::optional<Tensor>& num_merges) {
  const TextCall call = prepare_text(new_tokens, num_accepted, next_token, eos_ids, tokens, out_len, remaining, done,
                                     emitted, num_emitted, counts, nodes, parents, num_nodes, num_merges);
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

STABLE_TORCH_LIBRARY_IMPL(gsd_kernels, CPU, m) {
  m.impl("start_graph", TORCH_BOX(&gsd::start_graph));
  m.impl("feed_rows", TORCH_BOX(&gsd::feed_rows));
  m.impl("feed_chain", TORCH_BOX(&gsd::feed_chain));
  m.impl("accepted_path", TORCH_BOX(&gsd::accepted_path));
  m.impl("commit_text", TORCH_BOX(&gsd::commit_text));
}
