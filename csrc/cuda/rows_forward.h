// The launches of a decoder's forward of rows, in order: at most nine a layer, and two more for each
// piece of rows where attention goes piece by piece. The glue runs them on a GPU; tests count
// them, and run them on a CPU.
#pragma once

#include <cmath>
#include <vector>

#include "../algorithms/path_attention.h"
#include "../algorithms/rows_pair.h"

namespace gsd {

// Of a matrix the output is not set here.
struct RowsLayer {
  const uint16_t *input_norm, *second_norm;  // [hidden]
  const uint16_t *q_norm, *k_norm;           // [head_dim], null: none
  RowsMatrix q, k, v, o, gate, up, down;
  uint16_t *keys, *values;                                       // [B, Hkv, S, D]
  int64_t k_batch, k_head, k_slot, v_batch, v_head, v_slot;      // strides in elements
  int window;                                                    // positions that a row sees; 0: all
  bool paired;                                                   // q, k, v read embedding and feature side by side
  float* state;                                                  // [B · R, hidden]: takes what the layer reads; or null
};

constexpr int kPieceRows = 16;
constexpr int64_t kStateBytes = 64 << 20;  // of attention's states, beyond which rows attend piece by piece

struct RowsDecoder {
  int batch, rows, keep, hidden, inner, heads, kv_heads, head_dim, capacity, words, nodes;
  bool overlap, group;  // whether launches may begin early, and products of many rows are multiplied by groups of warps
  int64_t ahead;        // bytes that a product asks for of the next one's weights, where launches begin early
  float eps, rope_scale;
  const int32_t *tokens, *positions, *slots;  // [B, R]
  const int32_t* mask;                        // [B, R, words]
  const int32_t* depths;                      // [B, nodes]
  const int32_t *kv_len, *kv_start;           // [B]
  const float* inv_freq;                      // [head_dim / 2]
  RowsMatrix embedding;                       // [vocab, hidden]
  std::vector<RowsLayer> layers;
  const uint16_t* final_norm;  // [hidden]
  RowsMatrix head;
  RowsPair pair;           // of a drafter that reads features; `out` and `x` are not set here
  RowsMatrix projection;   // [hidden, 2 hidden], of such pairs to what the first layer reads; null: none
  const uint16_t* stored;  // [B · R, hidden]: every layer stores keys and values of it, and nothing else is done; or null
  float* state;      // [B · keep, hidden]: what the final norm reads; or null
  float* normed;     // [B · R, hidden]: what leaves the final norm, of every row; or null
  float* last;       // [B · keep, hidden]: what the output matrix reads
  uint16_t* logits;  // [B · keep, outputs of the head], of the weights' type
  float* spoiled;    // [B · R] or null: gets NaN where a key or value is not finite
  int64_t state_bytes = kStateBytes;
};

class RowsForward {
 public:
  explicit RowsForward(const RowsDecoder& decoder) : d(decoder), count(decoder.batch * decoder.rows) {
    RowsScratch most{};
    const auto needs = [&](const RowsProduct& product) {
      const RowsScratch needed = rows_product_scratch(product);
      most.partials = needed.partials > most.partials ? needed.partials : most.partials;
      most.counters = needed.counters > most.counters ? needed.counters : most.counters;
    };
    if (projects()) needs(projection(nullptr));
    for (const RowsLayer& layer : d.layers) {
      needs(qkv(layer, nullptr));
      if (!stores()) needs(o(layer, nullptr)), needs(gated(layer, nullptr)), needs(down(layer, nullptr));
    }
    if (!stores()) needs(output(nullptr));
    counters = place(4 * most.counters);  // first, so that one piece has to be cleared
    cleared = size;
    x = place(4 * int64_t{count} * d.hidden);
    normed = place(2 * int64_t{count} * d.hidden);
    pairs = place(reads_features() ? 4 * int64_t{count} * d.hidden : 0);
    bool all = true;
    for (const RowsLayer& layer : d.layers) all &= turned(layer);
    projected = place(all ? 0 : 4 * int64_t{count} * qkv_size());
    turns = place(4 * int64_t{count} * d.head_dim);
    queries = place(2 * int64_t{count} * q_size());
    attended = place(2 * int64_t{count} * q_size());
    products = place(2 * int64_t{count} * d.inner);
    ancestors = place(4 * int64_t{count} * ancestor_lists(nullptr).width());
    lengths = place(4 * int64_t{count});
    path = place(stores() ? 0 : 4 * path_scratch_floats(piece()));
    partials = place(4 * most.partials);
  }

  // Whether launches begin while the one before ends: those of few rows, and of groups of warps, gain by it.
  bool early() const { return d.overlap && (d.group || count <= kMostEarlyRows); }
  int64_t bytes() const { return size; }             // of scratch memory, at a multiple of 256 bytes
  int64_t cleared_bytes() const { return cleared; }  // of its beginning, which have to be 0

  // Calls `launch` for every kernel in order, up to the first error, which is returned. Where nothing is asked of the last
  // layer, it ends with its keys and values.
  template <class Launch>
  int run(char* memory, Launch& launch) const {
    if (count == 0) return 0;
    Launches<Launch> launches{launch};
    if (reads_features()) {
      launches(pair(memory));
    } else {  // without a residual where keys and values are stored alone
      launches(RowsEmbed{d.tokens, d.embedding, at<float>(memory, x), count, stores() ? 0 : d.hidden, once(memory)});
    }
    if (projects()) launches(before(projection(memory), qkv(d.layers[0], nullptr)));
    for (size_t l = 0; l < d.layers.size() && launches.error == 0; l++) {
      const RowsLayer& layer = d.layers[l];
      const bool last = l + 1 == d.layers.size(), ends = last && d.keep == 0 && d.normed == nullptr;
      const RowsProduct behind = !last ? qkv(d.layers[l + 1], nullptr) : d.keep > 0 ? output(nullptr) : RowsProduct{};
      if (!layer.paired && !stores()) {
        RowsNorm norm = norm_of(layer.input_norm, memory);
        norm.copy = layer.state;
        launches(norm);
      }
      project(layer, stores() ? behind : ends ? RowsProduct{} : o(layer, nullptr), memory, launches);
      if (!stores() && !ends) finish_layer(layer, behind, memory, launches);
    }
    if (d.normed != nullptr) {
      RowsNorm every = norm_of(d.final_norm, memory);
      every.exact = d.normed;
      launches(every);
    }
    if (d.keep == 0) return launches.error;
    RowsNorm norm = norm_of(d.final_norm, memory);
    norm.keep = d.keep;
    norm.exact = d.last, norm.copy = d.state;
    norm.marks = d.spoiled;  // so that a marked row's logits are NaN
    launches(norm), launches(output(memory));
    return launches.error;
  }

 private:
  // None behind the first that fails.
  template <class Launch>
  struct Launches {
    Launch& launch;
    int error = 0;
    template <class... Args>
    void operator()(const Args&... args) {
      if (error == 0) error = launch(args...);
    }
  };

  // Queries, keys and values; `next`: the product behind it.
  template <class Launch>
  void project(const RowsLayer& layer, const RowsProduct& next, char* memory, Launches<Launch>& launches) const {
    launches(before(qkv(layer, memory), next));
    if (!turned(layer)) launches(turn(layer, memory));
  }

  // Whether the product of q, k and v ends with their heads turned: packed matrices have tiles of half a head of 128, and
  // groups of warps no place to add up a head's squares.
  bool turned(const RowsLayer& layer) const {
    const RowsProduct product = qkv(layer, nullptr, false);
    const bool norms = layer.q_norm != nullptr || layer.k_norm != nullptr;
    return !product.packed() && !(norms && d.group && product.grouped());
  }

  template <class Launch>
  void finish_layer(const RowsLayer& layer, const RowsProduct& next, char* memory, Launches<Launch>& launches) const {
    attend(layer, memory, launches);
    launches(before(o(layer, memory), gated(layer, nullptr)));
    launches(norm_of(layer.second_norm, memory));
    launches(before(gated(layer, memory), down(layer, nullptr)));
    launches(before(down(layer, memory), next));
  }

  // Pieces follow each other, in one memory for their states. It changes no bit.
  template <class Launch>
  void attend(const RowsLayer& layer, char* memory, Launches<Launch>& launches) const {
    const PathAttentionSizes most = piece();
    for (int batch = 0; batch < d.batch; batch += most.batch) {
      for (int row = 0; row < d.rows; row += most.rows) {
        PathAttentionSizes sizes = most;
        sizes.batch = min_int(most.batch, d.batch - batch), sizes.rows = min_int(most.rows, d.rows - row);
        launches(attention(layer, memory, batch, row), sizes);
      }
    }
  }

  // What attends at a time: all sequences, or some; where states of one are too many, some rows of it.
  PathAttentionSizes piece() const {
    PathAttentionSizes sizes{1, d.kv_heads, d.heads / d.kv_heads, 1, d.head_dim, d.capacity};
    const int64_t of_row = 4 * path_scratch_floats(sizes), rows = d.state_bytes / (of_row > 0 ? of_row : 1);
    if (rows >= d.rows) {
      const int64_t batch = rows / (d.rows > 0 ? d.rows : 1);
      sizes.rows = d.rows, sizes.batch = batch < d.batch ? static_cast<int>(batch) : d.batch;
    } else {
      const int most = rows > kPieceRows ? static_cast<int>(rows) / kPieceRows * kPieceRows : kPieceRows;
      const int pieces = (d.rows + most - 1) / most;
      sizes.rows = ((d.rows + pieces - 1) / pieces + kPieceRows - 1) / kPieceRows * kPieceRows;
    }
    return sizes;
  }

  // A product that asks for the weights of the next one, where launches begin early.
  RowsProduct before(RowsProduct made, const RowsProduct& next) const {
    const bool grouped = d.group && next.grouped();
    if (early()) made.ahead = rows_ahead(next, d.ahead, grouped ? kMultiprocessors * kWideOutputs : kFirstOutputs);
    return made;
  }

  bool reads_features() const { return d.pair.features != nullptr; }
  bool projects() const { return d.projection.weight != nullptr; }
  bool stores() const { return d.stored != nullptr; }
  int q_size() const { return d.heads * d.head_dim; }
  int kv_size() const { return d.kv_heads * d.head_dim; }
  int qkv_size() const { return (stores() ? 0 : q_size()) + 2 * kv_size(); }

  int64_t place(int64_t bytes) {
    const int64_t begin = size;
    size += (bytes + 255) / 256 * 256;
    return begin;
  }
  template <class T>
  static T* at(char* memory, int64_t place) {
    return memory == nullptr ? nullptr : reinterpret_cast<T*>(memory + place);
  }

  RowsNorm norm_of(const uint16_t* weight, char* memory) const {
    return {at<float>(memory, x), weight, at<uint16_t>(memory, normed), nullptr, nullptr, nullptr,
            d.batch,              d.rows, d.rows,                       d.hidden, d.eps};
  }

  RowsProduct product(char* memory, int64_t read, int inputs, RowsEnd end, int64_t out_stride) const {
    RowsProduct made{};
    made.x = at<uint16_t>(memory, read);
    made.count = 1;
    made.rows = count;
    made.inputs = inputs;
    made.end = end;
    made.out_stride = out_stride;
    made.partials = at<float>(memory, partials);
    made.counters = at<int32_t>(memory, counters);
    return made;
  }

  RowsOnce once(char* memory) const {
    return {d.positions,      d.inv_freq, at<float>(memory, turns),
            d.head_dim / 2, d.rope_scale, stores() ? AncestorListArgs{} : ancestor_lists(memory)};
  }

  RowsPair pair(char* memory) const {
    RowsPair made = d.pair;
    made.out = at<uint16_t>(memory, pairs);
    made.x = projects() ? nullptr : at<float>(memory, x);
    made.once = once(memory);
    return made;
  }

  RowsProduct projection(char* memory) const {
    RowsProduct made = product(memory, pairs, 2 * d.hidden, RowsEnd::kStore, d.hidden);
    made.matrices[0] = d.projection;
    made.matrices[0].out = at<float>(memory, x);
    return made;
  }

  RowsProduct qkv(const RowsLayer& layer, char* memory) const { return qkv(layer, memory, turned(layer)); }
  RowsProduct qkv(const RowsLayer& layer, char* memory, bool turned) const {
    RowsProduct made = layer.paired ? product(memory, pairs, 2 * d.hidden, RowsEnd::kStore, qkv_size())
                                    : product(memory, normed, d.hidden, RowsEnd::kStore, qkv_size());
    made.count = 3;
    const RowsMatrix* of[] = {&layer.q, &layer.k, &layer.v};
    if (stores()) made.x = d.stored;
    int64_t place = projected;
    for (int i = 0; i < made.count; i++) {
      made.matrices[i] = *of[i];
      if (stores() && i == 0) made.matrices[i].outputs = 0;  // nobody asks
      made.matrices[i].out = at<float>(memory, place);
      place += 4 * made.matrices[i].outputs;
    }
    if (turned) made.end = RowsEnd::kTurn, made.turn = turn(layer, memory);
    return made;
  }

  // Added to the residual.
  RowsProduct added(const RowsMatrix& matrix, char* memory, int64_t read, int inputs) const {
    RowsProduct made = product(memory, read, inputs, RowsEnd::kAdd, d.hidden);
    made.matrices[0] = matrix;
    made.matrices[0].out = at<float>(memory, x);
    return made;
  }
  RowsProduct o(const RowsLayer& layer, char* memory) const { return added(layer.o, memory, attended, q_size()); }
  RowsProduct down(const RowsLayer& layer, char* memory) const { return added(layer.down, memory, products, d.inner); }

  RowsProduct gated(const RowsLayer& layer, char* memory) const {
    RowsProduct made = product(memory, normed, d.hidden, RowsEnd::kGate, d.inner);
    made.count = 2;
    made.matrices[0] = layer.gate;
    made.matrices[1] = layer.up;
    made.rounded = at<uint16_t>(memory, products);
    return made;
  }

  RowsProduct output(char* memory) const {
    RowsProduct made = product(memory, normed, d.hidden, RowsEnd::kRound, d.head.outputs);
    made.rows = d.batch * d.keep;
    made.matrices[0] = d.head;
    made.rounded = d.logits;
    return made;
  }

  RowsTurn turn(const RowsLayer& layer, char* memory) const {
    RowsTurn made{};
    made.qkv = at<float>(memory, projected);
    made.q_norm = layer.q_norm, made.k_norm = layer.k_norm;
    made.turns = at<float>(memory, turns), made.slots = d.slots;
    made.q = at<uint16_t>(memory, queries);
    made.k_cache = layer.keys, made.v_cache = layer.values, made.spoiled = d.spoiled;
    made.k_batch = layer.k_batch, made.k_head = layer.k_head, made.k_slot = layer.k_slot;
    made.v_batch = layer.v_batch, made.v_head = layer.v_head, made.v_slot = layer.v_slot;
    made.batch = d.batch, made.rows = d.rows, made.heads = stores() ? 0 : d.heads, made.kv_heads = d.kv_heads;
    made.head_dim = d.head_dim, made.capacity = d.capacity;
    made.eps = d.eps;
    return made;
  }

  AncestorListArgs ancestor_lists(char* memory) const {
    return {d.mask, d.depths, d.kv_len, at<int32_t>(memory, ancestors), at<int32_t>(memory, lengths),
            d.batch, d.rows,  d.words,  d.nodes,                        d.capacity};
  }

  // From a row of a sequence on.
  PathAttentionArgs attention(const RowsLayer& layer, char* memory, int batch, int row) const {
    const int64_t first = int64_t{batch} * d.rows + row, width = ancestor_lists(nullptr).width();
    PathAttentionArgs made{};
    made.q = at<uint16_t>(memory, queries + 2 * first * q_size());
    made.k = layer.keys + batch * layer.k_batch, made.v = layer.values + batch * layer.v_batch;
    made.slots = at<int32_t>(memory, ancestors + 4 * first * width);
    made.lengths = at<int32_t>(memory, lengths + 4 * first);
    made.kv_len = d.kv_len + batch, made.kv_start = d.kv_start + batch, made.positions = d.positions + first;
    made.scratch = at<float>(memory, path);
    made.out = at<uint16_t>(memory, attended + 2 * first * q_size());
    made.q_row = made.out_row = q_size();
    made.k_batch = layer.k_batch, made.k_head = layer.k_head, made.k_slot = static_cast<int>(layer.k_slot);
    made.v_batch = layer.v_batch, made.v_head = layer.v_head, made.v_slot = static_cast<int>(layer.v_slot);
    made.path = static_cast<int>(width);
    made.window = layer.window;
    made.scale = kLog2E / std::sqrt(static_cast<float>(d.head_dim));
    return made;
  }

  const RowsDecoder& d;
  const int count;  // of rows, B · R
  int64_t size = 0, cleared = 0;
  // Places in the scratch memory.
  int64_t counters = 0, x = 0, normed = 0, pairs = 0, projected = 0, turns = 0, queries = 0, attended = 0, products = 0;
  int64_t ancestors = 0, lengths = 0, path = 0, partials = 0;
};

}  // namespace gsd
