// The rows and picks of verify.
#pragma once

#include "../algorithms/verify.h"
#include "common.h"

namespace gsd {

using VerifyCall = Call<VerifySizes, VerifyArgs, 3>;

inline VerifyCall prepare_verify(const Tensor& token_ids, const Tensor& parent_rows, const Tensor& depths,
                                 const Tensor& ancestor_mask, const Tensor& num_rows, const Tensor& sampled,
                                 const Tensor& eos_ids, const Tensor& remaining, const Tensor& done,
                                 int64_t max_path) {
  const int32_t* tokens = read<int32_t>("token_ids", token_ids, {kAny, kAny});
  const int64_t batch = token_ids.size(0), rows = token_ids.size(1);
  const VerifySizes sizes{narrow(rows), narrow(eos_ids.numel()), narrow(max_path)};
  STD_TORCH_CHECK(rows >= 1 && max_path >= 0, "verify: expected at least one row and max_path >= 0, got ", rows,
                  " and ", max_path);
  Fresh<3> accepted(sampled);
  const VerifyArgs args{tokens,
                        read<int32_t>("parent_rows", parent_rows, {batch, rows}),
                        read<int32_t>("depths", depths, {batch, rows}),
                        read<int32_t>("ancestor_mask", ancestor_mask, {batch, rows, sizes.words()}),
                        read<int32_t>("num_rows", num_rows, {batch}),
                        read<int32_t>("sampled", sampled, {batch, rows}),
                        read<int32_t>("eos_ids", eos_ids, {kAny}),
                        read<int32_t>("remaining", remaining, {batch}),
                        read<bool>("done", done, {batch}),
                        accepted.of<int32_t>({batch, max_path + 1}),
                        accepted.of<int32_t>({batch}),
                        accepted.of<int32_t>({batch})};
  return {sizes, args, batch, accepted.results()};
}

}  // namespace gsd
