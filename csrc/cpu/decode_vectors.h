// Decoders of packed weights by vectors, for the translation units that have some: after decode.h and decode_zmm.h or
// decode_ymm.h, inside the target. Sixteen (or thirty-two) values of a group are rounded once and looked up, 32 weights at a
// time. Products of codes and scales are exact, so fused sums have the definition's bits.

GSD_TILE __m128i sixteen_at(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
GSD_TILE __m256i bytes_at(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

// A block's kWeights weights into `to`.
template <class Block>
struct Vectors;
template <>
struct Vectors<BlockQ4_0> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    O::look_up(O::of(times(counted(-8), half_lanes(block))), nibble_codes(block + 2), to);
  }
};
template <>
struct Vectors<BlockQ4_1> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    const Sixteen values = times_plus(counted(0), half_lanes(block), half_lanes(block + 2));
    O::look_up(O::of(values), nibble_codes(block + 4), to);
  }
};
template <>
struct Vectors<BlockQ5_0> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    const Sixteen d = half_lanes(block);
    O::look_up(O::of(times(counted(-16), d)), O::of(times(counted(0), d)),
               with_fifth(nibble_codes(block + 6), bits_at(block + 2)), to);
  }
};
template <>
struct Vectors<BlockQ5_1> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    const Sixteen d = half_lanes(block), m = half_lanes(block + 2);
    O::look_up(O::of(times_plus(counted(0), d, m)), O::of(times_plus(counted(16), d, m)),
               with_fifth(nibble_codes(block + 8), bits_at(block + 4)), to);
  }
};
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
struct Vectors<BlockIQ4_NL> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    O::look_up(O::of(times(sixteen(kIQ4_NLValues), half_lanes(block))), nibble_codes(block + 2), to);
  }
};
template <>
struct Vectors<BlockMXFP4> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    const Sixteen d = same(BlockMXFP4::scale(block[0]));
    O::look_up(O::of_any(times(sixteen(kMXFP4Values), d)), nibble_codes(block + 1), to);
  }
};
GSD_TILE Sixteen scaled(Sixteen d, uint8_t by) { return times(d, same(static_cast<float>(by))); }
template <>
struct Vectors<BlockQ4_K> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    const Sixteen d = half_lanes(block), low = half_lanes(block + 2), count = counted(0);
    uint8_t scale[8], minimum[8];
    six_bits(block + 4, scale, minimum);
    for (int j = 0; j < 8; j += 2) {
      const __m256i codes = bytes_at(block + 16 + 16 * j);
      const Sixteen first = times_minus(count, scaled(d, scale[j]), scaled(low, minimum[j]));
      const Sixteen second = times_minus(count, scaled(d, scale[j + 1]), scaled(low, minimum[j + 1]));
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
      O::look_up(O::of(times_minus(counted(0), by, from)),
                 O::of(times_minus(counted(16), by, from)), with_fifth(codes, bits_of(fifth, j)), to + 32 * j);
    }
  }
};
template <>
struct Vectors<BlockQ6_K> {
  template <class O, class T>
  GSD_TILE void decode(const uint8_t* block, T* to) {
    const Sixteen d = half_lanes(block + 208);
    float scale[16];
    store_sixteen(scale, times(d, wide_bytes(sixteen_at(block + 192))));
    for (int half = 0; half < 2; half++) {
      const __m256i high = bytes_at(block + 128 + 32 * half);
      for (int part = 0; part < 4; part++) {
        const __m256i from = bytes_at(block + 64 * half + 32 * (part & 1)), fifteen = _mm256_set1_epi8(15);
        const __m256i low = _mm256_and_si256(part < 2 ? from : _mm256_srli_epi16(from, 4), fifteen);
        const __m256i two = _mm256_and_si256(_mm256_srli_epi16(high, 2 * part), _mm256_set1_epi8(3));
        const __m256i code = _mm256_sub_epi8(_mm256_or_si256(low, _mm256_slli_epi16(two, 4)), _mm256_set1_epi8(32));
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

// The sixteen values of a group, each half a byte's.
template <class Values>
struct SixteenOf;
template <>
struct SixteenOf<ValuesInt4> {
  GSD_TILE Sixteen values(const float* beside) {
    return times(minus(counted(0), same(beside[1])), same(beside[0]));
  }
};
template <>
struct SixteenOf<ValuesInt4Offset> {
  GSD_TILE Sixteen values(const float* beside) {
    return plus(times(counted(-8), same(beside[0])), same(beside[1]));
  }
};
template <const float (&table)[16]>
struct SixteenOf<ValuesOfTable<table>> {
  GSD_TILE Sixteen values(const float* beside) {
    return times(sixteen(table), same(beside[0]));
  }
};

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
    R::look_up(values, half_codes<Values::kHighFirst>(from), to);
  }
};
template <>
struct GroupVectors<CodesInt8> {
  template <class R>
  GSD_TILE Sixteen held(const float* beside) {
    return same(beside[0]);
  }
  template <class R, class T>
  GSD_TILE void decode(const Sixteen& d, const uint8_t* from, T* to) {
    R::put(R::rounded(times(wide_bytes(sixteen_at(from)), d)),
           R::rounded(times(wide_bytes(sixteen_at(from + 16)), d)), to);
  }
};
struct ScaleAndZero {
  Sixteen d, zero;
  GSD_TILE Sixteen of(const ScaleAndZero& by, const uint8_t* from) {
    return times(minus(wide_codes(sixteen_at(from)), by.zero), by.d);
  }
};
template <>
struct GroupVectors<CodesUint8> {
  template <class R>
  GSD_TILE ScaleAndZero held(const float* beside) {
    return {same(beside[0]), same(beside[1])};
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

#undef GSD_BLOCKS
#define GSD_BLOCKS(Block) \
  {decode_vectors<Block, ToFloat32>, decode_vectors<Block, ToBfloat16>, decode_vectors<Block, ToFloat16>}
#undef GSD_GROUPS
#define GSD_GROUPS(Codes)                                                       \
  {decode_group_vectors<Codes, ToFloat32>, decode_group_vectors<Codes, ToBfloat16>, \
   decode_group_vectors<Codes, ToFloat16>}
