// Products with AVX-512: thirty-two registers of sixteen floats.
#include "../algorithms/elements.h"
#include "instructions.h"
#include "row_forms.h"

namespace gsd {

#if GSD_X86
GSD_BEGIN_TARGET("avx512f,avx512bw,avx512vl,avx2,fma,f16c")
namespace {

constexpr int kLanes = 16;
#include "products_tile.h"
#include "plain.h"
#include "decode_zmm.h"
#include "decode_vectors.h"
#include "decode.h"
#include "products_zmm.h"
#include "units.h"
#include "unpacking.h"

struct Codes : IntegerSums {
  static constexpr int kStep = 32;
  GSD_TILE void see(const int8_t* from, Row& row) {
    row = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  GSD_TILE void widen(const int8_t* from, Weights& to) { see(from, to); }
  GSD_TILE void add(const Row& row, const Weights& weights, Sum& sum) {
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(row, weights));
  }
};

constexpr RowKernel kFloat32 = kernel_of<Float32>(), kBfloat16 = kernel_of<PairedBfloat16>(),
                    kFloat16 = kernel_of<Float16>();
#define GSD_UNPACKED(F) unpacking_of<PairedBfloat16, F>
constexpr IsaKernels kKernels{
    "avx512", {kFloat32, kBfloat16, kFloat16}, {kFloat32, kBfloat16, kFloat16}, GSD_DECODERS,
    {{nullptr, nullptr, nullptr, GSD_FORMATS(GSD_UNPACKED)}, 5}, integers_of<Codes>(0)};

}  // namespace
GSD_END_TARGET

const IsaKernels* avx512_kernels() { return &kKernels; }
#else
const IsaKernels* avx512_kernels() { return nullptr; }
#endif

}  // namespace gsd
