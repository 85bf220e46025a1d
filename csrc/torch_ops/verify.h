// The rows and picks of verify.
#pragma once

#include "../algorithms/verify.h"
#include "op.h"

namespace gsd {

using VerifyCall = Call<VerifySizes, VerifyArgs>;

inline VerifyCall prepare_verify(Arguments& in) {
  STD_TORCH_CHECK(in['R'] >= 1 && in['D'] >= 0, "verify: expected at least one row and max_path >= 0, got ", in['R'],
                  " and ", in['D']);
  return {{in.size('R'), in.size('E'), in.size('D')}, in.fill<VerifyArgs, 12>(), in['B']};
}

}  // namespace gsd
