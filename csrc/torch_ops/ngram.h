// The table and rows of ngram_insert, ngram_lookup, perturb_candidates and mix_candidates.
#pragma once

#include <optional>
#include <tuple>
#include <utility>

#include "../algorithms/ngram.h"
#include "common.h"

namespace gsd {

inline NgramTable ngram_table(const Tensor& keys, const Tensor& tokens, const Tensor& log_probs, int64_t batch,
                              const NgramSizes& s) {
  check("keys", keys, ScalarType::Long, {batch, s.capacity});
  check("table_tokens", tokens, ScalarType::Int, {batch, s.capacity, s.branch});
  check("table_log_probs", log_probs, ScalarType::Float, {batch, s.capacity, s.branch});
  return {written<int64_t>(keys), written<int32_t>(tokens), written<float>(log_probs)};
}

inline NgramSizes ngram_sizes(const Tensor& keys, const Tensor& tokens, int64_t batch, int64_t rows, int64_t context,
                              int64_t max_context, int64_t ways) {
  check("keys", keys, ScalarType::Long, {batch, kAny});
  check("table_tokens", tokens, ScalarType::Int, {batch, kAny, kAny});
  const int64_t capacity = keys.size(1);
  constexpr int64_t kMost = 1 << 30;
  STD_TORCH_CHECK(ways >= 1 && ways <= kMostWays && (ways & (ways - 1)) == 0, "ways: expected a power of two up to ",
                  kMostWays, ", got ", ways);
  STD_TORCH_CHECK(capacity >= ways && capacity <= kMost && (capacity & (capacity - 1)) == 0,
                  "keys: expected a power of two of at least ", ways, " entries, got ", capacity);
  STD_TORCH_CHECK(max_context >= 1 && max_context <= kMostLengths && max_context <= context,
                  "contexts: expected at least ", max_context, " tokens of each, 1 ... ", kMostLengths, ", got ",
                  context);
  STD_TORCH_CHECK(rows < kMost / kMostLengths && tokens.size(2) < kMost, "contexts: too many rows, ", rows);
  return {static_cast<int>(capacity), static_cast<int>(ways),    static_cast<int>(tokens.size(2)),
          static_cast<int>(rows),     static_cast<int>(context), static_cast<int>(max_context)};
}

inline NgramSizes ngram_sizes(const Tensor& keys, const Tensor& tokens, const Tensor& contexts, int64_t max_context,
                              int64_t ways) {
  check("contexts", contexts, ScalarType::Int, {keys.size(0), kAny, kAny});
  return ngram_sizes(keys, tokens, keys.size(0), contexts.size(1), contexts.size(2), max_context, ways);
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
  const NgramSizes sizes = ngram_sizes(keys, table_tokens, contexts, max_context, ways);
  const int64_t batch = keys.size(0);
  check("tokens", tokens, ScalarType::Int, {batch, sizes.rows, sizes.branch});
  check("log_probs", log_probs, ScalarType::Float, {batch, sizes.rows, sizes.branch});
  check("valid", valid, ScalarType::Bool, {batch, sizes.rows});
  const NgramInsertArgs args{ngram_table(keys, table_tokens, table_log_probs, batch, sizes), read<int32_t>(contexts),
                             read<int32_t>(tokens), read<float>(log_probs), read<bool>(valid), {}};
  return {sizes, args, batch};
}

// As above, with contexts of a tree's rows.
inline NgramInsertCall prepare_ngram_remember(const Tensor& keys, const Tensor& table_tokens,
                                              const Tensor& table_log_probs, const Tensor& token_ids,
                                              const Tensor& parent_rows, const Tensor& depths, const Tensor& num_rows,
                                              const Tensor& tail, const Tensor& tokens, const Tensor& log_probs,
                                              int64_t max_context, int64_t ways) {
  check("token_ids", token_ids, ScalarType::Int, {keys.size(0), kAny});
  const int64_t batch = keys.size(0), rows = token_ids.size(1);
  check("parent_rows", parent_rows, ScalarType::Int, {batch, rows});
  check("depths", depths, ScalarType::Int, {batch, rows});
  check("num_rows", num_rows, ScalarType::Int, {batch});
  check("tail", tail, ScalarType::Int, {batch, kAny});
  const NgramSizes sizes = ngram_sizes(keys, table_tokens, batch, rows, tail.size(1), max_context, ways);
  check("tokens", tokens, ScalarType::Int, {batch, rows, sizes.branch});
  check("log_probs", log_probs, ScalarType::Float, {batch, rows, sizes.branch});
  const NgramTree tree{read<int32_t>(token_ids), read<int32_t>(parent_rows), read<int32_t>(depths),
                       read<int32_t>(num_rows), read<int32_t>(tail)};
  const NgramInsertArgs args{ngram_table(keys, table_tokens, table_log_probs, batch, sizes), nullptr,
                             read<int32_t>(tokens), read<float>(log_probs), nullptr, tree};
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
                                            const Tensor& table_log_probs, const Tensor& contexts,
                                            int64_t max_context, int64_t ways) {
  const NgramSizes sizes = ngram_sizes(keys, table_tokens, contexts, max_context, ways);
  const int64_t batch = keys.size(0);
  NgramLookupOutputs outputs{new_int32(contexts, {batch, sizes.rows, sizes.branch}),
                             torch::stable::new_empty(table_log_probs, {batch, sizes.rows, sizes.branch}),
                             new_int32(contexts, {batch, sizes.rows})};
  const NgramLookupArgs args{ngram_table(keys, table_tokens, table_log_probs, batch, sizes), read<int32_t>(contexts),
                             written<int32_t>(std::get<0>(outputs)), written<float>(std::get<1>(outputs)),
                             written<int32_t>(std::get<2>(outputs))};
  return {sizes, args, batch, std::move(outputs)};
}

struct NgramRecallCall {
  NgramSizes sizes;
  NgramRecallArgs args;  // of the first sequence
  int64_t batch;
  NgramLookupOutputs outputs;
};

inline NgramRecallCall prepare_ngram_recall(const Tensor& keys, const Tensor& table_tokens,
                                            const Tensor& table_log_probs, const Tensor& token_ids,
                                            const Tensor& contexts, const Tensor& depths, const Tensor& nodes,
                                            int64_t wanted, int64_t max_context, int64_t ways,
                                            const std::optional<Tensor>& first_pick, const std::optional<Tensor>& seed,
                                            const std::optional<Tensor>& sequence_ids) {
  check("token_ids", token_ids, ScalarType::Int, {keys.size(0), kAny});
  const int64_t batch = keys.size(0), graph_nodes = token_ids.size(1);
  check("contexts", contexts, ScalarType::Int, {batch, graph_nodes, kAny});
  check("depths", depths, ScalarType::Int, {batch, graph_nodes});
  check("nodes", nodes, ScalarType::Int, {batch, kAny});
  STD_TORCH_CHECK(graph_nodes >= 1, "token_ids: expected at least one node");
  const NgramSizes sizes =
      ngram_sizes(keys, table_tokens, batch, nodes.size(1), contexts.size(2), max_context, ways);
  STD_TORCH_CHECK(wanted >= 0 && wanted <= sizes.branch, "branch: expected at most ", sizes.branch, ", got ", wanted);
  STD_TORCH_CHECK(first_pick.has_value() == seed.has_value() && seed.has_value() == sequence_ids.has_value(),
                  "first_pick, seed, sequence_ids: expected all or none");
  if (seed) {
    check("first_pick", *first_pick, ScalarType::Int, {batch});
    check("seed", *seed, ScalarType::Long, {});
    check("sequence_ids", *sequence_ids, ScalarType::Int, {batch});
  }
  NgramLookupOutputs outputs{new_int32(nodes, {batch, sizes.rows, wanted}),
                             torch::stable::new_empty(table_log_probs, {batch, sizes.rows, wanted}),
                             new_int32(nodes, {batch, sizes.rows})};
  const NgramRecallArgs args{ngram_table(keys, table_tokens, table_log_probs, batch, sizes),
                             read<int32_t>(token_ids),
                             read<int32_t>(contexts),
                             read<int32_t>(depths),
                             read<int32_t>(nodes),
                             seed ? read<int32_t>(*first_pick) : nullptr,
                             seed ? read<int64_t>(*seed) : nullptr,
                             seed ? read<int32_t>(*sequence_ids) : nullptr,
                             written<int32_t>(std::get<0>(outputs)),
                             written<float>(std::get<1>(outputs)),
                             written<int32_t>(std::get<2>(outputs)),
                             static_cast<int>(graph_nodes),
                             static_cast<int>(wanted)};
  return {sizes, args, batch, std::move(outputs)};
}

struct CalibrateCall {
  CalibrateArgs args;
  int64_t candidates;
  Tensor output;
};

inline CalibrateCall prepare_calibrate(const Tensor& log_probs, const Tensor& log_ratio,
                                       const std::optional<Tensor>& index, const std::optional<Tensor>& edges) {
  check("log_probs", log_probs, ScalarType::Float, {kAny, kAny, kAny});
  check("log_ratio", log_ratio, ScalarType::Float, {kAny, kAny});
  const int64_t batch = log_probs.size(0), rows = log_probs.size(1), branch = log_probs.size(2);
  const int64_t entries = log_ratio.size(0), columns = log_ratio.size(1), ranks = edges ? entries : columns;
  if (index) check("index", *index, ScalarType::Int, {batch, rows});
  if (edges) check("edges", *edges, ScalarType::Float, {columns - 1});
  STD_TORCH_CHECK(!(index && edges), "index, edges: expected at most one of them");
  STD_TORCH_CHECK(entries >= 1 && branch <= ranks, "log_ratio: expected at least ", branch, " ranks, got ", ranks);
  Tensor output = torch::stable::new_empty(log_probs, {batch, rows, branch});
  const CalibrateArgs args{read<float>(log_probs),
                           read<float>(log_ratio),
                           index ? read<int32_t>(*index) : nullptr,
                           edges ? read<float>(*edges) : nullptr,
                           written<float>(output),
                           static_cast<int>(branch),
                           static_cast<int>(entries),
                           static_cast<int>(columns)};
  return {args, batch * rows * branch, std::move(output)};
}

struct PerturbCall {
  PerturbArgs args;
  int64_t rows;  // of all sequences
  Tensor output;
};

inline PerturbCall prepare_perturb(const Tensor& tokens, const Tensor& log_probs, const Tensor& positions,
                                   const Tensor& seed, const Tensor& sequence_ids) {
  check("tokens", tokens, ScalarType::Int, {kAny, kAny, kAny});
  const int64_t batch = tokens.size(0), rows = tokens.size(1), branch = tokens.size(2);
  check("log_probs", log_probs, ScalarType::Float, {batch, rows, branch});
  check("positions", positions, ScalarType::Int, {batch, rows});
  check("seed", seed, ScalarType::Long, {});
  check("sequence_ids", sequence_ids, ScalarType::Int, {batch});
  Tensor output = torch::stable::new_empty(log_probs, {batch, rows, branch});
  const PerturbArgs args{read<int32_t>(tokens),       read<float>(log_probs),     read<int32_t>(positions),
                         read<int64_t>(seed),         read<int32_t>(sequence_ids), written<float>(output),
                         static_cast<int>(rows),      static_cast<int>(branch)};
  return {args, batch * rows, std::move(output)};
}

using MixOutputs = std::tuple<Tensor, Tensor>;

struct MixCall {
  MixSizes sizes;
  MixArgs args;  // of the first row
  int64_t rows;
  MixOutputs outputs;
};

inline MixCall prepare_mix(const Tensor& tokens, const Tensor& log_probs, const Tensor& other_tokens,
                           const Tensor& other_log_probs, const Tensor& weight, const std::optional<Tensor>& index) {
  check("tokens", tokens, ScalarType::Int, {kAny, kAny, kAny});
  const int64_t batch = tokens.size(0), rows = tokens.size(1), branch = tokens.size(2);
  check("log_probs", log_probs, ScalarType::Float, {batch, rows, branch});
  check("other_tokens", other_tokens, ScalarType::Int, {batch, rows, kAny});
  const int64_t others = other_tokens.size(2);
  check("other_log_probs", other_log_probs, ScalarType::Float, {batch, rows, others});
  const bool table = weight.dim() == 1;
  if (table) {
    check("weight", weight, ScalarType::Float, {kAny});
    STD_TORCH_CHECK(weight.size(0) >= 1, "weight: expected at least one entry");
  } else {
    check("weight", weight, ScalarType::Float, {batch, rows});
  }
  STD_TORCH_CHECK(table || !index, "index: expected a table of weights with it, got one for each row");
  if (index) check("index", *index, ScalarType::Int, {batch, rows});
  constexpr int64_t kMost = 8192;  // their probabilities lie in shared memory
  STD_TORCH_CHECK(branch + others <= kMost, "other_tokens: expected at most ", kMost, " candidates in all, got ",
                  branch + others);
  MixOutputs outputs{new_int32(tokens, {batch, rows, branch}),
                     torch::stable::new_empty(log_probs, {batch, rows, branch})};
  const MixArgs args{read<int32_t>(tokens),
                     read<float>(log_probs),
                     read<int32_t>(other_tokens),
                     read<float>(other_log_probs),
                     read<float>(weight),
                     index ? read<int32_t>(*index) : nullptr,
                     written<int32_t>(std::get<0>(outputs)),
                     written<float>(std::get<1>(outputs))};
  const MixSizes sizes{static_cast<int>(branch), static_cast<int>(others),
                       table ? static_cast<int>(weight.size(0)) : 0};
  return {sizes, args, batch * rows, std::move(outputs)};
}

}  // namespace gsd
