// What the .cu files offer to the glue: kernels launched on a stream, no torch types. Every function returns a
// cudaError_t as int and neither allocates nor synchronises, so it can be captured in a CUDA graph.
#pragma once

#include <cstdint>

#include "../algorithms/attention.h"
#include "../algorithms/commit.h"
#include "../algorithms/flatten.h"
#include "../algorithms/learn.h"
#include "../algorithms/merge.h"
#include "../algorithms/verify.h"
#include "../algorithms/ngram.h"
#include "../algorithms/recall_levels.h"
#include "../algorithms/sampling.h"
#include "../algorithms/step.h"

namespace gsd {

// One launch each; a thread block takes one sequence.
int launch_merge(const MergeArgs& first, const MergeSizes& sizes, int64_t batch, void* stream);
int launch_flatten(const FlattenArgs& first, const FlattenSizes& sizes, int64_t batch, void* stream);
int launch_verify(const VerifyArgs& first, const VerifySizes& sizes, int64_t batch, void* stream);

int launch_ngram_insert(const NgramInsertArgs& first, const NgramSizes& sizes, int64_t batch, void* stream);
int launch_ngram_lookup(const NgramLookupArgs& first, const NgramSizes& sizes, int64_t batch, void* stream);

// A thread block takes one node; of launch_levels one sequence, all levels in one launch.
int launch_history_recall(const HistoryRecall& first, const NgramSizes& sizes, int64_t batch, void* stream);
int launch_levels(const LevelsArgs& first, const LevelSizes& sizes, int64_t batch, void* stream);
int launch_history_append(const FollowArgs& first, const NgramSizes& sizes, int64_t batch, void* stream);

// One thread block.
int launch_learn(const LearnArgs& args, const LearnSizes& sizes, void* stream);

// A thread takes one of the B·W rows.
int launch_perturb(const PerturbArgs& args, int64_t rows, void* stream);

// A thread block takes one of the B·W rows.
int launch_mix(const MixArgs& first, const MixSizes& sizes, int64_t rows, void* stream);

int launch_start(const StartArgs& first, const StartSizes& sizes, int64_t batch, void* stream);
int launch_feed(const FeedArgs<int64_t>& first, const FeedSizes& sizes, int64_t batch, void* stream);
int launch_feed(const FeedArgs<int32_t>& first, const FeedSizes& sizes, int64_t batch, void* stream);
int launch_chain(const ChainArgs& first, const ChainSizes& sizes, int64_t batch, void* stream);
int launch_path(const PathArgs& first, const PathSizes& sizes, int64_t batch, void* stream);
int launch_text(const TextArgs& first, const TextSizes& sizes, int64_t batch, void* stream);

int launch_commit(const CommitArgs& args, int64_t batch, void* stream);
int launch_advance(int32_t* kv_len, const int32_t* num_accepted, int64_t batch, int path, void* stream);

// A thread block takes one of the B·R rows.
int launch_pick(const PickBatch& args, const PickSizes& sizes, LogitType type, int64_t blocks, void* stream);

// dag_attention in float16 or bfloat16, head_dim 64 or 128: all splits in one launch, combined by a second. The plan
// sets how many there are, by the shapes and the current device.
int plan_attention(AttentionSizes* sizes);
int launch_attention(const AttentionArgs& args, const AttentionSizes& sizes, bool bfloat16, void* stream);

}  // namespace gsd
