// The index, graph and text of corpus_recall.
#pragma once

#include "../algorithms/corpus.h"
#include "common.h"

namespace gsd {

struct CorpusCall {
  CorpusSizes sizes;
  CorpusArgs args;
  int64_t rows;  // B·W
  Fresh<3>::Results outputs;
};

inline CorpusCall prepare_corpus(const Tensor& text, const Tensor& order, const Tensor& following,
                                 const Tensor& token_ids, const Tensor& parents, const Tensor& tokens,
                                 const Tensor& out_len, const Tensor& kv_start, const Tensor& frontier, int64_t branch,
                                 int64_t vocab) {
  const int32_t* entries = read<int32_t>("order", order, {kAny});
  const int32_t* drafted = read<int32_t>("token_ids", token_ids, {kAny, kAny});
  const int64_t batch = token_ids.size(0), nodes = token_ids.size(1);
  const int32_t* asked = read<int32_t>("frontier", frontier, {batch, kAny});
  constexpr int64_t kMost = 1 << 30;
  STD_TORCH_CHECK(branch >= 0 && branch <= kCorpusTokens, "branch: expected 0 ... ", kCorpusTokens, ", got ", branch);
  STD_TORCH_CHECK(vocab >= 1 && vocab < kMost && nodes < kMost, "vocab: expected a vocabulary size, got ", vocab);
  const int64_t width = frontier.size(1);
  Fresh<3> found(frontier);
  const CorpusArgs args{{read<int32_t>("text", text, {kAny}), entries,
                         read<int32_t>("following", following, {order.size(0)}), text.size(0), order.size(0)},
                        drafted,
                        read<int32_t>("parents", parents, {batch, nodes}),
                        read<int64_t>("tokens", tokens, {batch, kAny}),
                        read<int32_t>("out_len", out_len, {batch}),
                        read<int32_t>("kv_start", kv_start, {batch}),
                        asked,
                        found.of<int32_t>({batch, width, branch}),
                        found.of<float>({batch, width, branch}),
                        found.of<int32_t>({batch, width})};
  const CorpusSizes sizes{narrow(nodes), narrow(width), narrow(branch),
                          narrow(vocab), tokens.size(1)};
  return {sizes, args, batch * width, found.results()};
}

}  // namespace gsd
