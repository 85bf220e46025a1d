// Packed weights in the forward of rows: eight of a row at a time become the chunk that the dense matrix has there, on
// the way to the tile that is multiplied. Products and the embedding go on as with dense weights, bit for bit.
//
// A weight is made as by csrc/cpu/decode.h: in float32, its format's products and sums in their order and none merged
// with another, rounded once.
//
// Matrices stay as they lie in a file or a module. A block of Q8_0 has 34 bytes and begins at even addresses only, so
// that no asynchronous copy can take it, and weights come through registers; another order of the bytes would be faster.
#pragma once

#include <type_traits>

#include "rows.h"

namespace gsd {

// Eight neighbours of a row as they lie: their codes, and what lies beside them; of a dense matrix the chunk itself.
struct PackedEight {
  uint32_t codes[4], beside[2];
};

struct PackedNot {
  GSD_HD static PackedEight load(const RowsMatrix& m, int inputs, int row, int input) {
    PackedEight eight{};
    const Chunk chunk = *reinterpret_cast<const Chunk*>(m.weight + int64_t{row} * inputs + input);
    GSD_UNROLL
    for (int i = 0; i < 4; i++) eight.codes[i] = chunk.words[i];
    return eight;
  }
};

// A float16 and 32 codes of a byte.
struct PackedQ8_0 {
  GSD_HD static PackedEight load(const RowsMatrix& m, int inputs, int row, int input) {
    constexpr int kBlock = 32, kBytes = 34, kPair = 2;
    const char* block = reinterpret_cast<const char*>(m.weight) + (int64_t{row} * inputs + input) / kBlock * kBytes;
    const uint16_t* pairs = reinterpret_cast<const uint16_t*>(block + kPair + input % kBlock);
    PackedEight eight{};
    GSD_UNROLL
    for (int i = 0; i < 4; i++) eight.codes[i] = pairs[i];
    eight.beside[0] = *reinterpret_cast<const uint16_t*>(block);
    return eight;
  }
  template <class Machine>
  GSD_HD static float value(Machine& machine, const PackedEight& eight, int i) {
    const int8_t code = static_cast<int8_t>(eight.codes[i / 2] >> i % 2 * 8);
    return machine.times(static_cast<float>(code), float_from_half(static_cast<uint16_t>(eight.beside[0])));
  }
};

// Codes of kBits, the first in the lowest ones; one or two floats beside the row for a group of its inputs.
template <int kBits, int kBeside>
struct PackedGroups {
  GSD_HD static PackedEight load(const RowsMatrix& m, int inputs, int row, int input) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(m.weight) + (int64_t{row} * inputs + input) * kBits / 32;
    const int group = input / (inputs / m.groups);
    const float* beside = m.scales + (int64_t{row} * m.groups + group) * kBeside;
    PackedEight eight{};
    GSD_UNROLL
    for (int i = 0; i < kBits / 4; i++) eight.codes[i] = words[i];
    GSD_UNROLL
    for (int i = 0; i < kBeside; i++) eight.beside[i] = float_bits(beside[i]);
    return eight;
  }
  GSD_HD static uint32_t code(const PackedEight& eight, int i) {
    return eight.codes[i * kBits / 32] >> i * kBits % 32 & ((1u << kBits) - 1);
  }
  GSD_HD static float beside(const PackedEight& eight, int i) { return float_from_bits(eight.beside[i]); }
};

struct PackedInt8 : PackedGroups<8, 1> {
  template <class Machine>
  GSD_HD static float value(Machine& machine, const PackedEight& eight, int i) {
    return machine.times(static_cast<float>(static_cast<int8_t>(code(eight, i))), beside(eight, 0));
  }
};

// Of Int8's and Int4's sizes, with a zero point.
template <int kBits>
struct PackedZero : PackedGroups<kBits, 2> {
  using Groups = PackedGroups<kBits, 2>;
  template <class Machine>
  GSD_HD static float value(Machine& machine, const PackedEight& eight, int i) {
    return machine.times(static_cast<float>(Groups::code(eight, i)) - Groups::beside(eight, 1), Groups::beside(eight, 0));
  }
};

struct PackedInt4Offset : PackedGroups<4, 2> {
  template <class Machine>
  GSD_HD static float value(Machine& machine, const PackedEight& eight, int i) {
    return machine.times(static_cast<float>(code(eight, i)) - 8.0f, beside(eight, 0)) + beside(eight, 1);
  }
};

template <class Element, class Format, class Machine>
GSD_HD Chunk chunk_of(Machine& machine, const PackedEight& eight) {
  Chunk chunk;
  GSD_UNROLL
  for (int i = 0; i < 4; i++) {
    if constexpr (std::is_same_v<Format, PackedNot>) {
      chunk.words[i] = eight.codes[i];
    } else {
      chunk.words[i] = Element::pack(Format::value(machine, eight, 2 * i), Format::value(machine, eight, 2 * i + 1));
    }
  }
  return chunk;
}

// Calls `use` with a matrix's format.
template <class Use>
GSD_HD void with_format(RowsKind kind, const Use& use) {
  switch (kind) {
    case RowsKind::kDense:
      return use(PackedNot{});
    case RowsKind::kQ8_0:
      return use(PackedQ8_0{});
    case RowsKind::kInt8:
      return use(PackedInt8{});
    case RowsKind::kUint8:
      return use(PackedZero<8>{});
    case RowsKind::kInt4:
      return use(PackedZero<4>{});
    case RowsKind::kInt4Offset:
      return use(PackedInt4Offset{});
  }
}

}  // namespace gsd
