// The graph, rows and text of start_graph, feed_rows, feed_chain, accepted_path and commit_text.
#pragma once

#include "../algorithms/step.h"
#include "graph.h"

namespace gsd {

struct StartCall {
  StartSizes sizes;
  StartArgs args;  // of the first sequence
  int64_t batch;
  Tensor outputs;  // where the first pick goes
};

inline StartCall prepare_start(const Tensors& tensors, const Tensor& tokens, const Tensor& out_len,
                               const Tensor& kv_start) {
  const GraphTensors graph = GraphTensors::of(tensors);
  const int64_t batch = graph.batch;
  Tensor first_pick = fresh<int32_t>(out_len, {batch});
  const StartArgs args{graph.data,
                       read<int64_t>("tokens", tokens, {batch, kAny}),
                       read<int32_t>("out_len", out_len, {batch}),
                       read<int32_t>("kv_start", kv_start, {batch}),
                       written<int32_t>(first_pick)};
  const StartSizes sizes{narrow(graph.nodes), narrow(graph.branch), narrow(graph.words), narrow(tokens.size(1))};
  return {sizes, args, batch, std::move(first_pick)};
}

template <class Integer>
using FeedCall = Call<FeedSizes, FeedArgs<Integer>, 5>;
using FeedOutputs = Fresh<5>::Results;

template <class Integer>
FeedCall<Integer> prepare_feed(const Tensor& token_ids, const Tensor& depths, const MaybeTensor& slots,
                               const Tensor& kv_len, const Tensor& kv_start, const MaybeTensor& node_depths,
                               int64_t first_slot, int64_t shift, int64_t vocab) {
  const int32_t* tokens = read<int32_t>("token_ids", token_ids, {kAny, kAny});
  const int64_t batch = token_ids.size(0), rows = token_ids.size(1);
  int32_t* written_depths = written<int32_t>("node_depths", node_depths, {batch, kAny});
  const int64_t nodes = node_depths ? node_depths->size(1) : 0;
  STD_TORCH_CHECK(!node_depths || (!slots && first_slot >= 0 && first_slot + rows <= nodes),
                  "node_depths: expected at least ", first_slot + rows, " nodes, got ", nodes);
  const FeedSizes sizes{narrow(rows), narrow(nodes), narrow(first_slot), narrow(shift), narrow(vocab)};
  Fresh<5> fed(token_ids);
  const FeedArgs<Integer> args{tokens,
                               read<int32_t>("depths", depths, {batch, rows}),
                               read<int32_t>("slots", slots, {batch, rows}),
                               read<int32_t>("kv_len", kv_len, {batch}),
                               read<int32_t>("kv_start", kv_start, {batch}),
                               fed.of<Integer>({batch, rows}),
                               fed.of<Integer>({batch, rows}),
                               fed.of<Integer>({batch, rows}),
                               fed.of<int32_t>({batch, rows}),
                               fed.of<int32_t>({batch, rows}),
                               written_depths};
  return {sizes, args, batch, fed.results()};
}

using ChainCall = Call<ChainSizes, ChainArgs, 6>;

inline ChainCall prepare_chain(const Tensor& tokens, const Tensor& end, const Tensor& cached, int64_t width) {
  const int64_t* texts = read<int64_t>("tokens", tokens, {kAny, kAny});
  const int64_t batch = tokens.size(0);
  STD_TORCH_CHECK(width >= 1 && width < (1 << 20), "width: expected at least 1, got ", width);
  const ChainSizes sizes{narrow(width), narrow(tokens.size(1))};
  Fresh<6> chain(end);
  const ChainArgs args{texts,
                       read<int32_t>("end", end, {batch}),
                       written<int32_t>("cached", cached, {batch}),
                       chain.of<int32_t>({batch}),
                       chain.of<int32_t>({batch, width}),
                       chain.of<int32_t>({batch, width}),
                       chain.of<int32_t>({batch, width}),
                       chain.of<int32_t>({batch, width, sizes.words()}),
                       chain.of<int32_t>({batch, width})};
  return {sizes, args, batch, chain.results()};
}

using PathCall = Call<PathSizes, PathArgs, 2>;

inline PathCall prepare_path(const Tensor& accepted_rows, const Tensor& num_accepted, const Tensor& next_token,
                             const Tensor& token_ids, const Tensor& node_ids) {
  const int32_t* accepted = read<int32_t>("accepted_rows", accepted_rows, {kAny, kAny});
  const int64_t batch = accepted_rows.size(0), path = accepted_rows.size(1);
  const int32_t* tokens = read<int32_t>("token_ids", token_ids, {batch, kAny});
  const int64_t rows = token_ids.size(1);
  STD_TORCH_CHECK(rows >= 1, "token_ids: expected at least one row");
  Fresh<2> emitted(accepted_rows);
  const PathArgs args{accepted,
                      read<int32_t>("num_accepted", num_accepted, {batch}),
                      read<int32_t>("next_token", next_token, {batch}),
                      tokens,
                      read<int32_t>("node_ids", node_ids, {batch, rows}),
                      emitted.of<int32_t>({batch, path}),
                      emitted.of<int32_t>({batch, path})};
  return {{narrow(path), narrow(rows)}, args, batch, emitted.results()};
}

using TextCall = Call<TextSizes, TextArgs>;

inline TextCall prepare_text(const Tensor& new_tokens, const Tensor& num_accepted, const Tensor& next_token,
                             const Tensor& eos_ids, const Tensor& tokens, const Tensor& out_len,
                             const Tensor& remaining, const Tensor& done, const Tensor& emitted,
                             const Tensor& num_emitted, const Tensor& counts, const MaybeTensor& nodes,
                             const MaybeTensor& parents, const MaybeTensor& num_nodes, const MaybeTensor& num_merges) {
  const int32_t* added = read<int32_t>("new_tokens", new_tokens, {kAny, kAny});
  const int64_t batch = new_tokens.size(0), path = new_tokens.size(1);
  STD_TORCH_CHECK(nodes.has_value() == parents.has_value() && nodes.has_value() == num_nodes.has_value() &&
                      nodes.has_value() == num_merges.has_value(),
                  "nodes, parents, num_nodes, num_merges: expected all or none");
  const TextArgs args{added,
                      read<int32_t>("num_accepted", num_accepted, {batch}),
                      read<int32_t>("next_token", next_token, {batch}),
                      read<int32_t>("eos_ids", eos_ids, {kAny}),
                      written<int64_t>("tokens", tokens, {batch, kAny}),
                      written<int32_t>("out_len", out_len, {batch}),
                      written<int32_t>("remaining", remaining, {batch}),
                      written<bool>("done", done, {batch}),
                      written<int32_t>("emitted", emitted, {batch, kAny}),
                      written<int32_t>("num_emitted", num_emitted, {batch}),
                      written<int64_t>("counts", counts, {3}),
                      read<int32_t>("nodes", nodes, {batch, path}),
                      read<int32_t>("parents", parents, {batch, kAny}),
                      read<int32_t>("num_nodes", num_nodes, {batch}),
                      read<int32_t>("num_merges", num_merges, {batch})};
  STD_TORCH_CHECK(emitted.size(1) >= path, "emitted: expected at least ", path, " places, got ", emitted.size(1));
  const TextSizes sizes{narrow(path), narrow(emitted.size(1)), narrow(tokens.size(1)),
                        parents ? narrow(parents->size(1)) : 0, narrow(eos_ids.size(0))};
  return {sizes, args, batch};
}

}  // namespace gsd
