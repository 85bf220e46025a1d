// The launch code of csrc/cuda as nvcc compiled it, over a runtime that stands in for CUDA's. It launches nothing, refuses
// what a GPU of compute capability 9.0 refuses, and keeps the last error as CUDA's does: until it is asked for.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "../../csrc/cuda/glue.h"
#include "../../csrc/cuda/launch.h"
#include "../../csrc/cuda/rows.h"

namespace {

constexpr size_t kWithoutOptIn = 48 << 10, kMost = 227 << 10;

struct Launch {
  std::string kernel;
  unsigned threads, cluster, blocks;
};

// The runtime's state, and what a test makes of its GPU.
struct Gpu {
  std::map<const void*, std::string> kernels;
  std::map<const void*, size_t> allowed;  // dynamic shared memory, where it is more than a block may have without asking
  std::vector<Launch> launches;
  cudaError_t last = cudaSuccess;
  int clusters = 33;  // that run together
  bool maps = true;
  int maps_made = 0;
};

// Kernels are registered before main begins.
Gpu& gpu() {
  static Gpu state;
  return state;
}

cudaError_t answer(cudaError_t error) {
  if (error != cudaSuccess) gpu().last = error;
  return error;
}

cudaError_t launched(const void* kernel, dim3 grid, dim3 block, size_t shared, unsigned cluster) {
  if (grid.x * grid.y * grid.z == 0 || block.x == 0 || block.x > 1024) return answer(cudaErrorInvalidConfiguration);
  const auto allowed = gpu().allowed.find(kernel);
  if (shared > (allowed == gpu().allowed.end() ? kWithoutOptIn : allowed->second)) return answer(cudaErrorInvalidValue);
  if (cluster > 1 && gpu().clusters == 0) return answer(cudaErrorInvalidClusterSize);
  gpu().launches.push_back({gpu().kernels.at(kernel), block.x, cluster, grid.x * grid.y * grid.z});
  return cudaSuccess;
}

unsigned cluster_of(const cudaLaunchConfig_t& config) {
  unsigned cluster = 1;
  for (unsigned i = 0; i < config.numAttrs; i++) {
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = config.attrs[i].val.clusterDim.x;
  }
  return cluster;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} pushed;

CUresult make_map(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                  const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                  CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  gpu().maps_made++;
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  gpu().kernels[host] = name;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
  return *static_cast<cudaStream_t*>(stream) = pushed.stream, cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t) {
  return launched(kernel, grid, block, shared, 1);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  return launched(kernel, config->gridDim, config->blockDim, config->dynamicSmemBytes, cluster_of(*config));
}

cudaError_t cudaGetLastError() {
  const cudaError_t last = gpu().last;
  return gpu().last = cudaSuccess, last;
}
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      return *value = 9, cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      return *value = 132, cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return *value = static_cast<int>(kMost), cudaSuccess;
    default:
      return answer(cudaErrorInvalidValue);
  }
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void* kernel) {
  *found = {};
  found->ptxVersion = 90;
  found->sharedSizeBytes = gpu().kernels.at(kernel).find("rows_group") == std::string::npos ? 0 : 128;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || static_cast<size_t>(value) > kMost) {
    return answer(cudaErrorInvalidValue);
  }
  gpu().allowed[kernel] = static_cast<size_t>(value);
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*) {
  return *clusters = gpu().clusters, cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** entry, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *entry = reinterpret_cast<void*>(&make_map), *result = cudaDriverEntryPointSuccess;
  return gpu().maps ? cudaSuccess : answer(cudaErrorSymbolNotFound);
}

AOTITorchError torch_c10_cuda_check_msg(int32_t, const char*, const char*, uint32_t, bool, char** text) {
  static char message[] = "a CUDA error";
  *text = message;
  return 0;
}
void torch_c10_cuda_free_error_msg(char*) {}

}  // extern "C"

namespace gsd {
namespace {

int failures = 0;

bool expect(bool holds, const char* what) {
  if (!holds) fprintf(stderr, "%s\n", what), failures++;
  return holds;
}

FlattenSizes flattened(int rows) { return {32, 4, rows, 4}; }
int flatten(int rows) { return launch_flatten({}, flattened(rows), 1, nullptr); }
int start(int nodes) { return launch_start({}, {nodes, 2, 1, 8}, 1, nullptr); }

CommitArgs commit_of(int path) {
  CommitArgs args{};
  args.num_caches = 1, args.heads = 2, args.row_bytes = 128, args.path = path;
  return args;
}

bool raises(int error) {
  try {
    check_launch(error);
  } catch (const std::exception&) {
    return true;
  }
  return false;
}

// A call that failed is told of once: the next one that is right goes through.
void errors() {
  expect(raises(flatten(4096)), "more shared memory than a block may have");
  expect(!raises(start(8)), "flatten's error is the next launch's");
  expect(raises(launch_commit(commit_of(1 << 16), 1, nullptr)), "a path that shared memory does not hold");
  expect(!raises(start(8)), "commit's error is the next launch's");
}

RowsProduct product() {
  RowsProduct made{};
  made.count = 1, made.rows = 64, made.inputs = 4096, made.end = RowsEnd::kAdd;
  made.matrices[0].outputs = 4096;
  return made;
}

// Where groups of warps cannot be launched, nothing is, and nothing is left of the question.
void groups(bool possible) {
  bool taken = !possible;
  expect(launch_rows_group(product(), {nullptr, true, false, true}, taken) == 0, "an error");
  expect(taken == possible, "taken");
  const bool right = expect(gpu().launches.size() == (possible ? 1 : 0), "launches");
  if (right && possible) {
    const Launch& made = gpu().launches[0];
    const unsigned splits = static_cast<unsigned>(product().splits()), tiles = made.blocks / splits;
    expect(made.cluster == (gpu().clusters < static_cast<int>(tiles) ? 1 : splits), "a cluster a tile, where all fit");
    expect(made.blocks <= 132, "one wave");
  }
  gpu().launches.clear();
  const int made = gpu().maps_made;
  expect(launch_rows_product(product(), {nullptr, false, false, true}) == 0, "a product by either");
  expect(made == gpu().maps_made && (made > 0) == possible, "maps are kept");
  if (expect(gpu().launches.size() == 1, "a launch")) {
    expect((gpu().launches[0].kernel.find("rows_group") != std::string::npos) == possible, "the other kernel");
  }
}

// What a kernel may have does not become less: another thread's launch may come between the two calls.
void memory() {
  const auto may = [] {
    std::map<const void*, size_t> most = gpu().allowed;
    return most.begin()->second;
  };
  expect(flatten(1024) == 0, "a large graph");
  const size_t large = may();
  expect(flatten(768) == 0 && may() >= large, "a smaller graph's launch leaves less to others");
  gpu().allowed.clear();
  expect(launch_commit(commit_of(200), 1, nullptr) == 0, "a long path");
  const size_t longest = may();
  expect(launch_commit(commit_of(110), 1, nullptr) == 0 && may() >= longest, "a shorter path leaves less to others");
}

// A block has threads, whatever it has to do.
void empty() {
  expect(start(0) == 0, "start_graph without nodes");
  expect(launch_feed(FeedArgs<int64_t>{}, {}, 1, nullptr) == 0, "feed_rows without rows");
  expect(launch_path({}, {}, 1, nullptr) == 0, "accepted_path without a path");
  expect(launch_text({}, {}, 1, nullptr) == 0, "commit_text without a path");
  for (const Launch& launch : gpu().launches) expect(launch.threads == 32, "a warp");
}

}  // namespace
}  // namespace gsd

int main(int, char** arguments) {
  const std::string part = arguments[1];
  if (part == "errors") gsd::errors();
  if (part == "groups") gsd::groups(true);
  if (part == "uneven clusters") gpu().clusters = 31, gsd::groups(true);
  if (part == "no clusters") gpu().clusters = 0, gsd::groups(true);
  if (part == "no maps") gpu().maps = false, gsd::groups(false);
  if (part == "memory") gsd::memory();
  if (part == "empty") gsd::empty();
  return gsd::failures == 0 ? 0 : 3;
}
