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

// Numbers in memory. A compiler that knew that they are in a register too would spread them by shuffles, of which a cycle has
// one.
template <class Numbers>
GSD_TILE void keep_in_memory(Numbers& numbers) {
  __asm__("" : "+m"(numbers));
}

// The first four bytes of sixteen blocks, lane 4 j + s that of output j's step s, as they give numbers.
struct Heads {
  typedef Sixteen Number;
  typedef __m512i From;
  GSD_TILE Sixteen half(From heads, int at) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(at > 0 ? _mm512_srli_epi32(heads, 16) : heads));
  }
  GSD_TILE Sixteen exponent(From heads) {  // as of Plain
    const __m512i sizes = _mm512_and_si512(_mm512_slli_epi32(heads, 23), _mm512_set1_epi32(0x7F800000));
    return _mm512_castsi512_ps(_mm512_max_epu32(sizes, _mm512_set1_epi32(0x00400000)));
  }
  // Loaded one by one: a gather of sixteen takes twice as long on a Zen 4, a tenth of a unit's time.
  template <int kBytes>
  GSD_TILE From of(const Four& c, int64_t i, int64_t k) {
    const int64_t first = i / kStepInputs, last = k / kStepInputs - 1;  // steps that there are not repeat the last
    const auto head = [&](int j, int64_t step) __attribute__((always_inline)) {
      int32_t bytes;
      __builtin_memcpy(&bytes, c.weights[j] + fewer(first + step, last) * kBytes, sizeof bytes);
      return bytes;
    };
    __m128i output[kOutputs];
    GSD_UNROLL
    for (int j = 0; j < kOutputs; j++) output[j] = _mm_set_epi32(head(j, 3), head(j, 2), head(j, 1), head(j, 0));
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set_m128i(output[1], output[0])),
                              _mm256_set_m128i(output[3], output[2]), 1);
  }
};

// Numbers of a unit's blocks, kEach an output: d and m of output j's `step`.
template <class F, int kBlock>
struct UnitNumbers;
template <class F>
struct UnitNumbers<F, 32> {
  static constexpr int kHeld = kSteps * kStepInputs, kEach = kSteps;
  struct Numbers {
    alignas(64) float scale[kBlocksHeld], other[kBlocksHeld];
    Sixteen d(int j, int step, int) const { return Machine::same(scale[kSteps * j + step]); }
    Sixteen m(int j, int step) const { return F::kPair ? Machine::same(other[kSteps * j + step]) : d(j, step, 0); }
  };
  GSD_TILE void numbers_of(const Four& c, int64_t i, int64_t k, Numbers& to) {
    const auto all = F::template numbers<Heads>(Heads::of<F::kBytes>(c, i, k));
    Machine::store_sixteen(to.scale, all.scale);
    keep_in_memory(to.scale);
    if constexpr (F::kPair) {
      Machine::store_sixteen(to.other, all.other);
      keep_in_memory(to.other);
    }
  }
};
template <class F>
struct UnitNumbers<F, 256> {
  static constexpr int kHeld = F::kWeights, kEach = kHeld / kStepInputs;
  struct Numbers {
    decltype(F::template numbers<Machine>(static_cast<const uint8_t*>(nullptr))) of[kOutputs];
    Sixteen d(int j, int step, int half) const { return of[j].d(step, half); }
    Sixteen m(int j, int step) const { return of[j].m(step); }
  };
  GSD_TILE void numbers_of(const Four& c, int64_t i, int64_t, Numbers& to) {
    for (int j = 0; j < kOutputs; j++) {
      to.of[j] = F::template numbers<Machine>(c.weights[j] + i / kHeld * F::kBytes);
      keep_in_memory(to.of[j]);
    }
  }
};

// kTable words of each of `Count` blocks.
template <int kTable, int Count>
struct Tables {
  alignas(64) uint16_t values[Count][kTable];
  GSD_TILE __m512i look_up(const Tables& in, int block, __m512i codes) {
    const uint16_t* from = in.values[block];
    if constexpr (kTable == 32) return _mm512_permutexvar_epi16(codes, _mm512_load_si512(from));
    const __m256i* half = reinterpret_cast<const __m256i*>(from);
    return _mm512_permutexvar_epi16(codes, _mm512_broadcast_i64x4(_mm256_load_si256(half)));
  }
};

// Words of two times sixteen values.
template <class F>
GSD_TILE __m512i words_of(Sixteen first, Sixteen second) {
  if constexpr (F::kNormal) return normal_words(first, second);
  const __m512i upper = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                         23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return _mm512_permutex2var_epi16(_mm512_castps_si512(first), upper, _mm512_castps_si512(second));
}

// Tables of all blocks, `kEach` an output, by their numbers.
template <class F, int kEach, class N, class Held>
GSD_TILE void make_tables(const N& numbers, Held& to) {
  constexpr unsigned kTogether = 32 / F::kTable, kAll = kEach * kOutputs;
  const auto values = [&](unsigned block, int first) __attribute__((always_inline)) {
    const int j = static_cast<int>(block / kEach), step = static_cast<int>(block % kEach);
    return values_from<F>(first, numbers.d(j, step, 0), numbers.m(j, step));
  };
  for (unsigned block = 0; block < kAll; block += kTogether) {
    const Sixteen second = kTogether == 2 ? values(block + 1, 0) : values(block, 16);
    _mm512_storeu_si512(to.values[block], words_of<F>(values(block, 0), second));
  }
}

// What 32 codes of output j's `step` are, by numbers.
template <class F, class N>
GSD_TILE __m512i multiply_codes(const Machine::ByteCodes& codes, const N& by, int j, int step) {
  const Sixteen m = by.m(j, step);
  return words_of<F>(F::value(Machine{}, F::template levels<Machine>(codes.low), by.d(j, step, 0), m),
                     F::value(Machine{}, F::template levels<Machine>(codes.high), by.d(j, step, 1), m));
}

// Blocks, of which the numbers are a part.
template <class F, bool kBesideRows = (F::kBeside > 0)>
struct UnitOf : UnitNumbers<F, F::kWeights> {
  typedef UnitNumbers<F, F::kWeights> Source;
  typedef typename Source::Numbers Numbers;
  static constexpr bool kTables = F::kTable > 0;
  static constexpr int kEach = Source::kEach, kStepBytes = F::kBytes * kStepInputs / F::kWeights;
  struct Nothing {};
  typedef std::conditional_t<kTables, Numbers, Nothing> Read;
  typedef std::conditional_t<kTables, Tables<F::kTable, kEach * kOutputs>, Numbers> Held;

  GSD_TILE void read(const Four& c, int64_t i, int64_t k, Read& to) {
    if constexpr (kTables) Source::numbers_of(c, i, k, to);
  }
  GSD_TILE void hold(const Four& c, int64_t i, int64_t k, const Read& from, Held& held) {
    if constexpr (kTables) make_tables<F, kEach>(from, held);
    else Source::numbers_of(c, i, k, held);
  }
  GSD_TILE __m512i words(const uint8_t* row, int64_t i, const Held& held, int j) {
    const int step = static_cast<int>(i / kStepInputs % kEach);
    const auto codes = F::template codes<Machine>(row + i / F::kWeights * F::kBytes, step);
    if constexpr (kTables) return Held::look_up(held, kEach * j + step, codes);
    else return multiply_codes<F>(codes, held, j, step);
  }
};

// Groups of whole 32s, whose numbers lie beside the rows. Of every output a unit has as many as kEach, four where groups may
// begin at any step of it.
template <class F>
struct UnitOf<F, true> {
  static constexpr int kHeld = kSteps * kStepInputs, kStepBytes = kStepInputs / F::kWeights;
  struct Read {};
  struct Copied {
    float scale[kBlocksHeld], other[kBlocksHeld];
    Sixteen d(int place, int, int) const { return Machine::same(scale[place]); }
    Sixteen m(int place, int) const { return Machine::same(other[place]); }
  };
  struct Held : std::conditional_t<(F::kTable > 0), Tables<F::kTable, kBlocksHeld>, Copied> {
    int shift;  // a group has 1 << shift steps, or more
  };
  template <int kEach>
  struct InPlace {
    const Four& c;
    int64_t at[kEach];
    InPlace(const Four& columns, int64_t i, int64_t k) : c(columns) {
      for (int part = 0; part < kEach; part++) {  // the last group where there are no more
        const int64_t step = fewer(i / kStepInputs + part * (kSteps / kEach), k / kStepInputs - 1);
        at[part] = static_cast<uint32_t>(step) / static_cast<uint32_t>(c.size / kStepInputs) * int64_t{F::kBeside};
      }
    }
    const float* of(int j, int part) const { return c.beside[j] + at[part]; }
    Sixteen d(int j, int part, int) const { return Machine::same(of(j, part)[0]); }
    Sixteen m(int j, int part) const { return Machine::same(of(j, part)[F::kBeside - 1]); }
  };
  template <int kEach>
  GSD_TILE void hold_groups(const Four& c, int64_t i, int64_t k, Held& held) {
    const InPlace<kEach> numbers(c, i, k);
    if constexpr (F::kTable > 0) {
      make_tables<F, kEach>(numbers, held);
    } else {
      for (int place = 0; place < kOutputs * kEach; place++) {
        const float* from = numbers.of(place / kEach, place % kEach);
        held.scale[place] = from[0], held.other[place] = from[F::kBeside - 1];
      }
    }
  }
  GSD_TILE void read(const Four&, int64_t, int64_t, Read&) {}
  GSD_TILE void hold(const Four& c, int64_t i, int64_t k, const Read&, Held& held) {
    const int64_t steps = c.size / kStepInputs;
    held.shift = steps % 4 == 0 ? 2 : steps % 2 == 0 ? 1 : 0;
    if (held.shift == 2) hold_groups<1>(c, i, k, held);
    else if (held.shift == 1) hold_groups<2>(c, i, k, held);
    else hold_groups<4>(c, i, k, held);
  }
  GSD_TILE __m512i words(const uint8_t* row, int64_t i, const Held& held, int j) {
    const int place = (kSteps * j + static_cast<int>(i / kStepInputs % kSteps)) >> held.shift;
    const auto codes = F::template codes<Machine>(row + i / F::kWeights, 0);
    if constexpr (F::kTable > 0) return Held::look_up(held, place, codes);
    else return multiply_codes<F>(codes, held, place, 0);
  }
};

// Whether a matrix has units: groups of whole 32s.
template <class F>
bool has_units(const Weights& w) {
  return F::kBeside == 0 || w.inputs / w.groups % kStepInputs == 0;
}

// Whether none of these outputs has a number beside it that could make a weight a subnormal one.
template <class F>
bool are_normal(const Weights& w, int64_t begin, int64_t end) {
  const int64_t numbers = w.groups * F::kBeside;
  return numbers == 0 || Machine::all_normal(w.scales + begin * numbers, (end - begin) * numbers);
}
