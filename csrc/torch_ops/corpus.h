// The index, graph and text of corpus_recall.
#pragma once

#include "../algorithms/corpus.h"
#include "op.h"

namespace gsd {

struct CorpusCall {
  CorpusSizes sizes;
  CorpusArgs args;
  int64_t batch;
};

inline CorpusCall prepare_corpus(Arguments& in) {
  constexpr int64_t kMost = 1 << 30;
  STD_TORCH_CHECK(in['K'] >= 0 && in['K'] <= kCorpusTokens, "branch: expected 0 ... ", kCorpusTokens, ", got ", in['K']);
  STD_TORCH_CHECK(in['V'] >= 1 && in['V'] < kMost && in['N'] < kMost, "vocab: expected a vocabulary size, got ", in['V']);
  const CorpusIndex index{in.next(), in.next(), in.next(), in['T'], in['E']};
  const CorpusArgs args{index,     in.next(), in.next(), in.next(), in.next(),
                        in.next(), in.next(), in.next(), in.next(), in.next()};
  return {{in.size('N'), in.size('W'), in.size('K'), in.size('V'), in['S']}, args, in['B']};
}

}  // namespace gsd
