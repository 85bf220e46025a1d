// The logits, warpers and noise of sample_rows, draft_candidates and warped_log_probs.
#pragma once

#include "../algorithms/sampling.h"
#include "op.h"

namespace gsd {

struct PickCall {
  PickBatch args;
  PickSizes sizes;
  LogitType type;
  int64_t rows;  // of all sequences
};

inline LogitType logit_type(ScalarType dtype) {
  switch (dtype) {
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

// A row's distribution, cut by the warpers, is common to the three; what is drawn from it is theirs to add.
inline PickCall warped_rows(Arguments& in, int64_t branch) {
  STD_TORCH_CHECK(in['V'] >= 1 && in['V'] < (1 << 30), "logits: vocabulary of ", in['V'], ", expected 1 ... 2^30");
  const Warpers shared{static_cast<float>(in.real('t')), static_cast<float>(in['k']), static_cast<float>(in.real('p')),
                       static_cast<float>(in.real('m'))};
  PickBatch args{in.at("logits"), shared,           in.at("temperatures"), in.at("top_ks"),
                 in.at("top_ps"), in.at("min_ps"), in.size('R')};
  return {args, {in.size('V'), narrow(branch)}, logit_type(in.tensor("logits").scalar_type()), in['B'] * in['R']};
}

inline PickCall drawn_rows(Arguments& in, int64_t branch) {
  PickCall call = warped_rows(in, branch);
  call.args.positions = in.at("positions"), call.args.seed = in.at("seed");
  call.args.sequence_ids = in.at("sequence_ids"), call.args.tokens = in.result();
  return call;
}

inline PickCall prepare_sample(Arguments& in) { return drawn_rows(in, 1); }

inline PickCall prepare_draft(Arguments& in) {
  STD_TORCH_CHECK(in['K'] >= 1 && in['K'] <= 1024, "branch: expected 1 ... 1024, got ", in['K']);
  PickCall call = drawn_rows(in, in['K']);
  call.args.log_probs = in.result(), call.sizes.noisy = in['n'] != 0;
  return call;
}

inline PickCall prepare_log_probs(Arguments& in) {
  PickCall call = warped_rows(in, 0);
  call.args.scores = in.result();
  return call;
}

}  // namespace gsd
