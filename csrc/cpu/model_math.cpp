// Products may be fused with sums here: nothing in this file has to be bit-equal to another backend.
#pragma GCC optimize("fp-contract=fast")

#include "model_math.h"

#include <cmath>
#include <cstring>

#include "../algorithms/elements.h"
#include "lanes.h"

namespace gsd {
namespace {

typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef float Four __attribute__((vector_size(16)));
typedef int32_t FourInts __attribute__((vector_size(16)));

struct WideFloat32 {
  typedef float Stored;
  static inline __attribute__((always_inline)) void widen(const float* from, Floats& to) { load(from, to); }
};

struct WideBfloat16 {
  typedef uint16_t Stored;
  static inline __attribute__((always_inline)) void widen(const uint16_t* from, Floats& to) {
    Halves halves;
    memcpy(&halves, from, sizeof halves);
    to = (Floats)(__builtin_convertvector(halves, Words) << 16);
  }
};

struct WideFloat16 {
  typedef uint16_t Stored;
  static inline __attribute__((always_inline)) void widen(const uint16_t* from, Floats& to) {  // as float_from_half
    Halves halves;
    memcpy(&halves, from, sizeof halves);
    const Words wide = __builtin_convertvector(halves, Words) << 16, magnitude = wide << 1;
    const Floats normal = (Floats)((magnitude >> 4) + (0xE0u << 23)) * 1.925929944387236e-34f;
    const Floats subnormal = (Floats)((magnitude >> 17) | (126u << 23)) - 0.5f;
    const Ints small = (Ints)((magnitude >> 4) - (1u << 23)) >> 31;
    choose(small, subnormal, normal, to);
    to = (Floats)((wide & 0x80000000u) | (Words)to);
  }
};

GSD_INLINE void fold(const Floats& x, Four& out) {
  Eight half[2];
  memcpy(half, &x, sizeof half);
  const Eight both = half[0] + half[1];
  Four quarter[2];
  memcpy(quarter, &both, sizeof quarter);
  out = quarter[0] + quarter[1];
}

GSD_INLINE void add_pairs(const Four& a, const Four& b, Four& out) {
  out = __builtin_shuffle(a, b, FourInts{0, 2, 4, 6}) + __builtin_shuffle(a, b, FourInts{1, 3, 5, 7});
}

// The sums of four vectors.
GSD_INLINE void sums(const Floats x[4], float out[4]) {
  Four f[4], low, high, all;
  GSD_UNROLL
  for (int i = 0; i < 4; i++) fold(x[i], f[i]);
  add_pairs(f[0], f[1], low);
  add_pairs(f[2], f[3], high);
  add_pairs(low, high, all);
  memcpy(out, &all, sizeof all);
}

GSD_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

constexpr int kColumns = 4;  // with six rows: 24 sums, four weights and a vector of x in 32 registers

// out[R, 4] = x[R, k] · column[4, k]ᵀ. Meanwhile memory is asked for `fetched` columns `ahead`.
template <class E, int R>
GSD_INLINE void product_tile(const float* x, int64_t x_stride, int64_t k,
                             const typename E::Stored* const column[kColumns],
                             const typename E::Stored* const* ahead, int64_t fetched, int64_t columns, float* out,
                             int64_t out_stride) {
  Floats total[R][kColumns] = {};
  for (int64_t i = 0; i < k; i += kLanes) {
    for (int64_t j = 0; j < fetched; j++) __builtin_prefetch(ahead[j] + i, 0, 2);
    Floats weight[kColumns], seen;
    GSD_UNROLL
    for (int j = 0; j < kColumns; j++) E::widen(column[j] + i, weight[j]);
    GSD_UNROLL
    for (int r = 0; r < R; r++) {
      load(x + r * x_stride + i, seen);
      GSD_UNROLL
      for (int j = 0; j < kColumns; j++) total[r][j] += seen * weight[j];
    }
  }
  GSD_UNROLL
  for (int r = 0; r < R; r++) {
    float sum[kColumns];
    sums(total[r], sum);
    GSD_UNROLL
    for (int j = 0; j < kColumns; j++) {
      if (j < columns) out[r * out_stride + j] = sum[j];
    }
  }
}

// The same for up to R rows, as many as there are.
template <class E, int R>
GSD_INLINE void product_rows(int64_t rows, const float* x, int64_t x_stride, int64_t k,
                             const typename E::Stored* const column[kColumns],
                             const typename E::Stored* const* ahead, int64_t fetched, int64_t columns, float* out,
                             int64_t out_stride) {
  if constexpr (R > 1) {
    if (rows < R) return product_rows<E, R - 1>(rows, x, x_stride, k, column, ahead, fetched, columns, out, out_stride);
  }
  product_tile<E, R>(x, x_stride, k, column, ahead, fetched, columns, out, out_stride);
}

// Tiles of four columns and up to R rows. Columns that hang over the edge repeat the last one and are not stored.
template <class E, int R>
GSD_INLINE void products_of(const float* x, int64_t x_stride, int64_t rows, int64_t k, const Matrix& w, int64_t begin,
                            int64_t end, float* out, int64_t out_stride) {
  typedef typename E::Stored Stored;
  const Stored* weights = static_cast<const Stored*>(w.data);
  const int64_t tiles = (rows + R - 1) / R, tall = (rows + tiles - 1) / tiles;  // as even as possible
  const int64_t asking = smaller(tiles, kColumns);  // each tile asks for a part of the next columns
  for (int64_t n = begin; n < end; n += kColumns) {
    const Stored *column[kColumns], *next[kColumns];
    GSD_UNROLL
    for (int j = 0; j < kColumns; j++) {
      column[j] = weights + smaller(n + j, end - 1) * w.row_stride;
      next[j] = column[j] + kColumns * w.row_stride;  // beyond the end it is asked for, and never read
    }
    for (int64_t m = 0, tile = 0; m < rows; m += tall, tile++) {
      const int64_t from = smaller(kColumns * tile / asking, kColumns);
      const int64_t to = smaller(kColumns * (tile + 1) / asking, kColumns);
      product_rows<E, R>(smaller(tall, rows - m), x + m * x_stride, x_stride, k, column, next + from, to - from,
                         smaller(kColumns, end - n), out + m * out_stride + n, out_stride);
    }
  }
}

// Tiles of four rows and V vectors.
template <class E, int V>
GSD_INLINE void weighted_tile(const float* weights, int64_t weights_stride, int64_t rows, const Matrix& v,
                              int64_t positions, int64_t d, float* out, int64_t out_stride) {
  const typename E::Stored* values = static_cast<const typename E::Stored*>(v.data) + d;
  for (int64_t m = 0; m < rows; m += 4) {
    const float* weight[4];
    float* to[4];
    Floats total[4][V] = {}, value;  // from zero: one chain over a long text would round three times as much
    GSD_UNROLL
    for (int r = 0; r < 4; r++) {
      weight[r] = weights + smaller(m + r, rows - 1) * weights_stride;
      to[r] = out + smaller(m + r, rows - 1) * out_stride + d;
    }
    for (int64_t p = 0; p < positions; p++) {
      GSD_UNROLL
      for (int j = 0; j < V; j++) {
        E::widen(values + p * v.row_stride + j * kLanes, value);
        GSD_UNROLL
        for (int r = 0; r < 4; r++) total[r][j] += value * weight[r][p];
      }
    }
    for (int64_t r = 0; r < smaller(4, rows - m); r++) {
      GSD_UNROLL
      for (int j = 0; j < V; j++) {
        load(to[r] + j * kLanes, value);
        store(value + total[r][j], to[r] + j * kLanes);
      }
    }
  }
}

template <class E, int V>
GSD_INLINE void weighted_rows_of(const float* weights, int64_t weights_stride, int64_t rows, const Matrix& v,
                                 int64_t positions, int64_t width, float* out, int64_t out_stride) {
  int64_t d = 0;
  for (; d + V * kLanes <= width; d += V * kLanes) {
    weighted_tile<E, V>(weights, weights_stride, rows, v, positions, d, out, out_stride);
  }
  for (; d < width; d += kLanes) {
    weighted_tile<E, 1>(weights, weights_stride, rows, v, positions, d, out, out_stride);
  }
}

template <class E>
GSD_INLINE void read_row_of(const Matrix& from, int64_t row, float* to, int64_t width) {
  typedef typename E::Stored Stored;
  const Stored* elements = static_cast<const Stored*>(from.data) + row * from.row_stride;
  Floats value;
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    E::widen(elements + i, value);
    store(value, to + i);
  }
  if (i < width) {
    Stored part[kLanes] = {};
    memcpy(part, elements + i, static_cast<size_t>(width - i) * sizeof(Stored));
    E::widen(part, value);
    memcpy(to + i, &value, static_cast<size_t>(width - i) * sizeof(float));
  }
}

// The lanes that a row still has, zeros beyond.
GSD_INLINE void load_up_to(const float* from, int64_t left, Floats& to) {
  to = Floats{};
  memcpy(&to, from, static_cast<size_t>(smaller(left, kLanes)) * sizeof(float));
}

}  // namespace

// Instances for every float type: with small tiles for 16 registers, and large ones for the 32 of AVX-512.
#define GSD_FOR_ELEMENTS(name, small, large, parameters, arguments)                                      \
  GSD_CLONES static void name##_float32 parameters { name##_of<WideFloat32, small> arguments; }          \
  GSD_CLONES static void name##_bfloat16 parameters { name##_of<WideBfloat16, small> arguments; }        \
  GSD_CLONES static void name##_float16 parameters { name##_of<WideFloat16, small> arguments; }          \
  GSD_AVX512 static void name##_float32_large parameters { name##_of<WideFloat32, large> arguments; }    \
  GSD_AVX512 static void name##_bfloat16_large parameters { name##_of<WideBfloat16, large> arguments; }  \
  GSD_AVX512 static void name##_float16_large parameters { name##_of<WideFloat16, large> arguments; }    \
  void name parameters {                                                                                 \
    decltype(&name##_float32) const run[2][3] = {                                                        \
        {name##_float32, name##_bfloat16, name##_float16},                                               \
        {name##_float32_large, name##_bfloat16_large, name##_float16_large}};                            \
    run[has_avx512()][static_cast<int>(matrix.element)] arguments;                                       \
  }

GSD_FOR_ELEMENTS(products, 2, 6,
                 (const float* x, int64_t x_stride, int64_t rows, int64_t k, const Matrix& matrix, int64_t begin,
                  int64_t end, float* out, int64_t out_stride),
                 (x, x_stride, rows, k, matrix, begin, end, out, out_stride))
GSD_FOR_ELEMENTS(weighted_rows, 1, 4,
                 (const float* weights, int64_t weights_stride, int64_t rows, const Matrix& matrix, int64_t positions,
                  int64_t width, float* out, int64_t out_stride),
                 (weights, weights_stride, rows, matrix, positions, width, out, out_stride))

void read_row(const Matrix& from, int64_t row, float* to, int64_t width) {
  switch (from.element) {
    case Element::kFloat32:
      return read_row_of<WideFloat32>(from, row, to, width);
    case Element::kBfloat16:
      return read_row_of<WideBfloat16>(from, row, to, width);
    case Element::kFloat16:
      return read_row_of<WideFloat16>(from, row, to, width);
  }
}

void write_row(const float* from, void* to, Element element, int64_t width) {
  if (element == Element::kFloat32) {
    memcpy(to, from, static_cast<size_t>(width) * sizeof(float));
  } else if (element == Element::kBfloat16) {
    for (int64_t i = 0; i < width; i++) static_cast<uint16_t*>(to)[i] = Bfloat16::round(from[i]);
  } else {
    for (int64_t i = 0; i < width; i++) static_cast<uint16_t*>(to)[i] = Half::round(from[i]);
  }
}

void make_finite(float* x, Element element, int64_t width) {
  const float most = element == Element::kFloat16    ? 65504.0f
                     : element == Element::kBfloat16 ? float_from_bits(0x7F7F0000)
                                                     : float_from_bits(0x7F7FFFFF);
  for (int64_t i = 0; i < width; i++) x[i] = x[i] > most ? most : x[i] < -most ? -most : x[i] == x[i] ? x[i] : 0.0f;
}

GSD_CLONES void scale_row(float* x, float by, int64_t width) {
  Floats seen;
  for (int64_t i = 0; i < width; i += kLanes) {
    load(x + i, seen);
    seen = seen * by;
    store(seen, x + i);
  }
}

GSD_CLONES void rms_norm(const float* x, const float* weight, float eps, float* out, int64_t width) {
  Floats square{}, seen, scaled;
  const int64_t whole = width / kLanes * kLanes, left = width - whole;
  for (int64_t i = 0; i < whole; i += kLanes) {
    load(x + i, seen);
    square += seen * seen;
  }
  if (left > 0) {
    load_up_to(x + whole, left, seen);
    square += seen * seen;
  }
  float total = 0.0f;
  for (int lane = 0; lane < kLanes; lane++) total += square[lane];
  const float by = 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
  for (int64_t i = 0; i < whole; i += kLanes) {
    load(x + i, seen);
    load(weight + i, scaled);
    store(seen * by * scaled, out + i);
  }
  if (left > 0) {
    load_up_to(x + whole, left, seen);
    load_up_to(weight + whole, left, scaled);
    seen = seen * by * scaled;
    memcpy(out + whole, &seen, static_cast<size_t>(left) * sizeof(float));
  }
}

GSD_CLONES void silu_times(float* gate, const float* up, int64_t width) {
  Floats g, u, e, share;
  Ints negative;
  for (int64_t i = 0; i < width; i += kLanes) {
    load(gate + i, g);
    load(up + i, u);
    exp_lanes((Floats)((Ints)g | INT32_MIN), e);  // of −|g|: ≤ 1, so nothing overflows
    sign_of(g, negative);
    choose(negative, e, Floats{} + 1.0f, share);
    store(g * u * (share / (1.0f + e)), gate + i);
  }
}

GSD_CLONES float largest(const float* scores, int64_t padded) {
  Eight best = negative_infinity() - Eight{}, seen;
  EightInts nan{};
  for (int64_t i = 0; i < padded; i += kEight) {
    load(scores + i, seen);
    nan |= seen != seen;
    best = seen > best ? seen : best;
  }
  float top = negative_infinity();
  bool found = false;
  for (int lane = 0; lane < kEight; lane++) {
    top = best[lane] > top ? best[lane] : top;
    found |= nan[lane] != 0;
  }
  return found ? float_from_bits(0x7FC00000) : top;  // NaN gets through
}

GSD_CLONES float exp_row(float* scores, int64_t padded, float shift) {
  Floats seen, e, total{};
  for (int64_t i = 0; i < padded; i += kLanes) {
    load(scores + i, seen);
    exp_lanes(seen - shift, e);
    total += e;
    store(e, scores + i);
  }
  float sum = 0.0f;
  for (int lane = 0; lane < kLanes; lane++) sum += total[lane];
  return sum;
}

}  // namespace gsd
