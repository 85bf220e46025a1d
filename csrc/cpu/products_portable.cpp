// Products for any processor: vectors that the compiler maps to what there is. The level that others prove themselves on.
#include <cstring>

#include "../algorithms/elements.h"
#include "lanes.h"
#include "products.h"

namespace gsd {
namespace {

#include "products_tile.h"
#include "plain.h"

typedef Plain Machine;
template <class F, class To, bool>
struct Strip {
  template <class N>
  struct Held {
    N numbers;
    int step;
  };
  template <class N>
  GSD_TILE Held<N> hold(const N& numbers, int step) {
    return {numbers, step};
  }
  template <class N>
  GSD_TILE void put(const Held<N>& held, const Plain::Codes& codes, typename To::Stored* to) {
    float values[32];
    plain_values<F>(codes, held.numbers, held.step, values);
    To::store(values, 32, to);
  }
};
#include "decode.h"

struct Generic : Dense {
  typedef float Seen;
  typedef Floats Weights;
  typedef Floats Row;
  typedef Floats Sum;
  typedef Floats Lanes;
  static constexpr int kStep = kLanes, kRows = 1, kVectors = 1, kTall = 1;

  GSD_TILE void clear(Sum& sum) { sum = Floats{}; }
  GSD_TILE void see(const float* from, Row& row) { load(from, row); }
  GSD_TILE void add(const Row& row, const Weights& weights, Sum& sum) { sum += row * weights; }
  GSD_TILE void arrange(const float* from, float* to) { memcpy(to, from, sizeof(Floats)); }

  static void sums(const Sum x[kOutputs], float out[kOutputs]) {
    for (int j = 0; j < kOutputs; j++) {
      float at[kLanes];
      memcpy(at, &x[j], sizeof at);
      for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; i++) at[i] += at[i + width];
      }
      out[j] = at[0];
    }
  }

  GSD_TILE void load_lanes(const float* from, int part, Lanes& to) {
    to = Floats{};
    memcpy(&to, from, static_cast<size_t>(part) * sizeof(float));
  }
  GSD_TILE void store_lanes(const Lanes& from, int part, float* to) {
    memcpy(to, &from, static_cast<size_t>(part) * sizeof(float));
  }
  GSD_TILE void add_lanes(const Lanes& value, float weight, Lanes& sum) { sum += value * weight; }
};

template <class Element, float (*kWiden)(Element)>
struct Scalars : Generic {
  typedef Element Stored;
  GSD_TILE void widen_lanes(const Stored* from, int part, Floats& to) {
    float wide[kLanes] = {};
    for (int i = 0; i < part; i++) wide[i] = kWiden(from[i]);
    load(wide, to);
  }
  GSD_TILE void widen(const Stored* from, Floats& to) { widen_lanes(from, kLanes, to); }
};

struct Rounding : Scalars<uint16_t, Bfloat16::widen> {  // as the levels do that multiply in bfloat16
  GSD_TILE void arrange(const float* from, float* to) {
    for (int i = 0; i < kLanes; i++) to[i] = Bfloat16::widen(Bfloat16::round(from[i]));
  }
};

// Codes of int8: sums are exact, so all levels have the same bits; what they leave in `out` are words of 32 bits.
struct Codes : Dense {
  typedef int8_t Stored;
  typedef int8_t Seen;
  static constexpr int kStep = 16, kRows = 1;
  struct Weights {
    int8_t of[kStep];
  };
  typedef Weights Row;
  typedef int32_t Sum;
  GSD_TILE void clear(Sum& sum) { sum = 0; }
  GSD_TILE void see(const int8_t* from, Row& row) { memcpy(row.of, from, kStep); }
  GSD_TILE void widen(const int8_t* from, Weights& to) { see(from, to); }
  GSD_TILE void add(const Row& row, const Weights& weights, Sum& sum) {
    for (int i = 0; i < kStep; i++) sum += row.of[i] * weights.of[i];
  }
  GSD_TILE void sums(const Sum x[kOutputs], float* out) { memcpy(out, x, kOutputs * sizeof(Sum)); }
};

}  // namespace

const IsaKernels* portable_kernels() {
  static const RowKernel float32 = kernel_of<Scalars<float, Plain::same>>(), bfloat16 = kernel_of<Rounding>(),
                         float16 = kernel_of<Scalars<uint16_t, Half::widen>>();
  static const IsaKernels kernels{
      "portable", {float32, bfloat16, float16}, {float32, bfloat16, float16}, GSD_DECODERS, {}, integers_of<Codes>(0)};
  return &kernels;
}

}  // namespace gsd
