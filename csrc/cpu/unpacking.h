// Products of few rows over packed weights that are decoded in registers, for the AVX-512 levels: after units.h and
// products_zmm.h, inside the target.

// The dense type Of over a packed format, for few rows: decoded in registers, where a strip would be written and read.
template <class Of, class F>
struct Unpacking : Of, UnitOf<F> {
  typedef UnitOf<F> Unit;
  typedef uint8_t Stored;
  static constexpr int kRows = 5, kStep = kStepInputs, kStepBytes = Unit::kStepBytes;
  static constexpr bool kPacked = true;
  GSD_TILE void unpack(const uint8_t* row, int64_t i, const typename Unit::Held& held, int j, typename Of::Weights& to) {
    Of::take(Unit::words(row, i, held, j), to);
  }
};

constexpr int64_t kOutputsLookedAt = 64;  // at a time: their numbers are in a cache when they are multiplied

// As UnpackingProducts has them.
template <class Of, class F>
bool unpacking_of(const void* packed, int64_t rows, const Weights& w, int64_t begin, int64_t end, float* out,
                  int64_t out_stride) {
  if (!has_units<F>(w)) return false;
  const int64_t numbers = w.groups * F::kBeside, size = numbers > 0 ? w.inputs / w.groups : w.inputs;
  const int64_t most = numbers > 0 ? kOutputsLookedAt : end - begin;
  for (int64_t n = begin; n < end; n += most) {
    const int64_t count = fewer(most, end - n);
    if (!are_normal<F>(w, n, n + count)) return false;
    const uint8_t* from = reinterpret_cast<const uint8_t*>(w.data) + n * w.row_bytes;
    products_over<Unpacking<Of, F>>(packed, rows, w.inputs, from, w.row_bytes, w.scales + n * numbers, numbers, size, 0,
                                    count, out + n - begin, out_stride, false);
  }
  return true;
}
