// Products of bfloat16 pairs, AVX512_BF16: 32 multiplications an instruction, summed in float32.
#include <cstring>

#include "../algorithms/elements.h"
#include "instructions.h"
#include "row_forms.h"

namespace gsd {

#if GSD_X86
GSD_BEGIN_TARGET("avx512f,avx512bw,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")
namespace {

constexpr int kLanes = 16;
#include "products_tile.h"
#include "plain.h"
#define GSD_ROUNDS_BFLOAT16
#include "decode_zmm.h"
#include "decode_vectors.h"
#include "decode.h"
#include "products_zmm.h"
#include "units.h"
#include "unpacking.h"

struct Dots : Avx512 {
  typedef uint16_t Stored;
  typedef uint16_t Seen;
  typedef __m512i Weights;
  typedef __m512i Row;
  static constexpr int kStep = 32;
  GSD_TILE void see(const uint16_t* from, Row& row) { row = whole_line(from); }
  GSD_TILE void take(__m512i words, Weights& to) { to = words; }
  GSD_TILE void widen(const uint16_t* from, Weights& to) {
    to = whole_line(from);
    keep_in_register(to);
  }
  GSD_TILE void widen_part(const uint16_t* from, int n, Weights& to) { to = part_of_line(from, n); }
  GSD_TILE void add(const Row& row, const Weights& weights, Sum& sum) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)row, (__m512bh)weights);
  }
  GSD_TILE void arrange(const float* from, uint16_t* to) {
    _mm512_storeu_si512(to, joined(bfloat16_words(_mm512_loadu_ps(from)), bfloat16_words(_mm512_loadu_ps(from + 16))));
  }
};

constexpr int kTall = 6, kWide = 32;             // rows and values of a tile
constexpr int64_t kMostPositions = 256;          // whose rounded weights are kept at a time
typedef uint32_t Pairs[kTall][kMostPositions / 2];  // weights of two positions, rounded

// 32 floats with those of the first and third eights' first halves in `low`, as unpacking pairs leaves them; and back.
GSD_TILE void load_unpacked(const float* from, int part, __m512& low, __m512& high) {
  const __m512 first = _mm512_maskz_loadu_ps(Avx512::first_lanes(static_cast<int>(fewer(part, kLanes))), from);
  const __m512 second =
      part > kLanes ? _mm512_maskz_loadu_ps(Avx512::first_lanes(part - kLanes), from + kLanes) : _mm512_setzero_ps();
  low = _mm512_shuffle_f32x4(first, second, 0x88), high = _mm512_shuffle_f32x4(first, second, 0xDD);
}
GSD_TILE void store_unpacked(__m512 low, __m512 high, int part, float* to) {
  const __m512i begin = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512 first = _mm512_permutex2var_ps(low, begin, high);
  const __m512 second = _mm512_permutex2var_ps(low, _mm512_add_epi32(begin, _mm512_set1_epi32(8)), high);
  _mm512_mask_storeu_ps(to, Avx512::first_lanes(static_cast<int>(fewer(part, kLanes))), first);
  if (part > kLanes) _mm512_mask_storeu_ps(to + kLanes, Avx512::first_lanes(part - kLanes), second);
}

// out[R, 32 · V] += weights · v, two positions at a time; `part` values are there of the last 32.
template <int R, int V>
GSD_TILE void pairs_tile(const Pairs& weights, const uint16_t* v, const int64_t* offsets, int64_t positions, float* out,
                         int64_t out_stride, int part) {
  __m512 total[R][2 * V];
  GSD_UNROLL
  for (int r = 0; r < R; r++) {
    GSD_UNROLL
    for (int j = 0; j < V; j++) {
      load_unpacked(out + r * out_stride + j * kWide, j + 1 < V ? kWide : part, total[r][2 * j], total[r][2 * j + 1]);
    }
  }
  for (int64_t p = 0; p < positions; p += 2) {
    __m512i value[2 * V];
    GSD_UNROLL
    for (int j = 0; j < V; j++) {
      const int there = j + 1 < V ? kWide : part;
      const __m512i even = part_of_line(v + offsets[p] + j * kWide, there);
      const __m512i odd =
          p + 1 < positions ? part_of_line(v + offsets[p + 1] + j * kWide, there) : _mm512_setzero_si512();
      value[2 * j] = _mm512_unpacklo_epi16(even, odd), value[2 * j + 1] = _mm512_unpackhi_epi16(even, odd);
    }
    GSD_UNROLL
    for (int r = 0; r < R; r++) {
      const __m512i weight = _mm512_set1_epi32(static_cast<int>(weights[r][p / 2]));
      GSD_UNROLL
      for (int j = 0; j < 2 * V; j++) {
        total[r][j] = _mm512_dpbf16_ps(total[r][j], (__m512bh)value[j], (__m512bh)weight);
      }
    }
  }
  GSD_UNROLL
  for (int r = 0; r < R; r++) {
    GSD_UNROLL
    for (int j = 0; j < V; j++) {
      store_unpacked(total[r][2 * j], total[r][2 * j + 1], j + 1 < V ? kWide : part, out + r * out_stride + j * kWide);
    }
  }
}

// The same for up to R rows, as many as there are, and all values.
template <int R>
GSD_TILE void pairs_rows(int64_t rows, const Pairs& weights, const uint16_t* v, const int64_t* offsets,
                         int64_t positions, int64_t width, float* out, int64_t out_stride) {
  if constexpr (R > 1) {
    if (rows < R) return pairs_rows<R - 1>(rows, weights, v, offsets, positions, width, out, out_stride);
  }
  int64_t d = 0;
  for (; d + 2 * kWide <= width; d += 2 * kWide) {
    pairs_tile<R, 2>(weights, v + d, offsets, positions, out + d, out_stride, kWide);
  }
  for (; d < width; d += kWide) {
    pairs_tile<R, 1>(weights, v + d, offsets, positions, out + d, out_stride, static_cast<int>(fewer(kWide, width - d)));
  }
}

// Weights of positions 2 i and 2 i + 1 rounded into a word each; 0 behind the last. A weight of a softmax is no subnormal number,
// which the instruction would take for 0.
GSD_TILE void round_pairs(const float* from, int64_t positions, uint32_t* to) {
  for (int64_t p = 0; p < positions; p += kLanes) {
    const __mmask16 there = Avx512::first_lanes(static_cast<int>(fewer(kLanes, positions - p)));
    const __m256bh both = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(there, from + p));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + p / 2), (__m256i)both);
  }
}

// RowKernel::weighted with weights rounded to bfloat16, as queries and keys are.
void weighted_pairs(const float* weights, int64_t weights_stride, int64_t rows, const void* v, const int64_t* offsets,
                    int64_t positions, int64_t width, float* out, int64_t out_stride) {
  Pairs rounded;
  for (int64_t first = 0; first < positions; first += kMostPositions) {
    const int64_t count = fewer(kMostPositions, positions - first);
    for (int64_t r = 0; r < rows; r += kTall) {
      const int64_t tall = fewer(kTall, rows - r);
      for (int64_t i = 0; i < tall; i++) round_pairs(weights + (r + i) * weights_stride + first, count, rounded[i]);
      pairs_rows<kTall>(tall, rounded, static_cast<const uint16_t*>(v), offsets + first, count, width,
                        out + r * out_stride, out_stride);
    }
  }
}

// Four products an instruction and word, of bytes with a sign by bytes without: 128 is added to the weights.
struct Codes : IntegerSums {
  static constexpr int kStep = 64;
  GSD_TILE __m512i without_sign(__m512i bytes) { return _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)); }
  GSD_TILE void see(const int8_t* from, Row& row) { row = _mm512_loadu_si512(from); }
  GSD_TILE void widen(const int8_t* from, Weights& to) { to = without_sign(_mm512_loadu_si512(from)); }
  GSD_TILE void widen_part(const int8_t* from, int n, Weights& to) {
    to = without_sign(_mm512_maskz_loadu_epi8((uint64_t{1} << n) - 1, from));
  }
  GSD_TILE void add(const Row& row, const Weights& weights, Sum& sum) { sum = _mm512_dpbusd_epi32(sum, weights, row); }
};

constexpr RowKernel kFloat32 = kernel_of<Float32>(), kFloat16 = kernel_of<Float16>();
constexpr RowKernel kBfloat16{1, kOutputs, row_bytes_of<Dots>, pack_of<Dots>, products_of<Dots>, weighted_pairs};
#define GSD_UNPACKED(F) unpacking_unless<has_codes(form_of(Kind::k##F)), Dots, F>()
constexpr IsaKernels kKernels{
    "avx512_bf16", {kFloat32, kBfloat16, kFloat16}, {kFloat32, kBfloat16, kFloat16}, GSD_DECODERS,
    {{nullptr, nullptr, nullptr, GSD_FORMATS(GSD_UNPACKED)}, 5}, integers_of<Codes>(128)};

}  // namespace
GSD_END_TARGET

const IsaKernels* avx512_bf16_kernels() { return &kKernels; }
#else
const IsaKernels* avx512_bf16_kernels() { return nullptr; }
#endif

}  // namespace gsd
