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

struct WideFloat32 {
  typedef float Stored;
  GSD_INLINE void widen(const float* from, Floats& to) { load(from, to); }
};

struct WideBfloat16 {
  typedef uint16_t Stored;
  GSD_INLINE void widen(const uint16_t* from, Floats& to) {
    Halves halves;
    memcpy(&halves, from, sizeof halves);
    to = (Floats)(__builtin_convertvector(halves, Words) << 16);
  }
};

struct WideFloat16 {
  typedef uint16_t Stored;
  GSD_INLINE void widen(const uint16_t* from, Floats& to) {  // as float_from_half
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

}  // namespace

GSD_CLONES void read_row(const Matrix& from, int64_t row, float* to, int64_t width) {
  switch (from.element) {
    case Element::kFloat32:
      return read_row_of<WideFloat32>(from, row, to, width);
    case Element::kBfloat16:
      return read_row_of<WideBfloat16>(from, row, to, width);
    case Element::kFloat16:
      return read_row_of<WideFloat16>(from, row, to, width);
  }
}

GSD_CLONES static void write_bfloat16(const float* from, uint16_t* to, int64_t width) {
  for (int64_t i = 0; i < width; i++) to[i] = Bfloat16::round(from[i]);
}

void write_row(const float* from, void* to, Element element, int64_t width) {
  if (element == Element::kFloat32) {
    memcpy(to, from, static_cast<size_t>(width) * sizeof(float));
  } else if (element == Element::kBfloat16) {
    write_bfloat16(from, static_cast<uint16_t*>(to), width);
  } else {
    for (int64_t i = 0; i < width; i++) static_cast<uint16_t*>(to)[i] = Half::round(from[i]);
  }
}

bool make_finite(float* x, Element element, int64_t width) {
  // By Element: the largest number, and the least that is rounded to infinity.
  constexpr float kMost[] = {0x1.fffffep127f, 0x1.fep127f, 65504.0f}, kInfinite[] = {INFINITY, 0x1.ffp127f, 65520.0f};
  const float most = kMost[static_cast<int>(element)], infinite = kInfinite[static_cast<int>(element)];
  int changed = 0;
  for (int64_t i = 0; i < width; i++) {
    changed |= !(std::fabs(x[i]) < infinite);
    x[i] = x[i] > most ? most : x[i] < -most ? -most : x[i] == x[i] ? x[i] : 0.0f;
  }
  return changed != 0;
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
  for (int64_t i = 0; i < width; i += kLanes) {
    load_some(x + i, width - i, seen);
    square += seen * seen;
  }
  const float by = 1.0f / std::sqrt(total(square) / static_cast<float>(width) + eps);
  for (int64_t i = 0; i < width; i += kLanes) {
    load_some(x + i, width - i, seen);
    load_some(weight + i, width - i, scaled);
    store_some(seen * by * scaled, width - i, out + i);
  }
}

GSD_CLONES void silu_times(const float* gate, const float* up, float* out, int64_t width) {
  Floats g, u, e, share;
  Ints negative;
  for (int64_t i = 0; i < width; i += kLanes) {
    load_some(gate + i, width - i, g);
    load_some(up + i, width - i, u);
    exp_to_one((Floats)((Ints)g | INT32_MIN), e);  // of −|g|: nothing overflows; NaN gets through g
    sign_of(g, negative);
    choose(negative, e, Floats{} + 1.0f, share);
    store_some(g * u * (share / (1.0f + e)), width - i, out + i);
  }
}

GSD_CLONES float exp_row(float* scores, int64_t padded, float shift) {
  Floats seen, e, sum{};
  const bool finite = shift - shift == 0.0f;
  for (int64_t i = 0; i < padded; i += kLanes) {
    load(scores + i, seen);
    finite ? exp_to_one(seen - shift, e) : exp_lanes(seen - shift, e);
    sum += e;
    store(e, scores + i);
  }
  return total(sum);
}

}  // namespace gsd
