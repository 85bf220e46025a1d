// The product of many rows by groups of warps (warp-specialized wgmma GEMM, fed by TMA: rows_group_product.h), in code for
// 9.0a alone.
#include <cuda_runtime.h>

#include <map>
#include <string>

#include "choose.h"
#include "kernel_facts.h"
#include "launch.h"
#include "rows.h"
#include "rows_boxes.h"
#include "warpgroup_machine.h"

namespace gsd {
namespace {

constexpr int kSwizzled = 1024;  // bytes: where boxes with exchanged chunks begin

template <class Element, int kRows>
__global__ void __launch_bounds__(GroupProduct<Element, kRows>::kThreads, 1)
    rows_group_kernel(const __grid_constant__ RowsProduct args, const __grid_constant__ RowsCut cut,
                      const __grid_constant__ GroupMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char group_arena[];
  __shared__ __align__(8) uint64_t barriers[GroupProduct<Element, kRows>::kBarriers];
  char* const arena = group_arena + (kSwizzled - __cvta_generic_to_shared(group_arena) % kSwizzled) % kSwizzled;
  CudaWarpgroupMachine machine(arena, barriers, maps);
  GroupProduct<Element, kRows>::run(machine, args, cut, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
#endif
}

struct GroupFacts {
  bool built;  // whether the kernel has code, which only what was compiled for 9.0a has, and the driver makes maps
  int multiprocessors, clusters[kMostSplits + 1];  // of so many blocks, together: fewer where multiprocessors are missing
};

// How the kernel is launched: `blocks` in clusters of `cluster`.
template <class Element, int kRows>
struct GroupConfig {
  static constexpr auto kernel = rows_group_kernel<Element, kRows>;
  static constexpr int kBytes = GroupProduct<Element, kRows>::kArenaBytes + kSwizzled;

  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  GroupConfig(int blocks, int cluster) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(GroupProduct<Element, kRows>::kThreads);
    config.dynamicSmemBytes = kBytes;
    config.attrs = attributes, config.numAttrs = 1;
  }
  GroupConfig(const GroupConfig&) = delete;  // it points into itself

  static int clusters(int size) {
    const GroupConfig one(size, size);
    int found = 0;
    if (cudaOccupancyMaxActiveClusters(&found, kernel, &one.config) != cudaSuccess) found = 0, drop_error();
    return found;
  }
};

using MakeMap = decltype(&cuTensorMapEncodeTiled);

// The driver's own, asked for once; its library is not linked. Null where the driver lacks it.
MakeMap make_map_function() {
  static const MakeMap found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result{};
    constexpr unsigned kSince = 12000;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, kSince, cudaEnableDefault, &result);
    if (error != cudaSuccess) drop_error();
    return reinterpret_cast<MakeMap>(error == cudaSuccess && result == cudaDriverEntryPointSuccess ? entry : nullptr);
  }();
  return found;
}

// Whether the driver takes them: not where gate and up lie 2^40 bytes apart. Boxes are copied as they are, so that a type of
// two bytes serves both dtypes. A map follows from its boxes alone, and takes the host some 100 us to make: it is kept.
bool make_map(CUtensorMap& map, const RowsBoxes& boxes) {
  thread_local std::map<std::string, CUtensorMap> made;
  const std::string key(reinterpret_cast<const char*>(&boxes), offsetof(RowsBoxes, box) + sizeof(boxes.box));
  if (const auto known = made.find(key); known != made.end()) return map = known->second, true;
  const cuuint32_t every[] = {1, 1, 1, 1, 1};
  const auto error = make_map_function()(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT16, boxes.kDimensions, const_cast<uint16_t*>(boxes.from), boxes.sizes, boxes.bytes,
      boxes.box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) return false;
  if (made.size() == 4096) made.clear();
  made[key] = map;
  return true;
}

template <class Element, int kRows>
int find_facts(int device, GroupFacts& facts) {
  using Config = GroupConfig<Element, kRows>;
  static KernelFacts<GroupFacts> known;
  return known.find(device, reinterpret_cast<const void*>(Config::kernel), facts, [&](GroupFacts& found) -> int {
    cudaFuncAttributes code{};
    int major = 0;
    cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error != cudaSuccess || major != 9) return found = {}, error;
    error = cudaFuncGetAttributes(&code, Config::kernel);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&found.multiprocessors, cudaDevAttrMultiProcessorCount, device);
    found.built = code.sharedSizeBytes > 0 && make_map_function() != nullptr;
    if (error != cudaSuccess || !found.built) return error;
    error = cudaFuncSetAttribute(Config::kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kBytes);
    for (int size = 2; size <= kMostSplits; size++) found.clusters[size] = Config::clusters(size);
    return error;
  });
}

// False, and nothing launched, where the driver refuses a map.
template <class Element, int kRows>
int launch(const RowsProduct& args, const RowsLaunch& how, const GroupFacts& facts, bool& taken) {
  using Group = GroupProduct<Element, kRows>;
  const RowsCut cut(args, Group::kOutputs);
  GroupMaps maps{};
  taken = make_map(maps.rows, RowsBoxes::rows(args.x, args.inputs, args.rows, kRows));
  for (int i = 0; i < args.count; i++) {
    if (args.matrices[i].outputs == 0 || (args.end == RowsEnd::kGate && i > 0)) continue;  // a map that no block has
    taken = taken && make_map(maps.matrices[i], RowsBoxes::weights(args, i));
  }
  if (!taken) return cudaSuccess;
  const int tiles = cut.output_blocks * ((args.rows + kRows - 1) / kRows), together = facts.clusters[cut.splits];
  const int blocks = cut.splits > 1 ? tiles * cut.splits : min_int(tiles, facts.multiprocessors);
  // As clusters only where that takes no further wave.
  const auto waves = [](int count, int at_once) { return (count + at_once - 1) / at_once; };
  const bool clusters = together > 0 && waves(tiles, together) <= waves(blocks, facts.multiprocessors);
  GroupConfig<Element, kRows> made(blocks, clusters ? cut.splits : 1);
  made.attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  made.attributes[1].val.programmaticStreamSerializationAllowed = 1;
  made.config.numAttrs = how.overlap ? 2 : 1;
  made.config.stream = static_cast<cudaStream_t>(how.stream);
  const cudaError_t launched = cudaLaunchKernelEx(&made.config, made.kernel, args, cut, maps);
  return launched == cudaSuccess ? cudaGetLastError() : launched;
}

template <class Element, int kRows>
int take(const RowsProduct& args, const RowsLaunch& how, bool& taken) {
  int device = 0;
  GroupFacts facts{};
  int error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = find_facts<Element, kRows>(device, facts);
  taken = error == cudaSuccess && facts.built;
  return taken ? launch<Element, kRows>(args, how, facts, taken) : error;
}

}  // namespace

int launch_rows_group(const RowsProduct& args, const RowsLaunch& how, bool& taken) {
  return with_type(how.bfloat16, [&](auto type) {
    return with_size<64, 128, 256>(args.group_rows(), [&](auto rows) {
      return take<decltype(type), decltype(rows)::value>(args, how, taken);
    });
  });
}

}  // namespace gsd
