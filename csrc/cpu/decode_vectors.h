// Decoders of packed weights by vectors, for the translation units that have some: after decode.h and decode_zmm.h or
// decode_ymm.h, inside the target. Sixteen (or thirty-two) values of a group are rounded once and looked up, 32 weights at a
// time. Products of codes and scales are exact, so fused sums have the definition's bits.

GSD_TILE __m128i sixteen_at(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
GSD_TILE __m256i bytes_at(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

// Values of the codes `first` … `first` + 15 under the numbers of a block or of a group: a scale, and a minimum, zero point or
// offset where there is one.
template <int Zero>
struct Scaled {
  GSD_TILE Sixteen of(int first, Sixteen d, Sixteen) { return times(counted(first - Zero), d); }
};
template <const float (&table)[16]>
struct ScaledTable {
  GSD_TILE Sixteen of(int, Sixteen d, Sixteen) { return times(sixteen(table), d); }
};
struct AboveMinimum {
  GSD_TILE Sixteen of(int first, Sixteen d, Sixteen m) { return times_plus(counted(first), d, m); }
};
struct BelowMinimum {
  GSD_TILE Sixteen of(int first, Sixteen d, Sixteen m) { return times_minus(counted(first), d, m); }
};
template <class Kind>
struct ValuesOf;
template <>
struct ValuesOf<BlockQ4_0> : Scaled<8> {};
template <>
struct ValuesOf<BlockQ4_1> : AboveMinimum {};
template <>
struct ValuesOf<BlockQ5_0> : Scaled<16> {};
template <>
struct ValuesOf<BlockQ5_1> : AboveMinimum {};
template <>
struct ValuesOf<BlockIQ4_NL> : ScaledTable<kIQ4_NLValues> {};
template <>
struct ValuesOf<BlockMXFP4> : ScaledTable<kMXFP4Values> {};
template <>
struct ValuesOf<ValuesInt4> {
  GSD_TILE Sixteen of(int first, Sixteen d, Sixteen zero) { return times(minus(counted(first), zero), d); }
};
template <>
struct ValuesOf<ValuesInt4Offset> {
  GSD_TILE Sixteen of(int first, Sixteen d, Sixteen offset) { return plus(times(counted(first - 8), d), offset); }
};
template <const float (&table)[16]>
struct ValuesOf<ValuesOfTable<table>> : ScaledTable<table> {};
template <>
struct ValuesOf<CodesInt8> {  // of sixteen bytes
  GSD_TILE Sixteen of(__m128i codes, Sixteen d, Sixteen) { return times(wide_bytes(codes), d); }
};
template <>
struct ValuesOf<CodesVectorwise> {
  GSD_TILE Sixteen of(__m128i codes, Sixteen d, Sixteen) {
    return times(times(wide_bytes(codes), d), same(CodesVectorwise::kOne));
  }
};
template <>
struct ValuesOf<CodesUint8> {
  GSD_TILE Sixteen of(__m128i codes, Sixteen d, Sixteen zero) { return times(minus(wide_codes(codes), zero), d); }
};

// A block's kWeights weights into `to`.
template <class Block>
struct Vectors;
template <class Block, int Codes, bool Minimum>
struct NibbleVectors {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    const Sixteen d = half_lanes(block), m = Minimum ? half_lanes(block + 2) : d;
    O::look_up(O::of(ValuesOf<Block>::of(0, d, m)), nibble_codes(block + Codes), to);
  }
};
template <class Block, int Fifth, bool Minimum>
struct FiveBitVectors {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    const Sixteen d = half_lanes(block), m = Minimum ? half_lanes(block + 2) : d;
    O::look_up(O::of(ValuesOf<Block>::of(0, d, m)), O::of(ValuesOf<Block>::of(16, d, m)),
               with_fifth(nibble_codes(block + Fifth + 4), bits_at(block + Fifth)), to);
  }
};
template <>
struct Vectors<BlockQ4_0> : NibbleVectors<BlockQ4_0, 2, false> {};
template <>
struct Vectors<BlockQ4_1> : NibbleVectors<BlockQ4_1, 4, true> {};
template <>
struct Vectors<BlockIQ4_NL> : NibbleVectors<BlockIQ4_NL, 2, false> {};
template <>
struct Vectors<BlockQ5_0> : FiveBitVectors<BlockQ5_0, 2, false> {};
template <>
struct Vectors<BlockQ5_1> : FiveBitVectors<BlockQ5_1, 4, true> {};
template <>
struct Vectors<BlockQ8_0> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    const Sixteen d = half_lanes(block);
    O::put(O::of(times(wide_bytes(sixteen_at(block + 2)), d)),
           O::of(times(wide_bytes(sixteen_at(block + 18)), d)), to);
  }
};
template <>
struct Vectors<BlockMXFP4> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    const Sixteen d = same(BlockMXFP4::scale(block[0]));
    O::look_up(O::of_any(ValuesOf<BlockMXFP4>::of(0, d, d)), nibble_codes(block + 1), to);
  }
};
GSD_TILE Sixteen scaled(Sixteen d, uint8_t by) { return times(d, same(static_cast<float>(by))); }
template <>
struct Vectors<BlockQ4_K> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    const Sixteen d = half_lanes(block), low = half_lanes(block + 2);
    uint8_t scale[8], minimum[8];
    six_bits(block + 4, scale, minimum);
    for (int j = 0; j < 8; j += 2) {
      const __m256i codes = bytes_at(block + 16 + 16 * j);
      const Sixteen first = BelowMinimum::of(0, scaled(d, scale[j]), scaled(low, minimum[j]));
      const Sixteen second = BelowMinimum::of(0, scaled(d, scale[j + 1]), scaled(low, minimum[j + 1]));
      O::look_up(O::of(first), low_codes(codes), to + 32 * j);
      O::look_up(O::of(second), high_codes(codes), to + 32 * j + 32);
    }
  }
};
template <>
struct Vectors<BlockQ5_K> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    const Sixteen d = half_lanes(block), low = half_lanes(block + 2);
    const __m256i fifth = bytes_at(block + 16);
    uint8_t scale[8], minimum[8];
    six_bits(block + 4, scale, minimum);
    for (int j = 0; j < 8; j++) {
      const __m256i bytes = bytes_at(block + 48 + 16 * (j & ~1));
      const Codes32 codes = j & 1 ? high_codes(bytes) : low_codes(bytes);
      const Sixteen by = scaled(d, scale[j]), from = scaled(low, minimum[j]);
      O::look_up(O::of(BelowMinimum::of(0, by, from)), O::of(BelowMinimum::of(16, by, from)),
                 with_fifth(codes, bits_of(fifth, j)), to + 32 * j);
    }
  }
};
// 32 codes of part 0 … 3 of a half of the block, as BlockQ6_K::widen has them.
GSD_TILE __m256i six_bit_codes(const uint8_t* block, int half, int part) {
  const __m128i up = _mm_cvtsi32_si128(part / 2 * 4), of_part = _mm_cvtsi32_si128(2 * part);
  const __m256i low = _mm256_srl_epi16(bytes_at(block + 64 * half + 32 * (part % 2)), up);
  const __m256i two = _mm256_srl_epi16(bytes_at(block + 128 + 32 * half), of_part);
  const __m256i high = _mm256_slli_epi16(_mm256_and_si256(two, _mm256_set1_epi8(3)), 4);
  return _mm256_sub_epi8(_mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi8(15)), high), _mm256_set1_epi8(32));
}
template <>
struct Vectors<BlockQ6_K> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    const Sixteen d = half_lanes(block + 208);
    float scale[16];
    store_sixteen(scale, times(d, wide_bytes(sixteen_at(block + 192))));
    for (int half = 0; half < 2; half++) {
      for (int part = 0; part < 4; part++) {
        const __m256i code = six_bit_codes(block, half, part);
        const float* by = scale + 8 * half + 2 * part;
        O::put(O::of(times(wide_bytes(_mm256_castsi256_si128(code)), same(by[0]))),
               O::of(times(wide_bytes(_mm256_extracti128_si256(code, 1)), same(by[1]))),
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
  GSD_TILE auto rounded(Sixteen x) {
    if constexpr (Normal) return O::of(x);
    else return O::of_any(x);
  }
};

// A group's weights, 32 at a time: what is `held` of its numbers, and 32 weights from codes.
template <class Codes>
struct GroupVectors;
template <class Values>
struct GroupVectors<CodesLookup<Values>> {
  template <class R>
  GSD_TILE auto held(const float* beside) {
    return R::doubled(R::rounded(ValuesOf<Values>::of(0, same(beside[0]), same(beside[Values::kBeside - 1]))));
  }
  template <class R, class Held, class T>
  GSD_TILE void decode(const Held& values, const uint8_t* from, T* to) {
    R::look_up(values, half_codes<Values::kHighFirst>(from), to);
  }
};
template <class Codes>
struct SignedVectors {
  template <class R>
  GSD_TILE Sixteen held(const float* beside) {
    return same(beside[0]);
  }
  template <class R, class T>
  GSD_TILE void decode(const Sixteen& d, const uint8_t* from, T* to) {
    R::put(R::rounded(ValuesOf<Codes>::of(sixteen_at(from), d, d)),
           R::rounded(ValuesOf<Codes>::of(sixteen_at(from + 16), d, d)), to);
  }
};
template <>
struct GroupVectors<CodesInt8> : SignedVectors<CodesInt8> {};
template <>
struct GroupVectors<CodesVectorwise> : SignedVectors<CodesVectorwise> {};
struct ScaleAndZero {
  Sixteen d, zero;
};
template <>
struct GroupVectors<CodesUint8> {
  template <class R>
  GSD_TILE ScaleAndZero held(const float* beside) {
    return {same(beside[0]), same(beside[1])};
  }
  template <class R, class T>
  GSD_TILE void decode(const ScaleAndZero& by, const uint8_t* from, T* to) {
    R::put(R::rounded(ValuesOf<CodesUint8>::of(sixteen_at(from), by.d, by.zero)),
           R::rounded(ValuesOf<CodesUint8>::of(sixteen_at(from + 16), by.d, by.zero)), to);
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

#undef GSD_BLOCKS
#define GSD_BLOCKS(Block) \
  {decode_vectors<Block, ToFloat32>, decode_vectors<Block, ToBfloat16>, decode_vectors<Block, ToFloat16>}
#undef GSD_GROUPS
#define GSD_GROUPS(Codes)                                                       \
  {decode_group_vectors<Codes, ToFloat32>, decode_group_vectors<Codes, ToBfloat16>, \
   decode_group_vectors<Codes, ToFloat16>}
