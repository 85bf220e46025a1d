// The CUDA ops: tensors checked and unpacked, kernels launched on torch's current stream. Compiled by the C++ compiler;
// no CUDA header is needed.
#include "../torch_ops/dag_attention.h"
#include "../torch_ops/graph_ops.h"
#include "../torch_ops/history.h"
#include "../torch_ops/ngram.h"
#include "../torch_ops/registration.h"
#include "../torch_ops/sampling.h"
#include "../torch_ops/step.h"
#include "glue.h"

namespace gsd {
namespace {

constexpr int kNodesOfBlock = 12;  // of a level of recall_levels, in what shared memory a block has without asking

int launch_commits(const CommitCall& call, void* stream) {
  std::vector<CacheTensor> waiting = call.caches;
  // One launch for each shape: one in all for models whose layers are alike.
  while (!waiting.empty()) {
    CommitArgs args{{}, 0, narrow(call.path), waiting.front(), call.accepted_rows, call.num_accepted, call.kv_len};
    std::vector<CacheTensor> later;
    for (const CacheTensor& cache : waiting) {
      const CacheShape& shape = cache;
      if (args.num_caches < kMaxCaches && memcmp(&shape, &args.shape, sizeof shape) == 0) {
        args.caches[args.num_caches++] = cache.data;
      } else {
        later.push_back(cache);
      }
    }
    check_launch(launch_commit(args, call.batch, stream));
    waiting = std::move(later);
  }
  // Apart from the copies, whose blocks all read the old lengths.
  return launch_advance(call.kv_len, call.num_accepted, call.batch, narrow(call.path), stream);
}

// Scores of the whole vocabulary lie in memory while rows are drawn from.
template <PickCall (*prepare)(Arguments&)>
PickCall with_scores(Arguments& in) {
  PickCall call = prepare(in);
  if (call.args.scores == nullptr) call.args.scores = in.scratch<float>(call.rows * in['V']);
  return call;
}

int launch_picks(const PickCall& call, void* stream) {
  return launch_pick(call.args, call.sizes, call.type, call.rows, stream);
}

AttentionCall planned_attention(Arguments& in) {
  AttentionCall call = prepare_attention(in);
  AttentionSizes& s = call.sizes;
  check_launch(plan_attention(&s));
  const int64_t outputs = static_cast<int64_t>(s.batch) * s.kv_heads * s.splits() * s.query_rows();
  call.args.partial_out = in.scratch<float>(outputs * s.head_dim);
  call.args.partial_lse = in.scratch<float>(outputs);
  return call;
}

int launch_planned(const AttentionCall& call, void* stream) {
  return launch_attention(call.args, call.sizes, call.bfloat16, stream);
}

}  // namespace
}  // namespace gsd

#if defined(GSD_ARCHITECTURES)
// For Python's ctypes: what setup.py compiled the kernels for, "8.0;9.0a".
extern "C" __attribute__((used, visibility("default"))) const char* gsd_architectures() { return GSD_ARCHITECTURES; }
#endif

GSD_OPS(CUDA, m) {
  using namespace gsd;
  LaunchedOp<prepare_merge>::add(m, "merge");
  LaunchedOp<prepare_flatten>::add(m, "flatten");
  LaunchedOp<prepare_verify>::add(m, "verify");
  LaunchedOp<prepare_commit, launch_commits>::add(m, "commit_kv");
  LaunchedOp<with_scores<prepare_sample>, launch_picks>::add(m, "sample_rows");
  LaunchedOp<with_scores<prepare_draft>, launch_picks>::add(m, "draft_candidates");
  LaunchedOp<prepare_log_probs, launch_picks>::add(m, "warped_log_probs");
  LaunchedOp<prepare_ngram<NgramInsertArgs>>::add(m, "ngram_insert");
  LaunchedOp<prepare_ngram<NgramLookupArgs>>::add(m, "ngram_lookup");
  LaunchedOp<prepare_perturb>::add(m, "perturb_candidates");
  LaunchedOp<prepare_mix>::add(m, "mix_candidates");
  LaunchedOp<prepare_history>::add(m, "history_recall");
  LaunchedOp<prepare_levels<kNodesOfBlock>>::add(m, "recall_levels");
  LaunchedOp<prepare_follow>::add(m, "history_append");
  LaunchedOp<prepare_learn>::add(m, "learn_source");
  LaunchedOp<prepare_start>::add(m, "start_graph");
  OfWidth<LaunchedOp<prepare_feed<int64_t>>, LaunchedOp<prepare_feed<int32_t>>>::add(m, "feed_rows");
  LaunchedOp<prepare_chain>::add(m, "feed_chain");
  LaunchedOp<prepare_path>::add(m, "accepted_path");
  LaunchedOp<prepare_text>::add(m, "commit_text");
  LaunchedOp<planned_attention, launch_planned>::add(m, "dag_attention");
}
