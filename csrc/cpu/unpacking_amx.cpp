// Products of few rows over packed weights under AMX: weights are decoded in registers into tiles in the nearest cache, while
// the tiles before them are multiplied. Sums have the order of products_amx.cpp.
#include "../algorithms/elements.h"
#include "instructions.h"
#include "row_forms.h"

namespace gsd {

#if GSD_X86 && defined(__linux__)
GSD_BEGIN_TARGET("avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c,amx-tile,amx-bf16")
namespace {

constexpr int kLanes = 16;
#include "products_tile.h"
#include "plain.h"
#define GSD_ROUNDS_BFLOAT16
#include "decode_zmm.h"
#include "decode_vectors.h"
#include "units.h"
#include "pairs_zmm.h"
#include "tiles.h"

constexpr int kWide = 32, kTile = 16, kQuads = kWide / kOutputs;  // outputs of two tiles of weights, in units
constexpr int64_t kPanel = kStepInputs * kTile;                    // elements of a tile

// Weights of 32 outputs, kHeld inputs of them.
template <class Unit>
struct Decoded {
  alignas(64) uint16_t weights[Unit::kHeld / kStepInputs][kWide][kStepInputs];
};

template <class Unit>
struct Decoding {
  Four columns[kQuads];
  typename Unit::Read read;
  typename Unit::Held held[2];
  Decoded<Unit> decoded[2];
};

// One step of two tiles of weights and one or two of rows.
template <bool Both>
GSD_TILE void multiply_tiles(HardTiles& tiles, const uint16_t (&weights)[kWide][kStepInputs], const uint16_t* x,
                             int64_t block_size) {
  tiles.template load<4>(weights, 64);
  tiles.template load<6>(x, 64);
  tiles.template add<0, 4, 6>();
  tiles.template load<5>(weights + kTile, 64);
  tiles.template add<1, 5, 6>();
  if constexpr (Both) {
    tiles.template load<7>(x + block_size, 64);
    tiles.template add<2, 4, 7>();
    tiles.template add<3, 5, 7>();
  }
}

// Four outputs' weights from input i on.
template <class Unit>
GSD_TILE void decode_quad(const Four& columns, int quad, int64_t i, int64_t k, const typename Unit::Held& held,
                          Decoded<Unit>& to) {
  const int64_t last = fewer(k, i + Unit::kHeld);
  for (int step = 0; i < last; i += kStepInputs, step++) {
    GSD_UNROLL
    for (int j = 0; j < kOutputs; j++) {
      _mm512_store_si512(to.weights[step][quad * kOutputs + j], Unit::words(columns.weights[j], i, held, j));
    }
  }
}

// A unit of a strip, in the order in which units are decoded.
struct Place {
  int64_t i;
  int quad;
};

template <class F, bool Both>
bool strips_of(const uint16_t* x, int64_t rows, const Weights& w, int64_t begin, int64_t end, float* out,
               int64_t out_stride) {
  typedef UnitOf<F> Unit;
  HardTiles tiles;
  Decoding<Unit> strip;
  alignas(64) float sums[kWide * kWide];
  const int64_t k = w.inputs, numbers = w.groups * F::kBeside, block_size = k * kRowBlock;
  const uint8_t* from = reinterpret_cast<const uint8_t*>(w.data);
  const char* ahead = w.data + begin * w.row_bytes;
  const char *touched = ahead, *at_end = w.data + end * w.row_bytes;
  for (int64_t n = begin; n < end; n += kWide) {
    const int outputs = static_cast<int>(fewer(kWide, end - n)), quads = (outputs + kOutputs - 1) / kOutputs;
    if (!are_normal<F>(w, n, n + outputs)) return false;
    for (int quad = 0; quad < quads; quad++) {
      for (int j = 0; j < kOutputs; j++) {
        const int64_t output = fewer(n + quad * kOutputs + j, end - 1);
        strip.columns[quad].weights[j] = from + output * w.row_bytes;
        strip.columns[quad].beside[j] = w.scales + output * numbers;
      }
      strip.columns[quad].size = F::kBeside > 0 ? k / w.groups : k;
    }
    tiles.clear();
    const char* next = w.data + (n + kWide) * w.row_bytes;  // what follows is asked for meanwhile
    ahead = next;
    if (ahead + kPagesAhead > touched) touch_pages(touched, sooner(ahead + 2 * kPagesAhead, at_end));
    int before = 0;  // steps that are decoded, not multiplied
    Place next_unit{0, 0};
    const auto pass = [&](Place& p) {
      if (++p.quad == quads) p.quad = 0, p.i += Unit::kHeld;
    };
    Unit::read(strip.columns[0], 0, k, strip.read);
    Unit::hold(strip.columns[0], 0, k, strip.read, strip.held[0]);
    pass(next_unit);
    if (next_unit.i < k) Unit::read(strip.columns[next_unit.quad], next_unit.i, k, strip.read);
    int at = 0;
    for (int64_t i = 0; i < k; i += Unit::kHeld) {
      Decoded<Unit>& now = strip.decoded[i / Unit::kHeld % 2];
      const Decoded<Unit>& done = strip.decoded[1 - i / Unit::kHeld % 2];
      const uint16_t* of_done = x + (i / kStepInputs - before) * kPanel;
      int multiplied = 0;
      const int64_t part = Unit::kHeld / kStepInputs * Unit::kStepBytes * kOutputs;
      for (int quad = 0; quad < quads; quad++) {
        if (next_unit.i < k) {
          Unit::hold(strip.columns[next_unit.quad], next_unit.i, k, strip.read, strip.held[1 - at]);
          pass(next_unit);
          if (next_unit.i < k) Unit::read(strip.columns[next_unit.quad], next_unit.i, k, strip.read);
        }
        decode_quad<Unit>(strip.columns[quad], quad, i, k, strip.held[at], now);
        at = 1 - at;
        for (const char* until = sooner(ahead + part, at_end); ahead < until; ahead += kLine) __builtin_prefetch(ahead, 0, 2);
        for (; multiplied * quads < before * (quad + 1); multiplied++) {
          multiply_tiles<Both>(tiles, done.weights[multiplied], of_done + multiplied * kPanel, block_size);
        }
      }
      before = static_cast<int>(fewer(k - i, Unit::kHeld) / kStepInputs);
    }
    const Decoded<Unit>& done = strip.decoded[(k - 1) / Unit::kHeld % 2];
    for (int step = 0; step < before; step++) {
      multiply_tiles<Both>(tiles, done.weights[step], x + (k / kStepInputs - before + step) * kPanel, block_size);
    }
    constexpr int64_t kLineBytes = kWide * sizeof(float);
    tiles.template store<0>(sums, kLineBytes), tiles.template store<1>(sums + kTile * kWide, kLineBytes);
    if constexpr (Both) {
      tiles.template store<2>(sums + kTile, kLineBytes), tiles.template store<3>(sums + kTile * kWide + kTile, kLineBytes);
    }
    for (int part = 0; part < 4; part++) {
      ZmmPairs::put_turned(sums, part, rows, outputs, out + n - begin, out_stride);
    }
  }
  return true;
}

// As UnpackingProducts has them.
template <class F>
bool unpacking_of(const void* packed, int64_t rows, const Weights& w, int64_t begin, int64_t end, float* out,
                  int64_t out_stride) {
  if (!has_units<F>(w)) return false;
  const uint16_t* x = static_cast<const uint16_t*>(packed);
  if (rows <= kRowBlock) return strips_of<F, false>(x, rows, w, begin, end, out, out_stride);
  return strips_of<F, true>(x, rows, w, begin, end, out, out_stride);
}

#define GSD_UNPACKED(F) unpacking_of<F>
constexpr UnpackingProducts kUnpacking{{nullptr, nullptr, nullptr, GSD_FORMATS(GSD_UNPACKED)}, 2 * kRowBlock};

}  // namespace
GSD_END_TARGET

const UnpackingProducts kAmxUnpacking = kUnpacking;
#else
const UnpackingProducts kAmxUnpacking{};
#endif

}  // namespace gsd
