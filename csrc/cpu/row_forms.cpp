#include "row_forms.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "../algorithms/elements.h"
#include "lanes.h"

namespace gsd {
namespace {

// Behind a row's codes, in the line that keeps rows from powers of two.
struct Beside {
  float scale;
  int32_t sum;  // of the codes
};
constexpr int64_t kFree = 64;  // bytes of that line
static_assert(sizeof(Beside) <= kFree);

constexpr float kShift = 12582912.0f;  // 1.5 · 2²³: the last bit of a sum with it is one

// To float16: infinite from 65520 on, and below its normal numbers by a sum with ¾, whose last bit is 2⁻²⁴.
GSD_INLINE float rounded_half(float x) {
  const uint32_t bits = float_bits(x), sign = bits & 0x80000000u, magnitude = bits ^ sign;
  const uint32_t small = sign | float_bits((float_from_bits(magnitude) + 0.75f) - 0.75f);
  const uint32_t even = bits + 0xFFFu + (bits >> 13 & 1u);
  const uint32_t normal = magnitude >= 0x477FF000u ? sign | 0x7F800000u : even & 0xFFFFE000u;
  return magnitude > 0x7F800000u ? x : float_from_bits(magnitude < 0x38800000u ? small : normal);
}

// Without a branch but for the dtype, which a loop asks for once: so such loops become vectors.
GSD_INLINE float rounded(float x, Element element) {
  if (element == Element::kBfloat16) return Bfloat16::widen(Bfloat16::round(x));
  return element == Element::kFloat16 ? rounded_half(x) : x;
}
GSD_CLONES void round_row(const float* x, float* to, int64_t k, Element element) {
  for (int64_t i = 0; i < k; i++) to[i] = rounded(x[i], element);
}

// NaN if there is one.
GSD_CLONES float largest_magnitude(const float* x, int64_t k) {
  uint32_t most = 0;  // magnitudes are ordered as their bits, NaN above all
  for (int64_t i = 0; i < k; i++) {
    const uint32_t magnitude = float_bits(x[i]) & 0x7FFFFFFFu;
    most = magnitude > most ? magnitude : most;
  }
  return float_from_bits(most);
}

// Codes −128 … 127 to the nearest, ties to even; their sum.
GSD_CLONES int32_t to_codes(const float* x, float by, int64_t k, int8_t* codes) {
  int32_t sum = 0;
  for (int64_t i = 0; i < k; i++) {
    float scaled = x[i] * by;
    scaled = scaled >= -128.0f ? scaled : -128.0f;  // NaN too
    scaled = scaled <= 127.0f ? scaled : 127.0f;
    const int32_t code = static_cast<int32_t>((scaled + kShift) - kShift);
    codes[i] = static_cast<int8_t>(code);
    sum += code;
  }
  return sum;
}

// What a row is rounded by: the scale that its products have, and what its values are multiplied by.
struct RowScale {
  float scale, by;
};

// torchao's choose_qparams_affine and quantize_affine: the scale is rounded to the model's dtype, and has a least value.
RowScale dynamic_scale(float most, Element element) {
  constexpr float kLeast = 1.1920928955078125e-07f;  // float32's epsilon
  const float scale = rounded(most / 127.5f, element);
  const float used = scale < kLeast ? kLeast : scale;
  return {used, 1.0f / used};
}

// bitsandbytes' int8_vectorwise_quant, of the row in float16: all codes are 0 where the largest magnitude is 0 or not finite.
RowScale vectorwise_scale(float most) { return {most, most > 0.0f && most < INFINITY ? 1.0f / most * 127.0f : 0.0f}; }

void pack_codes(const IsaKernels& level, Element element, RowForm form, const float* x, int64_t x_stride, int64_t first,
                int64_t last, int64_t k, void* packed) {
  const int64_t bytes = level.integers.row_bytes(k);
  std::vector<float> row(static_cast<size_t>(k));
  for (int64_t r = first; r < last; r++) {
    int8_t* to = static_cast<int8_t*>(packed) + r * bytes;
    round_row(x + r * x_stride, row.data(), k, element);
    if (form == RowForm::kVectorwise) round_row(row.data(), row.data(), k, Element::kFloat16);
    const float most = largest_magnitude(row.data(), k);
    const RowScale by = form == RowForm::kVectorwise ? vectorwise_scale(most) : dynamic_scale(most, element);
    memset(to, 0, static_cast<size_t>(bytes));
    const Beside beside{by.scale, by.by == 0.0f ? 0 : to_codes(row.data(), by.by, k, to)};
    memcpy(to + bytes - kFree, &beside, sizeof beside);
  }
}

// compressed-tensors' calculate_qparams and _quantize_dequantize: every step is rounded to the model's dtype.
float rounded_scale(float most, Element element) {
  constexpr float kEpsilon[] = {1.1920928955078125e-07f, 7.8125e-03f, 9.765625e-04f};  // by Element
  const float scale = rounded(most / 127.5f, element);
  return scale == 0.0f ? kEpsilon[static_cast<int>(element)] : scale;
}
GSD_CLONES void round_to_codes(float* x, float scale, int64_t k, Element element) {
  for (int64_t i = 0; i < k; i++) {
    float code = rounded(x[i] / scale, element);
    code = code < -128.0f ? -128.0f : code;
    code = code > 127.0f ? 127.0f : code;
    x[i] = rounded(((code + kShift) - kShift) * scale, element);
  }
}

void pack_rounded(const RowKernel& kernel, Element element, const float* x, int64_t x_stride, int64_t first,
                  int64_t last, int64_t k, void* packed) {
  std::vector<float> rows(static_cast<size_t>((last - first) * k));
  for (int64_t r = first; r < last; r++) {
    float* row = rows.data() + (r - first) * k;
    round_row(x + r * x_stride, row, k, element);
    round_to_codes(row, rounded_scale(largest_magnitude(row, k), element), k, element);
  }
  kernel.pack(rows.data(), k, 0, last - first, k, static_cast<char*>(packed) + first * kernel.row_bytes(k));
}

// Words of integer sums into floats.
GSD_CLONES void finish_row(float* out, int64_t n, int32_t taken, float by, const float* scales, Element element,
                           bool vectorwise) {
  constexpr float kOne = 6.200124e-05f;
  for (int64_t i = 0; i < n; i++) {
    const float sum = static_cast<float>(static_cast<int32_t>(float_bits(out[i]) - static_cast<uint32_t>(taken)));
    // sum · (the row's scale · the output's) · 1/127², as bitsandbytes' int8_mm_dequant has it; or T(sum · the row's scale) ·
    // the output's, T: the model's dtype.
    out[i] = vectorwise ? sum * (by * scales[i]) * kOne : rounded(sum * by, element) * scales[i];
  }
}

}  // namespace

int64_t packed_row_bytes(const IsaKernels& level, Element element, RowForm form, int64_t k) {
  return has_codes(form) ? level.integers.row_bytes(k) : level.large[static_cast<int>(element)].row_bytes(k);
}

void pack_rows(const IsaKernels& level, Element element, RowForm form, const float* x, int64_t x_stride, int64_t first,
               int64_t last, int64_t k, void* packed) {
  const RowKernel& kernel = level.large[static_cast<int>(element)];
  switch (form) {
    case RowForm::kDynamic:
    case RowForm::kVectorwise:
      return pack_codes(level, element, form, x, x_stride, first, last, k, packed);
    case RowForm::kRounded:
      return pack_rounded(kernel, element, x, x_stride, first, last, k, packed);
    default:
      return kernel.pack(x, x_stride, first, last, k, packed);
  }
}

void multiply_codes(const IsaKernels& level, Element element, const Weights& w, const void* packed, int64_t rows,
                    int64_t begin, int64_t end, float* out, int64_t out_stride) {
  const IntegerProducts& integers = level.integers;
  const int64_t bytes = integers.row_bytes(w.inputs);
  integers.products(packed, rows, w.inputs, w.data + begin * w.row_bytes, w.row_bytes, 0, end - begin, out, out_stride,
                    false);
  for (int64_t r = 0; r < rows; r++) {
    Beside beside;
    memcpy(&beside, static_cast<const char*>(packed) + (r + 1) * bytes - kFree, sizeof beside);
    finish_row(out + r * out_stride, end - begin, beside.sum * integers.offset, beside.scale, w.scales + begin, element,
               form_of(w.kind) == RowForm::kVectorwise);
  }
}

}  // namespace gsd
