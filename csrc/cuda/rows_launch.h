// How kernels of the forward of rows are launched: made ready once a device, and early where they wait.
#pragma once

#include <cuda_runtime.h>

#include "kernel_facts.h"
#include "rows.h"
#include "warp_machine.h"

namespace gsd {

constexpr int kOverlappingCode = 90;  // the oldest architecture for which kernels are compiled with their wait

// Makes a kernel ready on a device: the shared memory that it needs is allowed. `waits`: whether it was compiled with
// its wait. That is of the code, not of the GPU: what was compiled for an older one, and translated when it was loaded,
// does not wait.
inline int make_ready(int device, const void* kernel, int arena, bool& waits) {
  static KernelFacts<bool> facts;
  return facts.find(device, kernel, waits, [&](bool& found) -> int {
    int major = 0;
    cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error != cudaSuccess) return error;
    if (major < kOldestMajor) return cudaErrorNoKernelImageForDevice;
    if (arena > 0) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, arena);
    cudaFuncAttributes code{};
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&code, kernel);
    found = code.ptxVersion >= kOverlappingCode;
    return error;
  });
}

template <class... Args>
int launch_with(int arena, void (*kernel)(Args...), dim3 blocks, int threads, const RowsLaunch& how,
                const Args&... args) {
  int device = 0;
  bool waits = false;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const int ready = make_ready(device, reinterpret_cast<const void*>(kernel), arena, waits);
  if (ready != 0) return ready;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks, config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(arena);
  config.stream = static_cast<cudaStream_t>(how.stream);
  config.attrs = &overlap, config.numAttrs = how.overlap && waits ? 1 : 0;
  error = cudaLaunchKernelEx(&config, kernel, args...);
  return error == cudaSuccess ? cudaGetLastError() : error;
}

template <class... Args>
int launch(void (*kernel)(Args...), dim3 blocks, int threads, const RowsLaunch& how, const Args&... args) {
  return launch_with(0, kernel, blocks, threads, how, args...);
}

}  // namespace gsd
