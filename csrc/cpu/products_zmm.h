// Register types of the AVX-512 levels, for their translation units: after products_tile.h, inside the target.

// Where three rows are multiplied, GCC 12 would keep weights on the stack with half of the registers free.
GSD_TILE void keep_in_register(__m512& x) { asm("" : "+v"(x)); }
GSD_TILE void keep_in_register(__m512i& x) { asm("" : "+v"(x)); }

// Sums of the sixteen numbers in each of four registers, by one tree.
typedef int32_t Integers __attribute__((vector_size(64)));
template <class Numbers, class Register>
GSD_TILE void sum_lanes(const Register* x, float* out) {
  const __m512 a = (__m512)x[0], b = (__m512)x[1], c = (__m512)x[2], d = (__m512)x[3];
  const Numbers first = (Numbers)_mm512_unpacklo_ps(a, b) + (Numbers)_mm512_unpackhi_ps(a, b);
  const Numbers second = (Numbers)_mm512_unpacklo_ps(c, d) + (Numbers)_mm512_unpackhi_ps(c, d);
  const Numbers quarters = (Numbers)_mm512_shuffle_ps((__m512)first, (__m512)second, 0x44) +
                           (Numbers)_mm512_shuffle_ps((__m512)first, (__m512)second, 0xEE);
  const Numbers half = quarters + (Numbers)_mm512_shuffle_f32x4((__m512)quarters, (__m512)quarters, 0x4E);
  const Numbers all = half + (Numbers)_mm512_shuffle_f32x4((__m512)half, (__m512)half, 0xB1);
  _mm_storeu_ps(out, _mm512_castps512_ps128((__m512)all));
}

struct Avx512 : Dense {
  typedef __m512 Sum;
  typedef __m512 Lanes;
  static constexpr int kRows = 6, kVectors = 4, kTall = 4;

  GSD_TILE void clear(Sum& sum) { sum = _mm512_setzero_ps(); }

  GSD_TILE void sums(const Sum x[kOutputs], float out[kOutputs]) { sum_lanes<__m512>(x, out); }

  GSD_TILE __mmask16 first_lanes(int part) { return static_cast<__mmask16>((1u << part) - 1); }
  GSD_TILE void load_lanes(const float* from, int part, Lanes& to) {
    to = part == kLanes ? _mm512_loadu_ps(from) : _mm512_maskz_loadu_ps(first_lanes(part), from);
  }
  GSD_TILE void store_lanes(const Lanes& from, int part, float* to) {
    if (part == kLanes) return _mm512_storeu_ps(to, from);
    _mm512_mask_storeu_ps(to, first_lanes(part), from);
  }
  GSD_TILE void add_lanes(const Lanes& value, float weight, Lanes& sum) {
    sum = _mm512_fmadd_ps(value, _mm512_set1_ps(weight), sum);
  }
};

GSD_TILE __m512i wide_words(const uint16_t* from, int part) {  // 16-bit elements, one a word
  const __mmask16 lanes = static_cast<__mmask16>((1u << part) - 1);
  return _mm512_cvtepu16_epi32(part == kLanes ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))
                                              : _mm256_maskz_loadu_epi16(lanes, from));
}

GSD_TILE __m512i whole_line(const uint16_t* from) { return _mm512_loadu_si512(from); }

struct Float32 : Avx512 {
  typedef float Stored;
  typedef float Seen;
  typedef __m512 Weights;
  typedef __m512 Row;
  static constexpr int kStep = 16;
  GSD_TILE void see(const float* from, Row& row) { row = _mm512_loadu_ps(from); }
  GSD_TILE void widen(const float* from, Weights& to) {
    to = _mm512_loadu_ps(from);
    keep_in_register(to);
  }
  GSD_TILE void add(const Row& row, const Weights& weights, Sum& sum) { sum = _mm512_fmadd_ps(row, weights, sum); }
  GSD_TILE void arrange(const float* from, float* to) { _mm512_storeu_ps(to, _mm512_loadu_ps(from)); }
  GSD_TILE void widen_lanes(const float* from, int part, Lanes& to) { load_lanes(from, part, to); }
};

struct Float16 : Float32 {
  typedef uint16_t Stored;
  GSD_TILE void widen(const uint16_t* from, Weights& to) {
    to = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  GSD_TILE void widen_lanes(const uint16_t* from, int part, Lanes& to) {
    if (part == kLanes) widen(from, to);
    else to = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(part), from));
  }
};

// Two bfloat16 share a word: a shift widens the first, a mask the second. Rows are packed accordingly.
struct PairedBfloat16 : Avx512 {
  typedef uint16_t Stored;
  typedef float Seen;
  struct Weights {
    __m512 first, second;
  };
  typedef Weights Row;
  static constexpr int kStep = 32;
  GSD_TILE void see(const float* from, Row& row) {
    row.first = _mm512_loadu_ps(from), row.second = _mm512_loadu_ps(from + 16);
  }
  GSD_TILE void take(__m512i words, Weights& to) {
    to.first = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    to.second = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }
  GSD_TILE void widen(const uint16_t* from, Weights& to) { take(whole_line(from), to); }
  GSD_TILE void add(const Row& row, const Weights& weights, Sum& sum) {
    sum = _mm512_fmadd_ps(row.first, weights.first, sum);
    sum = _mm512_fmadd_ps(row.second, weights.second, sum);
  }
  GSD_TILE void arrange(const float* from, float* to) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    const __m512 low = _mm512_castsi512_ps(_mm512_and_si512(rounded_bits(_mm512_loadu_ps(from)), upper));
    const __m512 high = _mm512_castsi512_ps(_mm512_and_si512(rounded_bits(_mm512_loadu_ps(from + 16)), upper));
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    _mm512_storeu_ps(to, _mm512_permutex2var_ps(low, even, high));
    _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(low, _mm512_add_epi32(even, _mm512_set1_epi32(1)), high));
  }
  GSD_TILE void widen_lanes(const uint16_t* from, int part, Lanes& to) {
    to = _mm512_castsi512_ps(_mm512_slli_epi32(wide_words(from, part), 16));
  }
};

// Codes of int8, by any instruction.
struct IntegerSums : Dense {
  static constexpr int kRows = 6;
  typedef int8_t Stored;
  typedef int8_t Seen;
  typedef __m512i Weights;
  typedef __m512i Row;
  typedef __m512i Sum;
  GSD_TILE void clear(Sum& sum) { sum = _mm512_setzero_si512(); }
  GSD_TILE void sums(const Sum x[kOutputs], float* out) { sum_lanes<Integers>(x, out); }
};
