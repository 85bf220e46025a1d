// Products of bfloat16 pairs, AVX512_BF16: 32 multiplications an instruction, summed in float32.
#include "../algorithms/group.h"
#include "instructions.h"
#include "products.h"

namespace gsd {

#if GSD_X86
GSD_BEGIN_TARGET("avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")
namespace {

constexpr int kLanes = 16;
#include "products_tile.h"
#include "products_zmm.h"

struct Dots : Avx512 {
  typedef uint16_t Stored;
  typedef uint16_t Seen;
  typedef __m512i Weights;
  typedef __m512i Row;
  static constexpr int kStep = 32;
  GSD_TILE void see(const uint16_t* from, Row& row) { row = whole_line(from); }
  GSD_TILE void widen(const uint16_t* from, Weights& to) { to = whole_line(from); }
  GSD_TILE void widen_part(const uint16_t* from, int n, Weights& to) { to = part_of_line(from, n); }
  GSD_TILE void add(const Row& row, const Weights& weights, Sum& sum) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)row, (__m512bh)weights);
  }
  GSD_TILE void arrange(const float* from, uint16_t* to) {
    const __m512i low = rounded_words(from), high = rounded_words(from + 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(low, 16)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 16), _mm512_cvtepi32_epi16(_mm512_srli_epi32(high, 16)));
  }
  GSD_TILE void widen_lanes(const uint16_t* from, int part, Lanes& to) { PairedBfloat16::widen_lanes(from, part, to); }
};

constexpr RowKernel kFloat32 = kernel_of<Float32>(), kBfloat16 = kernel_of<Dots>(), kFloat16 = kernel_of<Float16>();
constexpr LevelKernels kKernels{"avx512_bf16", {kFloat32, kBfloat16, kFloat16}, {kFloat32, kBfloat16, kFloat16}};

}  // namespace
GSD_END_TARGET

const LevelKernels* avx512_bf16_kernels() { return &kKernels; }
#else
const LevelKernels* avx512_bf16_kernels() { return nullptr; }
#endif

}  // namespace gsd
