// Registers of decode_vectors.h with AVX2, before it: 32 codes are bytes, and rounded values are looked up a byte at a time.

struct Sixteen {  // floats
  __m256 low, high;
};

struct Registers {
  typedef Sixteen Number;
  typedef __m256i Codes;  // a byte each

  GSD_TILE Sixteen same(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  GSD_TILE Sixteen sixteen(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
  GSD_TILE void store_sixteen(float* to, Sixteen x) { _mm256_storeu_ps(to, x.low), _mm256_storeu_ps(to + 8, x.high); }
  GSD_TILE Sixteen times(Sixteen a, Sixteen b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
  GSD_TILE Sixteen plus(Sixteen a, Sixteen b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
  GSD_TILE Sixteen minus(Sixteen a, Sixteen b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
  GSD_TILE Sixteen times_plus(Sixteen a, Sixteen b, Sixteen c) { return plus(times(a, b), c); }
  GSD_TILE Sixteen times_minus(Sixteen a, Sixteen b, Sixteen c) { return minus(times(a, b), c); }
  GSD_TILE Sixteen eight_each(__m128 two) { return {_mm256_broadcastss_ps(two), _mm256_broadcastss_ps(_mm_movehdup_ps(two))}; }
  GSD_TILE Sixteen half_lanes(const uint8_t* from) {
    int16_t bits;
    __builtin_memcpy(&bits, from, sizeof bits);
    const __m256 half = _mm256_cvtph_ps(_mm_set1_epi16(bits));
    return {half, half};
  }
  GSD_TILE Sixteen floats_of(__m256i low, __m256i high) { return {_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)}; }
  GSD_TILE Sixteen counted(int first) {  // first … first + 15
    const __m256i lanes = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    return floats_of(_mm256_add_epi32(lanes, _mm256_set1_epi32(first)), _mm256_add_epi32(lanes, _mm256_set1_epi32(first + 8)));
  }
  GSD_TILE Sixteen wide_signed(__m128i x) {
    return floats_of(_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)));
  }
  GSD_TILE Sixteen wide_unsigned(__m128i x) {
    return floats_of(_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)));
  }

  GSD_TILE __m256i bytes_at(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  GSD_TILE Codes low_codes(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
  GSD_TILE Codes low_codes(__m128i first, __m128i second) { return low_codes(_mm256_set_m128i(second, first)); }
  GSD_TILE Codes nibbles(const uint8_t* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return low_codes(bytes, _mm_srli_epi16(bytes, 4));
  }
  GSD_TILE Codes either_nibbles(const uint8_t* from, int high) {
    return low_codes(high ? _mm256_srli_epi16(bytes_at(from), 4) : bytes_at(from));
  }
  template <bool kHighFirst>
  GSD_TILE Codes half_bytes(const uint8_t* from) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)), high = _mm_srli_epi16(low, 4);
    const __m128i first = kHighFirst ? high : low, second = kHighFirst ? low : high;
    return low_codes(_mm_unpacklo_epi8(first, second), _mm_unpackhi_epi8(first, second));
  }

  // Bytes of all ones where a bit is set: of 32, or number `which` of 32 bytes.
  GSD_TILE __m256i bits_of(const uint8_t* from, int which) {
    const __m256i bit = _mm256_set1_epi8(static_cast<char>(1 << which));
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes_at(from), bit), bit);
  }
  GSD_TILE __m256i bits_at(const uint8_t* from) {
    int32_t bits;
    __builtin_memcpy(&bits, from, sizeof bits);
    const __m256i places = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    return _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(bits), places), bit), bit);
  }
  GSD_TILE Codes with_fifth(Codes codes, __m256i bits) {
    return _mm256_or_si256(codes, _mm256_and_si256(bits, _mm256_set1_epi8(16)));
  }

  // Rounding here knows subnormal values too.
  GSD_TILE bool all_normal(const float*, int64_t) { return true; }
};

// Bfloat16 as Bfloat16::round gives them, in 32 bits.
GSD_TILE __m256i bfloat16_bits(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const __m256 quiet = _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_set1_epi32(0x400000)));
  const __m256 both = _mm256_blendv_ps(_mm256_castsi256_ps(up), quiet, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_castps_si256(both), 16);
}

// What 32 weights become in the model's dtype: looked up in a table of 16 or 32 rounded values, or put as they are.
struct WordsOut {
  struct Table {  // the low and the high bytes of 16 words, in both halves
    __m256i low, high;
  };
  struct Tables {
    Table first, second;
  };
  GSD_TILE Table table(__m256i values) {
    const __m256i low = _mm256_and_si256(values, _mm256_set1_epi16(0xFF)), high = _mm256_srli_epi16(values, 8);
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(low, high), 0xD8);  // all low ones, all high ones
    return {_mm256_permute2x128_si256(bytes, bytes, 0x00), _mm256_permute2x128_si256(bytes, bytes, 0x11)};
  }
  GSD_TILE Tables table(__m256i first, __m256i second) { return {table(first), table(second)}; }
  GSD_TILE void put_bytes(__m256i low, __m256i high, uint16_t* to) {
    const __m256i first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);
    put(_mm256_permute2x128_si256(first, second, 0x20), _mm256_permute2x128_si256(first, second, 0x31), to);
  }
  GSD_TILE void look_up(const Table& values, __m256i codes, uint16_t* to) {
    put_bytes(_mm256_shuffle_epi8(values.low, codes), _mm256_shuffle_epi8(values.high, codes), to);
  }
  GSD_TILE void look_up(const Tables& in, __m256i codes, uint16_t* to) {
    const Table &a = in.first, &b = in.second;
    const __m256i fifth = _mm256_slli_epi16(codes, 3);  // as the highest bit
    put_bytes(_mm256_blendv_epi8(_mm256_shuffle_epi8(a.low, codes), _mm256_shuffle_epi8(b.low, codes), fifth),
              _mm256_blendv_epi8(_mm256_shuffle_epi8(a.high, codes), _mm256_shuffle_epi8(b.high, codes), fifth), to);
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
  GSD_TILE __m256i of(Sixteen x) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(bfloat16_bits(x.low), bfloat16_bits(x.high)), 0xD8);
  }
  GSD_TILE __m256i of_any(Sixteen x) { return of(x); }
};
template <>
struct Out<ToFloat16> : WordsOut {
  GSD_TILE __m128i words(__m256 x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  GSD_TILE __m256i of(Sixteen x) { return _mm256_set_m128i(words(x.high), words(x.low)); }
  GSD_TILE __m256i of_any(Sixteen x) { return of(x); }
};
template <>
struct Out<ToFloat32> {
  struct Tables {
    Sixteen first, second;
  };
  GSD_TILE Sixteen of(Sixteen x) { return x; }
  GSD_TILE Sixteen of_any(Sixteen x) { return x; }
  GSD_TILE Tables table(Sixteen first, Sixteen second) { return {first, second}; }
  GSD_TILE Tables table(Sixteen values) { return {values, values}; }
  GSD_TILE __m256 bit(__m256i codes, int which) { return _mm256_castsi256_ps(_mm256_slli_epi32(codes, 31 - which)); }
  GSD_TILE __m256 pick(Sixteen values, __m256i codes) {
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(values.low, codes), _mm256_permutevar8x32_ps(values.high, codes),
                            bit(codes, 3));
  }
  GSD_TILE void look_up(const Tables& in, __m256i codes, float* to) {
    uint8_t code[32];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(code), codes);
    for (int i = 0; i < 32; i += 8) {
      const __m256i eight = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(code + i)));
      _mm256_storeu_ps(to + i, _mm256_blendv_ps(pick(in.first, eight), pick(in.second, eight), bit(eight, 4)));
    }
  }
  GSD_TILE void put(Sixteen first, Sixteen second, float* to) {
    Registers::store_sixteen(to, first), Registers::store_sixteen(to + 16, second);
  }
};
