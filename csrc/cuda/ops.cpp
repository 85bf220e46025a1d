// The CUDA ops: tensors checked and unpacked, kernels launched on torch's current stream. Compiled by the C++ compiler;
// no CUDA header is needed.
#include "../torch_ops/commit_kv.h"
#include "../torch_ops/dag_attention.h"
#include "../torch_ops/flatten.h"
#include "../torch_ops/learn.h"
#include "../torch_ops/merge.h"
#include "../torch_ops/ngram.h"
#include "../torch_ops/step.h"
#include "../torch_ops/verify.h"
#include "glue.h"
#include "launch.h"

namespace gsd {
namespace {

MergeOutputs merge(const std::vector<Tensor>& graph, const Tensor& frontier, const Tensor& cand_tokens,
                   const Tensor& cand_log_probs, int64_t level, int64_t width, int64_t merge_context,
                   double log_sibling_ratio, double log_min_prob) {
  check_device({&frontier, &cand_tokens, &cand_log_probs});
  check_device(frontier, graph);
  const DeviceGuard guard(frontier.get_device_index());
  const MergeCall call = prepare_merge(GraphTensors::of(graph), frontier, cand_tokens, cand_log_probs, level, width,
                                       merge_context, log_sibling_ratio, log_min_prob);
  check_launch(launch_merge(call.args, call.sizes, call.batch, current_stream(frontier)));
  return call.outputs;
}

FlattenOutputs flatten(const Tensor& token_ids, const Tensor& edge_targets, const Tensor& edge_log_probs,
                       int64_t max_rows, int64_t max_path) {
  check_device({&token_ids, &edge_targets, &edge_log_probs});
  const DeviceGuard guard(token_ids.get_device_index());
  const FlattenCall call = prepare_flatten(token_ids, edge_targets, edge_log_probs, max_rows, max_path);
  check_launch(launch_flatten(call.args, call.sizes, call.batch, current_stream(token_ids)));
  return call.outputs;
}

VerifyOutputs verify(const Tensor& token_ids, const Tensor& parent_rows, const Tensor& depths,
                     const Tensor& ancestor_mask, const Tensor& num_rows, const Tensor& sampled, const Tensor& eos_ids,
                     const Tensor& remaining, const Tensor& done, int64_t max_path) {
  check_device({&token_ids, &parent_rows, &depths, &ancestor_mask, &num_rows, &sampled, &eos_ids, &remaining, &done});
  const DeviceGuard guard(token_ids.get_device_index());
  const VerifyCall call = prepare_verify(token_ids, parent_rows, depths, ancestor_mask, num_rows, sampled, eos_ids,
                                         remaining, done, max_path);
  check_launch(launch_verify(call.args, call.sizes, call.batch, current_stream(token_ids)));
  return call.outputs;
}

bool same_geometry(const CacheTensor& a, const CacheTensor& b) {
  return a.batch_stride == b.batch_stride && a.head_stride == b.head_stride && a.slot_stride == b.slot_stride &&
         a.heads == b.heads && a.row_bytes == b.row_bytes;
}

void commit_kv(const std::vector<Tensor>& k_caches, const std::vector<Tensor>& v_caches, const Tensor& accepted_rows,
               const Tensor& num_accepted, const Tensor& kv_len) {
  check_device({&accepted_rows, &num_accepted, &kv_len});
  for (const auto* list : {&k_caches, &v_caches}) check_device(kv_len, *list);
  const DeviceGuard guard(kv_len.get_device_index());
  std::vector<CacheTensor> waiting = cache_tensors(k_caches, v_caches, accepted_rows, num_accepted, kv_len);
  const int64_t batch = accepted_rows.size(0);
  void* stream = current_stream(kv_len);

  // One launch for each geometry: one in all for models whose layers are alike.
  while (!waiting.empty()) {
    const CacheTensor like = waiting.front();
    CommitArgs args{};
    args.heads = static_cast<int>(like.heads);
    args.row_bytes = static_cast<int>(like.row_bytes);
    args.path = static_cast<int>(accepted_rows.size(1));
    args.batch_stride = like.batch_stride;
    args.head_stride = like.head_stride;
    args.slot_stride = like.slot_stride;
    args.accepted_rows = read<int32_t>(accepted_rows);
    args.num_accepted = read<int32_t>(num_accepted);
    args.kv_len = read<int32_t>(kv_len);
    std::vector<CacheTensor> later;
    for (const CacheTensor& cache : waiting) {
      if (args.num_caches < kMaxCaches && same_geometry(cache, like)) {
        args.caches[args.num_caches++] = cache.data;
      } else {
        later.push_back(cache);
      }
    }
    check_launch(launch_commit(args, batch, stream));
    waiting = std::move(later);
  }
  // Apart from the copies, whose blocks all read the old lengths.
  check_launch(launch_advance(written<int32_t>(kv_len), read<int32_t>(num_accepted), batch, stream));
}

struct WarperTensors {
  const std::optional<Tensor>&temperatures, &top_ks, &top_ps, &min_ps;
};

LogitType logit_type(const Tensor& logits) {
  switch (logits.scalar_type()) {
    case ScalarType::Float:
      return LogitType::kFloat32;
    case ScalarType::Half:
      return LogitType::kFloat16;
    case ScalarType::BFloat16:
      return LogitType::kBfloat16;
    case ScalarType::Double:
      return LogitType::kFloat64;
    default:
      STD_TORCH_CHECK(false, "logits: expected float64, float32, float16 or bfloat16");
  }
}

// A row's distribution, cut by the warpers, is common to the sampling ops; what is drawn from it is theirs to add.
PickBatch pick_batch(const Tensor& logits, const Tensor& scores, const Warpers& shared, const WarperTensors& own) {
  check_device({&logits, &scores});
  STD_TORCH_CHECK(logits.dim() == 3 && logits.size(2) >= 1 && logits.size(2) < (1 << 30) && logits.is_contiguous(),
                  "logits: expected [batch, rows, vocabulary], contiguous");
  const auto values = [&](const std::optional<Tensor>& t) -> const float* {
    if (!t) return nullptr;
    check_device({&logits, &*t});
    check("warpers", *t, ScalarType::Float, {logits.size(0)});
    return read<float>(*t);
  };
  PickBatch args{};
  args.logits = logits.const_data_ptr();
  args.scores = written<float>(scores);
  args.shared = shared;
  args.temperatures = values(own.temperatures);
  args.top_ks = values(own.top_ks);
  args.top_ps = values(own.top_ps);
  args.min_ps = values(own.min_ps);
  args.rows = static_cast<int>(logits.size(1));
  return args;
}

void launch_rows(const Tensor& logits, const PickBatch& args, int64_t branch, bool noise) {
  const PickSizes sizes{static_cast<int>(logits.size(2)), static_cast<int>(branch), noise};
  check_launch(launch_pick(args, sizes, logit_type(logits), logits.size(0) * logits.size(1), current_stream(logits)));
}

void pick(const Tensor& logits, const Tensor& positions, int64_t branch, const Tensor& seed,
          const Tensor& sequence_ids, const Warpers& shared, const WarperTensors& own, bool noise,
          const Tensor& tokens, const Tensor* log_probs) {
  check_device({&logits, &positions, &seed, &sequence_ids});
  const Tensor scores = torch::stable::new_empty(logits, logits.sizes(), ScalarType::Float);
  PickBatch args = pick_batch(logits, scores, shared, own);
  check("positions", positions, ScalarType::Int, {logits.size(0), logits.size(1)});
  check("seed", seed, ScalarType::Long, {});
  check("sequence_ids", sequence_ids, ScalarType::Int, {logits.size(0)});
  args.tokens = written<int32_t>(tokens);
  args.log_probs = log_probs != nullptr ? written<float>(*log_probs) : nullptr;
  args.positions = read<int32_t>(positions);
  args.seed = read<int64_t>(seed);
  args.sequence_ids = read<int32_t>(sequence_ids);
  launch_rows(logits, args, branch, noise);
}

Warpers warpers(double temperature, int64_t top_k, double top_p, double min_p) {
  return {static_cast<float>(temperature), static_cast<float>(top_k), static_cast<float>(top_p),
          static_cast<float>(min_p)};
}

Tensor sample_rows(const Tensor& logits, const Tensor& positions, const Tensor& seed, const Tensor& sequence_ids,
                   double temperature, int64_t top_k, double top_p, double min_p,
                   const std::optional<Tensor>& temperatures, const std::optional<Tensor>& top_ks,
                   const std::optional<Tensor>& top_ps, const std::optional<Tensor>& min_ps) {
  const DeviceGuard guard(logits.get_device_index());
  const Tensor tokens = new_int32(positions, {positions.size(0), positions.size(1)});
  pick(logits, positions, 1, seed, sequence_ids, warpers(temperature, top_k, top_p, min_p),
       {temperatures, top_ks, top_ps, min_ps}, true, tokens, nullptr);
  return tokens;
}

std::tuple<Tensor, Tensor> draft_candidates(const Tensor& logits, const Tensor& positions, int64_t branch,
                                            const Tensor& seed, const Tensor& sequence_ids, double temperature,
                                            int64_t top_k, double top_p, double min_p,
                                            const std::optional<Tensor>& temperatures,
                                            const std::optional<Tensor>& top_ks, const std::optional<Tensor>& top_ps,
                                            const std::optional<Tensor>& min_ps, bool noise) {
  STD_TORCH_CHECK(branch >= 1 && branch <= 1024, "branch: expected 1 ... 1024, got ", branch);
  const DeviceGuard guard(logits.get_device_index());
  const Tensor tokens = new_int32(positions, {positions.size(0), positions.size(1), branch});
  const Tensor log_probs =
      torch::stable::new_empty(positions, {positions.size(0), positions.size(1), branch}, ScalarType::Float);
  pick(logits, positions, branch, seed, sequence_ids, warpers(temperature, top_k, top_p, min_p),
       {temperatures, top_ks, top_ps, min_ps}, noise, tokens, &log_probs);
  return {tokens, log_probs};
}

Tensor warped_log_probs(const Tensor& logits, double temperature, int64_t top_k, double top_p, double min_p,
                        const std::optional<Tensor>& temperatures, const std::optional<Tensor>& top_ks,
                        const std::optional<Tensor>& top_ps, const std::optional<Tensor>& min_ps) {
  const DeviceGuard guard(logits.get_device_index());
  const Tensor log_probs = torch::stable::new_empty(logits, logits.sizes(), ScalarType::Float);
  const PickBatch args = pick_batch(logits, log_probs, warpers(temperature, top_k, top_p, min_p),
                                    {temperatures, top_ks, top_ps, min_ps});
  launch_rows(logits, args, 0, false);
  return log_probs;
}

void ngram_insert(const Tensor& keys, const Tensor& table_tokens, const Tensor& table_log_probs,
                  const Tensor& contexts, const Tensor& tokens, const Tensor& log_probs, const Tensor& valid,
                  int64_t max_context, int64_t ways) {
  check_device({&keys, &table_tokens, &table_log_probs, &contexts, &tokens, &log_probs, &valid});
  const DeviceGuard guard(keys.get_device_index());
  const NgramInsertCall call = prepare_ngram_insert(NgramTensors::of(keys, table_tokens, table_log_probs), contexts,
                                                    tokens, log_probs, valid, max_context, ways);
  check_launch(launch_ngram_insert(call.args, call.sizes, call.batch, current_stream(keys)));
}

NgramLookupOutputs ngram_lookup(const Tensor& keys, const Tensor& table_tokens, const Tensor& table_log_probs,
                                const Tensor& contexts, int64_t max_context, int64_t ways) {
  check_device({&keys, &table_tokens, &table_log_probs, &contexts});
  const DeviceGuard guard(keys.get_device_index());
  const NgramLookupCall call =
      prepare_ngram_lookup(NgramTensors::of(keys, table_tokens, table_log_probs), contexts, max_context, ways);
  check_launch(launch_ngram_lookup(call.args, call.sizes, call.batch, current_stream(keys)));
  return call.outputs;
}

void ngram_remember(const Tensor& keys, const Tensor& table_tokens, const Tensor& table_log_probs,
                    const Tensor& token_ids, const Tensor& parent_rows, const Tensor& depths, const Tensor& num_rows,
                    const Tensor& tail, const Tensor& tokens, const Tensor& log_probs, int64_t max_context,
                    int64_t ways) {
  check_device({&keys, &table_tokens, &table_log_probs, &token_ids, &parent_rows, &depths, &num_rows, &tail, &tokens,
                &log_probs});
  const DeviceGuard guard(keys.get_device_index());
  const NgramInsertCall call =
      prepare_ngram_remember(NgramTensors::of(keys, table_tokens, table_log_probs), token_ids, parent_rows, depths,
                             num_rows, tail, tokens, log_probs, max_context, ways);
  check_launch(launch_ngram_insert(call.args, call.sizes, call.batch, current_stream(keys)));
}

NgramLookupOutputs ngram_recall(const Tensor& keys, const Tensor& table_tokens, const Tensor& table_log_probs,
                                const Tensor& token_ids, const Tensor& contexts, const Tensor& depths,
                                const Tensor& nodes, int64_t branch, int64_t max_context, int64_t ways,
                                const std::optional<Tensor>& first_pick, const std::optional<Tensor>& seed,
                                const std::optional<Tensor>& sequence_ids) {
  check_device({&keys, &table_tokens, &table_log_probs, &token_ids, &contexts, &depths, &nodes});
  check_device(keys, {&first_pick, &seed, &sequence_ids});
  const DeviceGuard guard(keys.get_device_index());
  const NgramTensors table = NgramTensors::of(keys, table_tokens, table_log_probs);
  const NgramRecallCall call =
      prepare_ngram_recall(table, NodeTensors::of(token_ids, contexts, depths, table.batch), nodes, branch, max_context,
                           ways, first_pick, seed, sequence_ids);
  check_launch(launch_ngram_recall(call.args, call.sizes, call.batch, current_stream(keys)));
  return call.outputs;
}

Tensor calibrate_candidates(const Tensor& log_probs, const Tensor& log_ratio, const std::optional<Tensor>& index,
                            const std::optional<Tensor>& edges) {
  check_device({&log_probs, &log_ratio});
  check_device(log_probs, {&index, &edges});
  const DeviceGuard guard(log_probs.get_device_index());
  const CalibrateCall call = prepare_calibrate(log_probs, log_ratio, index, edges);
  check_launch(launch_calibrate(call.args, call.candidates, current_stream(log_probs)));
  return call.output;
}

Tensor perturb_candidates(const Tensor& tokens, const Tensor& log_probs, const Tensor& positions, const Tensor& seed,
                          const Tensor& sequence_ids) {
  check_device({&tokens, &log_probs, &positions, &seed, &sequence_ids});
  const DeviceGuard guard(tokens.get_device_index());
  const PerturbCall call = prepare_perturb(tokens, log_probs, positions, seed, sequence_ids);
  check_launch(launch_perturb(call.args, call.rows, current_stream(tokens)));
  return call.output;
}

MixOutputs mix_candidates(const Tensor& tokens, const Tensor& log_probs, const Tensor& other_tokens,
                          const Tensor& other_log_probs, const Tensor& weight, const std::optional<Tensor>& index) {
  check_device({&tokens, &log_probs, &other_tokens, &other_log_probs, &weight});
  check_device(tokens, {&index});
  const DeviceGuard guard(tokens.get_device_index());
  const MixCall call = prepare_mix(tokens, log_probs, other_tokens, other_log_probs, weight, index);
  check_launch(launch_mix(call.args, call.sizes, call.rows, current_stream(tokens)));
  return call.outputs;
}

Tensor start_graph(const std::vector<Tensor>& graph, const Tensor& tokens, const Tensor& out_len,
                   const Tensor& kv_start) {
  check_device({&tokens, &out_len, &kv_start});
  check_device(tokens, graph);
  const DeviceGuard guard(tokens.get_device_index());
  const StartCall call = prepare_start(GraphTensors::of(graph), tokens, out_len, kv_start);
  check_launch(launch_start(call.args, call.sizes, call.batch, current_stream(tokens)));
  return call.first_pick;
}

template <class Integer>
FeedOutputs feed(const Tensor& token_ids, const Tensor& depths, const std::optional<Tensor>& slots,
                 const Tensor& kv_len, const Tensor& kv_start, const std::optional<Tensor>& node_depths,
                 int64_t first_slot, int64_t shift, int64_t vocab) {
  const auto call =
      prepare_feed<Integer>(token_ids, depths, slots, kv_len, kv_start, node_depths, first_slot, shift, vocab);
  check_launch(launch_feed(call.args, call.sizes, call.batch, current_stream(token_ids)));
  return call.outputs;
}

FeedOutputs feed_rows(const Tensor& token_ids, const Tensor& depths, const std::optional<Tensor>& slots,
                      const Tensor& kv_len, const Tensor& kv_start, const std::optional<Tensor>& node_depths,
                      int64_t first_slot, int64_t shift, int64_t vocab, bool wide) {
  check_device({&token_ids, &depths, &kv_len, &kv_start});
  check_device(token_ids, {&slots, &node_depths});
  const DeviceGuard guard(token_ids.get_device_index());
  return wide ? feed<int64_t>(token_ids, depths, slots, kv_len, kv_start, node_depths, first_slot, shift, vocab)
              : feed<int32_t>(token_ids, depths, slots, kv_len, kv_start, node_depths, first_slot, shift, vocab);
}

ChainOutputs feed_chain(const Tensor& tokens, const Tensor& end, const Tensor& cached, int64_t width) {
  check_device({&tokens, &end, &cached});
  const DeviceGuard guard(tokens.get_device_index());
  const ChainCall call = prepare_chain(tokens, end, cached, width);
  check_launch(launch_chain(call.args, call.sizes, call.batch, current_stream(tokens)));
  return call.outputs;
}

PathOutputs accepted_path(const Tensor& accepted_rows, const Tensor& num_accepted, const Tensor& next_token,
                          const Tensor& token_ids, const Tensor& node_ids) {
  check_device({&accepted_rows, &num_accepted, &next_token, &token_ids, &node_ids});
  const DeviceGuard guard(accepted_rows.get_device_index());
  const PathCall call = prepare_path(accepted_rows, num_accepted, next_token, token_ids, node_ids);
  check_launch(launch_path(call.args, call.sizes, call.batch, current_stream(accepted_rows)));
  return call.outputs;
}

void commit_text(const Tensor& new_tokens, const Tensor& num_accepted, const Tensor& next_token,
                 const Tensor& eos_ids, const Tensor& tokens, const Tensor& out_len, const Tensor& remaining,
                 const Tensor& done, const Tensor& emitted, const Tensor& num_emitted, const Tensor& counts,
                 const std::optional<Tensor>& nodes, const std::optional<Tensor>& parents,
                 const std::optional<Tensor>& num_nodes, const std::optional<Tensor>& num_merges) {
  check_device({&new_tokens, &num_accepted, &next_token, &eos_ids, &tokens, &out_len, &remaining, &done, &emitted,
                &num_emitted, &counts});
  check_device(new_tokens, {&nodes, &parents, &num_nodes, &num_merges});
  const DeviceGuard guard(new_tokens.get_device_index());
  const TextCall call = prepare_text(new_tokens, num_accepted, next_token, eos_ids, tokens, out_len, remaining, done,
                                     emitted, num_emitted, counts, nodes, parents, num_nodes, num_merges);
  check_launch(launch_text(call.args, call.sizes, call.batch, current_stream(new_tokens)));
}

void learn_source(const Tensor& nodes, const Tensor& picked, const std::vector<Tensor>& node_ids,
                  const std::vector<Tensor>& tokens, const std::vector<Tensor>& log_probs,
                  const std::vector<Tensor>& index, const std::vector<Tensor>& first_tokens,
                  const std::vector<Tensor>& first_log_probs, const Tensor& start, const Tensor& shares,
                  const Tensor& counts, const Tensor& weights, const std::optional<Tensor>& prior,
                  const std::optional<Tensor>& hits, const std::optional<Tensor>& claimed,
                  const std::optional<Tensor>& log_ratio, double prior_count, double memory) {
  check_device({&nodes, &picked, &start, &shares, &counts, &weights});
  check_device(nodes, {&prior, &hits, &claimed, &log_ratio});
  for (const auto* level : {&node_ids, &tokens, &log_probs, &index, &first_tokens, &first_log_probs}) {
    check_device(nodes, *level);
  }
  const DeviceGuard guard(nodes.get_device_index());
  const LearnCall call =
      prepare_learn(nodes, picked, node_ids, tokens, log_probs, index, first_tokens, first_log_probs, start, shares,
                    counts, weights, prior, hits, claimed, log_ratio, prior_count, memory);
  check_launch(launch_learn(call.args, call.sizes, current_stream(nodes)));
}

std::tuple<Tensor, Tensor> dag_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                         const Tensor& ancestor_mask, const Tensor& kv_len,
                                         const std::optional<Tensor>& kv_start,
                                         const std::optional<Tensor>& row_depths,
                                         const std::optional<Tensor>& node_depths, double scale,
                                         std::optional<double> softcap, std::optional<int64_t> sliding_window,
                                         std::optional<int64_t> chunk, const std::optional<Tensor>& sinks) {
  check_device({&q, &k, &v, &ancestor_mask, &kv_len});
  check_device(q, {&kv_start, &row_depths, &node_depths, &sinks});
  const DeviceGuard guard(q.get_device_index());
  AttentionCall call = prepare_attention(q, k, v, ancestor_mask, kv_len, kv_start, row_depths, node_depths,
                                         scale, softcap, sliding_window, chunk, sinks);
  AttentionSizes& s = call.sizes;
  check_launch(plan_attention(&s));
  const int64_t outputs = static_cast<int64_t>(s.batch) * s.kv_heads * s.splits() * s.query_rows();
  const Tensor partial_out = torch::stable::new_empty(q, {outputs, s.head_dim}, ScalarType::Float);
  const Tensor partial_lse = torch::stable::new_empty(q, {outputs}, ScalarType::Float);
  call.args.partial_out = written<float>(partial_out);
  call.args.partial_lse = written<float>(partial_lse);
  check_launch(launch_attention(call.args, s, q.scalar_type() == ScalarType::BFloat16, current_stream(q)));
  return call.outputs;
}

}  // namespace
}  // namespace gsd

STABLE_TORCH_LIBRARY_IMPL(gsd_kernels, CUDA, m) {
  m.impl("merge", TORCH_BOX(&gsd::merge));
  m.impl("flatten", TORCH_BOX(&gsd::flatten));
  m.impl("verify", TORCH_BOX(&gsd::verify));
  m.impl("commit_kv", TORCH_BOX(&gsd::commit_kv));
  m.impl("sample_rows", TORCH_BOX(&gsd::sample_rows));
  m.impl("draft_candidates", TORCH_BOX(&gsd::draft_candidates));
  m.impl("warped_log_probs", TORCH_BOX(&gsd::warped_log_probs));
  m.impl("ngram_insert", TORCH_BOX(&gsd::ngram_insert));
  m.impl("ngram_lookup", TORCH_BOX(&gsd::ngram_lookup));
  m.impl("ngram_remember", TORCH_BOX(&gsd::ngram_remember));
  m.impl("ngram_recall", TORCH_BOX(&gsd::ngram_recall));
  m.impl("calibrate_candidates", TORCH_BOX(&gsd::calibrate_candidates));
  m.impl("perturb_candidates", TORCH_BOX(&gsd::perturb_candidates));
  m.impl("mix_candidates", TORCH_BOX(&gsd::mix_candidates));
  m.impl("learn_source", TORCH_BOX(&gsd::learn_source));
  m.impl("start_graph", TORCH_BOX(&gsd::start_graph));
  m.impl("feed_rows", TORCH_BOX(&gsd::feed_rows));
  m.impl("feed_chain", TORCH_BOX(&gsd::feed_chain));
  m.impl("accepted_path", TORCH_BOX(&gsd::accepted_path));
  m.impl("commit_text", TORCH_BOX(&gsd::commit_text));
  m.impl("dag_attention", TORCH_BOX(&gsd::dag_attention));
}
