// The n-gram table's ops on CPU tensors: csrc/algorithms/ngram.h run by a group of one thread a sequence.

#include "../torch_ops/ngram.h"
#include "sequences.h"

namespace gsd {
namespace {

void ngram_insert(const Tensor& keys, const Tensor& table_tokens, const Tensor& table_log_probs,
                  const Tensor& contexts, const Tensor& tokens, const Tensor& log_probs, const Tensor& valid,
                  int64_t max_context, int64_t ways) {
  const NgramInsertCall call = prepare_ngram_insert(keys, table_tokens, table_log_probs, contexts, tokens, log_probs,
                                                    valid, max_context, ways);
  for_each_sequence(call.batch, NgramArena::bytes(call.sizes), [&](int64_t b, char* arena) {
    SerialGroup group;
    insert_rows(group, call.args.at(call.sizes, b), call.sizes, arena);
  });
}

NgramLookupOutputs ngram_lookup(const Tensor& keys, const Tensor& table_tokens, const Tensor& table_log_probs,
                                const Tensor& contexts, int64_t max_context, int64_t ways) {
  const NgramLookupCall call =
      prepare_ngram_lookup(keys, table_tokens, table_log_probs, contexts, max_context, ways);
  for_each_sequence(call.batch, 0, [&](int64_t b, char*) {
    SerialGroup group;
    look_up_rows(group, call.args.at(call.sizes, b), call.sizes);
  });
  return call.outputs;
}

Tensor perturb_candidates(const Tensor& tokens, const Tensor& log_probs, const Tensor& positions, const Tensor& seed,
                          const Tensor& sequence_ids) {
  const PerturbCall call = prepare_perturb(tokens, log_probs, positions, seed, sequence_ids);
  for (int64_t row = 0; row < call.rows; row++) perturb_row(call.args, row);
  return call.output;
}

MixOutputs mix_candidates(const Tensor& tokens, const Tensor& log_probs, const Tensor& other_tokens,
                          const Tensor& other_log_probs, const Tensor& weight) {
  const MixCall call = prepare_mix(tokens, log_probs, other_tokens, other_log_probs, weight);
  for_each_sequence(call.rows, MixArena::bytes(call.sizes), [&](int64_t row, char* arena) {
    SerialGroup group;
    mix_row(group, call.args.at(call.sizes, row), call.sizes, arena);
  });
  return call.outputs;
}

}  // namespace
}  // namespace gsd

STABLE_TORCH_LIBRARY_IMPL(gsd_kernels, CPU, m) {
  m.impl("ngram_insert", TORCH_BOX(&gsd::ngram_insert));
  m.impl("ngram_lookup", TORCH_BOX(&gsd::ngram_lookup));
  m.impl("perturb_candidates", TORCH_BOX(&gsd::perturb_candidates));
  m.impl("mix_candidates", TORCH_BOX(&gsd::mix_candidates));
}
