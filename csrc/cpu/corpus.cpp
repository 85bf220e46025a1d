// corpus_recall on CPU tensors: csrc/algorithms/corpus.h, a row after the other. The index is mapped from its files, so
// what a look-up touches is all that is read of them.

#include "../torch_ops/corpus.h"
#include "../torch_ops/registration.h"

namespace gsd {
namespace {

constexpr int64_t kRowsPerThread = 16;  // microseconds each

void recall(const CorpusCall& call) {
  torch::stable::parallel_for(0, call.batch * call.sizes.frontier, kRowsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) corpus_recall_row(call.args, call.sizes, row);
  });
}

}  // namespace
}  // namespace gsd

GSD_OPS(CPU, m) {
  gsd::Op<gsd::prepare_corpus, gsd::recall>::add(m, "corpus_recall");
}
