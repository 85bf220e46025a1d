// Decoders of packed weights, included by every level's translation unit with its instructions switched on, behind
// products_tile.h's rule: no include may stand here. Loops are plain, for the compiler's vectors; a level may put better
// ones in the place of single kinds.
//
// A block gives kWeights floats by its format's definition: products and sums of float32 in the order below. All but
// Q6_K's products are exact, so that fused multiplications would make no difference.

GSD_TILE float half_at(const uint8_t* from) {
  uint16_t bits;
  __builtin_memcpy(&bits, from, sizeof bits);
  return float_from_half(bits);
}

// Sixteen bytes whose low nibbles are the first sixteen codes, whose high ones the others.
GSD_TILE void nibbles(const uint8_t* from, uint8_t to[32]) {
  for (int i = 0; i < 16; i++) to[i] = from[i] & 15, to[16 + i] = from[i] >> 4;
}

// The fifth bits of 32 codes.
GSD_TILE void fifth_bits(const uint8_t* from, uint8_t to[32]) {
  uint32_t high;
  __builtin_memcpy(&high, from, sizeof high);
  for (int i = 0; i < 32; i++) to[i] = static_cast<uint8_t>(to[i] | (high >> i & 1u) << 4);
}

struct BlockQ4_0 {
  static constexpr int kWeights = 32, kBytes = 18;
  GSD_TILE void widen(const uint8_t* block, float* to) {
    const float d = half_at(block);
    uint8_t code[32];
    nibbles(block + 2, code);
    for (int i = 0; i < 32; i++) to[i] = static_cast<float>(code[i] - 8) * d;
  }
};

struct BlockQ4_1 {
  static constexpr int kWeights = 32, kBytes = 20;
  GSD_TILE void widen(const uint8_t* block, float* to) {
    const float d = half_at(block), m = half_at(block + 2);
    uint8_t code[32];
    nibbles(block + 4, code);
    for (int i = 0; i < 32; i++) to[i] = static_cast<float>(code[i]) * d + m;
  }
};

struct BlockQ5_0 {
  static constexpr int kWeights = 32, kBytes = 22;
  GSD_TILE void widen(const uint8_t* block, float* to) {
    const float d = half_at(block);
    uint8_t code[32];
    nibbles(block + 6, code);
    fifth_bits(block + 2, code);
    for (int i = 0; i < 32; i++) to[i] = static_cast<float>(code[i] - 16) * d;
  }
};

struct BlockQ5_1 {
  static constexpr int kWeights = 32, kBytes = 24;
  GSD_TILE void widen(const uint8_t* block, float* to) {
    const float d = half_at(block), m = half_at(block + 2);
    uint8_t code[32];
    nibbles(block + 8, code);
    fifth_bits(block + 4, code);
    for (int i = 0; i < 32; i++) to[i] = static_cast<float>(code[i]) * d + m;
  }
};

struct BlockQ8_0 {
  static constexpr int kWeights = 32, kBytes = 34;
  GSD_TILE void widen(const uint8_t* block, float* to) {
    const float d = half_at(block);
    for (int i = 0; i < 32; i++) to[i] = static_cast<float>(static_cast<int8_t>(block[2 + i])) * d;
  }
};

constexpr float kIQ4_NLValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

struct BlockIQ4_NL {
  static constexpr int kWeights = 32, kBytes = 18;
  GSD_TILE void widen(const uint8_t* block, float* to) {
    const float d = half_at(block);
    float value[16];
    for (int i = 0; i < 16; i++) value[i] = kIQ4_NLValues[i] * d;
    for (int i = 0; i < 16; i++) to[i] = value[block[2 + i] & 15], to[16 + i] = value[block[2 + i] >> 4];
  }
};

constexpr float kMXFP4Values[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6};

struct BlockMXFP4 {
  static constexpr int kWeights = 32, kBytes = 17;
  GSD_TILE float scale(uint8_t exponent) {  // 2^(exponent − 127)
    const uint32_t bits = exponent > 0 ? static_cast<uint32_t>(exponent) << 23 : 0x00400000u;
    float found;
    __builtin_memcpy(&found, &bits, sizeof found);
    return found;
  }
  GSD_TILE void widen(const uint8_t* block, float* to) {
    const float d = scale(block[0]);
    float value[16];
    for (int i = 0; i < 16; i++) value[i] = kMXFP4Values[i] * d;
    for (int i = 0; i < 16; i++) to[i] = value[block[1 + i] & 15], to[16 + i] = value[block[1 + i] >> 4];
  }
};

// Six bits of scale and six of minimum for each of eight groups of 32, in twelve bytes.
GSD_TILE void six_bits(const uint8_t* s, uint8_t scale[8], uint8_t minimum[8]) {
  for (int j = 0; j < 4; j++) {
    scale[j] = s[j] & 63, minimum[j] = s[j + 4] & 63;
    scale[j + 4] = static_cast<uint8_t>((s[j + 8] & 15) | s[j] >> 6 << 4);
    minimum[j + 4] = static_cast<uint8_t>(s[j + 8] >> 4 | s[j + 4] >> 6 << 4);
  }
}

struct BlockQ4_K {
  static constexpr int kWeights = 256, kBytes = 144;
  GSD_TILE void widen(const uint8_t* block, float* to) {
    const float d = half_at(block), low = half_at(block + 2);
    uint8_t scale[8], minimum[8];
    six_bits(block + 4, scale, minimum);
    for (int j = 0; j < 8; j += 2) {
      const uint8_t* code = block + 16 + 16 * j;
      const float d0 = d * scale[j], m0 = low * minimum[j], d1 = d * scale[j + 1], m1 = low * minimum[j + 1];
      for (int i = 0; i < 32; i++) to[32 * j + i] = static_cast<float>(code[i] & 15) * d0 - m0;
      for (int i = 0; i < 32; i++) to[32 * j + 32 + i] = static_cast<float>(code[i] >> 4) * d1 - m1;
    }
  }
};

struct BlockQ5_K {
  static constexpr int kWeights = 256, kBytes = 176;
  GSD_TILE void widen(const uint8_t* block, float* to) {
    const float d = half_at(block), low = half_at(block + 2);
    const uint8_t* high = block + 16;
    uint8_t scale[8], minimum[8];
    six_bits(block + 4, scale, minimum);
    for (int j = 0; j < 8; j += 2) {
      const uint8_t* code = block + 48 + 16 * j;
      const float d0 = d * scale[j], m0 = low * minimum[j], d1 = d * scale[j + 1], m1 = low * minimum[j + 1];
      for (int i = 0; i < 32; i++) {
        to[32 * j + i] = static_cast<float>((code[i] & 15) + (high[i] >> j & 1) * 16) * d0 - m0;
      }
      for (int i = 0; i < 32; i++) {
        to[32 * j + 32 + i] = static_cast<float>((code[i] >> 4) + (high[i] >> (j + 1) & 1) * 16) * d1 - m1;
      }
    }
  }
};

struct BlockQ6_K {
  static constexpr int kWeights = 256, kBytes = 210;
  GSD_TILE void widen(const uint8_t* block, float* to) {
    const float d = half_at(block + 208);
    float scale[16];
    for (int j = 0; j < 16; j++) scale[j] = d * static_cast<float>(static_cast<int8_t>(block[192 + j]));
    for (int half = 0; half < 2; half++) {
      const uint8_t *low = block + 64 * half, *high = block + 128 + 32 * half;
      for (int part = 0; part < 4; part++) {  // 32 weights: bits 2 · part of `high`, a nibble of one half of `low`
        const uint8_t* from = low + 32 * (part & 1);
        float* out = to + 128 * half + 32 * part;
        const float first = scale[8 * half + 2 * part], second = scale[8 * half + 2 * part + 1];
        const int up = part < 2 ? 0 : 4;
        for (int i = 0; i < 16; i++) {
          const int code = (from[i] >> up & 15) | (high[i] >> (2 * part) & 3) << 4;
          out[i] = static_cast<float>(code - 32) * first;
        }
        for (int i = 16; i < 32; i++) {
          const int code = (from[i] >> up & 15) | (high[i] >> (2 * part) & 3) << 4;
          out[i] = static_cast<float>(code - 32) * second;
        }
      }
    }
  }
};

// Floats into the model's dtype.
struct ToFloat32 {
  typedef float Stored;
  GSD_TILE void store(const float* from, int n, Stored* to) {
    for (int i = 0; i < n; i++) to[i] = from[i];
  }
};
struct ToBfloat16 {
  typedef uint16_t Stored;
  GSD_TILE void store(const float* from, int n, Stored* to) {
    for (int i = 0; i < n; i++) {  // as Bfloat16::round
      uint32_t bits;
      __builtin_memcpy(&bits, from + i, sizeof bits);
      const uint32_t up = bits + 0x7FFFu + (bits >> 16 & 1u), nan = bits | 0x400000u;
      to[i] = static_cast<uint16_t>(((bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : up) >> 16);
    }
  }
};
struct ToFloat16 {
  typedef uint16_t Stored;
  GSD_TILE void store(const float* from, int n, Stored* to) {
    for (int i = 0; i < n; i++) to[i] = Half::round(from[i]);
  }
};

template <class Block, class To>
void decode_blocks(const void* row, const float*, int64_t, int64_t inputs, void* out) {
  const uint8_t* block = static_cast<const uint8_t*>(row);
  typename To::Stored* to = static_cast<typename To::Stored*>(out);
  for (int64_t i = 0; i < inputs; i += Block::kWeights, block += Block::kBytes) {
    float values[Block::kWeights];
    Block::widen(block, values);
    To::store(values, Block::kWeights, to + i);
  }
}

// Codes whose scales lie beside the rows, `beside`: those of the group that n weights belong to. `widen` takes the bytes
// that they begin at.
struct CodesInt8 {
  static constexpr int kBeside = 1, kWeightsOfByte = 1;
  GSD_TILE void widen(const uint8_t* from, int n, const float* beside, float* to) {
    for (int i = 0; i < n; i++) to[i] = static_cast<float>(static_cast<int8_t>(from[i])) * beside[0];
  }
};
// The same under the largest magnitude of a row, which 127 stands for.
struct CodesVectorwise : CodesInt8 {
  static constexpr float kOne = 7.874015718698502e-3f;  // as bitsandbytes' int8_vectorwise_dequant has it
  GSD_TILE void widen(const uint8_t* from, int n, const float* beside, float* to) {
    for (int i = 0; i < n; i++) to[i] = static_cast<float>(static_cast<int8_t>(from[i])) * beside[0] * kOne;
  }
};
struct CodesUint8 {  // zero points are integers
  static constexpr int kBeside = 2, kWeightsOfByte = 1;
  GSD_TILE void widen(const uint8_t* from, int n, const float* beside, float* to) {
    for (int i = 0; i < n; i++) to[i] = (static_cast<float>(from[i]) - beside[1]) * beside[0];
  }
};

// Sixteen values of a group, looked up by half a byte; the low half is the first weight's unless kHighFirst.
template <class Values>
struct CodesLookup : Values {
  static constexpr int kWeightsOfByte = 2;
  GSD_TILE void widen(const uint8_t* from, int n, const float* beside, float* to) {
    float value[16];
    for (int i = 0; i < 16; i++) value[i] = Values::of(i, beside);
    for (int i = 0; i < n; i++) to[i] = value[(i % 2 == 1) != Values::kHighFirst ? from[i / 2] >> 4 : from[i / 2] & 15];
  }
};
struct ValuesInt4 {
  static constexpr int kBeside = 2;
  static constexpr bool kHighFirst = false;
  GSD_TILE float of(int code, const float* beside) { return (static_cast<float>(code) - beside[1]) * beside[0]; }
};
struct ValuesInt4Offset {
  static constexpr int kBeside = 2;
  static constexpr bool kHighFirst = false;
  GSD_TILE float of(int code, const float* beside) { return static_cast<float>(code - 8) * beside[0] + beside[1]; }
};

// bitsandbytes/functional.py, get_4bit_type: quantiles of a normal distribution, and floats of four bits.
constexpr float kNF4Values[16] = {-1.0f,
                                  -0.6961928009986877f,
                                  -0.5250730514526367f,
                                  -0.39491748809814453f,
                                  -0.28444138169288635f,
                                  -0.18477343022823334f,
                                  -0.09105003625154495f,
                                  0.0f,
                                  0.07958029955625534f,
                                  0.16093020141124725f,
                                  0.24611230194568634f,
                                  0.33791524171829224f,
                                  0.44070982933044434f,
                                  0.5626170039176941f,
                                  0.7229568362236023f,
                                  1.0f};
constexpr float kFP4Values[16] = {0.0f,  0.0052083334885537624f,  0.6666666865348816f,  1.0f,  0.3333333432674408f,  0.5f,
                                  0.1666666716337204f,  0.25f,
                                  0.0f,  -0.0052083334885537624f, -0.6666666865348816f, -1.0f, -0.3333333432674408f, -0.5f,
                                  -0.1666666716337204f, -0.25f};
template <const float (&table)[16]>
struct ValuesOfTable {
  static constexpr int kBeside = 1;
  static constexpr bool kHighFirst = true;
  GSD_TILE float of(int code, const float* beside) { return table[code] * beside[0]; }
};
typedef CodesLookup<ValuesInt4> CodesInt4;
typedef CodesLookup<ValuesInt4Offset> CodesInt4Offset;
typedef CodesLookup<ValuesOfTable<kNF4Values>> CodesNF4;
typedef CodesLookup<ValuesOfTable<kFP4Values>> CodesFP4;

template <class Codes, class To>
void decode_groups(const void* row, const float* scales, int64_t groups, int64_t inputs, void* out) {
  const uint8_t* from = static_cast<const uint8_t*>(row);
  typename To::Stored* to = static_cast<typename To::Stored*>(out);
  const int64_t size = inputs / groups;
  for (int64_t g = 0; g < groups; g++, scales += Codes::kBeside) {
    for (int64_t i = g * size; i < (g + 1) * size; i += 32) {
      float values[32];
      const int n = static_cast<int>(fewer(32, (g + 1) * size - i));
      Codes::widen(from + i / Codes::kWeightsOfByte, n, scales, values);
      To::store(values, n, to + i);
    }
  }
}

template <class Number, class To>
void decode_floats(const void* row, const float*, int64_t, int64_t inputs, void* out) {
  const typename Number::Stored* from = static_cast<const typename Number::Stored*>(row);
  typename To::Stored* to = static_cast<typename To::Stored*>(out);
  for (int64_t i = 0; i < inputs; i += 32) {
    float values[32];
    const int n = static_cast<int>(fewer(32, inputs - i));
    for (int j = 0; j < n; j++) values[j] = Number::widen(from[i + j]);
    To::store(values, n, to + i);
  }
}

struct PlainFloat {
  typedef float Stored;
  GSD_TILE float widen(float x) { return x; }
};
struct PlainBfloat16 {
  typedef uint16_t Stored;
  GSD_TILE float widen(uint16_t bits) { return Bfloat16::widen(bits); }
};
struct PlainHalf {
  typedef uint16_t Stored;
  GSD_TILE float widen(uint16_t bits) { return Half::widen(bits); }
};

// By Kind and Element. A level names its own GSD_BLOCKS and GSD_GROUPS before it uses this.
#define GSD_FLOATS(From) {decode_floats<From, ToFloat32>, decode_floats<From, ToBfloat16>, decode_floats<From, ToFloat16>}
#define GSD_BLOCKS(Block) {decode_blocks<Block, ToFloat32>, decode_blocks<Block, ToBfloat16>, decode_blocks<Block, ToFloat16>}
#define GSD_GROUPS(Codes) {decode_groups<Codes, ToFloat32>, decode_groups<Codes, ToBfloat16>, decode_groups<Codes, ToFloat16>}
#define GSD_DECODERS                                                                                                \
  {{GSD_FLOATS(PlainFloat), GSD_FLOATS(PlainBfloat16), GSD_FLOATS(PlainHalf), GSD_BLOCKS(BlockQ4_0),                \
    GSD_BLOCKS(BlockQ4_1), GSD_BLOCKS(BlockQ5_0), GSD_BLOCKS(BlockQ5_1), GSD_BLOCKS(BlockQ8_0),                     \
    GSD_BLOCKS(BlockIQ4_NL), GSD_BLOCKS(BlockMXFP4), GSD_BLOCKS(BlockQ4_K), GSD_BLOCKS(BlockQ5_K),                  \
    GSD_BLOCKS(BlockQ6_K), GSD_GROUPS(CodesInt8), GSD_GROUPS(CodesUint8), GSD_GROUPS(CodesInt4),                    \
    GSD_GROUPS(CodesInt4Offset), GSD_GROUPS(CodesNF4), GSD_GROUPS(CodesFP4), GSD_GROUPS(CodesInt8),          \
    GSD_GROUPS(CodesInt8), GSD_GROUPS(CodesVectorwise)}}
