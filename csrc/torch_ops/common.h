// Checks and accessors that the headers of this folder share. In each of those, the tensors of an op are checked (by a
// line that says their shapes, arguments.h) and unpacked to the plain structs of csrc/algorithms, and its outputs
// allocated: for the CPU and for the CUDA library. Schemas are declared in the ops' rows, gsd_kernels/ops/*/api.py.
//
// Only LibTorch's stable ABI is used (oldest torch served: TORCH_TARGET_VERSION, set by setup.py), so that one wheel
// serves every torch from there on.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <initializer_list>
#include <optional>
#include <vector>

namespace gsd {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using MaybeTensor = std::optional<Tensor>;

// A size that was checked, as the algorithms count.
inline int narrow(int64_t size) { return static_cast<int>(size); }

template <class T>
T* written(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

template <class T>
const T* read(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

template <class T>
Tensor fresh(const Tensor& like, std::initializer_list<int64_t> shape) {
  return torch::stable::new_empty(like, shape, torch::headeronly::CppTypeToScalarType<T>::value);
}

}  // namespace gsd
