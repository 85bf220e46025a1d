// A linear layer over few rows: every weight is read once for all of them.
//
// Verification multiplies 2 … 64 rows with weights that do not fit into any cache. General matrix products pay for
// packing there, or read the weights once a row; for bfloat16 without hardware for it they are slower still.
#include <algorithm>
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
void row_linear(Arguments& in) {
  const Tensor& x = in.tensor("x");
  const void* const values = in.at("x");
  const int64_t rows = in['R'], k = in['I'], n = in['O'];
  STD_TORCH_CHECK(in['k'] != kDense || in.tensor("weight").scalar_type() == x.scalar_type(),
                  "weight: expected a matrix of the dtype of x, or packed");
  const Element element = element_of("x", x.scalar_type());
  const IsaKernels& level = kernels();
  const Weights w = weights_of(in, n, k, element);
  void* const out = in.result(x.scalar_type()).mutable_data_ptr();
  Lines<float> widened;
  widened.make_room(rows * k);
  for (int64_t r = 0; r < rows; r++) read_row({values, k, element}, r, widened.data() + r * k, k);
  const RowForm form = form_of(w.kind);
  Lines<char> packed;
  packed.make_room((rows + kRowBlock) * packed_row_bytes(level, element, form, k));
  pack_rows(level, element, form, widened.data(), k, 0, rows, k, packed.data());
  const int64_t of_unit = std::max<int64_t>(1, rows * k * kUnit);
  torch::stable::parallel_for(
      0, (n + kUnit - 1) / kUnit, std::max<int64_t>(1, kWorkPerThread / of_unit), [&](int64_t begin, int64_t end) {
        multiply_rounded(level, element, w, packed.data(), rows, begin * kUnit, std::min(n, end * kUnit), element,
                         out, n);
      });
}

// Rows of a packed matrix as they stand in the dense one; all of them without `rows`, int64 [n]. Of the dtype of `like`.
void unpack_rows(Arguments& in) {
  const int64_t inputs = in['I'], outputs = in['O'];
  STD_TORCH_CHECK(inputs > 0, "inputs: expected at least one");
  const ScalarType dtype = in.tensor("like").scalar_type();
  const Element element = element_of("like", dtype);
  const Weights w = weights_of(in, outputs, inputs, element);
  const int64_t* const chosen = in.at("rows");
  if (!in.has("rows")) in.set('N', outputs);
  const int64_t n = in['N'];
  for (int64_t i = 0; chosen != nullptr && i < n; i++) {
    STD_TORCH_CHECK(chosen[i] >= 0 && chosen[i] < outputs, "rows: ", chosen[i], " is outside the matrix of ", outputs);
  }
  char* const to = static_cast<char*>(in.result(dtype).mutable_data_ptr());
  const int64_t size = bytes_of(element);
  torch::stable::parallel_for(0, n, std::max<int64_t>(1, kWorkPerThread / inputs), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) decode_weights(element, w, chosen == nullptr ? i : chosen[i], to + i * inputs * size);
  });
}

}  // namespace
}  // namespace gsd

GSD_OPS(CPU, m) {
  gsd::Op<gsd::row_linear>::add(m, "row_linear");
  gsd::Op<gsd::unpack_rows>::add(m, "unpack_rows");
}
