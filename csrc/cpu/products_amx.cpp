// Products of bfloat16 pairs in tiles, AMX: 16 outputs × 32 inputs of a row-major weight are a tile as they lie; the
// rows are arranged so that 32 inputs × 16 rows are one. A tile multiplies all of its rows, so one row is sixteen.
//
// The loops are written for tiles of any make. Tiles in software, which only tests ask for, run them where there are none.
#include <cstring>

#include "../algorithms/elements.h"
#include "instructions.h"
#include "products.h"

#if GSD_X86 && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if !GSD_X86
#define GSD_BEGIN_TARGET(names)
#define GSD_END_TARGET
#endif

namespace gsd {
namespace {

constexpr int64_t kDeep = 32;             // inputs of a tile
constexpr int64_t kWide = 32;             // outputs of two tiles
constexpr int64_t kPanel = kDeep * 16;    // elements of a tile
constexpr int64_t kRowsAtOnce = 96;

int64_t padded(int64_t k) { return (k + kDeep - 1) / kDeep * kDeep; }
int64_t row_bytes(int64_t k) { return padded(k) * 2; }

// Of 16 rows: [k / 32][16 pairs of inputs][16 rows][2].
void pack(const float* x, int64_t x_stride, int64_t first, int64_t last, int64_t k, void* packed) {
  for (int64_t block = first; block < last; block += kRowBlock) {
    uint16_t* to = static_cast<uint16_t*>(packed) + block * padded(k);
    memset(to, 0, static_cast<size_t>(padded(k) * kRowBlock) * sizeof(uint16_t));
    for (int64_t r = block; r < last && r < block + kRowBlock; r++) {
      const float* from = x + r * x_stride;
      for (int64_t i = 0; i < k; i++) to[i / 2 * 32 + (r - block) * 2 + i % 2] = Bfloat16::round(from[i]);
    }
  }
}

// Two tiles of weights, copied with zeros where they hang over an edge.
void copy_part(const uint16_t* w, int64_t w_stride, int64_t outputs, int64_t inputs, uint16_t* to) {
  memset(to, 0, static_cast<size_t>(kWide * kDeep) * sizeof(uint16_t));
  for (int64_t n = 0; n < outputs; n++) {
    memcpy(to + n * kDeep, w + n * w_stride, static_cast<size_t>(inputs) * sizeof(uint16_t));
  }
}

int64_t fewer(int64_t a, int64_t b) { return a < b ? a : b; }

// No compiler makes tile instructions of its own accord, so that tiles in software may be multiplied here too.
GSD_BEGIN_TARGET("amx-tile,amx-bf16")

// Tiles 0 … 3: sums of two tiles of outputs and two of rows; 4, 5: weights; 6, 7: rows.
template <class Tiles>
void products(const void* packed, int64_t rows, int64_t k, const void* w, int64_t w_stride, int64_t begin, int64_t end,
              float* out, int64_t out_stride, bool resident) {
  Tiles tiles;
  alignas(64) uint16_t part[kWide * kDeep];
  alignas(64) float sums[4][16 * 16];
  const uint16_t* weights = static_cast<const uint16_t*>(w);
  const int64_t block_size = padded(k) * kRowBlock;
  for (int64_t first = 0; first < rows; first += kRowsAtOnce) {
    const int64_t last = fewer(rows, first + kRowsAtOnce);
    for (int64_t n = begin; n < end; n += kWide) {
      const int64_t outputs = fewer(kWide, end - n);
      for (int64_t r = first; r < last; r += 2 * kRowBlock) {
        const uint16_t* x = static_cast<const uint16_t*>(packed) + r / kRowBlock * block_size;
        const bool both = r + kRowBlock < last;
        tiles.clear();
        for (int64_t i = 0; i < k; i += kDeep) {
          const uint16_t* from = weights + n * w_stride + i;
          int64_t stride = w_stride;
          if (outputs < kWide || i + kDeep > k) {
            copy_part(from, w_stride, outputs, fewer(kDeep, k - i), part);
            from = part, stride = kDeep;
          } else if (r == first && !resident) {
            for (int64_t j = kWide; j < 2 * kWide; j++) __builtin_prefetch(from + j * w_stride, 0, 2);
          }
          tiles.template load<4>(from, stride * 2);
          tiles.template load<5>(from + 16 * stride, stride * 2);
          tiles.template load<6>(x + i / kDeep * kPanel, 64);
          tiles.template add<0, 4, 6>();
          tiles.template add<1, 5, 6>();
          if (both) {
            tiles.template load<7>(x + block_size + i / kDeep * kPanel, 64);
            tiles.template add<2, 4, 7>();
            tiles.template add<3, 5, 7>();
          }
        }
        tiles.template store<0>(sums[0]);
        tiles.template store<1>(sums[1]);
        tiles.template store<2>(sums[2]);
        tiles.template store<3>(sums[3]);
        for (int64_t m = r; m < fewer(last, r + 2 * kRowBlock); m++) {
          for (int64_t j = 0; j < outputs; j++) {
            out[m * out_stride + n + j] = sums[(m - r) / 16 * 2 + j / 16][j % 16 * 16 + (m - r) % 16];
          }
        }
      }
    }
  }
}

#if GSD_X86 && defined(__linux__)
#include "tiles.h"

void hard_products(const void* packed, int64_t rows, int64_t k, const void* w, int64_t w_stride, int64_t begin,
                   int64_t end, float* out, int64_t out_stride, bool resident) {
  products<HardTiles>(packed, rows, k, w, w_stride, begin, end, out, out_stride, resident);
}
#endif

GSD_END_TARGET

struct SoftTiles {
  char tile[8][1024];

  void clear() { memset(tile, 0, sizeof tile); }
  template <int T>
  void load(const void* from, int64_t stride) {
    for (int row = 0; row < 16; row++) memcpy(tile[T] + 64 * row, static_cast<const char*>(from) + row * stride, 64);
  }
  template <int T>
  void store(void* to) const {
    memcpy(to, tile[T], sizeof tile[T]);
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
};

}  // namespace

const IsaKernels* soft_amx_kernels() {
  static const IsaKernels* portable = portable_kernels();
  static const IsaKernels kernels{
      "amx_in_software",
      {portable->large[0], {kRowBlock, kWide, row_bytes, pack, products<SoftTiles>, portable->large[1].weighted}, portable->large[2]},
      {portable->small[0], portable->small[1], portable->small[2]},
      portable->decoders, {}, portable->integers};
  return &kernels;
}

#if GSD_X86 && defined(__linux__)
std::string amx_permission() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return granted ? "" : "the system does not let this process use tiles";
}

const IsaKernels* amx_kernels() {
  static const IsaKernels* pairs = avx512_bf16_kernels();
  static const IsaKernels kernels{
      "amx",
      {pairs->large[0], {kRowBlock, kWide, row_bytes, pack, hard_products, pairs->large[1].weighted}, pairs->large[2]},
      {pairs->small[0], pairs->small[1], pairs->small[2]},
      pairs->decoders, kAmxUnpacking, pairs->integers};
  return &kernels;
}

#else
std::string amx_permission() { return "tiles need Linux on x86-64"; }
const IsaKernels* amx_kernels() { return nullptr; }
#endif

}  // namespace gsd
