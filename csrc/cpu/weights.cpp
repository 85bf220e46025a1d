#include "weights.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "lines.h"
#include "row_forms.h"

namespace gsd {
namespace {

constexpr int64_t kStripBytes = 24 << 10;  // of decoded weights: they stay in the nearest cache beside a few rows

// Of the asking thread; it keeps its size.
char* strip_of(int64_t bytes) {
  static thread_local Lines<char> storage;
  storage.make_room(bytes);
  return storage.data();
}

void decode_row(const Weights& w, int64_t n, void* to) {
  w.decode(w.data + n * w.row_bytes, w.scales + n * w.groups * beside(w.kind), w.groups, w.inputs, to);
}

}  // namespace

void multiply(const IsaKernels& level, Element element, const Weights& w, const void* packed, int64_t rows,
              int64_t begin, int64_t end, float* out, int64_t out_stride) {
  if (has_codes(form_of(w.kind))) {
    return multiply_codes(level, element, w, packed, rows, begin, end, out, out_stride);
  }
  const RowKernel& kernel = level.large[static_cast<int>(element)];
  const int64_t k = w.inputs, size = bytes_of(element);
  if (w.decode == nullptr) {
    return kernel.products(packed, rows, k, w.data + begin * w.row_bytes, k, 0, end - begin, out, out_stride, false);
  }
  const auto unpacking = element == Element::kBfloat16 ? level.unpacking.of[static_cast<int>(w.kind)] : nullptr;
  if (unpacking != nullptr && rows <= level.unpacking.most_rows &&
      unpacking(packed, rows, w, begin, end, out, out_stride)) {
    return;
  }
  // Columns at powers of two would meet in one set of the first cache.
  const int64_t stride = ((k * size + kLineBytes - 1) / kLineBytes + 1) * kLineBytes / size;
  const int64_t fitting = kStripBytes / (stride * size) / kernel.wide * kernel.wide;
  const int64_t most = std::max(kernel.wide, fitting);
  char* strip = strip_of(most * stride * size);
  for (int64_t n = begin; n < end; n += most) {
    const int64_t count = std::min(most, end - n);
    for (int64_t j = 0; j < count; j++) decode_row(w, n + j, strip + j * stride * size);
    kernel.products(packed, rows, k, strip, stride, 0, count, out + n - begin, out_stride, true);
  }
}

void multiply_rounded(const IsaKernels& level, Element element, const Weights& w, const void* packed, int64_t rows,
                      int64_t begin, int64_t end, Element to, void* out, int64_t out_stride) {
  if (to == Element::kFloat32) {
    return multiply(level, element, w, packed, rows, begin, end, static_cast<float*>(out) + begin, out_stride);
  }
  constexpr int64_t kColumns = 64;
  Lines<float> part;
  part.make_room(rows * kColumns);
  for (int64_t n = begin; n < end; n += kColumns) {
    const int64_t count = std::min(kColumns, end - n);
    multiply(level, element, w, packed, rows, n, n + count, part.data(), kColumns);
    for (int64_t r = 0; r < rows; r++) {
      write_row(part.data() + r * kColumns, static_cast<char*>(out) + (r * out_stride + n) * bytes_of(to), to, count);
    }
  }
}

void decode_weights(Element element, const Weights& w, int64_t n, void* to) {
  if (w.decode != nullptr) return decode_row(w, n, to);
  memcpy(to, w.data + n * w.row_bytes, static_cast<size_t>(w.inputs * bytes_of(element)));
}

void read_weights(Element element, const Weights& w, int64_t n, float* to) {
  if (w.decode == nullptr) return read_row({w.data, w.inputs, element}, n, to, w.inputs);
  char* row = strip_of(w.inputs * bytes_of(element));
  decode_row(w, n, row);
  read_row({row, w.inputs, element}, 0, to, w.inputs);
}

}  // namespace gsd
