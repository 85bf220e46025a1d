// The formats of packed weights. A format is one struct: a block's weights and bytes, and four parts, from which every reader
// of weights is made. Formats of libraries have one or two weights a block, and their numbers beside the rows.
//
// numbers: d and m, from a block or from beside the rows.   codes: those of 32 weights, a step.
// levels: what a code counts as.                            value: a weight of its level, d and m, in float32.
//
// A machine M (H: of numbers) says what floats and codes are: one by one in csrc/cpu/plain.h, registers in decode_ymm.h and
// decode_zmm.h; rows_packed.h has a GPU's. Products of levels and scales within blocks are exact but for Q6_K's, so it makes
// no difference where they are fused with sums.
//
// No include may stand here, and no guard: whoever includes it declares functions by GSD_FORMAT, in a namespace and for a
// processor of its own.

// Numbers: the same for all steps of a block; one pair a step; a scale for sixteen weights.
template <class H>
struct InAll {
  typename H::Number scale, other;
  auto d(int, int) const { return scale; }
  auto m(int) const { return other; }
};
template <class H>
struct OfSteps {
  alignas(64) float of[16];
  auto d(int step, int) const { return H::same(of[step]); }
  auto m(int step) const { return H::same(of[8 + step]); }
};
template <class H>
struct OfSixteens {
  alignas(64) float of[16];
  auto d(int step, int half) const { return H::same(of[2 * step + half]); }
  auto m(int step) const { return d(step, 0); }
};

struct Numbers {
  static constexpr int kBeside = 0;                     // of them beside the rows
  static constexpr bool kPair = false, kNormal = true;  // has an m; no value is a subnormal number, if those beside are usual
};
struct OneHalf : Numbers {
  template <class H, class From>
  GSD_FORMAT auto numbers(const From& from) {
    return InAll<H>{H::half(from, 0), H::half(from, 0)};
  }
};
struct TwoHalves : Numbers {
  static constexpr bool kPair = true;
  template <class H, class From>
  GSD_FORMAT auto numbers(const From& from) {
    return InAll<H>{H::half(from, 0), H::half(from, 2)};
  }
};
struct Exponent : Numbers {  // 2^(e − 127); levels times it are numbers of bfloat16
  static constexpr bool kNormal = false;
  template <class H, class From>
  GSD_FORMAT auto numbers(const From& from) {
    return InAll<H>{H::exponent(from), H::exponent(from)};
  }
};
struct SixBitPairs : Numbers {  // behind two halves six bits each for scale and minimum of eight steps, in twelve bytes
  template <class H, class From>
  GSD_FORMAT auto numbers(const From& from) {
    OfSteps<H> found;
    H::six_bit_pairs(from, found.of);
    return found;
  }
};
template <int kHalf, int kBytes>
struct EightBitScales : Numbers {  // a half, by a byte with a sign for every sixteen weights
  template <class H, class From>
  GSD_FORMAT auto numbers(const From& from) {
    OfSixteens<H> found;
    H::scaled_bytes(from + kHalf, from + kBytes, found.of);
    return found;
  }
};
template <int kCount>
struct BesideRows : Numbers {  // kCount floats for a group of inputs
  static constexpr int kBeside = kCount;
  template <class H, class From>
  GSD_FORMAT auto numbers(const From& from) {
    return InAll<H>{H::same(from[0]), H::same(from[kCount - 1])};
  }
};

// Codes from byte kAt of a block on. kTable: how many there are to look values up by, 16 (of fewer too)
// or 32; 0: bytes, more than pay a table.
template <int kAt>
struct Nibbles {  // of sixteen bytes the low ones, then the high ones
  static constexpr int kTable = 16;
  template <class M>
  GSD_FORMAT auto codes(const uint8_t* block, int) {
    return M::nibbles(block + kAt);
  }
};
template <int kAt>
struct FiveBits {  // behind the fifth bits
  static constexpr int kTable = 32;
  template <class M>
  GSD_FORMAT auto codes(const uint8_t* block, int) {
    return M::with_fifth(M::nibbles(block + kAt + 4), M::bits_at(block + kAt));
  }
};
template <int kAt>
struct StepNibbles {  // of 32 bytes the low ones are a step, the high ones the next
  static constexpr int kTable = 16;
  template <class M>
  GSD_FORMAT auto codes(const uint8_t* block, int step) {
    return M::either_nibbles(block + kAt + step / 2 * 32, step % 2);
  }
};
template <int kAt, int kFifth>
struct StepFiveBits {  // bit j of byte i from kFifth on is the fifth of step j's code i
  static constexpr int kTable = 32;
  template <class M>
  GSD_FORMAT auto codes(const uint8_t* block, int step) {
    return M::with_fifth(StepNibbles<kAt>::template codes<M>(block, step), M::bits_of(block + kFifth, step));
  }
};
struct StepSixBits {  // less 32, as bytes with a sign; two halves of 128 weights
  static constexpr int kTable = 0;
  template <class M>
  GSD_FORMAT auto codes(const uint8_t* block, int step) {
    return M::six_bits(block, step / 4, step % 4);
  }
};
template <int kAt>
struct Bytes {
  static constexpr int kTable = 0, kCodes = kAt;
  template <class M>
  GSD_FORMAT auto codes(const uint8_t* block, int) {
    return M::bytes(block + kAt);
  }
};
template <bool kHighFirst>
struct HalfBytes {  // two weights a byte
  static constexpr int kTable = 16;
  template <class M>
  GSD_FORMAT auto codes(const uint8_t* from, int) {
    return M::template half_bytes<kHighFirst>(from);
  }
};

// Levels, of one code or of codes first … first + 15; of bytes.
template <int kZero>
struct Counted {
  GSD_FORMAT float level(uint32_t code) { return static_cast<float>(static_cast<int>(code) - kZero); }
  template <class M>
  GSD_FORMAT auto levels(int first) {
    return M::counted(first - kZero);
  }
};
template <class Table>
struct Listed {
  GSD_FORMAT float level(uint32_t code) { return Table::kOf[code]; }
  template <class M>
  GSD_FORMAT auto levels(int) {
    return M::sixteen(Table::kOf);
  }
};
struct Signed {
  GSD_FORMAT float level(uint32_t code) { return static_cast<float>(static_cast<int8_t>(code)); }
  template <class M, class B>
  GSD_FORMAT auto levels(const B& bytes) {
    return M::wide_signed(bytes);
  }
};
struct Unsigned {
  GSD_FORMAT float level(uint32_t code) { return static_cast<float>(code); }
  template <class M, class B>
  GSD_FORMAT auto levels(const B& bytes) {
    return M::wide_unsigned(bytes);
  }
};

// Values.
#define GSD_VALUE(Name, expression)                              \
  struct Name {                                                  \
    template <class M, class F>                                  \
    GSD_FORMAT F value(const M& by, F q, F d, [[maybe_unused]] F m) { \
      return expression;                                         \
    }                                                            \
  };
GSD_VALUE(Scaled, by.times(q, d))
GSD_VALUE(AboveMinimum, by.times_plus(q, d, m))
GSD_VALUE(BelowMinimum, by.times_minus(q, d, m))
GSD_VALUE(FromZero, by.times(by.minus(q, m), d))
GSD_VALUE(WithOffset, by.plus(by.times(q, d), m))
GSD_VALUE(OfLargest, by.times(by.times(q, d), by.same(7.874015718698502e-3f)))  // as bitsandbytes' int8_vectorwise_dequant
#undef GSD_VALUE

template <int kWeightsOfBlock, int kBytesOfBlock, class OfNumbers, class OfCodes, class OfLevels, class OfValue>
struct Format : OfNumbers, OfCodes, OfLevels, OfValue {
  static constexpr int kWeights = kWeightsOfBlock, kBytes = kBytesOfBlock;
};

struct LevelsIQ4_NL {
  static constexpr float kOf[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
};
struct LevelsMXFP4 {
  static constexpr float kOf[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6};
};
// bitsandbytes/functional.py, get_4bit_type: quantiles of a normal distribution, and floats of four bits.
struct LevelsNF4 {
  static constexpr float kOf[16] = {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
                                   -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
                                   0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f,
                                   0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f,
                                   0.7229568362236023f, 1.0f};
};
struct LevelsFP4 {
  static constexpr float kOf[16] = {0.0f, 0.0052083334885537624f, 0.6666666865348816f, 1.0f, 0.3333333432674408f,
                                   0.5f, 0.1666666716337204f, 0.25f, 0.0f, -0.0052083334885537624f,
                                   -0.6666666865348816f, -1.0f, -0.3333333432674408f, -0.5f, -0.1666666716337204f,
                                   -0.25f};
};

struct Q4_0 : Format<32, 18, OneHalf, Nibbles<2>, Counted<8>, Scaled> {};
struct Q4_1 : Format<32, 20, TwoHalves, Nibbles<4>, Counted<0>, AboveMinimum> {};
struct Q5_0 : Format<32, 22, OneHalf, FiveBits<2>, Counted<16>, Scaled> {};
struct Q5_1 : Format<32, 24, TwoHalves, FiveBits<4>, Counted<0>, AboveMinimum> {};
struct Q8_0 : Format<32, 34, OneHalf, Bytes<2>, Signed, Scaled> {};
struct IQ4_NL : Format<32, 18, OneHalf, Nibbles<2>, Listed<LevelsIQ4_NL>, Scaled> {};
struct MXFP4 : Format<32, 17, Exponent, Nibbles<1>, Listed<LevelsMXFP4>, Scaled> {};
struct Q4_K : Format<256, 144, SixBitPairs, StepNibbles<16>, Counted<0>, BelowMinimum> {};
struct Q5_K : Format<256, 176, SixBitPairs, StepFiveBits<48, 16>, Counted<0>, BelowMinimum> {};
struct Q6_K : Format<256, 210, EightBitScales<208, 192>, StepSixBits, Signed, Scaled> {};
struct Int8 : Format<1, 1, BesideRows<1>, Bytes<0>, Signed, Scaled> {};
struct Uint8 : Format<1, 1, BesideRows<2>, Bytes<0>, Unsigned, FromZero> {};
struct Int4 : Format<2, 1, BesideRows<2>, HalfBytes<false>, Counted<0>, FromZero> {};
struct Int4Offset : Format<2, 1, BesideRows<2>, HalfBytes<false>, Counted<8>, WithOffset> {};
struct NF4 : Format<2, 1, BesideRows<1>, HalfBytes<true>, Listed<LevelsNF4>, Scaled> {};
struct FP4 : Format<2, 1, BesideRows<1>, HalfBytes<true>, Listed<LevelsFP4>, Scaled> {};
typedef Int8 Int8Dynamic, Int8Rounded;  // for rows that are rounded first, see csrc/cpu/row_forms.h
struct Int8Vectorwise : Format<1, 1, BesideRows<1>, Bytes<0>, Signed, OfLargest> {};

// In the order of their numbers, from 3 on: gsd_kernels/ops/packed/kinds.py has a row for each.
#define GSD_FORMATS(of)                                                                                              \
  of(Q4_0), of(Q4_1), of(Q5_0), of(Q5_1), of(Q8_0), of(IQ4_NL), of(MXFP4), of(Q4_K), of(Q5_K), of(Q6_K), of(Int8),   \
      of(Uint8), of(Int4), of(Int4Offset), of(NF4), of(FP4), of(Int8Dynamic), of(Int8Rounded), of(Int8Vectorwise)
