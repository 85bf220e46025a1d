// The n-gram table's ops on CPU tensors: csrc/algorithms/ngram.h run by a group of one thread a sequence.

#include "../torch_ops/ngram.h"
#include "sequences.h"

namespace gsd {
namespace {

void ngram_insert(const Tensor& keys, const Tensor& table_tokens, const Tensor& table_log_probs,
                  const Tensor& contexts, const Tensor& tokens, const Tensor& log_probs, const Tensor& valid,
                  int64_t max_context, int64_t ways) {
  const NgramInsertCall call = prepare_ngram_insert(NgramTensors::of(keys, table_tokens, table_log_probs), contexts,
                                                    tokens, log_probs, valid, max_context, ways);
  for_each_sequence(call.batch, NgramArena::bytes(call.sizes), [&](int64_t b, char* arena) {
    SerialGroup group;
    insert_rows(group, call.args.at(call.sizes, b), call.sizes, arena);
  });
}

NgramLookupOutputs ngram_lookup(const Tensor& keys, const Tensor& table_tokens, const Tensor& table_log_probs,
                                const Tensor& contexts, int64_t max_context, int64_t ways) {
  const NgramLookupCall call =
      prepare_ngram_lookup(NgramTensors::of(keys, table_tokens, table_log_probs), contexts, max_context, ways);
  for_each_sequence(call.batch, 0, [&](int64_t b, char*) {
    SerialGroup group;
    look_up_rows(group, call.args.at(call.sizes, b), call.sizes);
  });
  return call.outputs;
}

void ngram_remember(const Tensor& keys, const Tensor& table_tokens, const Tensor& table_log_probs,
                    const Tensor& token_ids, const Tensor& parent_rows, const Tensor& depths, const Tensor& num_rows,
                    const Tensor& tail, const Tensor& tokens, const Tensor& log_probs, int64_t max_context,
                    int64_t ways) {
  const NgramInsertCall call =
      prepare_ngram_remember(NgramTensors::of(keys, table_tokens, table_log_probs), token_ids, parent_rows, depths,
                             num_rows, tail, tokens, log_probs, max_context, ways);
  for_each_sequence(call.batch, NgramArena::bytes(call.sizes), [&](int64_t b, char* arena) {
    SerialGroup group;
    insert_rows(group, call.args.at(call.sizes, b), call.sizes, arena);
  });
}

NgramLookupOutputs ngram_recall(const Tensor& keys, const Tensor& table_tokens, const Tensor& table_log_probs,
                                const Tensor& token_ids, const Tensor& contexts, const Tensor& depths,
                                const Tensor& nodes, int64_t branch, int64_t max_context, int64_t ways,
                                const std::optional<Tensor>& first_pick, const std::optional<Tensor>& seed,
                                const std::optional<Tensor>& sequence_ids) {
  const NgramTensors table = NgramTensors::of(keys, table_tokens, table_log_probs);
  const NgramRecallCall call =
      prepare_ngram_recall(table, NodeTensors::of(token_ids, contexts, depths, table.batch), nodes, branch, max_context,
                           ways, first_pick, seed, sequence_ids);
  for_each_sequence(call.batch, 0, [&](int64_t b, char*) {
    SerialGroup group;
    recall_nodes(group, call.args.at(call.sizes, b), call.sizes);
  });
  return call.outputs;
}

Tensor calibrate_candidates(const Tensor& log_probs, const Tensor& log_ratio, const std::optional<Tensor>& index,
                            const std::optional<Tensor>& edges) {
  const CalibrateCall call = prepare_calibrate(log_probs, log_ratio, index, edges);
  for (int64_t i = 0; i < call.candidates; i++) calibrate_candidate(call.args, i);
  return call.output;
}

Tensor perturb_candidates(const Tensor& tokens, const Tensor& log_probs, const Tensor& positions, const Tensor& seed,
                          const Tensor& sequence_ids) {
  const PerturbCall call = prepare_perturb(tokens, log_probs, positions, seed, sequence_ids);
  for (int64_t row = 0; row < call.rows; row++) perturb_row(call.args, row);
  return call.output;
}

MixOutputs mix_candidates(const Tensor& tokens, const Tensor& log_probs, const Tensor& other_tokens,
                          const Tensor& other_log_probs, const Tensor& weight, const std::optional<Tensor>& index) {
  const MixCall call = prepare_mix(tokens, log_probs, other_tokens, other_log_probs, weight, index);
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
  m.impl("ngram_remember", TORCH_BOX(&gsd::ngram_remember));
  m.impl("ngram_recall", TORCH_BOX(&gsd::ngram_recall));
  m.impl("calibrate_candidates", TORCH_BOX(&gsd::calibrate_candidates));
  m.impl("perturb_candidates", TORCH_BOX(&gsd::perturb_candidates));
  m.impl("mix_candidates", TORCH_BOX(&gsd::mix_candidates));
}
