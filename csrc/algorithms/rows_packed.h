// Packed weights in the forward of rows: eight of a row at a time become the chunk that the dense matrix has there, on
// the way to the tile that is multiplied. Products and the embedding go on as with dense weights, bit for bit.
//
// A weight is made as weight_formats.h defines it: in float32, products and sums in their order and none merged with
// another, rounded once.
//
// Matrices stay as they lie in a file or a module. A block of Q8_0 has 34 bytes and begins at even addresses only, so
// that no asynchronous copy can take it, and weights come through registers; another order of the bytes would be faster.
#pragma once

#include <type_traits>

#include "rows.h"

namespace gsd {

namespace formats {
#define GSD_FORMAT GSD_HD static
#include "weight_formats.h"
#undef GSD_FORMAT
}  // namespace formats

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

// The machine that values are computed by: no product is merged with a sum.
template <class Machine>
struct PackedMath {
  Machine& machine;
  GSD_HD float times(float a, float b) const { return machine.times(a, b); }
  GSD_HD float plus(float a, float b) const { return a + b; }
  GSD_HD float minus(float a, float b) const { return a - b; }
};

// Blocks of bytes behind one half.
template <class F, bool kBesideRows = (F::kBeside > 0)>
struct PackedOf {
  GSD_HD static PackedEight load(const RowsMatrix& m, int inputs, int row, int input) {
    const int64_t number = (int64_t{row} * inputs + input) / F::kWeights;
    const char* block = reinterpret_cast<const char*>(m.weight) + number * F::kBytes;
    const uint16_t* pairs = reinterpret_cast<const uint16_t*>(block + F::kCodes + input % F::kWeights);
    PackedEight eight{};
    GSD_UNROLL
    for (int i = 0; i < 4; i++) eight.codes[i] = pairs[i];
    eight.beside[0] = *reinterpret_cast<const uint16_t*>(block);
    return eight;
  }
  template <class Machine>
  GSD_HD static float value(Machine& machine, const PackedEight& eight, int i) {
    const float d = float_from_half(static_cast<uint16_t>(eight.beside[0]));
    return F::value(PackedMath<Machine>{machine}, F::level(eight.codes[i / 2] >> i % 2 * 8 & 255u), d, d);
  }
};

// Codes of kBits, the first in the lowest ones; one or two floats beside the row for a group of its inputs.
template <class F>
struct PackedOf<F, true> {
  static constexpr int kBits = 8 / F::kWeights;
  GSD_HD static PackedEight load(const RowsMatrix& m, int inputs, int row, int input) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(m.weight) + (int64_t{row} * inputs + input) * kBits / 32;
    const int group = input / (inputs / m.groups);
    const float* beside = m.scales + (int64_t{row} * m.groups + group) * F::kBeside;
    PackedEight eight{};
    GSD_UNROLL
    for (int i = 0; i < kBits / 4; i++) eight.codes[i] = words[i];
    GSD_UNROLL
    for (int i = 0; i < F::kBeside; i++) eight.beside[i] = float_bits(beside[i]);
    return eight;
  }
  template <class Machine>
  GSD_HD static float value(Machine& machine, const PackedEight& eight, int i) {
    const uint32_t code = eight.codes[i * kBits / 32] >> i * kBits % 32 & ((1u << kBits) - 1);
    return F::value(PackedMath<Machine>{machine}, F::level(code), float_from_bits(eight.beside[0]),
                    float_from_bits(eight.beside[F::kBeside - 1]));
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
      return use(PackedOf<formats::Q8_0>{});
    case RowsKind::kInt8:
      return use(PackedOf<formats::Int8>{});
    case RowsKind::kUint8:
      return use(PackedOf<formats::Uint8>{});
    case RowsKind::kInt4:
      return use(PackedOf<formats::Int4>{});
    case RowsKind::kInt4Offset:
      return use(PackedOf<formats::Int4Offset>{});
  }
}

}  // namespace gsd
