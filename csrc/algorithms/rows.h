// The forward of rows on tensor cores, but for the attention: what its kernels are given, and how a product is cut.
//
// Row m of B·R rows is sequence m / R. Sums and the residual are float32; what a product reads is float16 or bfloat16,
// as its weights. gsd_kernels/ops/decoder_rows/reference.py is the specification, docs/how-it-works.md has the reasons.
//
// The bits of a row do not depend on other rows or on their number: a product is an instruction of 16 outputs × 8 rows
// × 16 inputs over and over, whose sums go through the inputs in one order, and the cut of the inputs into splits
// follows from the matrices' shape alone.
#pragma once

#include "path_attention.h"

namespace gsd {

constexpr int kMaxMatrices = 3;       // side by side in one launch
constexpr int kTileOutputs = 64;      // of a block; of gate and up half as many each
constexpr int kWideOutputs = 128;     // the same where many rows are read for every output
constexpr int kTileInputs = 64;       // of a stage in shared memory: 128 bytes of a row
constexpr int kSmallestSplit = 4;     // stages: a shorter one costs more to add up than it gains
constexpr int kMostSplits = 8;        // blocks that every GPU of 9.0 has together in a cluster
constexpr int kMultiprocessors = 132; // to be filled; not asked of the device, see above
constexpr int kMostTileRows = 64;     // of a block
constexpr int kFirstOutputs = kMultiprocessors * 5 * kTileOutputs;  // of a product of few rows, that run together
constexpr int kLine = 128;            // bytes of the second-level cache
constexpr int kMostEarlyRows = 32;    // from compute capability 9.0 on launches begin early; with more they lose by it

// How a matrix lies. The numbers of packed kinds are those of gsd_kernels/ops/packed/kinds.py.
enum class RowsKind : int { kDense = -1, kQ8_0 = 7, kInt8 = 13, kUint8 = 14, kInt4 = 15, kInt4Offset = 16 };

struct RowsMatrix {
  const uint16_t* weight;  // [outputs, inputs], or packed rows; where it lies, at a multiple of 16 bytes
  const uint16_t* bias;    // [outputs] or null
  float* out;              // [rows, out_stride] from the matrix's first column on; kStore and kAdd
  int outputs;
  RowsKind kind = RowsKind::kDense;
  int groups = 0;                 // of a row, each of a multiple of 8 inputs
  const float* scales = nullptr;  // [outputs, groups], or [outputs, groups, 2] with zero points or offsets
};

enum class RowsEnd {
  kStore,  // out = x · weightᵀ + bias
  kAdd,    // out += x · weightᵀ + bias
  kGate,   // matrices 0 and 1 are gate and up: rounded = silu(gate) · up
  kRound,  // one matrix: rounded = x · weightᵀ + bias
  kTurn,   // matrices 0, 1 and 2 are q, k and v: x · weightᵀ + bias goes where `turn` says; q may have no outputs
};

// Queries and keys normed (Qwen3) and turned by their position, keys and values into the cache.
struct RowsTurn {
  const float* qkv;        // [batch · rows, (heads + 2 kv_heads) · head_dim], where a launch of its own turns them
  const float* turns;      // [batch · rows, head_dim / 2, 2], of RowsOnce
  const uint16_t* q_norm;  // [head_dim] or null
  const uint16_t* k_norm;  // likewise
  const int32_t* slots;    // [batch · rows]; one outside 0 … capacity − 1 is not written
  uint16_t* q;             // [batch · rows, heads, head_dim], rounded
  uint16_t *k_cache, *v_cache;
  float* spoiled;  // [batch · rows] or null: gets NaN where a key or value is not finite
  int64_t k_batch, k_head, k_slot, v_batch, v_head, v_slot;  // strides in elements, multiples of 4
  int batch, rows, heads, kv_heads, head_dim, capacity;      // head_dim 64 or 128
  float eps;

  GSD_HD int head_bits() const { return head_dim == 64 ? 6 : 7; }
};

// What the launches behind a product read first of the next one's weights, in pieces: of every row the beginning of each
// split, for the second-level cache while memory would idle. It changes no bit.
struct RowsAhead {
  const char* matrices[kMaxMatrices];
  int rows[kMaxMatrices];  // of each; 0: none
  int row_bytes, splits, split_bytes, bytes;  // bytes: of a piece, at most; all of them multiples of 16

  GSD_HD int pieces() const { return bytes == 0 ? 0 : (rows[0] + rows[1] + rows[2]) * splits; }
  // Where a piece begins, and its size.
  GSD_HD const char* piece(int number, int& size) const {
    const int begin = number % splits * split_bytes;
    int row = number / splits;
    const char* matrix = matrices[0];
    bool behind = true;
    GSD_UNROLL
    for (int i = 1; i < kMaxMatrices; i++) {  // no index into the arguments: that would be a copy on the stack
      behind = behind && row >= rows[i - 1];
      if (behind) row -= rows[i - 1], matrix = matrices[i];
    }
    size = min_int(bytes, row_bytes - begin);
    return matrix + static_cast<int64_t>(row) * row_bytes + begin;
  }
};

struct RowsProduct {
  const uint16_t* x;  // [rows, inputs], at a multiple of 16 bytes
  RowsMatrix matrices[kMaxMatrices];
  int count;     // of matrices
  int rows;      // any number
  int inputs;    // a multiple of 8: copies are 16 bytes
  RowsEnd end;
  int64_t out_stride;  // from row to row of what is written
  uint16_t* rounded;   // [rows, out_stride], to the weights' type; kGate and kRound
  float* partials;     // rows_product_scratch says how much of both, at a multiple of 16 bytes; null if nothing
  int32_t* counters;   // zero before the first launch; every launch leaves them so
  RowsAhead ahead;     // of the product that follows; all zeros: nothing
  RowsTurn turn;       // kTurn, of dense matrices

  // Blocks that lie side by side over the outputs.
  GSD_HD int output_blocks(int tile = kTileOutputs) const {
    if (end == RowsEnd::kGate) return (2 * matrices[0].outputs + tile - 1) / tile;
    int blocks = 0;
    for (int i = 0; i < count; i++) blocks += (matrices[i].outputs + tile - 1) / tile;
    return blocks;
  }
  // Whether a matrix is packed: such a launch has blocks of their own, which dense ones may share.
  GSD_HD bool packed() const {
    bool found = false;
    for (int i = 0; i < count; i++) found |= matrices[i].kind != RowsKind::kDense;
    return found;
  }
  GSD_HD bool wide_heads() const { return end == RowsEnd::kTurn && turn.head_dim == kWideOutputs; }
  GSD_HD int stages() const { return (inputs + kTileInputs - 1) / kTileInputs; }
  // Stages of a split, but for the last one: a power of two splits that leave a multiprocessor for every wide tile.
  GSD_HD int split_stages() const {
    int wanted = kMostSplits;
    while (wanted > 1 && wanted * output_blocks(kWideOutputs) > kMultiprocessors) wanted /= 2;
    return max_int((stages() + wanted - 1) / wanted, kSmallestSplit);
  }
  GSD_HD int splits() const { return max_int((stages() + split_stages() - 1) / split_stages(), 1); }
  // Rows of a block. Does not change any row's bits.
  GSD_HD int tile_rows() const { return rows <= 16 && !wide_heads() ? 16 : rows <= 32 ? 32 : kMostTileRows; }
  GSD_HD int row_blocks() const { return (rows + tile_rows() - 1) / tile_rows(); }
  // Rows of a block of groups of warps (rows_group_product.h), which is for dense matrices and more rows than launch early.
  GSD_HD bool grouped() const { return rows > kMostEarlyRows && !packed(); }
  GSD_HD int group_rows() const { return rows <= 64 ? 64 : rows <= 128 ? 128 : 256; }
  // Outputs of a block, likewise: a cut goes through the inputs. Wide ones read the rows half as often. A head that is
  // turned lies in one block.
  GSD_HD int tile_outputs() const {
    if (end == RowsEnd::kTurn) return turn.head_dim;
    const bool filled = 2 * output_blocks(kWideOutputs) * splits() >= kMultiprocessors;
    return tile_rows() == kMostTileRows && filled && !packed() ? kWideOutputs : kTileOutputs;
  }
};

// What blocks would otherwise divide for again.
struct RowsCut {
  int output_blocks, stages, split_stages, splits;

  GSD_HD explicit RowsCut(const RowsProduct& a, int tile_outputs = kTileOutputs)
      : output_blocks(a.output_blocks(tile_outputs)), stages(a.stages()), split_stages(a.split_stages()), splits(a.splits()) {}
};

// The beginning of a product's weights, so many bytes in all, of the outputs that blocks have first; nothing where some are
// packed.
GSD_HD RowsAhead rows_ahead(const RowsProduct& next, int64_t bytes, int outputs = kFirstOutputs) {
  RowsAhead made{};
  if (next.packed()) return made;
  int rows = 0;
  for (int i = 0; i < next.count; i++) {
    made.matrices[i] = reinterpret_cast<const char*>(next.matrices[i].weight);
    const int most = next.end == RowsEnd::kGate ? outputs / 2 : outputs - rows;
    rows += made.rows[i] = min_int(next.matrices[i].outputs, most);
  }
  made.splits = next.splits(), made.row_bytes = 2 * next.inputs, made.split_bytes = 2 * kTileInputs * next.split_stages();
  const int64_t pieces = int64_t{rows} * made.splits, most = pieces == 0 ? 0 : bytes / pieces / kLine * kLine;
  made.bytes = most < made.split_bytes ? static_cast<int>(most) : made.split_bytes;
  return made;
}

struct RowsScratch {
  int64_t partials;  // floats
  int64_t counters;  // of 32 bits
};

// What `args` needs; launches that follow each other share it, so the largest of each is enough.
GSD_HD RowsScratch rows_product_scratch(const RowsProduct& args) {
  if (args.splits() == 1) return {0, 0};
  const int64_t outputs = args.output_blocks(kWideOutputs) * kWideOutputs;  // as many as of smaller tiles, or more
  return {args.row_blocks() * args.splits() * outputs * args.tile_rows(), int64_t{args.row_blocks()} * args.output_blocks()};
}

// RMSNorm of rows of the residual.
struct RowsNorm {
  const float* x;          // [batch · rows, hidden]
  const uint16_t* weight;  // [hidden]
  uint16_t* out;           // [batch · keep, hidden], rounded
  float* exact;            // the same in float32, or null
  float* copy;             // x itself, as `exact`, or null
  const float* marks;      // [batch · rows] or null: a row whose mark is NaN becomes NaN in `out`
  int batch, rows, keep;   // the last `keep` rows of every sequence; keep = rows: all
  int hidden;              // a multiple of 8
  float eps;
};

// What all layers read of a row, made by the first launch: what its heads turn by (RoPE), and its ancestors.
struct RowsOnce {
  const int32_t* positions;  // [rows], of the text
  const float* inv_freq;     // [half]
  float* turns;              // [rows, half, 2]: cosine and sine of the angle, times rope_scale
  int half;                  // of a head
  float rope_scale;
  AncestorListArgs ancestors;  // of rows that attend; without memory: none
};

// Rows of the embedding as the first residual. Tokens outside the vocabulary read its nearest end.
struct RowsEmbed {
  const int32_t* tokens;  // [rows]
  RowsMatrix embedding;   // [vocab, hidden]
  float* x;               // [rows, hidden]
  int rows, hidden;       // hidden: a multiple of 8; 0: nothing but `once`
  RowsOnce once;
};

}  // namespace gsd
