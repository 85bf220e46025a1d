// Dynamic shared memory beyond what a kernel may have without asking.
#pragma once

#include <cuda_runtime.h>

#include "kernel_facts.h"

namespace gsd {

constexpr size_t kWithoutOptIn = 48 * 1024;

// Lets a kernel, which has no static shared memory, have `bytes` on the current device. It is allowed all that a block may
// have there, once: what a launch allows for itself alone another thread's launch could take away before it begins.
inline int allow_memory(const void* kernel, size_t bytes) {
  if (bytes <= kWithoutOptIn) return cudaSuccess;
  static KernelFacts<int> facts;
  int device = 0, most = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return facts.find(device, kernel, most, [&](int& found) -> int {
    const cudaError_t asked = cudaDeviceGetAttribute(&found, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return asked != cudaSuccess ? asked
                                : cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, found);
  });
}

}  // namespace gsd
