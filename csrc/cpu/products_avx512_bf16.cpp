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
#include "pairs_zmm.h"
#include "pair_blocks.h"

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
  GSD_TILE void add(const Row& row, const Weights& weights, Sum& sum) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)row, (__m512bh)weights);
  }
  GSD_TILE void arrange(const float* from, uint16_t* to) {
    _mm512_storeu_si512(to, joined(bfloat16_words(_mm512_loadu_ps(from)), bfloat16_words(_mm512_loadu_ps(from + 16))));
  }
};

// Of pair_blocks.h: a sum takes pair after pair. Words of two numbers pass as floats.
struct Pairs : Avx512, ZmmPairs {
  typedef float Stored;
  static constexpr int64_t kPositions = 2;
  GSD_TILE void widen_lanes(const float* from, int part, Lanes& to) { load_lanes(from, part, to); }
  GSD_TILE void add_lanes(const Lanes& value, float weight, Lanes& sum) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)value, (__m512bh)_mm512_set1_ps(weight));
  }

  void add(const uint16_t* a, int64_t a_stride, int64_t rows, const uint16_t* b, int64_t columns, int64_t depth, bool adds,
           float* out, int64_t out_stride) const {
    int64_t lines[kMostPairs / 2];
    for (int64_t word = 0; word < depth / 2; word++) lines[word] = word * kColumns;
    for (int64_t r = 0; !adds && r < rows; r++) memset(out + r * out_stride, 0, static_cast<size_t>(columns) * sizeof(float));
    weighted_of<Pairs>(reinterpret_cast<const float*>(a), a_stride / 2, rows, b, lines, depth / 2, columns, out, out_stride);
  }
};

// Four products an instruction and word, of bytes with a sign by bytes without: 128 is added to the weights.
struct Codes : IntegerSums {
  static constexpr int kStep = 64;
  GSD_TILE void see(const int8_t* from, Row& row) { row = _mm512_loadu_si512(from); }
  GSD_TILE void widen(const int8_t* from, Weights& to) {
    to = _mm512_xor_si512(_mm512_loadu_si512(from), _mm512_set1_epi8(-128));
  }
  GSD_TILE void add(const Row& row, const Weights& weights, Sum& sum) { sum = _mm512_dpbusd_epi32(sum, weights, row); }
};

constexpr RowKernel kFloat32 = kernel_of<Float32>(), kFloat16 = kernel_of<Float16>();
constexpr RowKernel kBfloat16{1, kOutputs, row_bytes_of<Dots>, pack_of<Dots>, products_of<Dots>};
#define GSD_UNPACKED(F) unpacking_of<Dots, F>
constexpr IsaKernels kKernels{
    "avx512_bf16", {kFloat32, kBfloat16, kFloat16}, {kFloat32, paired_kernel<Pairs>(), kFloat16}, GSD_DECODERS,
    {{nullptr, nullptr, nullptr, GSD_FORMATS(GSD_UNPACKED)}, 5}, integers_of<Codes>(128)};

}  // namespace
GSD_END_TARGET

const IsaKernels* avx512_bf16_kernels() { return &kKernels; }
#else
const IsaKernels* avx512_bf16_kernels() { return nullptr; }
#endif

}  // namespace gsd
