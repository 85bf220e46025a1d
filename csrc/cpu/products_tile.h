// The loops of every level, included by its translation unit with that level's instructions switched on. No include
// may stand here: what a header defines inline must not be compiled for more than the baseline.
//
// A level gives types T with: Stored (a weight in memory; bytes where kPacked, whose steps are kStepBytes, and what is Held for
// kHeld inputs of those), Seen (an element of a packed row), kStep (elements of a step),
// kParts (of a step, if rows stay in registers; 0 if weights do), Weights, Row, Sum and Lanes (registers), and the functions
// below.

#define GSD_TILE static inline __attribute__((always_inline))

constexpr int kOutputs = 4;  // of 32 registers six rows have 24 sums, 4 weights and a row; of 16 three have 12, one and 3
constexpr int64_t kNearBytes = 512 << 10;  // of packed rows, that stay in the second cache while all weights go past
constexpr int64_t kLine = 64, kPage = 4096;
// From outputs that are multiplied to those that are asked for: two fours, and as many bytes as memory gives while it answers.
// The four of a tile are read side by side but asked for one after the other, so the last is asked for one and a quarter of
// the way ahead only: of short rows that was no more than 6 kB, 0.3 µs of a thread's bandwidth. A quarter of the outputs at
// most, so that little behind them is read for nothing.
constexpr int64_t kAhead = 2 * kOutputs, kAheadBytes = 24 << 10;
constexpr int64_t kPagesAhead = 16 * kPage;  // from there to the pages whose addresses are known already

GSD_TILE int64_t fewer(int64_t a, int64_t b) { return a < b ? a : b; }
GSD_TILE const char* sooner(const char* a, const char* b) { return a < b ? a : b; }

template <class T>
int64_t row_bytes_of(int64_t k) {
  // Rows at powers of two would meet in one set of the first cache.
  return (k + T::kStep - 1) / T::kStep * T::kStep * static_cast<int64_t>(sizeof(typename T::Seen)) + kLine;
}

template <class T>
void pack_of(const float* x, int64_t x_stride, int64_t first, int64_t last, int64_t k, void* packed) {
  const int64_t bytes = row_bytes_of<T>(k), whole = k / T::kStep * T::kStep;
  for (int64_t r = first; r < last; r++) {
    const float* from = x + r * x_stride;
    typename T::Seen* to = reinterpret_cast<typename T::Seen*>(static_cast<char*>(packed) + r * bytes);
    int64_t i = 0;
    for (; i < whole; i += T::kStep) T::arrange(from + i, to + i);
    if (i < k) {
      float part[T::kStep] = {};
      for (int64_t j = i; j < k; j++) part[j - i] = from[j];
      T::arrange(part, to + i);
    }
  }
}

// What T has where weights lie as they are multiplied.
struct Dense {
  static constexpr int kParts = 0, kStepBytes = 0;
  static constexpr bool kPacked = false;
};

// Four outputs: their weights, and the numbers beside them where packed weights have some, for every `size` inputs.
template <class Stored>
struct Columns {
  const Stored* weights[kOutputs];
  const float* beside[kOutputs];
  int64_t size;
};

// What a tile holds of the values that its packed weights stand for.
template <class T, bool Packed = T::kPacked>
struct Kept {
  struct Read {};
  struct Held {};
};
template <class T>
struct Kept<T, true> {
  typedef typename T::Read Read;
  typedef typename T::Held Held;
};

// use(a step's weights): of the last one only `n` are there, and zeros behind them.
template <class T, class Use>
GSD_TILE void whole_step(const typename T::Stored* from, int n, const Use& use) {
  if (n == T::kStep) return use(from);
  typename T::Stored whole[T::kStep] = {};
  __builtin_memcpy(whole, from, static_cast<size_t>(n) * sizeof whole[0]);
  use(whole);
}

// total[R, 4] += x[R, n] · column[4, n]ᵀ over a step's n inputs. Four weights stay in registers while rows pass by; where
// registers are few, three rows stay while the weights of a part pass by. A sum has one order, whatever R is.
template <class T, int R>
GSD_TILE void multiply_step(const char* x, int64_t row_bytes, const Columns<typename T::Stored>& columns,
                            const typename Kept<T>::Held& held, int64_t i, int n,
                            typename T::Sum (&total)[R][kOutputs]) {
  typedef typename T::Seen Seen;
  typedef typename T::Stored Stored;
  const auto& column = columns.weights;
  if constexpr (T::kParts > 0) {
    GSD_UNROLL
    for (int part = 0; part < T::kParts; part++) {
      typename T::Row row[R];
      GSD_UNROLL
      for (int r = 0; r < R; r++) T::see_part(reinterpret_cast<const Seen*>(x + r * row_bytes) + i, part, row[r]);
      GSD_UNROLL
      for (int j = 0; j < kOutputs; j++) {
        typename T::Weights weights;
        whole_step<T>(column[j] + i, n, [&](const Stored* from) __attribute__((always_inline)) { T::widen(from, part, weights); });
        GSD_UNROLL
        for (int r = 0; r < R; r++) T::add(row[r], weights, total[r][j]);
      }
    }
  } else {
    typename T::Weights weights[kOutputs];
    typename T::Row row;
    GSD_UNROLL
    for (int j = 0; j < kOutputs; j++) {
      if constexpr (T::kPacked) T::unpack(column[j], i, held, j, weights[j]);
      else whole_step<T>(column[j] + i, n, [&](const Stored* from) __attribute__((always_inline)) { T::widen(from, weights[j]); });
    }
    GSD_UNROLL
    for (int r = 0; r < R; r++) {
      T::see(reinterpret_cast<const Seen*>(x + r * row_bytes) + i, row);
      GSD_UNROLL
      for (int j = 0; j < kOutputs; j++) T::add(row, weights[j], total[r][j]);
    }
  }
}

// out[R, 4] = x[R, k] · column[4, k]ᵀ. Meanwhile memory is asked for `asked` columns from `ahead` on, in its order.
template <class T, int R>
GSD_TILE void product_tile(const char* x, int64_t row_bytes, int64_t k, const Columns<typename T::Stored>& columns, const char* ahead,
                           int64_t asked, int64_t outputs, float* out, int64_t out_stride) {
  constexpr int64_t kStepBytes = T::kPacked ? T::kStepBytes : T::kStep * static_cast<int64_t>(sizeof(typename T::Stored));
  constexpr int64_t kStepsALine = kLine / kStepBytes;
  typename T::Sum total[R][kOutputs];
  GSD_UNROLL
  for (int r = 0; r < R; r++) {
    GSD_UNROLL
    for (int j = 0; j < kOutputs; j++) T::clear(total[r][j]);
  }
  typename Kept<T>::Read read;
  typename Kept<T>::Held held[2];  // of the packed weights at hand and of those that follow
  int now = 1;
  if constexpr (T::kPacked) {
    T::read(columns, 0, k, read);
    T::hold(columns, 0, k, read, held[0]);
    if (T::kHeld < k) T::read(columns, T::kHeld, k, read);
  }
  int64_t i = 0;
  for (; i + T::kStep <= k; i += T::kStep) {
    if constexpr (T::kPacked) {
      if (i % T::kHeld == 0) {
        if (i + T::kHeld < k) T::hold(columns, i + T::kHeld, k, read, held[now]);
        if (i + 2 * T::kHeld < k) T::read(columns, i + 2 * T::kHeld, k, read);
        now = 1 - now;
      }
    }
    multiply_step<T, R>(x, row_bytes, columns, held[now], i, T::kStep, total);
    if (kStepsALine <= 1 || i % (kStepsALine * T::kStep) == 0) {  // behind the loads that are waited for
      for (int64_t j = 0; j < asked; j++, ahead += kLine) __builtin_prefetch(ahead, 0, 2);
    }
  }
  if (i < k) multiply_step<T, R>(x, row_bytes, columns, held[now], i, static_cast<int>(k - i), total);
  GSD_UNROLL
  for (int r = 0; r < R; r++) {
    if (outputs == kOutputs) {
      T::sums(total[r], out + r * out_stride);
    } else {
      float sum[kOutputs];
      T::sums(total[r], sum);
      for (int j = 0; j < outputs; j++) out[r * out_stride + j] = sum[j];
    }
  }
}

// run(a constant) for as many rows as there are, up to R.
template <int R, class Run>
GSD_TILE void by_rows(int64_t rows, const Run& run) {
  if constexpr (R > 1) {
    if (rows < R) return by_rows<R - 1>(rows, run);
  }
  run(std::integral_constant<int, R>());
}

// Has the addresses of `touched` … `until` − 1 looked up, many pages at once: one by one, each would hold up the products
// for as long as that takes.
GSD_TILE void touch_pages(const char*& touched, const char* until) {
  for (; touched < until; touched += kPage) __builtin_prefetch(touched, 0, 2);
}

// Of weights `from`, with numbers `beside` them for groups of `size` inputs. Outputs that hang over the edge repeat the last one
// and are not stored.
template <class T>
GSD_TILE void products_over(const void* packed, int64_t rows, int64_t k, const typename T::Stored* from,
                            int64_t w_stride, const float* beside, int64_t beside_stride, int64_t size, int64_t begin,
                            int64_t end,
                            float* out, int64_t out_stride, bool resident) {
  typedef typename T::Stored Stored;
  const char* at_end = reinterpret_cast<const char*>(from + end * w_stride);
  const int64_t four = kOutputs * w_stride * static_cast<int64_t>(sizeof(Stored));
  const int64_t fours = fewer(kAheadBytes / four, (end - begin) / kOutputs / 4) * kOutputs;
  const int64_t ahead_outputs = fours > kAhead ? fours : kAhead;
  const int64_t bytes = row_bytes_of<T>(k), near = kNearBytes / bytes > 32 ? kNearBytes / bytes : 32;
  for (int64_t first = 0; first < rows; first += near) {
    const int64_t count = fewer(near, rows - first), tiles = (count + T::kRows - 1) / T::kRows;
    const int64_t asking = fewer(tiles, kOutputs);  // each tile asks for a part of the next columns
    const char* x = static_cast<const char*>(packed) + first * bytes;
    const char* touched = reinterpret_cast<const char*>(from + begin * w_stride);
    for (int64_t n = begin; n < end; n += kOutputs) {
      Columns<Stored> columns;
      GSD_UNROLL
      for (int j = 0; j < kOutputs; j++) {
        const int64_t output = fewer(n + j, end - 1);
        columns.weights[j] = from + output * w_stride;
        columns.beside[j] = beside + output * beside_stride;
      }
      columns.size = size;
      const char* ahead = reinterpret_cast<const char*>(from + (n + ahead_outputs) * w_stride);
      if (!resident && ahead + kPagesAhead > touched) touch_pages(touched, sooner(ahead + 2 * kPagesAhead, at_end));
      for (int64_t m = 0, tile = 0; tile < tiles; tile++) {
        const int64_t tall = (count - m + tiles - tile - 1) / (tiles - tile);  // as even as possible
        const int64_t begin_ask = fewer(kOutputs * tile / asking, kOutputs);
        const int64_t end_ask = fewer(kOutputs * (tile + 1) / asking, kOutputs);
        by_rows<T::kRows>(tall, [&](auto constant) __attribute__((always_inline)) {
          product_tile<T, decltype(constant)::value>(
              x + m * bytes, bytes, k, columns, ahead + begin_ask * w_stride * static_cast<int64_t>(sizeof(Stored)),
              resident ? 0 : end_ask - begin_ask, fewer(kOutputs, end - n), out + (first + m) * out_stride + n, out_stride);
        });
        m += tall;
      }
    }
  }
}

template <class T>
void products_of(const void* packed, int64_t rows, int64_t k, const void* w, int64_t w_stride, int64_t begin,
                 int64_t end, float* out, int64_t out_stride, bool resident) {
  products_over<T>(packed, rows, k, static_cast<const typename T::Stored*>(w), w_stride, nullptr, 0, k, begin, end, out,
                   out_stride, resident);
}

// out[R, V vectors] += weights · v, in registers over all positions.
template <class T, int R, int V>
GSD_TILE void weighted_tile(const float* weights, int64_t weights_stride, const typename T::Stored* v,
                            const int64_t* offsets, int64_t positions, float* out, int64_t out_stride, int part) {
  typename T::Lanes total[R][V], value[V];
  GSD_UNROLL
  for (int r = 0; r < R; r++) {
    GSD_UNROLL
    for (int j = 0; j < V; j++) T::load_lanes(out + r * out_stride + j * kLanes, part, total[r][j]);
  }
  for (int64_t p = 0; p < positions; p++) {
    GSD_UNROLL
    for (int j = 0; j < V; j++) T::widen_lanes(v + offsets[p] + j * kLanes, part, value[j]);
    GSD_UNROLL
    for (int r = 0; r < R; r++) {
      GSD_UNROLL
      for (int j = 0; j < V; j++) T::add_lanes(value[j], weights[r * weights_stride + p], total[r][j]);
    }
  }
  GSD_UNROLL
  for (int r = 0; r < R; r++) {
    GSD_UNROLL
    for (int j = 0; j < V; j++) T::store_lanes(total[r][j], part, out + r * out_stride + j * kLanes);
  }
}

template <class T>
void weighted_of(const float* weights, int64_t weights_stride, int64_t rows, const void* v, const int64_t* offsets,
                 int64_t positions, int64_t width, float* out, int64_t out_stride) {
  const typename T::Stored* values = static_cast<const typename T::Stored*>(v);
  for (int64_t r = 0; r < rows; r += T::kTall, weights += T::kTall * weights_stride, out += T::kTall * out_stride) {
    by_rows<T::kTall>(rows - r, [&](auto constant) __attribute__((always_inline)) {
      constexpr int kRows = decltype(constant)::value;
      int64_t d = 0;
      for (; d + T::kVectors * kLanes <= width; d += T::kVectors * kLanes) {
        weighted_tile<T, kRows, T::kVectors>(weights, weights_stride, values + d, offsets, positions, out + d, out_stride,
                                             kLanes);
      }
      for (; d < width; d += kLanes) {
        weighted_tile<T, kRows, 1>(weights, weights_stride, values + d, offsets, positions, out + d, out_stride,
                                   static_cast<int>(fewer(kLanes, width - d)));
      }
    });
  }
}

template <class T>
constexpr RowKernel kernel_of() {
  return {1, kOutputs, row_bytes_of<T>, pack_of<T>, products_of<T>, weighted_of<T>};
}

template <class T>
constexpr IntegerProducts integers_of(int offset) {
  return {offset, row_bytes_of<T>, products_of<T>};
}
