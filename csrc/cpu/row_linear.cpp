// A linear layer over few rows: every weight is read once for all of them.
//
// Verification multiplies 2 … 64 rows with weights that do not fit into any cache. General matrix products pay for
// packing there, or read the weights once a row; for bfloat16 without hardware for it they are slower still.
#include <algorithm>
#include <cstring>
#include <vector>

#include "../torch_ops/common.h"
#include "attention.h"

namespace gsd {
namespace {

constexpr int64_t kVector = 16;
constexpr int64_t kWorkPerThread = 1 << 19;  // multiplications that make a thread worth waking
constexpr int64_t kColumns = 64;             // of a thread's buffer

// x [M, K] · weightᵀ [N, K] → [M, N], summed in float32 and rounded once. A row's result depends on that row alone.
Tensor row_linear(const Tensor& x, const Tensor& weight) {
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "x: expected [rows, in], contiguous");
  STD_TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && weight.size(1) == x.size(1),
                  "weight: expected [out, ", x.size(1), "], contiguous");
  STD_TORCH_CHECK(weight.scalar_type() == x.scalar_type(), "weight: expected the dtype of x");
  const int64_t rows = x.size(0), k = x.size(1), n = weight.size(0);
  STD_TORCH_CHECK(k % kVector == 0, "x: expected a multiple of ", kVector, " columns, got ", k);
  const Element element = element_of("x", x.scalar_type());
  const Matrix w{weight.const_data_ptr(), k, element};
  Tensor out = torch::stable::new_empty(x, {rows, n});
  const bool direct = element == Element::kFloat32;
  const int64_t stride = k + kVector;  // rows at powers of two would meet in the cache
  std::vector<float> widened(static_cast<size_t>(rows * stride));
  for (int64_t r = 0; r < rows; r++) read_row({x.const_data_ptr(), k, element}, r, widened.data() + r * stride, k);
  const float* from = widened.data();
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t size = direct ? 4 : 2;
  const int64_t grain = std::max<int64_t>(kVector, kWorkPerThread / std::max<int64_t>(1, rows * k));
  torch::stable::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    if (direct) return products(from, stride, rows, k, w, begin, end, reinterpret_cast<float*>(to), n);
    // products() writes columns begin … end − 1 of a matrix; the buffer holds a few of them.
    std::vector<float> buffer(static_cast<size_t>(rows * kColumns));
    for (int64_t first = begin; first < end; first += kColumns) {
      const int64_t columns = std::min(kColumns, end - first);
      products(from, stride, rows, k, {static_cast<const char*>(w.data) + first * k * size, k, element}, 0, columns,
               buffer.data(), kColumns);
      for (int64_t r = 0; r < rows; r++) {
        write_row(buffer.data() + r * kColumns, to + (r * n + first) * size, element, columns);
      }
    }
  });
  return out;
}

}  // namespace
}  // namespace gsd

STABLE_TORCH_LIBRARY_IMPL(gsd_kernels, CPU, m) { m.impl("row_linear", TORCH_BOX(&gsd::row_linear)); }
