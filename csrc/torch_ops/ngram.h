// The table and rows of the n-gram ops; the candidates of those that perturb and mix them.
#pragma once

#include "../algorithms/ngram.h"
#include "common.h"

namespace gsd {

constexpr int64_t kMostEntries = 1 << 30;

// The tensors of an NgramTable.
struct NgramTensors {
  NgramTable data;  // of the first sequence
  int64_t batch, capacity, branch;

  static NgramTensors of(const Tensor& keys, const Tensor& tokens, const Tensor& log_probs) {
    int64_t* const all = written<int64_t>("keys", keys, {kAny, kAny});
    const int64_t batch = keys.size(0), capacity = keys.size(1);
    STD_TORCH_CHECK(capacity >= 1 && capacity <= kMostEntries && (capacity & (capacity - 1)) == 0,
                    "keys: expected a power of two of entries, got ", capacity);
    int32_t* const continuations = written<int32_t>("table_tokens", tokens, {batch, capacity, kAny});
    const int64_t branch = tokens.size(2);
    return {{all, continuations, written<float>("table_log_probs", log_probs, {batch, capacity, branch})},
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
  return {narrow(table.capacity), narrow(ways),    narrow(table.branch),
          narrow(rows),           narrow(context), narrow(max_context)};
}

using NgramInsertCall = Call<NgramSizes, NgramInsertArgs>;

inline NgramInsertCall prepare_ngram_insert(const Tensor& keys, const Tensor& table_tokens,
                                            const Tensor& table_log_probs, const Tensor& contexts,
                                            const Tensor& tokens, const Tensor& log_probs, const Tensor& valid,
                                            int64_t max_context, int64_t ways) {
  const NgramTensors table = NgramTensors::of(keys, table_tokens, table_log_probs);
  const int64_t batch = table.batch, branch = table.branch;
  const int32_t* given = read<int32_t>("contexts", contexts, {batch, kAny, kAny});
  const int64_t rows = contexts.size(1);
  const NgramSizes sizes = ngram_sizes(table, rows, contexts.size(2), max_context, ways);
  const NgramInsertArgs args{table.data,
                             given,
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
  const int32_t* drafted = read<int32_t>("token_ids", token_ids, {batch, kAny});
  const int64_t rows = token_ids.size(1);
  const NgramTree tree{drafted, read<int32_t>("parent_rows", parent_rows, {batch, rows}),
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

using NgramLookupCall = Call<NgramSizes, NgramLookupArgs, 3>;
using NgramRecallCall = Call<NgramSizes, NgramRecallArgs, 3>;

inline NgramLookupCall prepare_ngram_lookup(const Tensor& keys, const Tensor& table_tokens,
                                            const Tensor& table_log_probs, const Tensor& contexts, int64_t max_context,
                                            int64_t ways) {
  const NgramTensors table = NgramTensors::of(keys, table_tokens, table_log_probs);
  const int64_t batch = table.batch;
  const int32_t* given = read<int32_t>("contexts", contexts, {batch, kAny, kAny});
  const int64_t rows = contexts.size(1);
  const NgramSizes sizes = ngram_sizes(table, rows, contexts.size(2), max_context, ways);
  Fresh<3> found(contexts);
  const NgramLookupArgs args{table.data, given, found.of<int32_t>({batch, rows, table.branch}),
                             found.of<float>({batch, rows, table.branch}), found.of<int32_t>({batch, rows})};
  return {sizes, args, batch, found.results()};
}

// The nodes of a graph, all that a recall reads of it.
struct NodeTensors {
  const int32_t *token_ids, *contexts, *depths;
  int64_t nodes, context;

  static NodeTensors of(const Tensor& token_ids, const Tensor& contexts, const Tensor& depths, int64_t batch) {
    const int32_t* drafted = read<int32_t>("token_ids", token_ids, {batch, kAny});
    const int64_t nodes = token_ids.size(1);
    const int32_t* before = read<int32_t>("contexts", contexts, {batch, nodes, kAny});
    return {drafted, before, read<int32_t>("depths", depths, {batch, nodes}), nodes, contexts.size(2)};
  }
};

// Rows of nodes that are asked about, without the nodes and where what is found goes.
struct RecallAsked {
  NgramSizes sizes;
  NgramRecallArgs args;

  static RecallAsked of(const NgramTensors& table, const NodeTensors& graph, int64_t rows, int64_t wanted,
                        int64_t max_context, int64_t ways, const MaybeTensor& first_pick, const MaybeTensor& seed,
                        const MaybeTensor& sequence_ids) {
    const int64_t batch = table.batch;
    STD_TORCH_CHECK(graph.nodes >= 1, "token_ids: expected at least one node");
    const NgramSizes sizes = ngram_sizes(table, rows, graph.context, max_context, ways);
    STD_TORCH_CHECK(wanted >= 0 && wanted <= sizes.branch, "branch: expected at most ", sizes.branch, ", got ", wanted);
    STD_TORCH_CHECK(first_pick.has_value() == seed.has_value() && seed.has_value() == sequence_ids.has_value(),
                    "first_pick, seed, sequence_ids: expected all or none");
    NgramRecallArgs args{};
    args.table = table.data;
    args.token_ids = graph.token_ids, args.contexts = graph.contexts, args.depths = graph.depths;
    args.first_pick = read<int32_t>("first_pick", first_pick, {batch});
    args.seed = read<int64_t>("seed", seed, {});
    args.sequence_ids = read<int32_t>("sequence_ids", sequence_ids, {batch});
    args.graph_nodes = narrow(graph.nodes), args.wanted = narrow(wanted);
    return {sizes, args};
  }
};

inline NgramRecallCall prepare_recall(const NgramTensors& table, const NodeTensors& graph, const Tensor& nodes,
                                      int64_t wanted, int64_t max_context, int64_t ways,
                                      const MaybeTensor& first_pick, const MaybeTensor& seed,
                                      const MaybeTensor& sequence_ids) {
  const int64_t batch = table.batch;
  const int32_t* ids = read<int32_t>("nodes", nodes, {batch, kAny});
  auto [sizes, args] =
      RecallAsked::of(table, graph, nodes.size(1), wanted, max_context, ways, first_pick, seed, sequence_ids);
  Fresh<3> found(nodes);
  args.nodes = ids;
  args.tokens = found.of<int32_t>({batch, sizes.rows, wanted});
  args.log_probs = found.of<float>({batch, sizes.rows, wanted});
  args.matched = found.of<int32_t>({batch, sizes.rows});
  return {sizes, args, batch, found.results()};
}

struct PerturbCall {
  PerturbArgs args;
  int64_t rows;  // of all sequences
  Tensor outputs;
};

inline PerturbCall prepare_perturb(const Tensor& tokens, const Tensor& log_probs, const Tensor& positions,
                                   const Tensor& seed, const Tensor& sequence_ids) {
  const int32_t* ids = read<int32_t>("tokens", tokens, {kAny, kAny, kAny});
  const int64_t batch = tokens.size(0), rows = tokens.size(1), branch = tokens.size(2);
  Tensor output = fresh<float>(tokens, {batch, rows, branch});
  const PerturbArgs args{ids,
                         read<float>("log_probs", log_probs, {batch, rows, branch}),
                         read<int32_t>("positions", positions, {batch, rows}),
                         read<int64_t>("seed", seed, {}),
                         read<int32_t>("sequence_ids", sequence_ids, {batch}),
                         written<float>(output),
                         narrow(rows),
                         narrow(branch)};
  return {args, batch * rows, std::move(output)};
}

using MixCall = Call<MixSizes, MixArgs, 2>;  // a row in place of a sequence

inline MixCall prepare_mix(const Tensor& tokens, const Tensor& log_probs, const Tensor& other_tokens,
                           const Tensor& other_log_probs, const Tensor& weight, const MaybeTensor& index) {
  const int32_t* ids = read<int32_t>("tokens", tokens, {kAny, kAny, kAny});
  const int64_t batch = tokens.size(0), rows = tokens.size(1), branch = tokens.size(2);
  const int32_t* other_ids = read<int32_t>("other_tokens", other_tokens, {batch, rows, kAny});
  const int64_t others = other_tokens.size(2);
  const bool table = weight.dim() == 1;
  const float* weights = table ? read<float>("weight", weight, {kAny}) : read<float>("weight", weight, {batch, rows});
  STD_TORCH_CHECK(!table || weight.size(0) >= 1, "weight: expected at least one entry");
  STD_TORCH_CHECK(table || !index, "index: expected a table of weights with it, got one for each row");
  constexpr int64_t kMost = 8192;  // their probabilities lie in shared memory
  STD_TORCH_CHECK(branch + others <= kMost, "other_tokens: expected at most ", kMost, " candidates in all, got ",
                  branch + others);
  Fresh<2> mixed(tokens);
  const MixArgs args{ids,
                     read<float>("log_probs", log_probs, {batch, rows, branch}),
                     other_ids,
                     read<float>("other_log_probs", other_log_probs, {batch, rows, others}),
                     weights,
                     read<int32_t>("index", index, {batch, rows}),
                     mixed.of<int32_t>({batch, rows, branch}),
                     mixed.of<float>({batch, rows, branch})};
  const MixSizes sizes{narrow(branch), narrow(others), table ? narrow(weight.size(0)) : 0};
  return {sizes, args, batch * rows, mixed.results()};
}

}  // namespace gsd
