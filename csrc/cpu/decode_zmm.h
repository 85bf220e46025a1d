// Decoders of packed weights with AVX-512, for its translation units: after decode.h, inside the target. Sixteen (or
// thirty-two) values of a group are rounded once; one permutation of them decodes 32 weights. Products of codes and scales
// are exact, so fused sums have the definition's bits.

GSD_TILE __m512 half_lanes(const uint8_t* from) {
  return _mm512_cvtph_ps(_mm256_broadcastw_epi16(_mm_loadu_si16(from)));
}

GSD_TILE __m512 counted(int first) {  // first … first + 15
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_cvtepi32_ps(_mm512_add_epi32(lanes, _mm512_set1_epi32(first)));
}

GSD_TILE __m128i sixteen_at(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }

constexpr int64_t kFours = 0x0404040404040404, kEights = 2 * kFours, kTwelves = 3 * kFours;

// Of sixteen bytes those at `places`, two a word, shifted: a code is a word's low half byte, above it stands anything.
GSD_TILE __m512i shifted_bytes(const uint8_t* from, __m512i places, __m512i shifts) {
  const __m512i all = _mm512_broadcast_i32x4(sixteen_at(from));
  return _mm512_srlv_epi16(_mm512_shuffle_epi8(all, places), shifts);
}

// 32 codes, a word each: low nibbles of sixteen bytes, then high ones; or either of 32 bytes.
GSD_TILE __m512i nibble_words(const uint8_t* from) {
  const __m512i places = _mm512_set4_epi64(0x0F0F0E0E0D0D0C0C, 0x0B0B0A0A09090808, 0x0707060605050404, 0x0303020201010000);
  constexpr int64_t kShifts = 0x0004000400040004;
  const __m512i shifts = _mm512_set_epi64(kShifts, kShifts, kShifts, kShifts, 0, 0, 0, 0);
  return _mm512_and_si512(shifted_bytes(from, places, shifts), _mm512_set1_epi16(15));
}
GSD_TILE __m256i bytes_at(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
GSD_TILE __m512i low_words(__m256i bytes) {
  return _mm512_and_si512(_mm512_cvtepu8_epi16(bytes), _mm512_set1_epi16(15));
}
GSD_TILE __m512i high_words(__m256i bytes) { return _mm512_srli_epi16(_mm512_cvtepu8_epi16(bytes), 4); }
GSD_TILE __m512i with_fifth(__m512i codes, __mmask32 bits) {
  return _mm512_mask_add_epi16(codes, bits, codes, _mm512_set1_epi16(16));
}
GSD_TILE __mmask32 mask_at(const uint8_t* from) {
  uint32_t bits;
  __builtin_memcpy(&bits, from, sizeof bits);
  return static_cast<__mmask32>(bits);
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

// What 32 weights become in the model's dtype, in memory or in a register: looked up among 16 or 32 values, or put as they
// are. `doubled`: 16 values that are looked up by words of whose fifth bits nothing is known.
struct WordsOut {
  GSD_TILE void keep(__m512i words, uint16_t* to) { _mm512_storeu_si512(to, words); }
  GSD_TILE void keep(__m512i words, __m512i* to) { *to = words; }
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
    look_up(_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1), codes, to);
  }
  GSD_TILE void put(__m256i first, __m256i second, __m512i* to) {
    *to = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
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
  GSD_TILE __m512i low_codes(__m512i codes) { return _mm512_cvtepu16_epi32(_mm512_castsi512_si256(codes)); }
  GSD_TILE __m512i high_codes(__m512i codes) { return _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(codes, 1)); }
  GSD_TILE __m512 doubled(__m512 values) { return values; }  // no more than four bits are looked at
  GSD_TILE void look_up(__m512 values, __m512i codes, float* to) {
    put(_mm512_permutexvar_ps(low_codes(codes), values), _mm512_permutexvar_ps(high_codes(codes), values), to);
  }
  GSD_TILE void look_up(__m512 first, __m512 second, __m512i codes, float* to) {
    put(_mm512_permutex2var_ps(first, low_codes(codes), second),
        _mm512_permutex2var_ps(first, high_codes(codes), second), to);
  }
  GSD_TILE void put(__m512 first, __m512 second, float* to) {
    _mm512_storeu_ps(to, first), _mm512_storeu_ps(to + 16, second);
  }
};

// A block's kWeights weights into `to`.
template <class Block>
struct Vectors;
template <>
struct Vectors<BlockQ4_0> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    O::look_up(O::of(_mm512_mul_ps(counted(-8), half_lanes(block))), nibble_words(block + 2), to);
  }
};
template <>
struct Vectors<BlockQ4_1> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    const __m512 values = _mm512_fmadd_ps(counted(0), half_lanes(block), half_lanes(block + 2));
    O::look_up(O::of(values), nibble_words(block + 4), to);
  }
};
template <>
struct Vectors<BlockQ5_0> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    const __m512 d = half_lanes(block);
    O::look_up(O::of(_mm512_mul_ps(counted(-16), d)), O::of(_mm512_mul_ps(counted(0), d)),
               with_fifth(nibble_words(block + 6), mask_at(block + 2)), to);
  }
};
template <>
struct Vectors<BlockQ5_1> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    const __m512 d = half_lanes(block), m = half_lanes(block + 2);
    O::look_up(O::of(_mm512_fmadd_ps(counted(0), d, m)), O::of(_mm512_fmadd_ps(counted(16), d, m)),
               with_fifth(nibble_words(block + 8), mask_at(block + 4)), to);
  }
};
GSD_TILE __m512 wide_bytes(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
template <>
struct Vectors<BlockQ8_0> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    const __m512 d = half_lanes(block);
    O::put(O::of(_mm512_mul_ps(wide_bytes(sixteen_at(block + 2)), d)),
           O::of(_mm512_mul_ps(wide_bytes(sixteen_at(block + 18)), d)), to);
  }
};
template <>
struct Vectors<BlockIQ4_NL> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    O::look_up(O::of(_mm512_mul_ps(_mm512_loadu_ps(kIQ4_NLValues), half_lanes(block))), nibble_words(block + 2), to);
  }
};
template <>
struct Vectors<BlockMXFP4> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    const __m512 d = _mm512_set1_ps(BlockMXFP4::scale(block[0]));
    O::look_up(O::of_any(_mm512_mul_ps(_mm512_loadu_ps(kMXFP4Values), d)), nibble_words(block + 1), to);
  }
};
GSD_TILE __m512 scaled(__m512 d, uint8_t by) { return _mm512_mul_ps(d, _mm512_set1_ps(static_cast<float>(by))); }
template <>
struct Vectors<BlockQ4_K> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    const __m512 d = half_lanes(block), low = half_lanes(block + 2), count = counted(0);
    uint8_t scale[8], minimum[8];
    six_bits(block + 4, scale, minimum);
    for (int j = 0; j < 8; j += 2) {
      const __m256i codes = bytes_at(block + 16 + 16 * j);
      const __m512 first = _mm512_fmsub_ps(count, scaled(d, scale[j]), scaled(low, minimum[j]));
      const __m512 second = _mm512_fmsub_ps(count, scaled(d, scale[j + 1]), scaled(low, minimum[j + 1]));
      O::look_up(O::of(first), low_words(codes), to + 32 * j);
      O::look_up(O::of(second), high_words(codes), to + 32 * j + 32);
    }
  }
};
template <>
struct Vectors<BlockQ5_K> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    const __m512 d = half_lanes(block), low = half_lanes(block + 2);
    const __m256i fifth = bytes_at(block + 16);
    uint8_t scale[8], minimum[8];
    six_bits(block + 4, scale, minimum);
    for (int j = 0; j < 8; j++) {
      const __m256i bytes = bytes_at(block + 48 + 16 * (j & ~1));
      const __m512i codes = j & 1 ? high_words(bytes) : low_words(bytes);
      const __mmask32 bits = _mm256_test_epi8_mask(fifth, _mm256_set1_epi8(static_cast<char>(1 << j)));
      const __m512 by = scaled(d, scale[j]), from = scaled(low, minimum[j]);
      O::look_up(O::of(_mm512_fmsub_ps(counted(0), by, from)),
                 O::of(_mm512_fmsub_ps(counted(16), by, from)), with_fifth(codes, bits), to + 32 * j);
    }
  }
};
template <>
struct Vectors<BlockQ6_K> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    const __m512 d = half_lanes(block + 208);
    float scale[16];
    _mm512_storeu_ps(scale, _mm512_mul_ps(d, wide_bytes(sixteen_at(block + 192))));
    for (int half = 0; half < 2; half++) {
      const __m256i high = bytes_at(block + 128 + 32 * half);
      for (int part = 0; part < 4; part++) {
        const __m256i from = bytes_at(block + 64 * half + 32 * (part & 1)), fifteen = _mm256_set1_epi8(15);
        const __m256i low = _mm256_and_si256(part < 2 ? from : _mm256_srli_epi16(from, 4), fifteen);
        const __m256i two = _mm256_and_si256(_mm256_srli_epi16(high, 2 * part), _mm256_set1_epi8(3));
        const __m256i code = _mm256_sub_epi8(_mm256_or_si256(low, _mm256_slli_epi16(two, 4)), _mm256_set1_epi8(32));
        const float* by = scale + 8 * half + 2 * part;
        O::put(O::of(_mm512_mul_ps(wide_bytes(_mm256_castsi256_si128(code)), _mm512_set1_ps(by[0]))),
               O::of(_mm512_mul_ps(wide_bytes(_mm256_extracti128_si256(code, 1)), _mm512_set1_ps(by[1]))),
               to + 128 * half + 32 * part);
      }
    }
  }
};

template <class Block, class To>
void decode_vectors(const void* row, const float*, int64_t, int64_t inputs, void* out) {
  const uint8_t* block = static_cast<const uint8_t*>(row);
  typename To::Stored* to = static_cast<typename To::Stored*>(out);
  for (int64_t i = 0; i < inputs; i += Block::kWeights, block += Block::kBytes) {
    Vectors<Block>::template decode<Out<To>>(block, to + i);
  }
}

// How values of a group are rounded: with the instruction for normal ones, or for any.
template <class O, bool Normal>
struct Rounding16 : O {
  GSD_TILE auto rounded(__m512 x) {
    if constexpr (Normal) return O::of(x);
    else return O::of_any(x);
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

// The sixteen values of a group, each half a byte's.
template <class Values>
struct SixteenOf;
template <>
struct SixteenOf<ValuesInt4> {
  GSD_TILE __m512 values(const float* beside) {
    return _mm512_mul_ps(_mm512_sub_ps(counted(0), _mm512_set1_ps(beside[1])), _mm512_set1_ps(beside[0]));
  }
};
template <>
struct SixteenOf<ValuesInt4Offset> {
  GSD_TILE __m512 values(const float* beside) {
    return _mm512_add_ps(_mm512_mul_ps(counted(-8), _mm512_set1_ps(beside[0])), _mm512_set1_ps(beside[1]));
  }
};
template <const float (&table)[16]>
struct SixteenOf<ValuesOfTable<table>> {
  GSD_TILE __m512 values(const float* beside) {
    return _mm512_mul_ps(_mm512_loadu_ps(table), _mm512_set1_ps(beside[0]));
  }
};

// 32 codes of half a byte in the order of memory, a word each, under bits of which nothing is known.
template <bool HighFirst>
GSD_TILE __m512i half_words(const uint8_t* from) {
  const __m512i lanes = _mm512_set4_epi32(0x03030303, 0x02020202, 0x01010101, 0);
  const __m512i first = _mm512_set_epi64(kTwelves, kTwelves, kEights, kEights, kFours, kFours, 0, 0);
  return shifted_bytes(from, _mm512_add_epi8(lanes, first), _mm512_set1_epi32(HighFirst ? 4 : 4 << 16));
}

// A group's weights, 32 at a time: what is `held` of its numbers, and 32 weights from codes.
template <class Codes>
struct GroupVectors;
template <class Values>
struct GroupVectors<CodesLookup<Values>> {
  template <class R>
  GSD_TILE auto held(const float* beside) {
    return R::doubled(R::rounded(SixteenOf<Values>::values(beside)));
  }
  template <class R, class Held, class T>
  GSD_TILE void decode(const Held& values, const uint8_t* from, T* to) {
    R::look_up(values, half_words<Values::kHighFirst>(from), to);
  }
};
template <>
struct GroupVectors<CodesInt8> {
  template <class R>
  GSD_TILE __m512 held(const float* beside) {
    return _mm512_set1_ps(beside[0]);
  }
  template <class R, class T>
  GSD_TILE void decode(const __m512& d, const uint8_t* from, T* to) {
    R::put(R::rounded(_mm512_mul_ps(wide_bytes(sixteen_at(from)), d)),
           R::rounded(_mm512_mul_ps(wide_bytes(sixteen_at(from + 16)), d)), to);
  }
};
struct ScaleAndZero {
  __m512 d, zero;
  GSD_TILE __m512 of(const ScaleAndZero& by, const uint8_t* from) {
    return _mm512_mul_ps(_mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(sixteen_at(from))), by.zero), by.d);
  }
};
template <>
struct GroupVectors<CodesUint8> {
  template <class R>
  GSD_TILE ScaleAndZero held(const float* beside) {
    return {_mm512_set1_ps(beside[0]), _mm512_set1_ps(beside[1])};
  }
  template <class R, class T>
  GSD_TILE void decode(const ScaleAndZero& by, const uint8_t* from, T* to) {
    R::put(R::rounded(ScaleAndZero::of(by, from)), R::rounded(ScaleAndZero::of(by, from + 16)), to);
  }
};

// As many of a group's weights as there are in whole 32s.
template <class Codes, class R, class T>
GSD_TILE int64_t decode_whole(const uint8_t* from, const float* beside, int64_t size, T* to) {
  const auto held = GroupVectors<Codes>::template held<R>(beside);
  int64_t i = 0;
  for (; i + 32 <= size; i += 32) {
    GroupVectors<Codes>::template decode<R>(held, from + i / Codes::kWeightsOfByte, to + i);
  }
  return i;
}

template <class Codes, class To>
void decode_group_vectors(const void* row, const float* scales, int64_t groups, int64_t inputs, void* out) {
  const uint8_t* from = static_cast<const uint8_t*>(row);
  typename To::Stored* to = static_cast<typename To::Stored*>(out);
  const int64_t size = inputs / groups;
  const bool normal = all_normal(scales, groups * Codes::kBeside);
  for (int64_t g = 0; g < groups; g++, scales += Codes::kBeside, from += size / Codes::kWeightsOfByte, to += size) {
    const int64_t done = normal ? decode_whole<Codes, Rounding16<Out<To>, true>>(from, scales, size, to)
                                : decode_whole<Codes, Rounding16<Out<To>, false>>(from, scales, size, to);
    if (done == size) continue;
    float part[32];
    Codes::widen(from + done / Codes::kWeightsOfByte, static_cast<int>(size - done), scales, part);
    To::store(part, static_cast<int>(size - done), to + done);
  }
}

// The dense type Of over packed weights, for few rows: decoded in registers, where a strip would be written and read.
template <class Of>
struct Unpacking : Of {
  typedef uint8_t Stored;
  static constexpr int kRows = 5, kStep = 32;
  static constexpr bool kPacked = true;
};
template <class Of, class Block>
struct OfBlocks : Unpacking<Of> {
  struct Held {};
  static constexpr int kStepBytes = Block::kBytes, kBeside = 0;
  GSD_TILE void unpack(const uint8_t* row, int64_t i, const Held&, typename Of::Weights& to) {
    __m512i words;
    Vectors<Block>::template decode<Out<ToBfloat16>>(row + i / Block::kWeights * Block::kBytes, &words);
    Of::take(words, to);
  }
};
template <class Of, class Codes>
struct OfGroups : Unpacking<Of> {
  typedef Rounding16<Out<ToBfloat16>, true> Round;
  typedef decltype(GroupVectors<Codes>::template held<Round>(nullptr)) Held;
  static constexpr int kStepBytes = 32 / Codes::kWeightsOfByte, kBeside = Codes::kBeside;
  GSD_TILE void hold(const float* beside, Held& held) { held = GroupVectors<Codes>::template held<Round>(beside); }
  GSD_TILE void unpack(const uint8_t* row, int64_t i, const Held& held, typename Of::Weights& to) {
    __m512i words;
    GroupVectors<Codes>::template decode<Round>(held, row + i / Codes::kWeightsOfByte, &words);
    Of::take(words, to);
  }
};

// As UnpackingProducts has them.
template <class T>
bool unpacking_of(const void* packed, int64_t rows, const Weights& w, int64_t begin, int64_t end, float* out,
                  int64_t out_stride) {
  const int64_t numbers = w.groups * T::kBeside;
  const float* beside = w.scales + begin * numbers;
  if (numbers > 0 && (w.inputs / w.groups % T::kStep != 0 || !all_normal(beside, (end - begin) * numbers))) return false;
  const uint8_t* from = reinterpret_cast<const uint8_t*>(w.data) + begin * w.row_bytes;
  products_over<T>(packed, rows, w.inputs, from, w.row_bytes, beside, w.groups, 0, end - begin, out, out_stride, false);
  return true;
}

#undef GSD_BLOCKS
#define GSD_BLOCKS(Block) \
  {decode_vectors<Block, ToFloat32>, decode_vectors<Block, ToBfloat16>, decode_vectors<Block, ToFloat16>}
#undef GSD_GROUPS
#define GSD_GROUPS(Codes)                                                       \
  {decode_group_vectors<Codes, ToFloat32>, decode_group_vectors<Codes, ToBfloat16>, \
   decode_group_vectors<Codes, ToFloat16>}
#define GSD_OF_BLOCKS(Of, Block) unpacking_of<OfBlocks<Of, Block>>
#define GSD_OF_GROUPS(Of, Codes) unpacking_of<OfGroups<Of, Codes>>
#define GSD_UNPACKING(Of)                                                                                  \
  {{nullptr, nullptr, nullptr, GSD_OF_BLOCKS(Of, BlockQ4_0), GSD_OF_BLOCKS(Of, BlockQ4_1),                  \
    GSD_OF_BLOCKS(Of, BlockQ5_0), GSD_OF_BLOCKS(Of, BlockQ5_1), GSD_OF_BLOCKS(Of, BlockQ8_0),               \
    GSD_OF_BLOCKS(Of, BlockIQ4_NL), GSD_OF_BLOCKS(Of, BlockMXFP4), nullptr, nullptr, nullptr,               \
    GSD_OF_GROUPS(Of, CodesInt8), GSD_OF_GROUPS(Of, CodesUint8), GSD_OF_GROUPS(Of, CodesInt4),              \
    GSD_OF_GROUPS(Of, CodesInt4Offset), GSD_OF_GROUPS(Of, CodesNF4), GSD_OF_GROUPS(Of, CodesFP4)},          \
   Unpacking<Of>::kRows}
