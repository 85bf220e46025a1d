// The table and rows of the n-gram ops; the candidates of those that perturb and mix them.
#pragma once

#include "../algorithms/ngram.h"
#include "op.h"

namespace gsd {

constexpr int64_t kMostEntries = 1 << 30;

// `capacity` entries of `branch` continuations each, in sets of `ways`; `rows` contexts of `context` tokens.
inline NgramSizes ngram_sizes(int64_t capacity, int64_t ways, int64_t branch, int64_t rows, int64_t context,
                              int64_t max_context) {
  STD_TORCH_CHECK(capacity >= 1 && capacity <= kMostEntries && (capacity & (capacity - 1)) == 0,
                  "keys: expected a power of two of entries, got ", capacity);
  const int64_t most = kMostWays < capacity ? kMostWays : capacity;
  STD_TORCH_CHECK(ways >= 1 && ways <= most && (ways & (ways - 1)) == 0, "ways: expected a power of two up to ", most,
                  ", got ", ways);
  STD_TORCH_CHECK(max_context >= 1 && max_context <= kMostLengths && max_context <= context,
                  "contexts: expected at least ", max_context, " tokens of each, 1 ... ", kMostLengths, ", got ",
                  context);
  STD_TORCH_CHECK(rows < kMostEntries / kMostLengths && branch < kMostEntries, "contexts: too many rows, ", rows);
  return {narrow(capacity), narrow(ways), narrow(branch), narrow(rows), narrow(context), narrow(max_context)};
}

inline NgramSizes ngram_sizes(const Arguments& in) {
  return ngram_sizes(in['C'], in['w'], in['T'], in['R'], in['X'], in['m']);
}

template <class Args>
auto prepare_ngram(Arguments& in) {
  return Call{ngram_sizes(in), in.each<Args>(), in['B']};
}

inline auto prepare_perturb(Arguments& in) {
  return Call{PerturbSizes{in.size('R'), in.size('K')}, in.each<PerturbArgs>(), in['B']};
}

// A row in place of a sequence.
inline auto prepare_mix(Arguments& in) {
  const Tensor& weight = in.tensor("weight");
  const bool table = weight.dim() == 1;
  STD_TORCH_CHECK(table ? weight.size(0) >= 1
                        : weight.dim() == 2 && weight.size(0) == in['B'] && weight.size(1) == in['R'],
                  "weight: expected a table of at least one entry, or one of each of ", in['B'], " x ", in['R'], " rows");
  STD_TORCH_CHECK(table || !in.has("index"), "index: expected a table of weights with it, got one for each row");
  constexpr int64_t kMost = 8192;  // their probabilities lie in shared memory
  STD_TORCH_CHECK(in['K'] + in['O'] <= kMost, "other_tokens: expected at most ", kMost, " candidates in all, got ",
                  in['K'] + in['O']);
  const MixSizes sizes{in.size('K'), in.size('O'), table ? narrow(weight.size(0)) : 0};
  Call call{sizes, in.each<MixArgs>("BR"), in['B'] * in['R']};
  constexpr size_t kWeight = offsetof(MixArgs, weight) / sizeof(char*);
  call.args.steps[kWeight] = table ? 0 : sizeof(float);  // of which the line does not say the shape
  return call;
}

}  // namespace gsd
