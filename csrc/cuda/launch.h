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

// The runtime keeps a call's error until somebody asks, and whoever asks after the next launch takes it for that one's. So
// whoever reports an error, or goes on without what failed, drops it.
void drop_error();

// The work of a group on each of `batch` sequences, by a thread block each, in one launch.
template <class Args, class Sizes>
int launch_sequences(const Each<Args>& all, const Sizes& sizes, int64_t batch, void* stream);

int launch_commit(const CommitArgs& args, int64_t batch, void* stream);
int launch_advance(int32_t* kv_len, const int32_t* num_accepted, int64_t batch, int path, void* stream);

// A thread block takes one of the B·R rows.
int launch_pick(const PickBatch& args, const PickSizes& sizes, LogitType type, int64_t blocks, void* stream);

// dag_attention in float16 or bfloat16, head_dim 64 or 128: all splits in one launch, combined by a second. The plan
// sets how many there are, by the shapes and the current device.
int plan_attention(AttentionSizes* sizes);
int launch_attention(const AttentionArgs& args, const AttentionSizes& sizes, bool bfloat16, void* stream);

}  // namespace gsd
