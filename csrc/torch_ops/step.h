// The graph, rows and text of start_graph, feed_rows, feed_chain, accepted_path and commit_text.
#pragma once

#include <optional>
#include <tuple>
#include <utility>

#include "../algorithms/step.h"
#include "graph.h"

namespace gsd {

struct StartCall {
  StartSizes sizes;
  StartArgs args;  // of the first sequence, as below
  int64_t batch;
  Tensor outputs;  // where the first pick goes
};

inline StartCall prepare_start(const std::vector<Tensor>& tensors, const Tensor& tokens, const Tensor& out_len,
                               const Tensor& kv_start) {
  const GraphTensors graph = GraphTensors::of(tensors);
  const int64_t batch = graph.batch;
  Tensor first_pick = new_int32(out_len, {batch});
  const StartArgs args{graph.data,
                       read<int64_t>("tokens", tokens, {batch, kAny}),
                       read<int32_t>("out_len", out_len, {batch}),
                       read<int32_t>("kv_start", kv_start, {batch}),
                       written<int32_t>(first_pick)};
  const StartSizes sizes{static_cast<int>(graph.nodes), static_cast<int>(graph.branch), static_cast<int>(graph.words),
                         static_cast<int>(tokens.size(1))};
  return {sizes, args, batch, std::move(first_pick)};
}

using FeedOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class Integer>
struct FeedCall {
  FeedSizes sizes;
  FeedArgs<Integer> args;
  int64_t batch;
  FeedOutputs outputs;
};

template <class Integer>
FeedCall<Integer> prepare_feed(const Tensor& token_ids, const Tensor& depths, const std::optional<Tensor>& slots,
                               const Tensor& kv_len, const Tensor& kv_start, const std::optional<Tensor>& node_depths,
                               int64_t first_slot, int64_t shift, int64_t vocab) {
  check("token_ids", token_ids, ScalarType::Int, {kAny, kAny});
  const int64_t batch = token_ids.size(0), rows = token_ids.size(1);
  int64_t nodes = 0;
  if (node_depths) {
    check("node_depths", *node_depths, ScalarType::Int, {batch, kAny});
    nodes = node_depths->size(1);
    STD_TORCH_CHECK(!slots && first_slot >= 0 && first_slot + rows <= nodes, "node_depths: expected at least ",
                    first_slot + rows, " nodes, got ", nodes);
  }
  const FeedSizes sizes{static_cast<int>(rows), static_cast<int>(nodes), static_cast<int>(first_slot),
                        static_cast<int>(shift), static_cast<int>(vocab)};
  constexpr ScalarType kInteger = sizeof(Integer) == 8 ? ScalarType::Long : ScalarType::Int;
  const auto fresh = [&](ScalarType type) { return torch::stable::new_empty(token_ids, {batch, rows}, type); };
  FeedOutputs outputs{fresh(kInteger), fresh(kInteger), fresh(kInteger), fresh(ScalarType::Int),
                      fresh(ScalarType::Int)};
  const FeedArgs<Integer> args{read<int32_t>(token_ids),
                               read<int32_t>("depths", depths, {batch, rows}),
                               read<int32_t>("slots", slots, {batch, rows}),
                               read<int32_t>("kv_len", kv_len, {batch}),
                               read<int32_t>("kv_start", kv_start, {batch}),
                               written<Integer>(std::get<0>(outputs)),
                               written<Integer>(std::get<1>(outputs)),
                               written<Integer>(std::get<2>(outputs)),
                               written<int32_t>(std::get<3>(outputs)),
                               written<int32_t>(std::get<4>(outputs)),
                               node_depths ? written<int32_t>(*node_depths) : nullptr};
  return {sizes, args, batch, std::move(outputs)};
}

using ChainOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

struct ChainCall {
  ChainSizes sizes;
  ChainArgs args;
  int64_t batch;
  ChainOutputs outputs;
};

inline ChainCall prepare_chain(const Tensor& tokens, const Tensor& end, const Tensor& cached, int64_t width) {
  check("tokens", tokens, ScalarType::Long, {kAny, kAny});
  const int64_t batch = tokens.size(0);
  check("end", end, ScalarType::Int, {batch});
  STD_TORCH_CHECK(width >= 1 && width < (1 << 20), "width: expected at least 1, got ", width);
  const ChainSizes sizes{static_cast<int>(width), static_cast<int>(tokens.size(1))};
  ChainOutputs outputs{new_int32(end, {batch}),        new_int32(end, {batch, width}),
                       new_int32(end, {batch, width}), new_int32(end, {batch, width}),
                       new_int32(end, {batch, width, sizes.words()}), new_int32(end, {batch, width})};
  const ChainArgs args{read<int64_t>(tokens),
                       read<int32_t>(end),
                       written<int32_t>("cached", cached, {batch}),
                       written<int32_t>(std::get<0>(outputs)),
                       written<int32_t>(std::get<1>(outputs)),
                       written<int32_t>(std::get<2>(outputs)),
                       written<int32_t>(std::get<3>(outputs)),
                       written<int32_t>(std::get<4>(outputs)),
                       written<int32_t>(std::get<5>(outputs))};
  return {sizes, args, batch, std::move(outputs)};
}

using PathOutputs = std::tuple<Tensor, Tensor>;

struct PathCall {
  PathSizes sizes;
  PathArgs args;
  int64_t batch;
  PathOutputs outputs;
};

inline PathCall prepare_path(const Tensor& accepted_rows, const Tensor& num_accepted, const Tensor& next_token,
                             const Tensor& token_ids, const Tensor& node_ids) {
  check("accepted_rows", accepted_rows, ScalarType::Int, {kAny, kAny});
  const int64_t batch = accepted_rows.size(0), path = accepted_rows.size(1);
  check("token_ids", token_ids, ScalarType::Int, {batch, kAny});
  STD_TORCH_CHECK(token_ids.size(1) >= 1, "token_ids: expected at least one row");
  const PathSizes sizes{static_cast<int>(path), static_cast<int>(token_ids.size(1))};
  PathOutputs outputs{new_int32(accepted_rows, {batch, path}), new_int32(accepted_rows, {batch, path})};
  const PathArgs args{read<int32_t>(accepted_rows),
                      read<int32_t>("num_accepted", num_accepted, {batch}),
                      read<int32_t>("next_token", next_token, {batch}),
                      read<int32_t>(token_ids),
                      read<int32_t>("node_ids", node_ids, {batch, token_ids.size(1)}),
                      written<int32_t>(std::get<0>(outputs)),
                      written<int32_t>(std::get<1>(outputs))};
  return {sizes, args, batch, std::move(outputs)};
}

struct TextCall {
  TextSizes sizes;
  TextArgs args;
  int64_t batch;
};

inline TextCall prepare_text(const Tensor& new_tokens, const Tensor& num_accepted, const Tensor& next_token,
                             const Tensor& eos_ids, const Tensor& tokens, const Tensor& out_len,
                             const Tensor& remaining, const Tensor& done, const Tensor& emitted,
                             const Tensor& num_emitted, const Tensor& counts, const std::optional<Tensor>& nodes,
                             const std::optional<Tensor>& parents, const std::optional<Tensor>& num_nodes,
                             const std::optional<Tensor>& num_merges) {
  check("new_tokens", new_tokens, ScalarType::Int, {kAny, kAny});
  const int64_t batch = new_tokens.size(0), path = new_tokens.size(1);
  check("eos_ids", eos_ids, ScalarType::Int, {kAny});
  check("tokens", tokens, ScalarType::Long, {batch, kAny});
  check("emitted", emitted, ScalarType::Int, {batch, kAny});
  STD_TORCH_CHECK(emitted.size(1) >= path, "emitted: expected at least ", path, " places, got ", emitted.size(1));
  STD_TORCH_CHECK(nodes.has_value() == parents.has_value() && nodes.has_value() == num_nodes.has_value() &&
                      nodes.has_value() == num_merges.has_value(),
                  "nodes, parents, num_nodes, num_merges: expected all or none");
  if (parents) check("parents", *parents, ScalarType::Int, {batch, kAny});
  const int64_t capacity = parents ? parents->size(1) : 0;
  const TextSizes sizes{static_cast<int>(path), static_cast<int>(emitted.size(1)), static_cast<int>(tokens.size(1)),
                        static_cast<int>(capacity), static_cast<int>(eos_ids.size(0))};
  const TextArgs args{read<int32_t>(new_tokens),
                      read<int32_t>("num_accepted", num_accepted, {batch}),
                      read<int32_t>("next_token", next_token, {batch}),
                      read<int32_t>(eos_ids),
                      written<int64_t>(tokens),
                      written<int32_t>("out_len", out_len, {batch}),
                      written<int32_t>("remaining", remaining, {batch}),
                      written<bool>("done", done, {batch}),
                      written<int32_t>(emitted),
                      written<int32_t>("num_emitted", num_emitted, {batch}),
                      written<int64_t>("counts", counts, {3}),
                      read<int32_t>("nodes", nodes, {batch, path}),
                      parents ? read<int32_t>(*parents) : nullptr,
                      read<int32_t>("num_nodes", num_nodes, {batch}),
                      read<int32_t>("num_merges", num_merges, {batch})};
  return {sizes, args, batch};
}

}  // namespace gsd
