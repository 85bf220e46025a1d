// Packed weights of a bfloat16 model, decoded in registers: for the AVX-512 levels, after decode_vectors.h, inside the target.
//
// A unit is four outputs × kHeld inputs. What the weights of its blocks or groups are looked up or multiplied by is computed
// for all of them at once and held in memory, from where it comes back in every lane for no more than a load. What depends
// on memory is done for units ahead, so that no instruction waits long:
//
// read(columns, i, k, numbers): scales of the unit that begins with input i of k, if they take a while. hold(columns, i, k,
// numbers, held): what its weights are looked up by. words(row, i, held, j): the 32 weights from input i on, of output j of
// the four, whose row is given.

constexpr int kStepInputs = 32, kSteps = 4, kBlocksHeld = kSteps * kOutputs;
typedef Columns<uint8_t> Four;

GSD_TILE int step_of(int64_t i) { return static_cast<int>(i / kStepInputs % kSteps); }

// Lane 4 j + s: offset j of four.
GSD_TILE __m512i four_times(int64_t first, int64_t second, int64_t third) {
  const __m128i four = _mm_set_epi32(static_cast<int>(third), static_cast<int>(second), static_cast<int>(first), 0);
  const __m512i places = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  return _mm512_permutexvar_epi32(places, _mm512_castsi128_si512(four));
}
GSD_TILE __m512i steps_in_lanes() { return _mm512_set4_epi32(3, 2, 1, 0); }

// The lanes of steps that there are.
GSD_TILE __mmask16 steps_there(int64_t i, int64_t k) {
  const int64_t steps = fewer(kSteps, (k - i) / kStepInputs);
  return static_cast<__mmask16>(0x1111u * ((1u << steps) - 1u));
}

// The first four bytes of sixteen blocks.
template <int Bytes>
GSD_TILE __m512i heads_of(const Four& c, int64_t i, int64_t k) {
  const uint8_t* first = c.weights[0];
  const __m512i rows = four_times(c.weights[1] - first, c.weights[2] - first, c.weights[3] - first);
  const __m512i at = _mm512_add_epi32(rows, _mm512_mullo_epi32(steps_in_lanes(), _mm512_set1_epi32(Bytes)));
  return _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), steps_there(i, k), at, first + i / kStepInputs * Bytes, 1);
}
GSD_TILE Sixteen half_floats(__m512i low_halves) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(low_halves)); }

// Sixteen numbers in memory. A compiler that knew that they are in a register too would spread them by shuffles, of which a
// cycle has one.
GSD_TILE void put_sixteen(float (&to)[kBlocksHeld], Sixteen x) {
  store_sixteen(to, x);
  __asm__("" : "+m"(to));
}

// The scales of sixteen blocks or groups, and what stands beside those.
struct Numbers {
  alignas(64) float d[kBlocksHeld], m[kBlocksHeld];
};
template <int Bytes, bool Minimum>
GSD_TILE void half_numbers(const Four& c, int64_t i, int64_t k, Numbers& to) {
  const __m512i heads = heads_of<Bytes>(c, i, k);
  put_sixteen(to.d, half_floats(heads));
  if (Minimum) put_sixteen(to.m, half_floats(_mm512_srli_epi32(heads, 16)));
}

// Words of two times sixteen values, of which none is a subnormal one.
struct NormalWords {
  GSD_TILE __m512i of(Sixteen first, Sixteen second) { return normal_words(first, second); }
};
struct ExactWords {  // values of bfloat16 already
  GSD_TILE __m512i of(Sixteen first, Sixteen second) {
    const __m512i upper = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                           23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_permutex2var_epi16(_mm512_castps_si512(first), upper, _mm512_castps_si512(second));
  }
};

// Sixteen values of each of `Count` blocks, and a look-up by words of whose fifth bits nothing is known.
template <int Count>
struct Tables16 {
  alignas(64) uint16_t values[Count][16];
  GSD_TILE void put(Tables16& to, int block, __m512i two) { _mm512_storeu_si512(to.values[block], two); }
  GSD_TILE __m512i look_up(const Tables16& in, int block, __m512i codes) {
    const __m256i* from = reinterpret_cast<const __m256i*>(in.values[block]);
    return _mm512_permutexvar_epi16(codes, _mm512_broadcast_i64x4(_mm256_load_si256(from)));
  }
};
// Thirty-two of each.
template <int Count>
struct Tables32 {
  alignas(64) uint16_t values[Count][32];
  GSD_TILE void put(Tables32& to, int block, __m512i one) { _mm512_storeu_si512(to.values[block], one); }
  GSD_TILE __m512i look_up(const Tables32& in, int block, __m512i codes) {
    return _mm512_permutexvar_epi16(codes, _mm512_load_si512(in.values[block]));
  }
};

// Tables of blocks first … last − 1 under their numbers.
template <class Values, class Words, int Count>
GSD_TILE void make_tables(const float* d, const float* m, int first, int last, Tables16<Count>& to) {
  for (int block = first; block < last; block += 2, d += 2, m += 2) {
    to.put(to, block, Words::of(Values::of(0, same(d[0]), same(m[0])), Values::of(0, same(d[1]), same(m[1]))));
  }
}
template <class Values, class Words, int Count>
GSD_TILE void make_tables(const float* d, const float* m, int first, int last, Tables32<Count>& to) {
  for (int block = first; block < last; block++, d++, m++) {
    to.put(to, block, Words::of(Values::of(0, same(*d), same(*m)), Values::of(16, same(*d), same(*m))));
  }
}

template <class Kind>
struct UnitOf;

// Blocks of 32 that begin with their numbers, `Minimum` or no halves, by which a table is made of each.
template <class Block, class Tables, bool Minimum>
struct TableUnit {
  static constexpr int kHeld = kSteps * kStepInputs, kStepBytes = Block::kBytes, kBeside = 0;
  typedef Numbers Read;
  typedef Tables Held;
  GSD_TILE void read(const Four& c, int64_t i, int64_t k, Read& n) { half_numbers<Block::kBytes, Minimum>(c, i, k, n); }
  GSD_TILE void hold(const Four&, int64_t, int64_t, const Read& n, Held& held) {
    make_tables<ValuesOf<Block>, NormalWords>(n.d, Minimum ? n.m : n.d, 0, kBlocksHeld, held);
  }
};

// Codes of half a byte behind the numbers.
template <class Block, int Codes, bool Minimum>
struct NibbleUnit : TableUnit<Block, Tables16<kBlocksHeld>, Minimum> {
  GSD_TILE __m512i words(const uint8_t* row, int64_t i, const Tables16<kBlocksHeld>& held, int j) {
    const uint8_t* block = row + i / kStepInputs * Block::kBytes;
    return Tables16<kBlocksHeld>::look_up(held, kSteps * j + step_of(i), shifted_nibbles(block + Codes));
  }
};
template <>
struct UnitOf<BlockQ4_0> : NibbleUnit<BlockQ4_0, 2, false> {};
template <>
struct UnitOf<BlockQ4_1> : NibbleUnit<BlockQ4_1, 4, true> {};
template <>
struct UnitOf<BlockIQ4_NL> : NibbleUnit<BlockIQ4_NL, 2, false> {};
template <>
struct UnitOf<BlockMXFP4> : NibbleUnit<BlockMXFP4, 1, false> {
  GSD_TILE void read(const Four& c, int64_t i, int64_t k, Read& n) {  // as BlockMXFP4::scale
    const __m512i exponents = _mm512_slli_epi32(heads_of<BlockMXFP4::kBytes>(c, i, k), 23);
    const __m512i sizes = _mm512_and_si512(exponents, _mm512_set1_epi32(0x7F800000));
    put_sixteen(n.d, _mm512_castsi512_ps(_mm512_max_epu32(sizes, _mm512_set1_epi32(0x00400000))));
  }
  GSD_TILE void hold(const Four&, int64_t, int64_t, const Read& n, Held& held) {
    make_tables<ValuesOf<BlockMXFP4>, ExactWords>(n.d, n.d, 0, kBlocksHeld, held);
  }
};

// The same with fifth bits before the codes.
template <class Block, int Fifth, bool Minimum>
struct FiveBitUnit : TableUnit<Block, Tables32<kBlocksHeld>, Minimum> {
  GSD_TILE __m512i words(const uint8_t* row, int64_t i, const Tables32<kBlocksHeld>& held, int j) {
    const uint8_t* block = row + i / kStepInputs * Block::kBytes;
    const Codes32 codes = with_fifth(nibble_codes(block + Fifth + 4), bits_at(block + Fifth));
    return Tables32<kBlocksHeld>::look_up(held, kSteps * j + step_of(i), codes);
  }
};
template <>
struct UnitOf<BlockQ5_0> : FiveBitUnit<BlockQ5_0, 2, false> {};
template <>
struct UnitOf<BlockQ5_1> : FiveBitUnit<BlockQ5_1, 4, true> {};

template <>
struct UnitOf<BlockQ8_0> {
  static constexpr int kHeld = kSteps * kStepInputs, kStepBytes = BlockQ8_0::kBytes, kBeside = 0;
  struct Read {};
  typedef Numbers Held;
  GSD_TILE void read(const Four&, int64_t, int64_t, Read&) {}
  GSD_TILE void hold(const Four& c, int64_t i, int64_t k, const Read&, Held& held) {
    half_numbers<BlockQ8_0::kBytes, false>(c, i, k, held);
  }
  GSD_TILE __m512i words(const uint8_t* row, int64_t i, const Held& held, int j) {
    const uint8_t* codes = row + i / kStepInputs * BlockQ8_0::kBytes + 2;
    const Sixteen d = same(held.d[kSteps * j + step_of(i)]);
    return normal_words(times(wide_bytes(sixteen_at(codes)), d), times(wide_bytes(sixteen_at(codes + 16)), d));
  }
};

// Blocks of 256.
constexpr int kStepsOfK = 8;

GSD_TILE int part_of(int64_t i) { return static_cast<int>(i / kStepInputs % kStepsOfK); }

// The scales of eight groups of 32, then their minima.
GSD_TILE Sixteen six_bit_numbers(const uint8_t* block) {
  const __m128i all = sixteen_at(block);  // two halves, then s[0 … 11]; as of six_bits
  const __m128i low = _mm_srlv_epi32(_mm_shuffle_epi32(all, 0xED), _mm_set_epi32(4, 0, 0, 0));
  const __m128i high = _mm_srli_epi32(_mm_shuffle_epi32(all, 0xA5), 2);
  const __m128i bytes = _mm_or_si128(_mm_and_si128(low, _mm_set_epi32(0x0F0F0F0F, 0x3F3F3F3F, 0x0F0F0F0F, 0x3F3F3F3F)),
                                     _mm_and_si128(high, _mm_set_epi32(0x30303030, 0, 0x30303030, 0)));
  const __m512i places = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  return times(wide_codes(bytes), _mm512_permutexvar_ps(places, _mm512_castps128_ps512(_mm_cvtph_ps(all))));
}

template <class Block, class Tables>
struct SixBitUnit {
  static constexpr int kHeld = Block::kWeights, kStepBytes = Block::kBytes / kStepsOfK, kBeside = 0;
  struct Read {
    alignas(64) float numbers[kOutputs][2 * kStepsOfK];
  };
  typedef Tables Held;
  GSD_TILE void read(const Four& c, int64_t i, int64_t, Read& to) {
    for (int j = 0; j < kOutputs; j++) {
      put_sixteen(to.numbers[j], six_bit_numbers(c.weights[j] + i / Block::kWeights * Block::kBytes));
    }
  }
  GSD_TILE void hold(const Four&, int64_t, int64_t, const Read& from, Held& held) {
    for (int j = 0; j < kOutputs; j++) {
      const float* n = from.numbers[j];
      make_tables<BelowMinimum, NormalWords>(n, n + kStepsOfK, kStepsOfK * j, kStepsOfK * (j + 1), held);
    }
  }
  GSD_TILE Codes32 codes(const uint8_t* from, int part) {  // low nibbles of 32 bytes, or high ones
    const __m512i wide = _mm512_cvtepu8_epi16(bytes_at(from + part / 2 * kStepInputs));
    return _mm512_srlv_epi16(wide, _mm512_set1_epi16(static_cast<int16_t>(part % 2 * 4)));
  }
};
template <>
struct UnitOf<BlockQ4_K> : SixBitUnit<BlockQ4_K, Tables16<kStepsOfK * kOutputs>> {
  GSD_TILE __m512i words(const uint8_t* row, int64_t i, const Held& held, int j) {
    const uint8_t* block = row + i / BlockQ4_K::kWeights * BlockQ4_K::kBytes;
    return Held::look_up(held, kStepsOfK * j + part_of(i), codes(block + 16, part_of(i)));
  }
};
template <>
struct UnitOf<BlockQ5_K> : SixBitUnit<BlockQ5_K, Tables32<kStepsOfK * kOutputs>> {
  GSD_TILE __m512i words(const uint8_t* row, int64_t i, const Held& held, int j) {
    const uint8_t* block = row + i / BlockQ5_K::kWeights * BlockQ5_K::kBytes;
    const int part = part_of(i);
    const Codes32 low = _mm512_and_si512(codes(block + 48, part), _mm512_set1_epi16(15));
    return Held::look_up(held, kStepsOfK * j + part, with_fifth(low, bits_of(bytes_at(block + 16), part)));
  }
};
template <>
struct UnitOf<BlockQ6_K> {
  static constexpr int kHeld = BlockQ6_K::kWeights, kStepBytes = BlockQ6_K::kBytes / kStepsOfK, kBeside = 0;
  struct Held {
    alignas(64) float scale[kOutputs][2 * kStepsOfK];
  };
  struct Read {};
  GSD_TILE void read(const Four&, int64_t, int64_t, Read&) {}
  GSD_TILE void hold(const Four& c, int64_t i, int64_t, const Read&, Held& held) {
    for (int j = 0; j < kOutputs; j++) {
      const uint8_t* block = c.weights[j] + i / BlockQ6_K::kWeights * BlockQ6_K::kBytes;
      put_sixteen(held.scale[j], times(half_lanes(block + 208), wide_bytes(sixteen_at(block + 192))));
    }
  }
  GSD_TILE __m512i words(const uint8_t* row, int64_t i, const Held& held, int j) {
    const uint8_t* block = row + i / BlockQ6_K::kWeights * BlockQ6_K::kBytes;
    const int at = part_of(i), half = at / 4, part = at % 4;
    const __m256i code = six_bit_codes(block, half, part);
    const float* by = held.scale[j] + 2 * at;
    return normal_words(times(wide_bytes(_mm256_castsi256_si128(code)), same(by[0])),
                        times(wide_bytes(_mm256_extracti128_si256(code, 1)), same(by[1])));
  }
};

// Groups of whole 32s, whose numbers lie beside the rows. Of every output a unit has as many as `each`, four where groups
// may begin at any step of it.
struct Grouped {
  struct Read {};
  GSD_TILE void read(const Four&, int64_t, int64_t, Read&) {}
  GSD_TILE int shift(int64_t size) {
    const int64_t steps = size / kStepInputs;
    return steps % 4 == 0 ? 2 : steps % 2 == 0 ? 1 : 0;
  }
  // The group of the unit's `part`, each of which has 1 << shift steps; the last one where there are no more.
  GSD_TILE int64_t group(const Four& c, int64_t i, int64_t k, int part, int shift) {
    const int64_t step = fewer(i / kStepInputs + (part << shift), k / kStepInputs - 1);
    return static_cast<uint32_t>(step) / static_cast<uint32_t>(c.size / kStepInputs);
  }
};
template <class Values>
struct UnitOf<CodesLookup<Values>> : Grouped {
  static constexpr int kHeld = kSteps * kStepInputs, kStepBytes = kStepInputs / 2, kBeside = Values::kBeside;
  struct Held {
    Tables16<kBlocksHeld> tables;
    int shift;
  };
  template <int Each>
  GSD_TILE void tables_of(const Four& c, int64_t i, int64_t k, Held& held) {
    constexpr int kShift = Each == 1 ? 2 : Each == 2 ? 1 : 0, kTogether = Each == 1 ? 2 : 1;
    int64_t at[Each];
    for (int part = 0; part < Each; part++) at[part] = group(c, i, k, part, kShift) * kBeside;
    for (int j = 0; j < kOutputs; j += kTogether) {
      for (int part = 0; part < Each; part += 2) {
        const float *first = c.beside[j] + at[part], *second = Each == 1 ? c.beside[j + 1] + at[0] : c.beside[j] + at[part + 1];
        Tables16<kBlocksHeld>::put(held.tables, j * Each + part, NormalWords::of(values(first), values(second)));
      }
    }
  }
  GSD_TILE Sixteen values(const float* beside) {
    return ValuesOf<Values>::of(0, same(beside[0]), same(beside[kBeside - 1]));
  }
  GSD_TILE void hold(const Four& c, int64_t i, int64_t k, const Read&, Held& held) {
    held.shift = shift(c.size);
    if (held.shift == 2) tables_of<1>(c, i, k, held);
    else if (held.shift == 1) tables_of<2>(c, i, k, held);
    else tables_of<4>(c, i, k, held);
  }
  GSD_TILE __m512i words(const uint8_t* row, int64_t i, const Held& held, int j) {
    const int place = (kSteps * j + step_of(i)) >> held.shift;
    return Tables16<kBlocksHeld>::look_up(held.tables, place, half_codes<Values::kHighFirst>(row + i / 2));
  }
};
template <class Codes>
struct ByteUnit : Grouped {
  static constexpr int kHeld = kSteps * kStepInputs, kStepBytes = kStepInputs, kBeside = Codes::kBeside;
  struct Held {
    float d[kBlocksHeld], m[kBlocksHeld];
    int shift;
  };
  GSD_TILE void hold(const Four& c, int64_t i, int64_t k, const Read&, Held& held) {
    held.shift = shift(c.size);
    const int each = kSteps >> held.shift;
    for (int part = 0; part < each; part++) {
      const int64_t at = group(c, i, k, part, held.shift) * kBeside;
      for (int j = 0; j < kOutputs; j++) {
        held.d[j * each + part] = c.beside[j][at], held.m[j * each + part] = c.beside[j][at + kBeside - 1];
      }
    }
  }
  GSD_TILE __m512i words(const uint8_t* row, int64_t i, const Held& held, int j) {
    const int place = (kSteps * j + step_of(i)) >> held.shift;
    const Sixteen d = same(held.d[place]), m = same(held.m[place]);
    return normal_words(ValuesOf<Codes>::of(sixteen_at(row + i), d, m), ValuesOf<Codes>::of(sixteen_at(row + i + 16), d, m));
  }
};
template <>
struct UnitOf<CodesInt8> : ByteUnit<CodesInt8> {};
template <>
struct UnitOf<CodesUint8> : ByteUnit<CodesUint8> {};

// Whether a matrix has units: groups of whole 32s, and rows near enough for offsets of 32 bits.
template <class Unit>
bool has_units(const Weights& w) {
  return w.row_bytes < int64_t{1} << 29 && (Unit::kBeside == 0 || w.inputs / w.groups % kStepInputs == 0);
}

// Whether none of these outputs has a number beside it that could make a weight a subnormal one.
template <class Unit>
bool are_normal(const Weights& w, int64_t begin, int64_t end) {
  const int64_t numbers = w.groups * Unit::kBeside;
  return numbers == 0 || all_normal(w.scales + begin * numbers, (end - begin) * numbers);
}

// of(Codes or Block) by Kind.
#define GSD_BY_KIND(of)                                                                                             \
  {nullptr, nullptr, nullptr, of(BlockQ4_0), of(BlockQ4_1), of(BlockQ5_0), of(BlockQ5_1), of(BlockQ8_0),           \
   of(BlockIQ4_NL), of(BlockMXFP4), of(BlockQ4_K), of(BlockQ5_K), of(BlockQ6_K), of(CodesInt8), of(CodesUint8),    \
   of(CodesInt4), of(CodesInt4Offset), of(CodesNF4), of(CodesFP4), nullptr, of(CodesInt8), nullptr}
