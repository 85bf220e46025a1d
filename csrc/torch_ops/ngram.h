// The table and rows of the n-gram ops; the candidates of those that calibrate, perturb and mix them.
#pragma once

#include <optional>
#include <tuple>
#include <utility>

#include "../algorithms/ngram.h"
#include "common.h"

namespace gsd {

constexpr int64_t kMostEntries = 1 << 30;

// The tensors of an NgramTable.
struct NgramTensors {
  NgramTable data;  // of the first sequence
  int64_t batch, capacity, branch;

  static NgramTensors of(const Tensor& keys, const Tensor& tokens, const Tensor& log_probs) {
    check("keys", keys, ScalarType::Long, {kAny, kAny});
    const int64_t batch = keys.size(0), capacity = keys.size(1);
    STD_TORCH_CHECK(capacity >= 1 && capacity <= kMostEntries && (capacity & (capacity - 1)) == 0,
                    "keys: expected a power of two of entries, got ", capacity);
    check("table_tokens", tokens, ScalarType::Int, {batch, capacity, kAny});
    const int64_t branch = tokens.size(2);
    return {{written<int64_t>(keys), written<int32_t>(tokens),
             written<float>("table_log_probs", log_probs, {batch, capacity, branch})},
            batch, capacity, branch};
  }
};

inline NgramSizes ngram_sizes(const NgramTensors& table, int64_t rows, int64_t context, int64_t max_context,
                              int64_t ways) {
  const int64_t most = kMostWays < table.capacity ? kMostWays : table.capacity;
  STD_TORCH_CHECK(ways >= 1 && ways <= most && (ways & (ways - 1)) == 0, "ways: expected a power of two up to ", most,
                  ", got ", ways);
  STD_TORCH_CHECK(max_context >= 1 && max_context <= kMostLengths && max_context <= context,
                  "contexts: expected at least ", max_context, " tokens of each, 1 ... ", kMostLengths, ", got ",
                  context);
  STD_TORCH_CHECK(rows < kMostEntries / kMostLengths && table.branch < kMostEntries, "contexts: too many rows, ", rows);
  return {static_cast<int>(table.capacity), static_cast<int>(ways),    static_cast<int>(table.branch),
          static_cast<int>(rows),           static_cast<int>(context), static_cast<int>(max_context)};
}

struct NgramInsertCall {
  NgramSizes sizes;
  NgramInsertArgs args;  // of the first sequence
  int64_t batch;
};

inline NgramInsertCall prepare_ngram_insert(const Tensor& keys, const Tensor& table_tokens,
                                            const Tensor& table_log_probs, const Tensor& contexts,
                                            const Tensor& tokens, const Tensor& log_probs, const Tensor& valid,
                                            int64_t max_context, int64_t ways) {
  const NgramTensors table = NgramTensors::of(keys, table_tokens, table_log_probs);
  const int64_t batch = table.batch, branch = table.branch;
  check("contexts", contexts, ScalarType::Int, {batch, kAny, kAny});
  const int64_t rows = contexts.size(1);
  const NgramSizes sizes = ngram_sizes(table, rows, contexts.size(2), max_context, ways);
  const NgramInsertArgs args{table.data,
                             read<int32_t>(contexts),
                             read<int32_t>("tokens", tokens, {batch, rows, branch}),
                             read<float>("log_probs", log_probs, {batch, rows, branch}),
                             read<bool>("valid", valid, {batch, rows}),
                             {}};
  return {sizes, args, batch};
}

// As above, with contexts of a tree's rows.
inline NgramInsertCall prepare_ngram_remember(const Tensor& keys, const Tensor& table_tokens,
                                              const Tensor& table_log_probs, const Tensor& token_ids,
                                              const Tensor& parent_rows, const Tensor& depths, const Tensor& num_rows,
                                              const Tensor& tail, const Tensor& tokens, const Tensor& log_probs,
                                              int64_t max_context, int64_t ways) {
  const NgramTensors table = NgramTensors::of(keys, table_tokens, table_log_probs);
  const int64_t batch = table.batch, branch = table.branch;
  check("token_ids", token_ids, ScalarType::Int, {batch, kAny});
  const int64_t rows = token_ids.size(1);
  const NgramTree tree{read<int32_t>(token_ids), read<int32_t>("parent_rows", parent_rows, {batch, rows}),
                       read<int32_t>("depths", depths, {batch, rows}), read<int32_t>("num_rows", num_rows, {batch}),
                       read<int32_t>("tail", tail, {batch, kAny})};
  const NgramSizes sizes = ngram_sizes(table, rows, tail.size(1), max_context, ways);
  const NgramInsertArgs args{table.data,
                             nullptr,
                             read<int32_t>("tokens", tokens, {batch, rows, branch}),
                             read<float>("log_probs", log_probs, {batch, rows, branch}),
                             nullptr,
                             tree};
  return {sizes, args, batch};
}

using NgramLookupOutputs = std::tuple<Tensor, Tensor, Tensor>;

struct NgramLookupCall {
  NgramSizes sizes;
  NgramLookupArgs args;  // of the first sequence
  int64_t batch;
  NgramLookupOutputs outputs;
};

inline NgramLookupCall prepare_ngram_lookup(const Tensor& keys, const Tensor& table_tokens,
                                            const Tensor& table_log_probs, const Tensor& contexts, int64_t max_context,
                                            int64_t ways) {
  const NgramTensors table = NgramTensors::of(keys, table_tokens, table_log_probs);
  const int64_t batch = table.batch;
  check("contexts", contexts, ScalarType::Int, {batch, kAny, kAny});
  const int64_t rows = contexts.size(1);
  const NgramSizes sizes = ngram_sizes(table, rows, contexts.size(2), max_context, ways);
  NgramLookupOutputs outputs{new_int32(contexts, {batch, rows, table.branch}),
                             torch::stable::new_empty(contexts, {batch, rows, table.branch}, ScalarType::Float),
                             new_int32(contexts, {batch, rows})};
  const NgramLookupArgs args{table.data, read<int32_t>(contexts), written<int32_t>(std::get<0>(outputs)),
                             written<float>(std::get<1>(outputs)), written<int32_t>(std::get<2>(outputs))};
  return {sizes, args, batch, std::move(outputs)};
}

struct NgramRecallCall {
  NgramSizes sizes;
  NgramRecallArgs args;  // of the first sequence
  int64_t batch;
  NgramLookupOutputs outputs;
};

// The nodes of a graph, all that a recall reads of it.
struct NodeTensors {
  const int32_t *token_ids, *contexts, *depths;
  int64_t nodes, context;

  static NodeTensors of(const Tensor& token_ids, const Tensor& contexts, const Tensor& depths, int64_t batch) {
    check("token_ids", token_ids, ScalarType::Int, {batch, kAny});
    const int64_t nodes = token_ids.size(1);
    check("contexts", contexts, ScalarType::Int, {batch, nodes, kAny});
    return {read<int32_t>(token_ids), read<int32_t>(contexts), read<int32_t>("depths", depths, {batch, nodes}), nodes,
            contexts.size(2)};
  }
};

inline NgramRecallCall prepare_recall(const NgramTensors& table, const NodeTensors& graph, const Tensor& nodes,
                                      int64_t wanted, int64_t max_context, int64_t ways,
                                      const std::optional<Tensor>& first_pick, const std::optional<Tensor>& seed,
                                      const std::optional<Tensor>& sequence_ids) {
  const int64_t batch = table.batch;
  check("nodes", nodes, ScalarType::Int, {batch, kAny});
  STD_TORCH_CHECK(graph.nodes >= 1, "token_ids: expected at least one node");
  const NgramSizes sizes = ngram_sizes(table, nodes.size(1), graph.context, max_context, ways);
  STD_TORCH_CHECK(wanted >= 0 && wanted <= sizes.branch, "branch: expected at most ", sizes.branch, ", got ", wanted);
  STD_TORCH_CHECK(first_pick.has_value() == seed.has_value() && seed.has_value() == sequence_ids.has_value(),
                  "first_pick, seed, sequence_ids: expected all or none");
  NgramLookupOutputs outputs{new_int32(nodes, {batch, sizes.rows, wanted}),
                             torch::stable::new_empty(nodes, {batch, sizes.rows, wanted}, ScalarType::Float),
                             new_int32(nodes, {batch, sizes.rows})};
  const NgramRecallArgs args{table.data,
                             graph.token_ids,
                             graph.contexts,
                             graph.depths,
                             read<int32_t>(nodes),
                             read<int32_t>("first_pick", first_pick, {batch}),
                             read<int64_t>("seed", seed, {}),
                             read<int32_t>("sequence_ids", sequence_ids, {batch}),
                             written<int32_t>(std::get<0>(outputs)),
                             written<float>(std::get<1>(outputs)),
                             written<int32_t>(std::get<2>(outputs)),
                             static_cast<int>(graph.nodes),
                             static_cast<int>(wanted)};
  return {sizes, args, batch, std::move(outputs)};
}

inline NgramRecallCall prepare_ngram_recall(const Tensor& keys, const Tensor& table_tokens,
                                            const Tensor& table_log_probs, const Tensor& token_ids,
                                            const Tensor& contexts, const Tensor& depths, const Tensor& nodes,
                                            int64_t branch, int64_t max_context, int64_t ways,
                                            const std::optional<Tensor>& first_pick, const std::optional<Tensor>& seed,
                                            const std::optional<Tensor>& sequence_ids) {
  const NgramTensors table = NgramTensors::of(keys, table_tokens, table_log_probs);
  const NodeTensors graph = NodeTensors::of(token_ids, contexts, depths, table.batch);
  return prepare_recall(table, graph, nodes, branch, max_context, ways, first_pick, seed, sequence_ids);
}

struct CalibrateCall {
  CalibrateArgs args;
  int64_t candidates;
  Tensor outputs;
};

inline CalibrateCall prepare_calibrate(const Tensor& log_probs, const Tensor& log_ratio,
                                       const std::optional<Tensor>& index, const std::optional<Tensor>& edges) {
  check("log_probs", log_probs, ScalarType::Float, {kAny, kAny, kAny});
  check("log_ratio", log_ratio, ScalarType::Float, {kAny, kAny});
  const int64_t batch = log_probs.size(0), rows = log_probs.size(1), branch = log_probs.size(2);
  const int64_t entries = log_ratio.size(0), columns = log_ratio.size(1), ranks = edges ? entries : columns;
  STD_TORCH_CHECK(!(index && edges), "index, edges: expected at most one of them");
  STD_TORCH_CHECK(entries >= 1 && branch <= ranks, "log_ratio: expected at least ", branch, " ranks, got ", ranks);
  Tensor output = torch::stable::new_empty(log_probs, {batch, rows, branch});
  const CalibrateArgs args{read<float>(log_probs),
                           read<float>(log_ratio),
                           read<int32_t>("index", index, {batch, rows}),
                           read<float>("edges", edges, {columns - 1}),
                           written<float>(output),
                           static_cast<int>(branch),
                           static_cast<int>(entries),
                           static_cast<int>(columns)};
  return {args, batch * rows * branch, std::move(output)};
}

struct PerturbCall {
  PerturbArgs args;
  int64_t rows;  // of all sequences
  Tensor outputs;
};

inline PerturbCall prepare_perturb(const Tensor& tokens, const Tensor& log_probs, const Tensor& positions,
                                   const Tensor& seed, const Tensor& sequence_ids) {
  check("tokens", tokens, ScalarType::Int, {kAny, kAny, kAny});
  const int64_t batch = tokens.size(0), rows = tokens.size(1), branch = tokens.size(2);
  Tensor output = torch::stable::new_empty(log_probs, {batch, rows, branch});
  const PerturbArgs args{read<int32_t>(tokens),
                         read<float>("log_probs", log_probs, {batch, rows, branch}),
                         read<int32_t>("positions", positions, {batch, rows}),
                         read<int64_t>("seed", seed, {}),
                         read<int32_t>("sequence_ids", sequence_ids, {batch}),
                         written<float>(output),
                         static_cast<int>(rows),
                         static_cast<int>(branch)};
  return {args, batch * rows, std::move(output)};
}

using MixOutputs = std::tuple<Tensor, Tensor>;

struct MixCall {
  MixSizes sizes;
  MixArgs args;   // of the first row
  int64_t batch;  // rows of all sequences
  MixOutputs outputs;
};

inline MixCall prepare_mix(const Tensor& tokens, const Tensor& log_probs, const Tensor& other_tokens,
                           const Tensor& other_log_probs, const Tensor& weight, const std::optional<Tensor>& index) {
  check("tokens", tokens, ScalarType::Int, {kAny, kAny, kAny});
  const int64_t batch = tokens.size(0), rows = tokens.size(1), branch = tokens.size(2);
  check("other_tokens", other_tokens, ScalarType::Int, {batch, rows, kAny});
  const int64_t others = other_tokens.size(2);
  const bool table = weight.dim() == 1;
  if (table) {
    check("weight", weight, ScalarType::Float, {kAny});
    STD_TORCH_CHECK(weight.size(0) >= 1, "weight: expected at least one entry");
  } else {
    check("weight", weight, ScalarType::Float, {batch, rows});
  }
  STD_TORCH_CHECK(table || !index, "index: expected a table of weights with it, got one for each row");
  constexpr int64_t kMost = 8192;  // their probabilities lie in shared memory
  STD_TORCH_CHECK(branch + others <= kMost, "other_tokens: expected at most ", kMost, " candidates in all, got ",
                  branch + others);
  MixOutputs outputs{new_int32(tokens, {batch, rows, branch}),
                     torch::stable::new_empty(log_probs, {batch, rows, branch})};
  const MixArgs args{read<int32_t>(tokens),
                     read<float>("log_probs", log_probs, {batch, rows, branch}),
                     read<int32_t>(other_tokens),
                     read<float>("other_log_probs", other_log_probs, {batch, rows, others}),
                     read<float>(weight),
                     read<int32_t>("index", index, {batch, rows}),
                     written<int32_t>(std::get<0>(outputs)),
                     written<float>(std::get<1>(outputs))};
  const MixSizes sizes{static_cast<int>(branch), static_cast<int>(others),
                       table ? static_cast<int>(weight.size(0)) : 0};
  return {sizes, args, batch * rows, std::move(outputs)};
}

}  // namespace gsd
