// Rows as they lie when they are multiplied with a matrix: floats, or codes where the model's own definition has codes.
//
// A library that rounds activations to eight bits multiplies integers. Their sums are exact, so what is left are the
// roundings around them, which are done here one by one as the library does them: a row's product has the library's bits,
// at every level of instructions. Where a library puts floats in the place of the codes again, the products are float ones.
#pragma once

#include "products.h"

namespace gsd {

enum class RowForm : int {
  kFloats,
  kDynamic,  // codes of int8 under a scale of the row, as torchao's Int8DynamicActivationInt8WeightConfig has them
  kRounded,  // floats that such codes stand for, as compressed-tensors makes them for its dynamic int8 of tokens
  kVectorwise,  // codes of int8 under the row's largest magnitude, as bitsandbytes' LLM.int8 has them without outliers
  kCount
};
constexpr int kRowForms = static_cast<int>(RowForm::kCount);

constexpr RowForm form_of(Kind kind) {
  return kind == Kind::kInt8Dynamic      ? RowForm::kDynamic
         : kind == Kind::kInt8Rounded    ? RowForm::kRounded
         : kind == Kind::kInt8Vectorwise ? RowForm::kVectorwise
                                         : RowForm::kFloats;
}
constexpr bool has_codes(RowForm form) { return form == RowForm::kDynamic || form == RowForm::kVectorwise; }

// Inputs of a matrix whose products with codes fit into 32 bits.
constexpr int64_t kMostCodes = (int64_t{1} << 31) / (128 * 128) - 1;

// Bytes of one packed row; room is needed for a multiple of kRowBlock.
int64_t packed_row_bytes(const IsaKernels& level, Element element, RowForm form, int64_t k);

// Rows first … last − 1 of x (float32, rows x_stride apart), as RowKernel::pack has them.
void pack_rows(const IsaKernels& level, Element element, RowForm form, const float* x, int64_t x_stride, int64_t first,
               int64_t last, int64_t k, void* packed);

// As `multiply` in weights.h, for matrices of codes and rows in the form of theirs.
void multiply_codes(const IsaKernels& level, Element element, const Weights& w, const void* packed, int64_t rows,
                    int64_t begin, int64_t end, float* out, int64_t out_stride);

}  // namespace gsd
