// A linear layer over few rows: every weight is read once for all of them.
//
// Verification multiplies 2 … 64 rows with weights that do not fit into any cache. General matrix products pay for
// packing there, or read the weights once a row; for bfloat16 without hardware for it they are slower still.
#include <algorithm>
#include <optional>
#include <vector>

#include "../torch_ops/registration.h"
#include "../torch_ops/weights.h"
#include "lines.h"
#include "row_forms.h"

namespace gsd {
namespace {

constexpr int64_t kUnit = 32;                // columns that are not shared out among threads
constexpr int64_t kWorkPerThread = 1 << 19;  // multiplications that make a thread worth waking

// x [M, K] · weightᵀ [N, K] → [M, N], summed in float32 and rounded once. A row's result depends on that row alone.
Tensor row_linear(const Tensor& x, const Tensor& weight, int64_t kind, const MaybeTensor& scales) {
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "x: expected [rows, in], contiguous");
  STD_TORCH_CHECK(weight.dim() == 2 && (kind != kDense || weight.scalar_type() == x.scalar_type()),
                  "weight: expected a matrix of the dtype of x, or packed");
  const int64_t rows = x.size(0), k = x.size(1), n = weight.size(0);
  const Element element = element_of("x", x.scalar_type());
  const IsaKernels& level = kernels();
  const Weights w = weights_of("weight", weight, kind, scales ? &*scales : nullptr, n, k, element);
  Tensor out = torch::stable::new_empty(x, {rows, n});
  Lines<float> widened;
  widened.make_room(rows * k);
  for (int64_t r = 0; r < rows; r++) read_row({x.const_data_ptr(), k, element}, r, widened.data() + r * k, k);
  const RowForm form = form_of(w.kind);
  Lines<char> packed;
  packed.make_room((rows + kRowBlock) * packed_row_bytes(level, element, form, k));
  pack_rows(level, element, form, widened.data(), k, 0, rows, k, packed.data());
  const int64_t of_unit = std::max<int64_t>(1, rows * k * kUnit);
  torch::stable::parallel_for(
      0, (n + kUnit - 1) / kUnit, std::max<int64_t>(1, kWorkPerThread / of_unit), [&](int64_t begin, int64_t end) {
        multiply_rounded(level, element, w, packed.data(), rows, begin * kUnit, std::min(n, end * kUnit), element,
                         out.mutable_data_ptr(), n);
      });
  return out;
}

// Rows of a packed matrix as they stand in the dense one; all of them without `rows`, int64 [n]. Of the dtype of `like`.
Tensor unpack_rows(const Tensor& weight, int64_t kind, const MaybeTensor& scales, int64_t inputs,
                   const MaybeTensor& rows, const Tensor& like) {
  STD_TORCH_CHECK(weight.dim() == 2 && inputs > 0, "weight: expected a matrix with inputs");
  const Element element = element_of("like", like.scalar_type());
  const int64_t outputs = weight.size(0);
  const Weights w = weights_of("weight", weight, kind, scales ? &*scales : nullptr, outputs, inputs, element);
  if (rows) check("rows", *rows, ScalarType::Long, {kAny});
  const int64_t* chosen = rows ? read<int64_t>(*rows) : nullptr;
  const int64_t n = rows ? rows->size(0) : outputs;
  for (int64_t i = 0; chosen != nullptr && i < n; i++) {
    STD_TORCH_CHECK(chosen[i] >= 0 && chosen[i] < outputs, "rows: ", chosen[i], " is outside the matrix of ", outputs);
  }
  Tensor out = torch::stable::new_empty(like, {n, inputs});
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t size = bytes_of(element);
  torch::stable::parallel_for(0, n, std::max<int64_t>(1, kWorkPerThread / inputs), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) decode_weights(element, w, chosen == nullptr ? i : chosen[i], to + i * inputs * size);
  });
  return out;
}

}  // namespace
}  // namespace gsd

GSD_OPS(CPU, m) {
  m.impl("row_linear", TORCH_BOX(&gsd::row_linear));
  m.impl("unpack_rows", TORCH_BOX(&gsd::unpack_rows));
}
