// The rows and picks of verify.
#pragma once

#include <tuple>
#include <utility>

#include "../algorithms/verify.h"
#include "common.h"

namespace gsd {

using VerifyOutputs = std::tuple<Tensor, Tensor, Tensor>;

struct VerifyCall {
  VerifySizes sizes;
  VerifyArgs args;  // of the first sequence
  int64_t batch;
  VerifyOutputs outputs;
};

inline VerifyCall prepare_verify(const Tensor& token_ids, const Tensor& parent_rows, const Tensor& depths,
                                 const Tensor& ancestor_mask, const Tensor& num_rows, const Tensor& sampled,
                                 const Tensor& eos_ids, const Tensor& remaining, const Tensor& done,
                                 int64_t max_path) {
  check("token_ids", token_ids, ScalarType::Int, {kAny, kAny});
  const int64_t batch = token_ids.size(0), rows = token_ids.size(1);
  const VerifySizes sizes{static_cast<int>(rows), static_cast<int>(eos_ids.numel()), static_cast<int>(max_path)};
  STD_TORCH_CHECK(rows >= 1 && max_path >= 0, "verify: expected at least one row and max_path >= 0, got ", rows,
                  " and ", max_path);

  VerifyOutputs outputs{new_int32(sampled, {batch, max_path + 1}), new_int32(sampled, {batch}),
                        new_int32(sampled, {batch})};
  const VerifyArgs args{read<int32_t>(token_ids),
                        read<int32_t>("parent_rows", parent_rows, {batch, rows}),
                        read<int32_t>("depths", depths, {batch, rows}),
                        read<int32_t>("ancestor_mask", ancestor_mask, {batch, rows, sizes.words()}),
                        read<int32_t>("num_rows", num_rows, {batch}),
                        read<int32_t>("sampled", sampled, {batch, rows}),
                        read<int32_t>("eos_ids", eos_ids, {kAny}),
                        read<int32_t>("remaining", remaining, {batch}),
                        read<bool>("done", done, {batch}),
                        written<int32_t>(std::get<0>(outputs)),
                        written<int32_t>(std::get<1>(outputs)),
                        written<int32_t>(std::get<2>(outputs))};
  return {sizes, args, batch, std::move(outputs)};
}

}  // namespace gsd
