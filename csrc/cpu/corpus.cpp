// corpus_recall on CPU tensors: csrc/algorithms/corpus.h, a row after the other. The index is mapped from its files, so
// what a look-up touches is all that is read of them.

#include "../torch_ops/corpus.h"

namespace gsd {
namespace {

constexpr int64_t kRowsPerThread = 16;  // microseconds each

CorpusOutputs corpus_recall(const Tensor& text, const Tensor& order, const Tensor& following, const Tensor& token_ids,
                            const Tensor& parents, const Tensor& tokens, const Tensor& out_len, const Tensor& kv_start,
                            const Tensor& frontier, int64_t branch, int64_t vocab) {
  const CorpusCall call = prepare_corpus(text, order, following, token_ids, parents, tokens, out_len, kv_start,
                                         frontier, branch, vocab);
  torch::stable::parallel_for(0, call.rows, kRowsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) corpus_recall_row(call.args, call.sizes, row);
  });
  return call.outputs;
}

}  // namespace
}  // namespace gsd

STABLE_TORCH_LIBRARY_IMPL(gsd_kernels, CPU, m) { m.impl("corpus_recall", TORCH_BOX(&gsd::corpus_recall)); }
