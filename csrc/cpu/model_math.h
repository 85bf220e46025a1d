// The arithmetic of a LLaMA decoder over a few rows: float32 activations, weights and caches in any float type.
//
// Sizes that vectors run over (K of products, the width of everything but read_row, rms_norm and silu_times) are multiples of kLanes.
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

// One row of a matrix as floats, and back, rounded to the nearest.
void read_row(const Matrix& from, int64_t row, float* to, int64_t width);
void write_row(const float* from, void* to, Element element, int64_t width);

// NaN becomes 0, infinities the largest values.
bool make_finite(float* x, Element element, int64_t width);

// x · by
void scale_row(float* x, float by, int64_t width);

// out = x · weight / sqrt(mean(x²) + eps); out may be x
void rms_norm(const float* x, const float* weight, float eps, float* out, int64_t width);

// out = gate · sigmoid(gate) · up
void silu_times(const float* gate, const float* up, float* out, int64_t width);

// scores → exp(score − shift), in place; their sum.
float exp_row(float* scores, int64_t padded, float shift);

}  // namespace gsd
