// Products of few rows over packed weights that are decoded in registers, for the AVX-512 levels: after decode_vectors.h and
// products_zmm.h, inside the target.

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

constexpr int64_t kOutputsLookedAt = 64;  // at a time: their numbers are in a cache when they are multiplied

// As UnpackingProducts has them.
template <class T>
bool unpacking_of(const void* packed, int64_t rows, const Weights& w, int64_t begin, int64_t end, float* out,
                  int64_t out_stride) {
  const int64_t numbers = w.groups * T::kBeside, most = numbers > 0 ? kOutputsLookedAt : end - begin;
  if (numbers > 0 && w.inputs / w.groups % T::kStep != 0) return false;
  for (int64_t n = begin; n < end; n += most) {
    const int64_t count = fewer(most, end - n);
    const float* beside = w.scales + n * numbers;
    if (numbers > 0 && !all_normal(beside, count * numbers)) return false;
    const uint8_t* from = reinterpret_cast<const uint8_t*>(w.data) + n * w.row_bytes;
    products_over<T>(packed, rows, w.inputs, from, w.row_bytes, beside, w.groups, 0, count, out + n - begin, out_stride,
                     false);
  }
  return true;
}

#define GSD_OF_BLOCKS(Of, Block) unpacking_of<OfBlocks<Of, Block>>
#define GSD_OF_GROUPS(Of, Codes) unpacking_of<OfGroups<Of, Codes>>
#define GSD_UNPACKING(Of)                                                                                  \
  {{nullptr, nullptr, nullptr, GSD_OF_BLOCKS(Of, BlockQ4_0), GSD_OF_BLOCKS(Of, BlockQ4_1),                  \
    GSD_OF_BLOCKS(Of, BlockQ5_0), GSD_OF_BLOCKS(Of, BlockQ5_1), GSD_OF_BLOCKS(Of, BlockQ8_0),               \
    GSD_OF_BLOCKS(Of, BlockIQ4_NL), GSD_OF_BLOCKS(Of, BlockMXFP4), nullptr, nullptr, nullptr,               \
    GSD_OF_GROUPS(Of, CodesInt8), GSD_OF_GROUPS(Of, CodesUint8), GSD_OF_GROUPS(Of, CodesInt4),              \
    GSD_OF_GROUPS(Of, CodesInt4Offset), GSD_OF_GROUPS(Of, CodesNF4), GSD_OF_GROUPS(Of, CodesFP4)},          \
   Unpacking<Of>::kRows}
