// The float type of a tensor, as csrc/cpu names it.
#pragma once

#include "../cpu/model_math.h"
#include "common.h"

namespace gsd {

inline Element element_of(const char* name, ScalarType dtype) {
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, name,
                  ": expected float32, bfloat16 or float16");
  return dtype == ScalarType::Float      ? Element::kFloat32
         : dtype == ScalarType::BFloat16 ? Element::kBfloat16
                                         : Element::kFloat16;
}

}  // namespace gsd
