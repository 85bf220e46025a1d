// A matrix of weights from its tensors; kinds of packed ones are numbered as in csrc/cpu/weights.h.
#pragma once

#include "../cpu/row_forms.h"
#include "arguments.h"
#include "elements.h"

namespace gsd {

constexpr int64_t kDense = -1;  // the kind of a matrix whose dtype says all

// `data`: [outputs, inputs] of any float type (kDense), int8 [outputs, inputs], or uint8 [outputs, bytes of a row].
// `scales`: where the kind has them beside its rows float32 [outputs, groups], or [outputs, groups, 2] with zero points
// or offsets behind the scales; else null or empty.
inline Weights weights_of(const char* name, const Tensor& data, int64_t kind, const Tensor* scales, int64_t outputs,
                          int64_t inputs, Element element) {
  STD_TORCH_CHECK(data.dim() == 2 && data.size(0) == outputs && data.is_contiguous(), name, ": expected ", outputs,
                  " contiguous rows");
  STD_TORCH_CHECK(kind >= kDense && kind < kKinds, name, ": there is no kind of packed weights number ", kind);
  Weights w{static_cast<const char*>(data.const_data_ptr()), outputs, inputs, 0, Kind::kFloat32, nullptr, nullptr, 0};
  const Element own = kind == kDense ? element_of(name, data.scalar_type()) : element;
  const Kind of = kind != kDense ? static_cast<Kind>(kind)
                                 : static_cast<Kind>(static_cast<int>(Kind::kFloat32) + static_cast<int>(own));
  w.kind = of;
  const bool is_signed = of == Kind::kInt8 || form_of(of) != RowForm::kFloats;
  const ScalarType bytes = is_signed ? ScalarType::Char : ScalarType::Byte;
  STD_TORCH_CHECK(kind == kDense || data.scalar_type() == bytes, name, ": expected ",
                  is_signed ? "int8" : "uint8", " for this kind of packed weights");
  STD_TORCH_CHECK(inputs % block_weights(of) == 0, name, ": expected inputs in blocks of ", block_weights(of), ", got ",
                  inputs);
  w.row_bytes = inputs / block_weights(of) * block_bytes(of);
  const int64_t width = kind == kDense || is_signed ? inputs : w.row_bytes;
  STD_TORCH_CHECK(data.size(1) == width, name, ": expected rows of ", width, ", got ", data.size(1));
  if (kind != kDense || own != element) w.decode = kernels().decoders.of[static_cast<int>(of)][static_cast<int>(element)];
  if (beside(of) > 0) {
    const bool pairs = beside(of) == 2;
    STD_TORCH_CHECK(scales != nullptr && scales->dim() == (pairs ? 3 : 2) && scales->size(0) == outputs &&
                        scales->is_contiguous() && scales->scalar_type() == ScalarType::Float && scales->size(1) > 0 &&
                        inputs % (scales->size(1) * block_weights(of)) == 0 && (!pairs || scales->size(2) == 2),
                    name, ": expected scales, float32 [", outputs, ", groups that divide ", inputs, pairs ? ", 2]" : "]");
    w.scales = read<float>(*scales), w.groups = scales->size(1);
  }
  STD_TORCH_CHECK(!has_codes(form_of(of)) || (w.groups == 1 && inputs <= kMostCodes), name,
                  ": expected one scale a row and at most ", kMostCodes, " inputs, got ", w.groups, " and ", inputs);
  return w;
}

// That of the arguments weight, kind and scales.
inline Weights weights_of(const Arguments& in, int64_t outputs, int64_t inputs, Element element) {
  return weights_of("weight", in.tensor("weight"), in['k'], in.has("scales") ? &in.tensor("scales") : nullptr, outputs,
                    inputs, element);
}

}  // namespace gsd
