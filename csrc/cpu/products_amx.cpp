// Products of bfloat16 pairs in tiles, AMX: 16 outputs × 32 inputs of a row-major weight are a tile as they lie; the
// rows are arranged so that 32 inputs × 16 rows are one. A tile multiplies all of its rows, so one row is sixteen.
//
// The loops are written for tiles of any make. Tiles in software, which only tests ask for, run them where there are none.
#include <algorithm>
#include <cstring>
#include <vector>

#include "../algorithms/elements.h"
#include "instructions.h"
#include "products.h"

#if GSD_X86 && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace gsd {
namespace {

namespace soft {
constexpr int kLanes = 16;
#include "products_tile.h"

struct Tiles {
  char tile[8][1024];

  void clear() { memset(tile, 0, sizeof tile); }
  template <int T>
  void load(const void* from, int64_t stride) {
    for (int row = 0; row < 16; row++) memcpy(tile[T] + 64 * row, static_cast<const char*>(from) + row * stride, 64);
  }
  template <int T>
  void store(void* to, int64_t stride) const {
    for (int row = 0; row < 16; row++) memcpy(static_cast<char*>(to) + row * stride, tile[T] + 64 * row, 64);
  }
  template <int C, int A, int B>
  void add() {
    float c[256];
    uint16_t a[512], b[512];
    memcpy(c, tile[C], sizeof c), memcpy(a, tile[A], sizeof a), memcpy(b, tile[B], sizeof b);
    for (int m = 0; m < 16; m++) {
      for (int pair = 0; pair < 16; pair++) {
        for (int n = 0; n < 16; n++) {
          for (int i = 0; i < 2; i++) {
            c[m * 16 + n] += Bfloat16::widen(a[m * 32 + 2 * pair + i]) * Bfloat16::widen(b[pair * 32 + 2 * n + i]);
          }
        }
      }
    }
    memcpy(tile[C], c, sizeof c);
  }

  // As ZmmPairs has them.
  static void round(const float* from, int64_t n, uint16_t* to) {
    for (int i = 0; i < 32; i++) to[i] = i < n ? Bfloat16::round(from[i]) : 0;
  }
  static void turn(const uint16_t* from, int64_t stride, int64_t rows, int64_t n, uint16_t* to, int64_t line) {
    for (int r = 0; r < 16; r++) {
      for (int i = 0; i < 32; i++) to[i / 2 * line + r * 2 + i % 2] = r < rows && i < n ? from[r * stride + i] : 0;
    }
  }
  static void pair(const uint16_t* first, const uint16_t* second, int64_t n, uint16_t* to) {
    for (int i = 0; i < 32; i++) {
      const uint16_t* from = i % 2 == 0 ? first : second;
      to[i] = from != nullptr && i / 2 < n ? from[i / 2] : 0;
    }
  }
  static void put_turned(const float* sums, int part, int64_t rows, int64_t outputs, float* out, int64_t out_stride) {
    const int64_t first = part / 2 * 16, n = part % 2 * 16;
    for (int64_t r = first; r < fewer(first + 16, rows); r++) {
      for (int64_t j = n; j < fewer(n + 16, outputs); j++) out[r * out_stride + j] = sums[32 * j + r];
    }
  }
};
#include "pair_blocks.h"
#include "tile_loops.h"
}  // namespace soft

#if GSD_X86 && defined(__linux__)
GSD_BEGIN_TARGET("avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c,amx-tile,amx-bf16")
namespace hard {
constexpr int kLanes = 16;
#include "products_tile.h"
#include "pairs_zmm.h"
#include "tiles.h"

struct Tiles : HardTiles, ZmmPairs {};
#include "pair_blocks.h"
#include "tile_loops.h"

constexpr RowKernel kLarge{kRowBlock, 2 * kTile, paired_row_bytes, pack, products}, kSmall = paired_kernel<TileBlocks>();
}  // namespace hard
GSD_END_TARGET
#endif

}  // namespace

const IsaKernels* soft_amx_kernels() {
  static const IsaKernels* portable = portable_kernels();
  static const IsaKernels kernels{
      "amx_in_software",
      {portable->large[0], {kRowBlock, 2 * soft::kTile, soft::paired_row_bytes, soft::pack, soft::products}, portable->large[2]},
      {portable->small[0], soft::paired_kernel<soft::TileBlocks>(), portable->small[2]},
      portable->decoders, {}, portable->integers};
  return &kernels;
}

#if GSD_X86 && defined(__linux__)
std::string amx_permission() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return granted ? "" : "no tiles, or the system does not let this process use them";
}

const IsaKernels* amx_kernels() {
  static const IsaKernels* pairs = avx512_bf16_kernels();
  static const IsaKernels kernels{
      "amx",
      {pairs->large[0], hard::kLarge, pairs->large[2]},
      {pairs->small[0], hard::kSmall, pairs->small[2]},
      pairs->decoders, kAmxUnpacking, pairs->integers};
  return &kernels;
}

#else
std::string amx_permission() { return "tiles need Linux on x86-64"; }
const IsaKernels* amx_kernels() { return nullptr; }
#endif

}  // namespace gsd
