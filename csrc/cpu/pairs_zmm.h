// Blocks of bfloat16 pairs in AVX-512 registers, for the translation units that multiply them: inside the target, behind
// products_tile.h.

// Words of 16 rows, transposed.
GSD_TILE void transpose(__m512i (&x)[16]) {
  __m512i y[16];
  GSD_UNROLL
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  GSD_UNROLL
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]), x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]), x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  GSD_UNROLL
  for (int i = 0; i < 4; i++) {  // a quarter of a register has a column of four rows
    const __m512i even = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88), odd = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xDD);
    const __m512i even_below = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
    const __m512i odd_below = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xDD);
    y[i] = _mm512_shuffle_i32x4(even, even_below, 0x88), y[i + 8] = _mm512_shuffle_i32x4(even, even_below, 0xDD);
    y[i + 4] = _mm512_shuffle_i32x4(odd, odd_below, 0x88), y[i + 12] = _mm512_shuffle_i32x4(odd, odd_below, 0xDD);
  }
  GSD_UNROLL
  for (int i = 0; i < 16; i++) x[i] = y[i];
}

GSD_TILE __mmask16 first_of_16(int64_t n) { return static_cast<__mmask16>(n >= 16 ? 0xFFFF : (1u << n) - 1); }

struct ZmmPairs {
  // 32 numbers, of which `n` are there. None that is multiplied is subnormal: the products take such for 0.
  GSD_TILE void round(const float* from, int64_t n, uint16_t* to) {
    const __m512 low = _mm512_maskz_loadu_ps(first_of_16(n), from);
    const __m512 high = n > 16 ? _mm512_maskz_loadu_ps(first_of_16(n - 16), from + 16) : _mm512_setzero_ps();
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }

  // 32 numbers of 16 rows into 16 lines of words, a pair of each row; so many are there, of so many rows.
  GSD_TILE void turn(const uint16_t* from, int64_t stride, int64_t rows, int64_t n, uint16_t* to, int64_t line) {
    const __mmask32 there = static_cast<__mmask32>((uint64_t{1} << fewer(n, 32)) - 1);
    __m512i x[16];
    GSD_UNROLL
    for (int r = 0; r < 16; r++) x[r] = _mm512_maskz_loadu_epi16(r < rows ? there : 0, from + r * stride);
    transpose(x);
    GSD_UNROLL
    for (int pair = 0; pair < 16; pair++) _mm512_storeu_si512(to + line * pair, x[pair]);
  }

  // Two rows of 16 numbers into 16 words; null: zeros.
  GSD_TILE __m512i words(const uint16_t* from, int64_t n) {
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(from == nullptr ? 0 : first_of_16(n), from));
  }
  GSD_TILE void pair(const uint16_t* first, const uint16_t* second, int64_t n, uint16_t* to) {
    _mm512_storeu_si512(to, _mm512_or_si512(words(first, n), _mm512_slli_epi32(words(second, n), 16)));
  }

  // One of four quarters of sums [32 outputs][32 rows]; so many are wanted of all.
  GSD_TILE void put_turned(const float* sums, int part, int64_t rows, int64_t outputs, float* out, int64_t out_stride) {
    const int64_t r = part / 2 * 16, n = part % 2 * 16;
    if (r >= rows || n >= outputs) return;
    __m512i x[16];
    GSD_UNROLL
    for (int i = 0; i < 16; i++) x[i] = _mm512_loadu_si512(sums + 32 * (n + i) + r);
    transpose(x);
    GSD_UNROLL
    for (int i = 0; i < 16; i++) {
      if (r + i < rows) _mm512_mask_storeu_epi32(out + (r + i) * out_stride + n, first_of_16(outputs - n), x[i]);
    }
  }
};
