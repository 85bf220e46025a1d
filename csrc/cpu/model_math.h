// The arithmetic of a LLaMA decoder over a few rows: float32 activations, weights and caches in any float type.
//
// Sizes that vectors run over (K of products, the width of everything but read_row and rms_norm) are multiples of kLanes.
// Every output is computed by one thread in one order, so results do not depend on the number of threads.
#pragma once

#include <cstdint>

namespace gsd {

enum class Element { kFloat32, kBfloat16, kFloat16 };

inline int64_t bytes_of(Element element) { return element == Element::kFloat32 ? 4 : 2; }

// A row-major matrix of weights, or of one cache head's positions.
struct Matrix {
  const void* data;
  int64_t row_stride;  // elements
  Element element;
};

// out[m, n] = Σ_k x[m, k] · w[n, k] for the columns begin … end − 1. Strides of x and out are in elements; rows of x that
// lie 4096 bytes apart would compete for the same places of the nearest cache.
void products(const float* x, int64_t x_stride, int64_t rows, int64_t k, const Matrix& w, int64_t begin, int64_t end,
              float* out, int64_t out_stride);

// out[m, :] += Σ_p weights[m, p] · v[p, :] over `positions` rows of v.
void weighted_rows(const float* weights, int64_t weights_stride, int64_t rows, const Matrix& v, int64_t positions,
                   int64_t width, float* out, int64_t out_stride);

// One row of a matrix as floats, and back, rounded to the nearest.
void read_row(const Matrix& from, int64_t row, float* to, int64_t width);
void write_row(const float* from, void* to, Element element, int64_t width);

// NaN becomes 0, infinities the largest values.
void make_finite(float* x, Element element, int64_t width);

// x · by
void scale_row(float* x, float by, int64_t width);

// out = x · weight / sqrt(mean(x²) + eps); out may be x
void rms_norm(const float* x, const float* weight, float eps, float* out, int64_t width);

// gate · sigmoid(gate) · up, into gate
void silu_times(float* gate, const float* up, int64_t width);

// The largest of n scores, padded to kLanes with −inf; NaN if there is one.
float largest(const float* scores, int64_t padded);

// scores → exp(score − shift), in place; their sum.
float exp_row(float* scores, int64_t padded, float shift);

}  // namespace gsd
