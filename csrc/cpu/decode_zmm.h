// Vectors of decode_vectors.h with AVX-512, before it: 32 codes are words, and one permutation of rounded values decodes them.

typedef __m512 Sixteen;   // floats
typedef __m512i Codes32;  // a word each

GSD_TILE Sixteen same(float x) { return _mm512_set1_ps(x); }
GSD_TILE Sixteen sixteen(const float* from) { return _mm512_loadu_ps(from); }
GSD_TILE void store_sixteen(float* to, Sixteen x) { _mm512_storeu_ps(to, x); }
GSD_TILE Sixteen times(Sixteen a, Sixteen b) { return _mm512_mul_ps(a, b); }
GSD_TILE Sixteen plus(Sixteen a, Sixteen b) { return _mm512_add_ps(a, b); }
GSD_TILE Sixteen minus(Sixteen a, Sixteen b) { return _mm512_sub_ps(a, b); }
GSD_TILE Sixteen times_plus(Sixteen a, Sixteen b, Sixteen c) { return _mm512_fmadd_ps(a, b, c); }
GSD_TILE Sixteen times_minus(Sixteen a, Sixteen b, Sixteen c) { return _mm512_fmsub_ps(a, b, c); }
GSD_TILE Sixteen half_lanes(const uint8_t* from) {
  return _mm512_cvtph_ps(_mm256_broadcastw_epi16(_mm_loadu_si16(from)));
}

GSD_TILE Sixteen counted(int first) {  // first … first + 15
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_cvtepi32_ps(_mm512_add_epi32(lanes, _mm512_set1_epi32(first)));
}

constexpr int64_t kFours = 0x0404040404040404, kEights = 2 * kFours, kTwelves = 3 * kFours;

// Of sixteen bytes those at `places`, two a word, shifted: a code is a word's low half byte, above it stands anything.
GSD_TILE __m512i shifted_bytes(const uint8_t* from, __m512i places, __m512i shifts) {
  const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm512_srlv_epi16(_mm512_shuffle_epi8(all, places), shifts);
}

// 32 codes, a word each: low nibbles of sixteen bytes, then high ones; or either of 32 bytes.
GSD_TILE Codes32 shifted_nibbles(const uint8_t* from) {  // under bits of which nothing is known
  const __m512i places = _mm512_set4_epi64(0x0F0F0E0E0D0D0C0C, 0x0B0B0A0A09090808, 0x0707060605050404, 0x0303020201010000);
  constexpr int64_t kShifts = 0x0004000400040004;
  return shifted_bytes(from, places, _mm512_set_epi64(kShifts, kShifts, kShifts, kShifts, 0, 0, 0, 0));
}
GSD_TILE Codes32 nibble_codes(const uint8_t* from) {
  return _mm512_and_si512(shifted_nibbles(from), _mm512_set1_epi16(15));
}
GSD_TILE Sixteen wide_bytes(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
GSD_TILE Sixteen wide_codes(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)); }
GSD_TILE Codes32 low_codes(__m256i bytes) {
  return _mm512_and_si512(_mm512_cvtepu8_epi16(bytes), _mm512_set1_epi16(15));
}
GSD_TILE Codes32 high_codes(__m256i bytes) { return _mm512_srli_epi16(_mm512_cvtepu8_epi16(bytes), 4); }
GSD_TILE Codes32 with_fifth(Codes32 codes, __mmask32 bits) {
  return _mm512_mask_add_epi16(codes, bits, codes, _mm512_set1_epi16(16));
}
GSD_TILE __mmask32 bits_at(const uint8_t* from) {
  uint32_t bits;
  __builtin_memcpy(&bits, from, sizeof bits);
  return static_cast<__mmask32>(bits);
}
GSD_TILE __mmask32 bits_of(__m256i bytes, int which) {
  return _mm256_test_epi8_mask(bytes, _mm256_set1_epi8(static_cast<char>(1 << which)));
}

// 32 codes of half a byte in the order of memory, a word each, under bits of which nothing is known.
template <bool HighFirst>
GSD_TILE Codes32 half_codes(const uint8_t* from) {
  const __m512i lanes = _mm512_set4_epi32(0x03030303, 0x02020202, 0x01010101, 0);
  const __m512i first = _mm512_set_epi64(kTwelves, kTwelves, kEights, kEights, kFours, kFours, 0, 0);
  return shifted_bytes(from, _mm512_add_epi8(lanes, first), _mm512_set1_epi32(HighFirst ? 4 : 4 << 16));
}

// Words of bfloat16 as Bfloat16::round gives them.
GSD_TILE __m256i bfloat16_words(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i both = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16));
}

// Of floats that are no subnormal ones, as products and differences of scales in float16 and codes are.
GSD_TILE __m256i normal_words(__m512 x) {
#ifdef GSD_ROUNDS_BFLOAT16
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  return bfloat16_words(x);
#endif
}

// Two registers at a time.
GSD_TILE __m512i joined(__m256i first, __m256i second) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}
GSD_TILE __m512i bfloat16_words(__m512 first, __m512 second) {
  return joined(bfloat16_words(first), bfloat16_words(second));
}
GSD_TILE __m512i normal_words(__m512 first, __m512 second) {
#ifdef GSD_ROUNDS_BFLOAT16
  return (__m512i)_mm512_cvtne2ps_pbh(second, first);
#else
  return bfloat16_words(first, second);
#endif
}

// What 32 weights become in the model's dtype: looked up among 16 or 32 values, or put as they are. `doubled`: 16 values
// that are looked up by words of whose fifth bits nothing is known.
struct WordsOut {
  GSD_TILE void keep(__m512i words, uint16_t* to) { _mm512_storeu_si512(to, words); }
  GSD_TILE __m512i doubled(__m256i values) { return _mm512_broadcast_i64x4(values); }
  template <class T>
  GSD_TILE void look_up(__m512i values, __m512i codes, T* to) {
    keep(_mm512_permutexvar_epi16(codes, values), to);
  }
  template <class T>
  GSD_TILE void look_up(__m256i values, __m512i codes, T* to) {
    look_up(_mm512_castsi256_si512(values), codes, to);
  }
  template <class T>
  GSD_TILE void look_up(__m256i first, __m256i second, __m512i codes, T* to) {
    look_up(joined(first, second), codes, to);
  }
  GSD_TILE void put(__m256i first, __m256i second, uint16_t* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), first);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 16), second);
  }
};
template <class To>
struct Out;
template <>
struct Out<ToBfloat16> : WordsOut {
  GSD_TILE __m256i of(__m512 x) { return normal_words(x); }
  GSD_TILE __m256i of_any(__m512 x) { return bfloat16_words(x); }
};
template <>
struct Out<ToFloat16> : WordsOut {
  GSD_TILE __m256i of_any(__m512 x) { return of(x); }
  GSD_TILE __m256i of(__m512 x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
};
template <>
struct Out<ToFloat32> {
  GSD_TILE __m512 of(__m512 x) { return x; }
  GSD_TILE __m512 of_any(__m512 x) { return x; }
  GSD_TILE __m512i first_codes(__m512i codes) { return _mm512_cvtepu16_epi32(_mm512_castsi512_si256(codes)); }
  GSD_TILE __m512i last_codes(__m512i codes) { return _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(codes, 1)); }
  GSD_TILE __m512 doubled(__m512 values) { return values; }  // no more than four bits are looked at
  GSD_TILE void look_up(__m512 values, __m512i codes, float* to) {
    put(_mm512_permutexvar_ps(first_codes(codes), values), _mm512_permutexvar_ps(last_codes(codes), values), to);
  }
  GSD_TILE void look_up(__m512 first, __m512 second, __m512i codes, float* to) {
    put(_mm512_permutex2var_ps(first, first_codes(codes), second),
        _mm512_permutex2var_ps(first, last_codes(codes), second), to);
  }
  GSD_TILE void put(__m512 first, __m512 second, float* to) {
    _mm512_storeu_ps(to, first), _mm512_storeu_ps(to + 16, second);
  }
};

// Whether no value under these numbers, which stand beside codes, can be a subnormal one: all are 0 or far from those.
GSD_TILE bool all_normal(const float* beside, int64_t count) {
  const __m512i limit = _mm512_set1_epi32(0x4D000000 - 1);  // of 2^-50, without the sign
  __mmask16 small = 0;
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 there = static_cast<__mmask16>(0xFFFFu >> (16 - fewer(16, count - i)));
    const __m512i sizes = _mm512_slli_epi32(_mm512_maskz_loadu_epi32(there, beside + i), 1);
    small |= _mm512_cmplt_epu32_mask(_mm512_sub_epi32(sizes, _mm512_set1_epi32(1)), limit);
  }
  return small == 0;
}
