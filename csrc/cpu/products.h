// Products of a few rows with weights that lie row-major in memory, for every instruction set in one library.
//
// Nothing is packed or copied but the rows, which are few. A product is summed in one order that depends on the length
// of the inner dimension alone: not on how many rows there are, which of them is meant, where a thread's share of the
// outputs begins. So a row has the same bits alone and among others.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "model_math.h"
#include "weights.h"

namespace gsd {

constexpr int64_t kRowBlock = 16;  // the largest group of rows

// One level's functions for weights of one float type.
struct RowKernel {
  int64_t group;  // rows that are packed together
  int64_t wide;   // outputs that are multiplied together

  // Bytes of one packed row; room is needed for a multiple of kRowBlock.
  int64_t (*row_bytes)(int64_t k);

  // Rows first … last − 1 of x (float32, rows x_stride apart), rounded where the products multiply in bfloat16.
  // `first` is a multiple of `group`, and last too unless there are no more rows.
  void (*pack)(const float* x, int64_t x_stride, int64_t first, int64_t last, int64_t k, void* packed);

  // out[r, n] = Σ_k x[r, k] · w[n, k] for the outputs begin … end − 1; rows of w are w_stride elements apart. `resident`:
  // the weights are in a cache, so memory is not asked for those that follow.
  void (*products)(const void* packed, int64_t rows, int64_t k, const void* w, int64_t w_stride, int64_t begin,
                   int64_t end, float* out, int64_t out_stride, bool resident);

  // Of caches alone. out[r, :] += Σ_p weights[r, p] · v[offsets[p] …], so many positions at a time: `positions` is a
  // multiple of `together` unless it ends a sum. Weights may be rounded to bfloat16 where v is. Nothing beyond `width` is touched.
  void (*weighted)(const float* weights, int64_t weights_stride, int64_t rows, const void* v, const int64_t* offsets,
                   int64_t positions, int64_t width, float* out, int64_t out_stride) = nullptr;
  int64_t together = 1;
  int64_t sharing = 64;  // rows that share the reading of keys and values, at most
};

// Products of few rows with packed weights of the model's bfloat16, decoded in registers, by Kind; null: by strips. As
// `multiply` in weights.h; false, and all is to be done by strips, where groups or numbers beside them are of unusual sizes.
typedef bool (*Unpack)(const void* packed, int64_t rows, const Weights& w, int64_t begin, int64_t end, float* out,
                       int64_t out_stride);
struct UnpackingProducts {
  Unpack of[kKinds];
  int64_t most_rows;  // with more a strip is decoded once for all
};

// Products of int8 codes, as `products` above but for `out`, whose words are int32: Σ_k x[r, k] · (w[n, k] + offset). Rows of
// codes are row_bytes apart, with zeros behind the codes; a line of theirs is free.
struct IntegerProducts {
  int offset;
  int64_t (*row_bytes)(int64_t k);
  void (*products)(const void* packed, int64_t rows, int64_t k, const void* w, int64_t w_stride, int64_t begin,
                   int64_t end, float* out, int64_t out_stride, bool resident);
};

struct IsaKernels {
  const char* name;
  RowKernel large[3];  // of the model's weights, by Element
  RowKernel small[3];  // of the cache, whose products are short
  Decoders decoders;   // of packed weights
  UnpackingProducts unpacking;
  IntegerProducts integers;
};

// What each translation unit was compiled to; null where the compiler or the architecture has no such instructions.
const IsaKernels* portable_kernels();
const IsaKernels* avx2_kernels();
const IsaKernels* avx512_kernels();
const IsaKernels* avx512_bf16_kernels();
const IsaKernels* amx_kernels();
extern const UnpackingProducts kAmxUnpacking;  // its products with packed weights, if there are tiles
const IsaKernels* soft_amx_kernels();  // never chosen, only asked for by name

// Whether the system lets this process use tiles, asked for once; empty, or the reason.
std::string amx_permission();

// The best level that has proven itself, or the one that GSD_KERNELS_CPU_LEVEL or use_level names.
// Throws what names the variable if that one cannot run here.
const IsaKernels& kernels();

}  // namespace gsd
