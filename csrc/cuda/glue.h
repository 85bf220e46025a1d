// What the CUDA ops share: the current stream, errors of launches, tensors on one device, ops of two halves.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <string>
#include <vector>

#include "../torch_ops/common.h"
#include "../torch_ops/op.h"
#include "errors.h"

#ifndef USE_CUDA
#error "compile with -DUSE_CUDA: torch's stable headers declare their CUDA functions only then"
#endif

// Weak, so that the library can also be loaded (not run) beside a CPU-only torch: tests check its registrations there.
#pragma weak aoti_torch_get_current_cuda_stream
#pragma weak torch_c10_cuda_check_msg
#pragma weak torch_c10_cuda_free_error_msg

namespace gsd {

using torch::stable::accelerator::DeviceGuard;

inline void* current_stream(const Tensor& on) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream));
  return stream;
}

inline void check_launch(int error) {
  if (error == 0) return;
  drop_error();
  char* text = nullptr;
  torch_c10_cuda_check_msg(error, __FILE__, __func__, __LINE__, true, &text);
  const std::string message = text != nullptr ? text : "CUDA error " + std::to_string(error);
  if (text != nullptr) torch_c10_cuda_free_error_msg(text);
  STD_TORCH_CHECK(false, "gsd_kernels: ", message);
}

// A pointer into another device's memory would end in an illegal access.
inline void check_device(std::initializer_list<const Tensor*> tensors) {
  const Tensor& first = **tensors.begin();
  for (const Tensor* t : tensors) {
    STD_TORCH_CHECK(t->is_cuda() && t->get_device_index() == first.get_device_index(),
                    "gsd_kernels: all tensors of one call must be on the same CUDA device");
  }
}

// Tensors that may be absent are left out.
inline void check_device(const Tensor& first, std::initializer_list<const std::optional<Tensor>*> tensors) {
  for (const auto* t : tensors) {
    if (*t) check_device({&first, &**t});
  }
}

inline void check_device(const Tensor& first, const Tensors& tensors) {
  for (const Tensor& t : tensors) check_device({&first, &t});
}

// The same of an op's arguments, whatever they are.
inline void check_on(const Tensor& first, const Tensor& t) { check_device({&first, &t}); }
inline void check_on(const Tensor& first, const MaybeTensor& t) { check_device(first, {&t}); }
inline void check_on(const Tensor& first, const Tensors& tensors) { check_device(first, tensors); }
template <class Number>
void check_on(const Tensor&, Number) {}

// The first argument that is a tensor.
inline void find_tensor(const Tensor& t, const Tensor** found) {
  if (*found == nullptr) *found = &t;
}
template <class Other>
void find_tensor(const Other&, const Tensor**) {}

// Launches a call on the current stream of its tensors' device.
template <auto launch, class Call>
void launch_on(const Tensor& on, const Call& call) {
  void* stream = current_stream(on);
  if constexpr (std::is_invocable_v<decltype(launch), const Call&, void*>) {
    check_launch(launch(call, stream));
  } else {  // as most of launch.h: arguments, sizes and a number of sequences or rows
    check_launch(launch(call.args, call.sizes, call.batch, stream));
  }
}

// Ops from their halves (see torch_ops/op.h), the second one a launch.
template <auto prepare, auto launch>
struct LaunchedOp : NamedOp<LaunchedOp<prepare, launch>> {
  static void boxed(StableIValue* stack, uint64_t, uint64_t) {
    Arguments arguments(LaunchedOp::line(), stack);
    const Tensor& on = arguments.first();
    for (const MaybeTensor& t : arguments.tensors) check_on(on, t);
    const DeviceGuard guard(on.get_device_index());
    launch_on<launch>(on, prepare(arguments));
    arguments.give(stack);
  }
};

template <auto prepare, auto launch>
struct TypedLaunchedOp;

template <class Call, class... Arguments, Call (*prepare)(Arguments...), auto launch>
struct TypedLaunchedOp<prepare, launch> {
  static auto call(Arguments... arguments) {
    const Tensor* on = nullptr;
    (find_tensor(arguments, &on), ...);
    (check_on(*on, arguments), ...);
    const DeviceGuard guard(on->get_device_index());
    const Call call = prepare(arguments...);
    launch_on<launch>(*on, call);
    return outputs_of(call, 0);
  }
};

}  // namespace gsd
