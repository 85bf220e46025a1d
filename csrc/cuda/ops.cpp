// The CUDA ops: tensors checked and unpacked, kernels launched on torch's current stream. Compiled by the C++ compiler;
// no CUDA header is needed.
#include "../torch_ops/commit_kv.h"
#include "../torch_ops/dag_attention.h"
#include "../torch_ops/flatten.h"
#include "../torch_ops/learn.h"
#include "../torch_ops/merge.h"
#include "../torch_ops/ngram.h"
#include "../torch_ops/recall_levels.h"
#include "../torch_ops/registration.h"
#include "../torch_ops/step.h"
#include "../torch_ops/verify.h"
#include "glue.h"
#include "launch.h"

namespace gsd {
namespace {

template <class Integer>
int launch_feed_of(const FeedArgs<Integer>& args, const FeedSizes& sizes, int64_t batch, void* stream) {
  return launch_feed(args, sizes, batch, stream);
}

int launch_perturbation(const PerturbCall& call, void* stream) { return launch_perturb(call.args, call.rows, stream); }

int launch_learning(const LearnCall& call, void* stream) { return launch_learn(call.args, call.sizes, stream); }

bool same_geometry(const CacheTensor& a, const CacheTensor& b) {
  return a.batch_stride == b.batch_stride && a.head_stride == b.head_stride && a.slot_stride == b.slot_stride &&
         a.heads == b.heads && a.slots == b.slots && a.row_bytes == b.row_bytes;
}

void commit_kv(const Tensors& k_caches, const Tensors& v_caches, const Tensor& accepted_rows,
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
    args.slots = static_cast<int>(like.slots);
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
  const int path = narrow(accepted_rows.size(1));
  check_launch(launch_advance(written<int32_t>(kv_len), read<int32_t>(num_accepted), batch, path, stream));
}

struct WarperTensors {
  const MaybeTensor&temperatures, &top_ks, &top_ps, &min_ps;
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
  const auto values = [&](const MaybeTensor& t) -> const float* {
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
                   const MaybeTensor& temperatures, const MaybeTensor& top_ks,
                   const MaybeTensor& top_ps, const MaybeTensor& min_ps) {
  const DeviceGuard guard(logits.get_device_index());
  const Tensor tokens = fresh<int32_t>(positions, {positions.size(0), positions.size(1)});
  pick(logits, positions, 1, seed, sequence_ids, warpers(temperature, top_k, top_p, min_p),
       {temperatures, top_ks, top_ps, min_ps}, true, tokens, nullptr);
  return tokens;
}

std::tuple<Tensor, Tensor> draft_candidates(const Tensor& logits, const Tensor& positions, int64_t branch,
                                            const Tensor& seed, const Tensor& sequence_ids, double temperature,
                                            int64_t top_k, double top_p, double min_p,
                                            const MaybeTensor& temperatures,
                                            const MaybeTensor& top_ks, const MaybeTensor& top_ps,
                                            const MaybeTensor& min_ps, bool noise) {
  STD_TORCH_CHECK(branch >= 1 && branch <= 1024, "branch: expected 1 ... 1024, got ", branch);
  const DeviceGuard guard(logits.get_device_index());
  const Tensor tokens = fresh<int32_t>(positions, {positions.size(0), positions.size(1), branch});
  const Tensor log_probs =
      fresh<float>(positions, {positions.size(0), positions.size(1), branch});
  pick(logits, positions, branch, seed, sequence_ids, warpers(temperature, top_k, top_p, min_p),
       {temperatures, top_ks, top_ps, min_ps}, noise, tokens, &log_probs);
  return {tokens, log_probs};
}

Tensor warped_log_probs(const Tensor& logits, double temperature, int64_t top_k, double top_p, double min_p,
                        const MaybeTensor& temperatures, const MaybeTensor& top_ks,
                        const MaybeTensor& top_ps, const MaybeTensor& min_ps) {
  const DeviceGuard guard(logits.get_device_index());
  const Tensor log_probs = torch::stable::new_empty(logits, logits.sizes(), ScalarType::Float);
  const PickBatch args = pick_batch(logits, log_probs, warpers(temperature, top_k, top_p, min_p),
                                    {temperatures, top_ks, top_ps, min_ps});
  launch_rows(logits, args, 0, false);
  return log_probs;
}

using FeedRows = OfWidth<LaunchedOp<prepare_feed<int64_t>, launch_feed_of<int64_t>>,
                         LaunchedOp<prepare_feed<int32_t>, launch_feed_of<int32_t>>>;

std::tuple<Tensor, Tensor> dag_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                         const Tensor& ancestor_mask, const Tensor& kv_len,
                                         const MaybeTensor& kv_start,
                                         const MaybeTensor& row_depths,
                                         const MaybeTensor& node_depths, double scale,
                                         std::optional<double> softcap, std::optional<int64_t> sliding_window,
                                         std::optional<int64_t> chunk, const MaybeTensor& sinks) {
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

#if defined(GSD_ARCHITECTURES)
// For Python's ctypes: what setup.py compiled the kernels for, "8.0;9.0a".
extern "C" __attribute__((used, visibility("default"))) const char* gsd_architectures() { return GSD_ARCHITECTURES; }
#endif

GSD_OPS(CUDA, m) {
  using namespace gsd;
  LaunchedOp<prepare_merge, launch_merge>::add(m, "merge");
  LaunchedOp<prepare_flatten, launch_flatten>::add(m, "flatten");
  LaunchedOp<prepare_verify, launch_verify>::add(m, "verify");
  m.impl("commit_kv", TORCH_BOX(&commit_kv));
  m.impl("sample_rows", TORCH_BOX(&sample_rows));
  m.impl("draft_candidates", TORCH_BOX(&draft_candidates));
  m.impl("warped_log_probs", TORCH_BOX(&warped_log_probs));
  LaunchedOp<prepare_ngram_insert, launch_ngram_insert>::add(m, "ngram_insert");
  LaunchedOp<prepare_ngram_lookup, launch_ngram_lookup>::add(m, "ngram_lookup");
  LaunchedOp<prepare_perturb, launch_perturbation>::add(m, "perturb_candidates");
  LaunchedOp<prepare_mix, launch_mix>::add(m, "mix_candidates");
  LaunchedOp<prepare_history, launch_history_recall>::add(m, "history_recall");
  LaunchedOp<prepare_levels, launch_levels>::add(m, "recall_levels");
  LaunchedOp<prepare_follow, launch_history_append>::add(m, "history_append");
  m.impl("learn_source", TORCH_BOX((&TypedLaunchedOp<prepare_learn, launch_learning>::call)));
  LaunchedOp<prepare_start, launch_start>::add(m, "start_graph");
  FeedRows::add(m, "feed_rows");
  LaunchedOp<prepare_chain, launch_chain>::add(m, "feed_chain");
  LaunchedOp<prepare_path, launch_path>::add(m, "accepted_path");
  LaunchedOp<prepare_text, launch_text>::add(m, "commit_text");
  m.impl("dag_attention", TORCH_BOX(&dag_attention));
}
