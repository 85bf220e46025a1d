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

constexpr int64_t kAny = -1;  // any size

// A size that was checked, as the algorithms count.
inline int narrow(int64_t size) { return static_cast<int>(size); }

inline void check(const char* name, const Tensor& t, ScalarType dtype, std::initializer_list<int64_t> shape) {
  STD_TORCH_CHECK(t.scalar_type() == dtype, name, ": wrong dtype");
  STD_TORCH_CHECK(t.dim() == static_cast<int64_t>(shape.size()), name, ": expected ", shape.size(), " dimensions, got ",
                  t.dim());
  int64_t d = 0;
  for (const int64_t size : shape) {
    STD_TORCH_CHECK(size == kAny || t.size(d) == size, name, ": expected size ", size, " in dimension ", d, ", got ",
                    t.size(d));
    d++;
  }
  STD_TORCH_CHECK(t.is_contiguous(), name, ": must be contiguous");
}

template <class T>
T* written(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

template <class T>
const T* read(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

// The same of a tensor that is checked first.
template <class T>
T* written(const char* name, const Tensor& t, std::initializer_list<int64_t> shape) {
  check(name, t, torch::headeronly::CppTypeToScalarType<T>::value, shape);
  return written<T>(t);
}

template <class T>
const T* read(const char* name, const Tensor& t, std::initializer_list<int64_t> shape) {
  check(name, t, torch::headeronly::CppTypeToScalarType<T>::value, shape);
  return read<T>(t);
}

// Null for one that is absent.
template <class T>
T* written(const char* name, const MaybeTensor& t, std::initializer_list<int64_t> shape) {
  return t ? written<T>(name, *t, shape) : nullptr;
}

template <class T>
const T* read(const char* name, const MaybeTensor& t, std::initializer_list<int64_t> shape) {
  return t ? read<T>(name, *t, shape) : nullptr;
}

template <class T>
Tensor fresh(const Tensor& like, std::initializer_list<int64_t> shape) {
  return torch::stable::new_empty(like, shape, torch::headeronly::CppTypeToScalarType<T>::value);
}

}  // namespace gsd
