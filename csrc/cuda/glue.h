// What the CUDA ops share: the current stream, errors of launches, tensors on one device, ops of two halves.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <string>

#include "../torch_ops/op.h"
#include "launch.h"

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
inline void check_device(const Tensor& first, const Tensor& t) {
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == first.get_device_index(),
                  "gsd_kernels: all tensors of one call must be on the same CUDA device");
}

// Ops from their parts (see torch_ops/op.h), the second one a launch on the current stream of its tensors' device; without
// one, that of the group's work (launch.h).
template <auto prepare, auto... launch>
struct LaunchedOp : NamedOp<LaunchedOp<prepare, launch...>> {
  static void boxed(StableIValue* stack, uint64_t, uint64_t) {
    Arguments arguments(LaunchedOp::line(), stack);
    const Tensor& on = arguments.first();
    for (const MaybeTensor& t : arguments.tensors) {
      if (t) check_device(on, *t);
    }
    for (const auto& [name, list] : arguments.lists) {
      for (const Tensor& t : list) check_device(on, t);
    }
    const DeviceGuard guard(on.get_device_index());
    const auto call = prepare(arguments);
    void* stream = current_stream(on);
    if constexpr (sizeof...(launch) > 0) {
      check_launch((launch(call, stream), ...));
    } else {
      check_launch(launch_sequences(call.args, call.sizes, call.batch, stream));
    }
    arguments.give(stack);
  }
};

}  // namespace gsd
