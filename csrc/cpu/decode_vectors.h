// The machine of weight_formats.h that levels with vectors have: after plain.h and the Registers of decode_ymm.h or
// decode_zmm.h, inside the target. Sixteen (or thirty-two) values of a group are rounded once and looked up, 32 weights at a
// time.

struct Machine : Registers {
  struct ByteCodes {
    __m128i low, high;
  };
  GSD_TILE __m128i sixteen_at(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
  GSD_TILE ByteCodes bytes(const uint8_t* from) { return {sixteen_at(from), sixteen_at(from + 16)}; }
  GSD_TILE ByteCodes six_bits(const uint8_t* block, int half, int part) {
    const __m128i up = _mm_cvtsi32_si128(part / 2 * 4), of_part = _mm_cvtsi32_si128(2 * part);
    const __m256i low = _mm256_srl_epi16(bytes_at(block + 64 * half + 32 * (part % 2)), up);
    const __m256i two = _mm256_srl_epi16(bytes_at(block + 128 + 32 * half), of_part);
    const __m256i high = _mm256_slli_epi16(_mm256_and_si256(two, _mm256_set1_epi8(3)), 4);
    const __m256i codes =
        _mm256_sub_epi8(_mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi8(15)), high), _mm256_set1_epi8(32));
    return {_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1)};
  }

  GSD_TILE Sixteen half(const uint8_t* block, int at) { return half_lanes(block + at); }
  GSD_TILE Sixteen exponent(const uint8_t* block) { return same(Plain::exponent(block)); }
  GSD_TILE void six_bit_pairs(const uint8_t* block, float* to) {
    const __m128i all = sixteen_at(block);  // two halves, then s[0 … 11], as of Plain
    const __m128i low = _mm_srlv_epi32(_mm_shuffle_epi32(all, 0xED), _mm_set_epi32(4, 0, 0, 0));
    const __m128i high = _mm_srli_epi32(_mm_shuffle_epi32(all, 0xA5), 2);
    const __m128i bytes = _mm_or_si128(_mm_and_si128(low, _mm_set_epi32(0x0F0F0F0F, 0x3F3F3F3F, 0x0F0F0F0F, 0x3F3F3F3F)),
                                       _mm_and_si128(high, _mm_set_epi32(0x30303030, 0, 0x30303030, 0)));
    store_sixteen(to, times(wide_unsigned(bytes), eight_each(_mm_cvtph_ps(all))));
  }
  GSD_TILE void scaled_bytes(const uint8_t* d, const uint8_t* bytes, float* to) {
    store_sixteen(to, times(half_lanes(d), wide_signed(sixteen_at(bytes))));
  }
};

// Values of the codes `first` … `first` + 15.
template <class F>
GSD_TILE Sixteen values_from(int first, Sixteen d, Sixteen m) {
  return F::value(Machine{}, F::template levels<Machine>(first), d, m);
}

template <class F, class To, bool kNormal>
struct Strip {
  typedef Out<To> O;
  typedef typename To::Stored Stored;
  struct ByBytes {
    Sixteen d[2], m;
  };
  GSD_TILE auto rounded(Sixteen x) {
    if constexpr (kNormal) return O::of(x);
    else return O::of_any(x);
  }
  template <class N>
  GSD_TILE auto hold(const N& numbers, int step) {
    const Sixteen d = numbers.d(step, 0), m = numbers.m(step);
    if constexpr (F::kTable == 0) return ByBytes{{d, numbers.d(step, 1)}, m};
    else if constexpr (F::kTable == 16) return O::table(rounded(values_from<F>(0, d, m)));
    else return O::table(rounded(values_from<F>(0, d, m)), rounded(values_from<F>(16, d, m)));
  }
  GSD_TILE void put(const ByBytes& by, const Machine::ByteCodes& bytes, Stored* to) {
    O::put(rounded(F::value(Machine{}, F::template levels<Machine>(bytes.low), by.d[0], by.m)),
           rounded(F::value(Machine{}, F::template levels<Machine>(bytes.high), by.d[1], by.m)), to);
  }
  template <class Table>
  GSD_TILE void put(const Table& table, const Registers::Codes& codes, Stored* to) {
    O::look_up(table, codes, to);
  }
};
