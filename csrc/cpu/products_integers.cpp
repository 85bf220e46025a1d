// Products of int8 codes at every level, in the loops of products_tile.h. Sums are exact, so all levels have the same bits;
// what they leave in `out` are words of 32 bits.
#include <cstring>

#include "../algorithms/elements.h"
#include "instructions.h"
#include "products.h"

namespace gsd {
namespace {

namespace portable {

constexpr int kLanes = 16;
#include "products_tile.h"

struct Codes {
  typedef int8_t Stored;
  typedef int8_t Seen;
  static constexpr int kStep = 16, kRows = 1, kParts = 0, kStepBytes = 0;
  static constexpr bool kPacked = false;
  struct Weights {
    int8_t of[kStep];
  };
  typedef Weights Row;
  typedef int32_t Sum;
  GSD_TILE void clear(Sum& sum) { sum = 0; }
  GSD_TILE void see(const int8_t* from, Row& row) { memcpy(row.of, from, kStep); }
  GSD_TILE void widen(const int8_t* from, Weights& to) { memcpy(to.of, from, kStep); }
  GSD_TILE void widen_part(const int8_t* from, int n, Weights& to) {
    to = {};
    memcpy(to.of, from, static_cast<size_t>(n));
  }
  GSD_TILE void add(const Row& row, const Weights& weights, Sum& sum) {
    for (int i = 0; i < kStep; i++) sum += row.of[i] * weights.of[i];
  }
  GSD_TILE void sums(const Sum x[kOutputs], float* out) { memcpy(out, x, kOutputs * sizeof(Sum)); }
};

}  // namespace portable
}  // namespace

const IntegerProducts kPortableIntegers{0, portable::row_bytes_of<portable::Codes>, portable::products_of<portable::Codes>};

#if GSD_X86
GSD_BEGIN_TARGET("avx2,fma,f16c")
namespace {
namespace avx2 {

constexpr int kLanes = 16;
#include "products_tile.h"

struct Codes {
  typedef int8_t Stored;
  typedef int8_t Seen;
  static constexpr int kStep = 16, kRows = 2, kParts = 0, kStepBytes = 0;
  static constexpr bool kPacked = false;
  typedef __m256i Weights;
  typedef __m256i Row;
  typedef __m256i Sum;
  GSD_TILE void clear(Sum& sum) { sum = _mm256_setzero_si256(); }
  GSD_TILE void see(const int8_t* from, Row& row) {
    row = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  GSD_TILE void widen(const int8_t* from, Weights& to) { see(from, to); }
  GSD_TILE void widen_part(const int8_t* from, int n, Weights& to) {
    int8_t whole[kStep] = {};
    memcpy(whole, from, static_cast<size_t>(n));
    see(whole, to);
  }
  GSD_TILE void add(const Row& row, const Weights& weights, Sum& sum) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(row, weights));
  }
  GSD_TILE void sums(const Sum x[kOutputs], float* out) {
    const __m256i both = _mm256_hadd_epi32(_mm256_hadd_epi32(x[0], x[1]), _mm256_hadd_epi32(x[2], x[3]));
    const __m128i all = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), all);
  }
};

}  // namespace avx2
}  // namespace
GSD_END_TARGET

const IntegerProducts kAvx2Integers{0, avx2::row_bytes_of<avx2::Codes>, avx2::products_of<avx2::Codes>};

GSD_BEGIN_TARGET("avx512f,avx512bw,avx512vl,avx2,fma,f16c")
namespace {
namespace avx512 {

constexpr int kLanes = 16;
#include "products_tile.h"

// Of 32 outputs' worth of registers six rows have 24 sums.
struct Sums {
  static constexpr int kRows = 6, kParts = 0, kStepBytes = 0;
  static constexpr bool kPacked = false;
  typedef int8_t Stored;
  typedef int8_t Seen;
  typedef __m512i Weights;
  typedef __m512i Row;
  typedef __m512i Sum;
  GSD_TILE void clear(Sum& sum) { sum = _mm512_setzero_si512(); }
  GSD_TILE void sums(const Sum x[kOutputs], float* out) {
    const __m512i first = _mm512_add_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    const __m512i second = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    const __m512i both = _mm512_add_epi32(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
  }
};

struct Codes : Sums {
  static constexpr int kStep = 32;
  GSD_TILE void see(const int8_t* from, Row& row) {
    row = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  GSD_TILE void widen(const int8_t* from, Weights& to) { see(from, to); }
  GSD_TILE void widen_part(const int8_t* from, int n, Weights& to) {
    to = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(static_cast<__mmask32>((uint64_t{1} << n) - 1), from));
  }
  GSD_TILE void add(const Row& row, const Weights& weights, Sum& sum) {
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(row, weights));
  }
};

}  // namespace avx512
}  // namespace
GSD_END_TARGET

const IntegerProducts kAvx512Integers{0, avx512::row_bytes_of<avx512::Codes>, avx512::products_of<avx512::Codes>};

GSD_BEGIN_TARGET("avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")
namespace {
namespace vnni {

constexpr int kLanes = 16;
#include "products_tile.h"

// Four products an instruction and word, of bytes with a sign by bytes without: 128 is added to the weights.
struct Codes : avx512::Sums {
  static constexpr int kStep = 64, kOffset = 128;
  GSD_TILE __m512i without_sign(__m512i bytes) { return _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)); }
  GSD_TILE void see(const int8_t* from, Row& row) { row = _mm512_loadu_si512(from); }
  GSD_TILE void widen(const int8_t* from, Weights& to) { to = without_sign(_mm512_loadu_si512(from)); }
  GSD_TILE void widen_part(const int8_t* from, int n, Weights& to) {
    to = without_sign(_mm512_maskz_loadu_epi8((uint64_t{1} << n) - 1, from));
  }
  GSD_TILE void add(const Row& row, const Weights& weights, Sum& sum) { sum = _mm512_dpbusd_epi32(sum, weights, row); }
};

}  // namespace vnni
}  // namespace
GSD_END_TARGET

const IntegerProducts kVnniIntegers{vnni::Codes::kOffset, vnni::row_bytes_of<vnni::Codes>, vnni::products_of<vnni::Codes>};
#endif

}  // namespace gsd
