// Attention's products of bfloat16 in blocks of rows, for every level that has them: a RowKernel of keys and values, which
// are arranged in words of two numbers, a block at a time, and read by all rows. Inside the target; no include may stand here.
//
// A level gives Blocks with: kPositions (that are added up before a sum takes them), `round`, `turn` and `pair` as of ZmmPairs,
// and `add`: out[rows, columns] = a[rows, words] · b[words, kColumns], or +=.

constexpr int64_t kPairs = 2 * kRowBlock, kColumns = 64, kMostPairs = 256;  // numbers of 16 words; columns; numbers at a time

GSD_TILE int64_t up_to(int64_t n, int64_t of) { return (n + of - 1) / of * of; }

int64_t paired_row_bytes(int64_t k) { return up_to(k, kPairs) * static_cast<int64_t>(sizeof(uint16_t)); }

template <class Blocks>
void pack_paired(const float* x, int64_t x_stride, int64_t first, int64_t last, int64_t k, void* packed) {
  for (int64_t r = first; r < last; r++) {
    uint16_t* to = static_cast<uint16_t*>(packed) + r * up_to(k, kPairs);
    for (int64_t i = 0; i < k; i += kPairs) Blocks::round(x + r * x_stride + i, k - i, to + i);
  }
}

// RowKernel::products
template <class Blocks>
void paired_products(const void* packed, int64_t rows, int64_t k, const void* w, int64_t w_stride, int64_t begin,
                     int64_t end, float* out, int64_t out_stride, bool) {
  Blocks blocks;
  alignas(64) uint16_t keys[kMostPairs * kColumns];
  const int64_t x_stride = up_to(k, kPairs);
  for (int64_t n = begin; n < end; n += kColumns) {
    const int64_t columns = fewer(kColumns, end - n);
    for (int64_t i = 0; i < k; i += kMostPairs) {
      const int64_t depth = fewer(x_stride - i, kMostPairs);
      for (int64_t j = 0; j < columns; j += kRowBlock) {
        for (int64_t d = 0; d < depth; d += kPairs) {
          const uint16_t* from = static_cast<const uint16_t*>(w) + (n + j) * w_stride + i + d;
          for (int64_t r = 0; r < kRowBlock; r++) __builtin_prefetch(from + (kColumns + r) * w_stride, 0, 2);
          Blocks::turn(from, w_stride, columns - j, k - i - d, keys + d * kColumns + 2 * j, 2 * kColumns);
        }
      }
      blocks.add(static_cast<const uint16_t*>(packed) + i, x_stride, rows, keys, columns, depth, i > 0, out + n, out_stride);
    }
  }
}

// RowKernel::weighted
template <class Blocks>
void paired_weighted(const float* weights, int64_t weights_stride, int64_t rows, const void* v, const int64_t* offsets,
                     int64_t positions, int64_t width, float* out, int64_t out_stride) {
  constexpr int64_t kRounded = kMostPairs + kPairs;  // which is no power of two
  Blocks blocks;
  alignas(64) uint16_t values[kMostPairs * kColumns], rounded[kPairs * kRounded];
  const uint16_t* from = static_cast<const uint16_t*>(v);
  for (int64_t first = 0; first < positions; first += kMostPairs) {
    const int64_t count = fewer(kMostPairs, positions - first), depth = up_to(count, Blocks::kPositions);
    for (int64_t d = 0; d < width; d += kColumns) {
      const int64_t columns = fewer(kColumns, width - d);
      for (int64_t p = 0; p < depth; p += 2) {
        for (int64_t j = 0; j < columns; j += kRowBlock) {
          const auto at = [&](int64_t p) { return p < count ? from + offsets[first + p] + d + j : nullptr; };
          __builtin_prefetch(at(p + kPairs + j / kRowBlock % 2), 0, 2);  // lines of two positions in turn
          Blocks::pair(at(p), at(p + 1), columns - j, values + p * kColumns + 2 * j);
        }
      }
      for (int64_t r = 0; r < rows; r += kPairs) {
        const int64_t tall = fewer(kPairs, rows - r);
        for (int64_t i = 0; i < tall; i++) {
          const float* weight = weights + (r + i) * weights_stride + first;
          for (int64_t p = 0; p < count; p += kPairs) Blocks::round(weight + p, count - p, rounded + i * kRounded + p);
        }
        blocks.add(rounded, kRounded, tall, values, columns, depth, true, out + r * out_stride + d, out_stride);
      }
    }
  }
}

template <class Blocks>
constexpr RowKernel paired_kernel() {
  return {1, kColumns, paired_row_bytes, pack_paired<Blocks>, paired_products<Blocks>, paired_weighted<Blocks>,
          Blocks::kPositions, kMostPairs};
}
