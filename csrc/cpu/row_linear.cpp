// A linear layer over few rows: every weight is read once for all of them.
//
// Verification multiplies 2 … 64 rows with weights that do not fit into any cache. General matrix products pay for
// packing there, or read the weights once a row; for bfloat16 without hardware for it they are slower still.
#include <algorithm>
#include <vector>

#include "../torch_ops/common.h"
#include "attention.h"
#include "products.h"

namespace gsd {
namespace {

constexpr int64_t kUnit = 32;                // columns that are not shared out among threads
constexpr int64_t kWorkPerThread = 1 << 19;  // multiplications that make a thread worth waking
constexpr int64_t kColumns = 64;             // of a thread's buffer

// x [M, K] · weightᵀ [N, K] → [M, N], summed in float32 and rounded once. A row's result depends on that row alone.
Tensor row_linear(const Tensor& x, const Tensor& weight) {
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "x: expected [rows, in], contiguous");
  STD_TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && weight.size(1) == x.size(1),
                  "weight: expected [out, ", x.size(1), "], contiguous");
  STD_TORCH_CHECK(weight.scalar_type() == x.scalar_type(), "weight: expected the dtype of x");
  const int64_t rows = x.size(0), k = x.size(1), n = weight.size(0);
  const Element element = element_of("x", x.scalar_type());
  const RowKernel& kernel = kernels().large[static_cast<int>(element)];
  Tensor out = torch::stable::new_empty(x, {rows, n});
  std::vector<float> widened(static_cast<size_t>(rows * k));
  for (int64_t r = 0; r < rows; r++) read_row({x.const_data_ptr(), k, element}, r, widened.data() + r * k, k);
  std::vector<char> packed(static_cast<size_t>((rows + kRowBlock) * kernel.row_bytes(k)));
  kernel.pack(widened.data(), k, 0, rows, k, packed.data());
  const char* w = static_cast<const char*>(weight.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t size = bytes_of(element), of_unit = std::max<int64_t>(1, rows * k * kUnit);
  const auto columns = [&](int64_t begin, int64_t end) {
    if (element == Element::kFloat32) {
      return kernel.products(packed.data(), rows, k, w, k, begin, end, reinterpret_cast<float*>(to), n);
    }
    std::vector<float> buffer(static_cast<size_t>(rows * kColumns));
    for (int64_t first = begin; first < end; first += kColumns) {
      const int64_t count = std::min(kColumns, end - first);
      kernel.products(packed.data(), rows, k, w + first * k * size, k, 0, count, buffer.data(), kColumns);
      for (int64_t r = 0; r < rows; r++) {
        write_row(buffer.data() + r * kColumns, to + (r * n + first) * size, element, count);
      }
    }
  };
  torch::stable::parallel_for(0, (n + kUnit - 1) / kUnit, std::max<int64_t>(1, kWorkPerThread / of_unit),
                              [&](int64_t begin, int64_t end) { columns(begin * kUnit, std::min(n, end * kUnit)); });
  return out;
}

}  // namespace
}  // namespace gsd

STABLE_TORCH_LIBRARY_IMPL(gsd_kernels, CPU, m) { m.impl("row_linear", TORCH_BOX(&gsd::row_linear)); }
