// Registers of decode_vectors.h with AVX-512, before it: 32 codes are words, and one permutation of rounded values decodes
// them.

typedef __m512 Sixteen;  // floats

struct Registers {
  typedef Sixteen Number;
  typedef __m512i Codes;  // a word each, whose low four bits are the code; above them stands anything but behind with_fifth

  GSD_TILE Sixteen same(float x) { return _mm512_set1_ps(x); }
  GSD_TILE Sixteen sixteen(const float* from) { return _mm512_loadu_ps(from); }
  GSD_TILE void store_sixteen(float* to, Sixteen x) { _mm512_storeu_ps(to, x); }
  GSD_TILE Sixteen times(Sixteen a, Sixteen b) { return _mm512_mul_ps(a, b); }
  GSD_TILE Sixteen plus(Sixteen a, Sixteen b) { return _mm512_add_ps(a, b); }
  GSD_TILE Sixteen minus(Sixteen a, Sixteen b) { return _mm512_sub_ps(a, b); }
  GSD_TILE Sixteen times_plus(Sixteen a, Sixteen b, Sixteen c) { return _mm512_fmadd_ps(a, b, c); }
  GSD_TILE Sixteen times_minus(Sixteen a, Sixteen b, Sixteen c) { return _mm512_fmsub_ps(a, b, c); }
  GSD_TILE Sixteen eight_each(__m128 two) {
    const __m512i places = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_permutexvar_ps(places, _mm512_castps128_ps512(two));
  }
  GSD_TILE Sixteen half_lanes(const uint8_t* from) {
    return _mm512_cvtph_ps(_mm256_broadcastw_epi16(_mm_loadu_si16(from)));
  }
  GSD_TILE Sixteen counted(int first) {  // first … first + 15
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_cvtepi32_ps(_mm512_add_epi32(lanes, _mm512_set1_epi32(first)));
  }
  GSD_TILE Sixteen wide_signed(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
  GSD_TILE Sixteen wide_unsigned(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)); }

  // A shift of four-byte words, half as wide as what it is for: a neighbour's bits stand above a code then.
  GSD_TILE Codes nibbles(const uint8_t* from) {
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm512_cvtepu8_epi16(_mm256_srlv_epi32(twice, _mm256_set_epi32(4, 4, 4, 4, 0, 0, 0, 0)));
  }
  template <bool kHighFirst>
  GSD_TILE Codes half_bytes(const uint8_t* from) {
    constexpr int64_t kFours = 0x0404040404040404, kEights = 2 * kFours, kTwelves = 3 * kFours;
    const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m512i lanes = _mm512_set4_epi32(0x03030303, 0x02020202, 0x01010101, 0);
    const __m512i first = _mm512_set_epi64(kTwelves, kTwelves, kEights, kEights, kFours, kFours, 0, 0);
    const __m512i bytes = _mm512_shuffle_epi8(all, _mm512_add_epi8(lanes, first));
    return _mm512_srlv_epi16(bytes, _mm512_set1_epi32(kHighFirst ? 4 : 4 << 16));
  }
  GSD_TILE __m256i bytes_at(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  GSD_TILE Codes either_nibbles(const uint8_t* from, int high) {
    return _mm512_cvtepu8_epi16(_mm256_srlv_epi32(bytes_at(from), _mm256_set1_epi32(4 * high)));
  }
  GSD_TILE __mmask32 bits_at(const uint8_t* from) {
    uint32_t bits;
    __builtin_memcpy(&bits, from, sizeof bits);
    return static_cast<__mmask32>(bits);
  }
  GSD_TILE __mmask32 bits_of(const uint8_t* from, int which) {
    return _mm256_test_epi8_mask(bytes_at(from), _mm256_set1_epi8(static_cast<char>(1 << which)));
  }
  GSD_TILE Codes with_fifth(Codes codes, __mmask32 bits) {
    const __m512i low = _mm512_and_si512(codes, _mm512_set1_epi16(15));
    return _mm512_mask_add_epi16(low, bits, low, _mm512_set1_epi16(16));
  }

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
};

// Bfloat16 as Bfloat16::round gives it: in the high halves, over rests; in words.
GSD_TILE __m512i rounded_bits(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
}
GSD_TILE __m256i bfloat16_words(__m512 x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bits(x), 16)); }
GSD_TILE __m512i joined(__m256i first, __m256i second) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}

// Of floats that are no subnormal ones, as products and differences of scales in float16 and codes are; of one register or two.
#ifdef GSD_ROUNDS_BFLOAT16
GSD_TILE __m256i normal_words(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
GSD_TILE __m512i normal_words(__m512 first, __m512 second) { return (__m512i)_mm512_cvtne2ps_pbh(second, first); }
#else
GSD_TILE __m256i normal_words(__m512 x) { return bfloat16_words(x); }
GSD_TILE __m512i normal_words(__m512 first, __m512 second) {
  return joined(bfloat16_words(first), bfloat16_words(second));
}
#endif

// What 32 weights become in the model's dtype: looked up in a table of 16 or 32 rounded values, or put as they are.
struct WordsOut {
  GSD_TILE __m512i table(__m256i values) { return _mm512_broadcast_i64x4(values); }
  GSD_TILE __m512i table(__m256i first, __m256i second) { return joined(first, second); }
  GSD_TILE void look_up(__m512i values, __m512i codes, uint16_t* to) {
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(codes, values));
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
  struct Tables {
    __m512 first, second;
  };
  GSD_TILE __m512 of(__m512 x) { return x; }
  GSD_TILE __m512 of_any(__m512 x) { return x; }
  GSD_TILE __m512 table(__m512 values) { return values; }  // no more than four bits are looked at
  GSD_TILE Tables table(__m512 first, __m512 second) { return {first, second}; }
  GSD_TILE __m512 pick(__m512 values, __m512i codes) { return _mm512_permutexvar_ps(codes, values); }
  GSD_TILE __m512 pick(const Tables& in, __m512i codes) { return _mm512_permutex2var_ps(in.first, codes, in.second); }
  template <class Table>
  GSD_TILE void look_up(const Table& in, __m512i codes, float* to) {
    put(pick(in, _mm512_cvtepu16_epi32(_mm512_castsi512_si256(codes))),
        pick(in, _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(codes, 1))), to);
  }
  GSD_TILE void put(__m512 first, __m512 second, float* to) {
    _mm512_storeu_ps(to, first), _mm512_storeu_ps(to + 16, second);
  }
};
