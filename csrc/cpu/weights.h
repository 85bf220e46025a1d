// A matrix of weights as it lies in a file or a module: rows of outputs, one behind the other, dense or in blocks.
//
// A packed matrix stands for the dense one that its format defines, each value in float32, rounded once to the model's
// dtype. Products decode a strip of outputs into the nearest cache and multiply it as the dense matrix would be: the same
// bits, and a strip is decoded once for all rows.
#pragma once

#include <cstdint>

#include "model_math.h"

namespace gsd {

struct IsaKernels;

namespace formats {
#define GSD_FORMAT static inline
#include "../algorithms/weight_formats.h"
#undef GSD_FORMAT
}  // namespace formats

// Floats of a model's dtypes, then the formats. Their numbers are those of gsd_kernels/ops/packed/kinds.py.
#define GSD_KIND(F) k##F
enum class Kind : int { kFloat32, kBfloat16, kFloat16, GSD_FORMATS(GSD_KIND), kCount };
constexpr int kKinds = static_cast<int>(Kind::kCount);

// Weights of a block and its bytes, 1 weight where there are no blocks. Floats beside the rows for a group of inputs: none, a
// scale, or a scale and a zero point or offset.
struct FormatSizes {
  int64_t weights, bytes, beside;
};
#define GSD_SIZES(F) {formats::F::kWeights, formats::F::kBytes, formats::F::kBeside}
constexpr FormatSizes kSizes[kKinds] = {{1, 4, 0}, {1, 2, 0}, {1, 2, 0}, GSD_FORMATS(GSD_SIZES)};
constexpr int64_t block_weights(Kind kind) { return kSizes[static_cast<int>(kind)].weights; }
constexpr int64_t block_bytes(Kind kind) { return kSizes[static_cast<int>(kind)].bytes; }
constexpr int64_t beside(Kind kind) { return kSizes[static_cast<int>(kind)].beside; }

// One row of `inputs` weights from where it lies into the model's dtype. scales: float32 [groups, beside(kind)], of this
// row, for kinds that have theirs beside them.
typedef void (*Decode)(const void* row, const float* scales, int64_t groups, int64_t inputs, void* out);

// Of floats, through float32.
template <Element from, Element to>
void decode_floats(const void* row, const float*, int64_t, int64_t inputs, void* out) {
  constexpr int64_t kAtOnce = 64;
  float values[kAtOnce];
  for (int64_t i = 0; i < inputs; i += kAtOnce) {
    const int64_t n = inputs - i < kAtOnce ? inputs - i : kAtOnce;
    read_row({static_cast<const char*>(row) + i * bytes_of(from), 0, from}, 0, values, n);
    write_row(values, static_cast<char*>(out) + i * bytes_of(to), to, n);
  }
}
#define GSD_FLOATS(k)                                                                                      \
  {decode_floats<Element::k, Element::kFloat32>, decode_floats<Element::k, Element::kBfloat16>,            \
   decode_floats<Element::k, Element::kFloat16>}

// By kind and by Element of the model.
struct Decoders {
  Decode of[kKinds][3];
};

struct Weights {
  const char* data;
  int64_t outputs, inputs, row_bytes;
  Kind kind;
  Decode decode;        // null: dense, in the model's dtype
  const float* scales;  // [outputs, groups, beside(kind)], or null
  int64_t groups;
};

// out[r, n − begin] = Σ_k x[r, k] · w[n, k] for the outputs begin … end − 1 of packed rows, in the form of w's kind.
void multiply(const IsaKernels& level, Element element, const Weights& w, const void* packed, int64_t rows,
              int64_t begin, int64_t end, float* out, int64_t out_stride);

// The same, rounded to `to`, into rows of `out` that begin with output 0.
void multiply_rounded(const IsaKernels& level, Element element, const Weights& w, const void* packed, int64_t rows,
                      int64_t begin, int64_t end, Element to, void* out, int64_t out_stride);

// Row n in the model's dtype.
void decode_weights(Element element, const Weights& w, int64_t n, void* to);

// The same as floats.
void read_weights(Element element, const Weights& w, int64_t n, float* to);

}  // namespace gsd
