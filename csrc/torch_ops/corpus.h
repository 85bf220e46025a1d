// The index, graph and text of corpus_recall.
#pragma once

#include <tuple>
#include <utility>

#include "../algorithms/corpus.h"
#include "common.h"

namespace gsd {

using CorpusOutputs = std::tuple<Tensor, Tensor, Tensor>;

struct CorpusCall {
  CorpusSizes sizes;
  CorpusArgs args;
  int64_t rows;  // B·W
  CorpusOutputs outputs;
};

inline CorpusCall prepare_corpus(const Tensor& text, const Tensor& order, const Tensor& following,
                                 const Tensor& token_ids, const Tensor& parents, const Tensor& tokens,
                                 const Tensor& out_len, const Tensor& kv_start, const Tensor& frontier, int64_t branch,
                                 int64_t vocab) {
  check("order", order, ScalarType::Int, {kAny});
  check("token_ids", token_ids, ScalarType::Int, {kAny, kAny});
  const int64_t batch = token_ids.size(0), nodes = token_ids.size(1);
  check("frontier", frontier, ScalarType::Int, {batch, kAny});
  constexpr int64_t kMost = 1 << 30;
  STD_TORCH_CHECK(branch >= 0 && branch <= kCorpusTokens, "branch: expected 0 ... ", kCorpusTokens, ", got ", branch);
  STD_TORCH_CHECK(vocab >= 1 && vocab < kMost && nodes < kMost, "vocab: expected a vocabulary size, got ", vocab);
  const int64_t width = frontier.size(1);
  CorpusOutputs outputs{new_int32(frontier, {batch, width, branch}),
                        torch::stable::new_empty(frontier, {batch, width, branch}, ScalarType::Float),
                        new_int32(frontier, {batch, width})};
  const CorpusArgs args{{read<int32_t>("text", text, {kAny}), read<int32_t>(order),
                         read<int32_t>("following", following, {order.size(0)}), text.size(0), order.size(0)},
                        read<int32_t>(token_ids),
                        read<int32_t>("parents", parents, {batch, nodes}),
                        read<int64_t>("tokens", tokens, {batch, kAny}),
                        read<int32_t>("out_len", out_len, {batch}),
                        read<int32_t>("kv_start", kv_start, {batch}),
                        read<int32_t>(frontier),
                        written<int32_t>(std::get<0>(outputs)),
                        written<float>(std::get<1>(outputs)),
                        written<int32_t>(std::get<2>(outputs))};
  const CorpusSizes sizes{static_cast<int>(nodes), static_cast<int>(width), static_cast<int>(branch),
                          static_cast<int>(vocab), tokens.size(1)};
  return {sizes, args, batch * width, std::move(outputs)};
}

}  // namespace gsd
