// Checks and accessors that the headers of this folder share. In each of those, the tensors of an op are checked and
// unpacked to the plain structs of csrc/algorithms, and its outputs allocated: for the CPU and for the CUDA library.
// Schemas are declared in the ops' rows, gsd_kernels/ops/*/api.py.
//
// Only LibTorch's stable ABI is used (oldest torch served: TORCH_TARGET_VERSION, set by setup.py), so that one wheel
// serves every torch from there on.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <array>
#include <initializer_list>
#include <optional>
#include <tuple>
#include <utility>
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

// What an op of several results returns. Each is allocated where its pointer is asked for, in their order.
template <size_t n>
class Fresh {
 public:
  using Results = decltype(std::tuple_cat(std::declval<std::array<Tensor, n>>()));

  explicit Fresh(const Tensor& like) : like_(like) { made_.reserve(n); }

  template <class T>
  T* of(std::initializer_list<int64_t> shape) {
    made_.push_back(fresh<T>(like_, shape));
    return written<T>(made_.back());
  }

  Results results() const { return all(std::make_index_sequence<n>()); }

 private:
  template <size_t... i>
  Results all(std::index_sequence<i...>) const {
    return Results{made_[i]...};
  }

  Tensor like_;
  Tensors made_;
};

// A call of an op that works on every sequence by itself.
template <class Sizes, class Args, size_t n = 0>
struct Call {
  Sizes sizes;
  Args args;  // of the first sequence
  int64_t batch;
  typename Fresh<n>::Results outputs;
};

template <class Sizes, class Args>
struct Call<Sizes, Args, 0> {
  Sizes sizes;
  Args args;
  int64_t batch;
};

}  // namespace gsd
