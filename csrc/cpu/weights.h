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

// The formats. Their numbers are those of gsd_kernels/ops/packed/kinds.py.
enum class Kind : int {
  kFloat32, kBfloat16, kFloat16,                        // as the model's dtype: dense
  kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kIQ4_NL, kMXFP4,   // blocks of 32, as GGUF has them
  kQ4_K, kQ5_K, kQ6_K,                                  // of 256
  kInt8, kUint8,                                        // a byte a weight; what scales it lies beside the rows
  kInt4, kInt4Offset, kNF4, kFP4,                       // half a byte
  kInt8Dynamic, kInt8Rounded, kInt8Vectorwise,          // as kInt8, for rows that are rounded first: see row_forms.h
  kCount
};
constexpr int kKinds = static_cast<int>(Kind::kCount);

// Floats beside the rows for a group of inputs: none, a scale, or a scale and a zero point or offset.
constexpr int64_t beside(Kind kind) {
  return kind < Kind::kInt8 ? 0 : kind == Kind::kUint8 || kind == Kind::kInt4 || kind == Kind::kInt4Offset ? 2 : 1;
}

// One row of `inputs` weights from where it lies into the model's dtype. scales: float32 [groups, beside(kind)], of this
// row, for kinds that have theirs beside them.
typedef void (*Decode)(const void* row, const float* scales, int64_t groups, int64_t inputs, void* out);

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

// Weights of a block, and its bytes; 1 weight where there are no blocks.
int64_t block_weights(Kind kind);
int64_t block_bytes(Kind kind);

// out[r, n − begin] = Σ_k x[r, k] · w[n, k] for the outputs begin … end − 1 of packed rows, in the form of w's kind.
void multiply(const IsaKernels& level, Element element, const Weights& w, const void* packed, int64_t rows,
              int64_t begin, int64_t end, float* out, int64_t out_stride);

// Row n in the model's dtype.
void decode_weights(Element element, const Weights& w, int64_t n, void* to);

// The same as floats.
void read_weights(Element element, const Weights& w, int64_t n, float* to);

}  // namespace gsd
