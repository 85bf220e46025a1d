// Products in tiles of any make, included with those of the hardware and with those in software, behind pair_blocks.h. Inside
// the target; no include may stand here.

constexpr int64_t kTile = 16, kDeep = 32;  // rows or columns of a tile, and numbers of a row of pairs

// What is done while a block is multiplied, step by step: the last one's sums, [32 outputs][32 rows], are put where they belong,
// and the weights that follow are asked for.
struct Behind {
  const uint16_t* ahead = nullptr;
  const float* sums = nullptr;
  float* out = nullptr;
  int64_t stride = 0, asked = 0, rows = 0, outputs = 0, out_stride = 0;
  int part = 4;  // of four

  void step(int64_t i) {
    for (int64_t r = 0; r < asked; r++) __builtin_prefetch(ahead + r * stride + i, 0, 2);
    if (part < 4) Tiles::put_turned(sums, part++, rows, outputs, out, out_stride);
  }
  void finish() {
    for (asked = 0; part < 4;) step(0);
  }
};

struct TileBlocks : Tiles {
  static constexpr int64_t kPositions = kDeep;

  // Sums are a tile as they lie if there are as many.
  template <int C>
  void begin(const float* out, int64_t out_stride, int64_t rows, int64_t columns) {
    if (rows >= kTile && columns >= kTile) return load<C>(out, out_stride * 4);
    alignas(64) float part[kTile][kTile] = {};
    for (int64_t r = 0; r < fewer(rows, kTile); r++) copy(out + r * out_stride, columns, part[r]);
    load<C>(part, 64);
  }
  template <int C>
  void end(float* out, int64_t out_stride, int64_t rows, int64_t columns) const {
    alignas(64) float part[kTile][kTile];
    if (rows >= kTile && columns >= kTile) return store<C>(out, out_stride * 4);
    store<C>(part, 64);
    for (int64_t r = 0; r < fewer(rows, kTile); r++) copy(part[r], columns, out + r * out_stride);
  }
  static void copy(const float* from, int64_t columns, float* to) {
    memcpy(to, from, static_cast<size_t>(fewer(columns, kTile)) * sizeof(float));
  }

  // out[rows, columns] = a[rows, depth] · b, or +=; up to 32 rows and columns. Of b, words of pairs, the tiles of the second 16
  // columns lie `second` behind.
  void add_tiles(const uint16_t* a, int64_t a_stride, int64_t rows, const uint16_t* b, int64_t b_line, int64_t second,
                 int64_t columns, int64_t depth, bool adds, float* out, int64_t out_stride, Behind& behind) {
    const bool tall = rows > kTile, wide = columns > kTile;
    float *below = out + kTile * out_stride, *beside = out + kTile, *last = below + kTile;
    this->clear();
    if (adds) begin<0>(out, out_stride, rows, columns);
    if (adds && tall) begin<1>(below, out_stride, rows - kTile, columns);
    if (adds && wide) begin<2>(beside, out_stride, rows, columns - kTile);
    if (adds && tall && wide) begin<3>(last, out_stride, rows - kTile, columns - kTile);
    for (int64_t i = 0; i < depth; i += kDeep) {
      const uint16_t* words = b + i / 2 * b_line;
      load<4>(a + i, a_stride * 2);
      load<6>(words, b_line * 2);
      Tiles::add<0, 4, 6>();
      if (tall) load<5>(a + kTile * a_stride + i, a_stride * 2), Tiles::add<1, 5, 6>();
      if (wide) load<7>(words + second, b_line * 2), Tiles::add<2, 4, 7>();
      if (tall && wide) Tiles::add<3, 5, 7>();
      behind.step(i);
    }
    end<0>(out, out_stride, rows, columns);
    if (tall) end<1>(below, out_stride, rows - kTile, columns);
    if (wide) end<2>(beside, out_stride, rows, columns - kTile);
    if (tall && wide) end<3>(last, out_stride, rows - kTile, columns - kTile);
  }

  // Of pair_blocks.h. Rows are tiles as they lie.
  void add(const uint16_t* a, int64_t a_stride, int64_t rows, const uint16_t* b, int64_t columns, int64_t depth, bool adds,
           float* out, int64_t out_stride) {
    Behind nothing;
    for (int64_t n = 0; n < columns; n += 2 * kTile) {
      for (int64_t r = 0; r < rows; r += 2 * kTile) {
        add_tiles(a + r * a_stride, a_stride, rows - r, b + 2 * n, 2 * kColumns, 2 * kTile, columns - n, depth, adds,
                  out + r * out_stride + n, out_stride, nothing);
      }
    }
  }
};

// Of 16 rows: [k / 32][16 pairs of inputs][16 rows][2].
void pack(const float* x, int64_t x_stride, int64_t first, int64_t last, int64_t k, void* packed) {
  alignas(64) uint16_t rounded[kTile * kDeep];
  for (int64_t block = first; block < last; block += kTile) {
    uint16_t* to = static_cast<uint16_t*>(packed) + block * up_to(k, kDeep);
    const int64_t rows = fewer(kTile, last - block);
    for (int64_t i = 0; i < k; i += kDeep) {
      for (int64_t r = 0; r < rows; r++) Tiles::round(x + (block + r) * x_stride + i, k - i, rounded + r * kDeep);
      Tiles::turn(rounded, kDeep, rows, kDeep, to + i * kTile, 2 * kTile);
    }
  }
}

// RowKernel::products. Weights are tiles as they lie, but for copies where they hang over an edge, so that sums are
// [outputs][rows].
void products(const void* packed, int64_t rows, int64_t k, const void* w, int64_t w_stride, int64_t begin, int64_t end,
              float* out, int64_t out_stride, bool resident) {
  TileBlocks tiles;
  constexpr int64_t kWide = 2 * kTile;
  alignas(64) float sums[2][kWide * kWide];
  std::vector<uint16_t> copied;
  Behind behind;
  const int64_t depth = up_to(k, kDeep), blocks = (rows + kWide - 1) / kWide;
  behind.out_stride = out_stride;
  int turn = 0;
  for (int64_t n = begin; n < end; n += kWide) {
    const int64_t outputs = fewer(kWide, end - n);
    const uint16_t* weights = static_cast<const uint16_t*>(w) + n * w_stride;
    behind.stride = w_stride;
    if (outputs < kWide || depth > k) {
      copied.assign(static_cast<size_t>(kWide * depth), 0);
      for (int64_t j = 0; j < outputs; j++) std::copy_n(weights + j * w_stride, k, copied.data() + j * depth);
      weights = copied.data(), behind.stride = depth;
    }
    // The next outputs are asked for by all blocks of rows in turn: at once they would be waited for.
    const int64_t next = resident || behind.stride != w_stride ? 0 : kWide;
    for (int64_t r = 0, asked = 0; r < rows; r += kWide, turn = 1 - turn) {
      const int64_t until = next * (r / kWide + 1) / blocks;
      const uint16_t* x = static_cast<const uint16_t*>(packed) + r * depth;
      behind.ahead = weights + (kWide + asked) * w_stride, behind.asked = until - asked, asked = until;
      tiles.add_tiles(weights, behind.stride, kWide, x, 2 * kTile, kTile * depth, up_to(fewer(kWide, rows - r), kTile), depth,
                      false, sums[turn], kWide, behind);
      behind.finish();
      behind.sums = sums[turn], behind.rows = rows - r, behind.outputs = outputs, behind.part = 0;
      behind.out = out + r * out_stride + n;
    }
  }
  behind.finish();
}
