// Products with AVX2, FMA and F16C: sixteen registers of eight floats.
#include <cstring>

#include "../algorithms/elements.h"
#include "instructions.h"
#include "products.h"

namespace gsd {

#if GSD_X86
GSD_BEGIN_TARGET("avx2,fma,f16c")
namespace {

constexpr int kLanes = 8;
#include "products_tile.h"
#include "plain.h"
#include "decode_ymm.h"
#include "decode_vectors.h"
#include "decode.h"

struct Eight32 {
  typedef float Stored;
  GSD_TILE __m256 eight(const float* from) { return _mm256_loadu_ps(from); }
};
struct EightHalf {
  typedef uint16_t Stored;
  GSD_TILE __m256 eight(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
};
struct EightBfloat16 {
  typedef uint16_t Stored;
  GSD_TILE __m256 eight(const uint16_t* from) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
};

struct Avx2 : Dense {
  typedef float Seen;
  typedef __m256 Sum;
  typedef __m256 Lanes;
  static constexpr int kRows = 3, kVectors = 4, kTall = 2;

  GSD_TILE void clear(Sum& sum) { sum = _mm256_setzero_ps(); }

  // The same tree for each of the four.
  GSD_TILE void sums(const Sum x[kOutputs], float out[kOutputs]) {
    const __m256 first = _mm256_add_ps(_mm256_unpacklo_ps(x[0], x[1]), _mm256_unpackhi_ps(x[0], x[1]));
    const __m256 second = _mm256_add_ps(_mm256_unpacklo_ps(x[2], x[3]), _mm256_unpackhi_ps(x[2], x[3]));
    const __m256 both = _mm256_add_ps(_mm256_shuffle_ps(first, second, 0x44), _mm256_shuffle_ps(first, second, 0xEE));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1)));
  }

  // `part` of eight elements, and zeros.
  template <class E>
  GSD_TILE __m256 part_of(const typename E::Stored* from, int part) {
    if (part == kLanes) return E::eight(from);
    typename E::Stored whole[kLanes] = {};
    memcpy(whole, from, static_cast<size_t>(part) * sizeof whole[0]);
    return E::eight(whole);
  }
  GSD_TILE void load_lanes(const float* from, int part, Lanes& to) { to = part_of<Eight32>(from, part); }
  GSD_TILE void store_lanes(const Lanes& from, int part, float* to) {
    if (part == kLanes) return _mm256_storeu_ps(to, from);
    float whole[kLanes];
    _mm256_storeu_ps(whole, from);
    memcpy(to, whole, static_cast<size_t>(part) * sizeof(float));
  }
  GSD_TILE void add_lanes(const Lanes& value, float weight, Lanes& sum) {
    sum = _mm256_fmadd_ps(value, _mm256_set1_ps(weight), sum);
  }
};

// Elements in the order of memory, eight at a time.
template <class E>
struct Ordered : Avx2 {
  typedef typename E::Stored Stored;
  typedef __m256 Weights;
  typedef __m256 Row;
  static constexpr int kStep = 8, kParts = 1;

  GSD_TILE void see_part(const float* from, int part, Row& row) { row = _mm256_loadu_ps(from + 8 * part); }
  GSD_TILE void widen(const Stored* from, int, Weights& to) { to = E::eight(from); }
  GSD_TILE void add(const Row& row, const Weights& weights, Sum& sum) { sum = _mm256_fmadd_ps(row, weights, sum); }
  GSD_TILE void arrange(const float* from, float* to) { _mm256_storeu_ps(to, _mm256_loadu_ps(from)); }

  GSD_TILE void widen_lanes(const Stored* from, int part, Lanes& to) { to = Avx2::part_of<E>(from, part); }
};

// Two bfloat16 share a word: a shift widens the first, a mask the second. Rows are packed accordingly.
struct PairedBfloat16 : Ordered<EightBfloat16> {
  static constexpr int kStep = 16, kParts = 2;

  GSD_TILE void widen(const uint16_t* from, int part, Weights& to) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    to = _mm256_castsi256_ps(part == 0 ? _mm256_slli_epi32(words, 16)
                                       : _mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }
  GSD_TILE void arrange(const float* from, float* to) {
    for (int i = 0; i < kStep / 2; i++) {
      for (int half = 0; half < 2; half++) to[i + 8 * half] = Bfloat16::widen(Bfloat16::round(from[2 * i + half]));
    }
  }
};

struct Codes : Dense {
  typedef int8_t Stored;
  typedef int8_t Seen;
  static constexpr int kStep = 16, kRows = 2;
  typedef __m256i Weights;
  typedef __m256i Row;
  typedef __m256i Sum;
  GSD_TILE void clear(Sum& sum) { sum = _mm256_setzero_si256(); }
  GSD_TILE void see(const int8_t* from, Row& row) {
    row = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  GSD_TILE void widen(const int8_t* from, Weights& to) { see(from, to); }
  GSD_TILE void add(const Row& row, const Weights& weights, Sum& sum) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(row, weights));
  }
  GSD_TILE void sums(const Sum x[kOutputs], float* out) {
    const __m256i both = _mm256_hadd_epi32(_mm256_hadd_epi32(x[0], x[1]), _mm256_hadd_epi32(x[2], x[3]));
    const __m128i all = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), all);
  }
};

constexpr RowKernel kFloat32 = kernel_of<Ordered<Eight32>>(), kBfloat16 = kernel_of<PairedBfloat16>(),
                    kFloat16 = kernel_of<Ordered<EightHalf>>();
constexpr IsaKernels kKernels{
    "avx2", {kFloat32, kBfloat16, kFloat16}, {kFloat32, kBfloat16, kFloat16}, GSD_DECODERS, {}, integers_of<Codes>(0)};

}  // namespace
GSD_END_TARGET

const IsaKernels* avx2_kernels() { return &kKernels; }
#else
const IsaKernels* avx2_kernels() { return nullptr; }
#endif

}  // namespace gsd
