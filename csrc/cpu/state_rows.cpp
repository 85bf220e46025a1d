// Recurrent layers over rows of a tree: gsd_kernels/ops/state_rows/api.py has the formulas, window.py the layout.
//
// Every head reads its state once for all rows, four vectors of keys and queries at a time; then every row folds in the
// tokens and rows on its path, in the order of the text. What is computed of a row is the same however many there are.
#include <algorithm>
#include <vector>

#include "../torch_ops/registration.h"
#include "lanes.h"

namespace gsd {
namespace {

constexpr int kVectors = 4;  // that are multiplied with a state at once
constexpr int64_t kBlocks = 3;

struct Sizes {
  int64_t batch, rows, heads, groups, key, value, decays, block, places;  // places: of a window, those of rows included
  int64_t first = 0;                                                      // rows of earlier calls
  int64_t committed() const { return kBlocks * block; }
  int64_t place(int64_t row) const { return committed() + first + row; }
};

// One sequence's rows: what is the same for all heads.
struct Paths {
  std::vector<int64_t> before;             // places of the tokens and rows before each row, behind one another
  std::vector<int64_t> begin, in_previous; // of a row: its first in `before`; how many lie in the block before its own
  std::vector<int64_t> slot;               // of the state that a row reads
};

struct Window {
  float *state, *keys, *updates, *sums;
};

struct Rows {
  const float *query, *key, *value, *decay, *beta;
  float* out;
};

// out[v][j] = Σ_i vectors[v][i] · state[i][j] of kVectors vectors, in the order of i.
GSD_INLINE void read_state(const float* state, const float* const* vectors, float* const* out, int64_t key,
                           int64_t value) {
  for (int64_t j = 0; j < value; j += kLanes) {
    Floats sums[kVectors] = {};
    for (int64_t i = 0; i < key; i++) {
      Floats s;
      load_some(state + i * value + j, value - j, s);
      for (int v = 0; v < kVectors; v++) sums[v] += vectors[v][i] * s;
    }
    for (int v = 0; v < kVectors; v++) store_some(sums[v], value - j, out[v] + j);
  }
}

// The decays between two tokens: exp(since + left), `left` = total − sum or −sum.
GSD_INLINE void weights_of(const float* since, const float* before, const float* other, int64_t count, Floats& to) {
  Floats a, b, c = {};
  load_some(since, count, a);
  load_some(other, count, b);
  if (before != nullptr) load_some(before, count, c);
  exp_lanes(a + (c - b), to);
}

// Work of one head: scratch holds 2·rows vectors of keys and 2·rows of values.
GSD_CLONES void head_rows(const Sizes& z, const Paths& paths, const Window& w, const Rows& rows, int64_t b, int64_t h,
                          float* scratch) {
  const int64_t g = h / (z.heads / z.groups), K = z.key, V = z.value, D = z.decays;
  const auto sums = [&](int64_t place) { return w.sums + ((b * z.places + place) * z.heads + h) * D; };
  const auto keys = [&](int64_t place) { return w.keys + ((b * z.places + place) * z.groups + g) * K; };
  const auto updates = [&](int64_t place) { return w.updates + ((b * z.places + place) * z.heads + h) * V; };
  const auto query = [&](int64_t r) { return rows.query + ((b * z.rows + r) * z.groups + g) * K; };
  float *decayed = scratch, *read = scratch + 2 * z.rows * K;  // [row][key, query]
  for (int64_t r = 0; r < z.rows; r++) {
    const int64_t end = paths.begin[r + 1], own = z.place(r), previous = paths.in_previous[r];
    const float* decay = rows.decay + ((b * z.rows + r) * z.heads + h) * D;
    const bool opens = end - paths.begin[r] == previous;  // its block
    const float* last = opens ? nullptr : sums(paths.before[end - 1]);
    float* since = sums(own);
    for (int64_t d = 0; d < D; d++) since[d] = last == nullptr ? decay[d] : decay[d] + last[d];
    const float* through = previous > 0 ? sums(paths.before[paths.begin[r] + previous - 1]) : nullptr;
    const float *k = keys(own), *q = query(r);
    float *to_k = decayed + 2 * r * K, *to_q = to_k + K;
    Floats e = {};  // of all channels where they decay alike
    if (D == 1) {
      Floats t = {};
      fill(since[0], e);
      if (through != nullptr) fill(through[0], t);
      exp_lanes(e + t, e);
    }
    for (int64_t i = 0; i < K; i += kLanes) {
      Floats x, y;
      if (D > 1) {
        Floats t = {};
        load_some(since + i, K - i, e);
        if (through != nullptr) load_some(through + i, K - i, t);
        exp_lanes(e + t, e);
      }
      load_some(k + i, K - i, x);
      load_some(q + i, K - i, y);
      store_some(x * e, K - i, to_k + i);
      store_some(y * e, K - i, to_q + i);
    }
  }
  for (int64_t slot = 0; slot < 2; slot++) {
    const float* state = w.state + ((slot * z.batch + b) * z.heads + h) * K * V;
    const float* vectors[kVectors] = {};
    float* out[kVectors] = {};
    int count = 0;
    const auto multiply = [&]() __attribute__((always_inline)) {
      for (int v = count; v < kVectors; v++) vectors[v] = vectors[0], out[v] = out[0];
      read_state(state, vectors, out, K, V);
      count = 0;
    };
    for (int64_t r = 0; r < z.rows; r++) {
      if (paths.slot[r] != slot) continue;
      for (int64_t x = rows.beta == nullptr ? 1 : 0; x < 2; x++) {
        vectors[count] = decayed + (2 * r + x) * K;
        out[count] = read + (2 * r + x) * V;
        if (++count == kVectors) multiply();
      }
    }
    if (count > 0) multiply();
  }
  for (int64_t r = 0; r < z.rows; r++) {
    const int64_t first = paths.begin[r], end = paths.begin[r + 1], previous = paths.in_previous[r];
    const int64_t own = z.place(r);
    const float *k = keys(own), *q = query(r), *since = sums(own);
    const float* through = previous > 0 ? sums(paths.before[first + previous - 1]) : nullptr;
    float *of_key = read + 2 * r * V, *of_query = of_key + V, *update = updates(own);
    const auto fold = [&](int64_t place, const float* left, bool itself) __attribute__((always_inline)) {
      const float *other = keys(place), *there = sums(place), *u = updates(place);
      Floats by_key = {}, by_query = {}, weight = {};
      if (D == 1) {
        fill(0.0f, by_key);
        Floats e;
        fill(since[0] + ((left == nullptr ? 0.0f : left[0]) - there[0]), e);
        exp_lanes(e, weight);
      }
      for (int64_t i = 0; i < K; i += kLanes) {
        Floats x, y, o;
        load_some(other + i, K - i, o);
        if (D > 1) weights_of(since + i, left == nullptr ? nullptr : left + i, there + i, K - i, weight);
        load_some(k + i, K - i, x);
        load_some(q + i, K - i, y);
        if (D > 1) o *= weight;
        by_key += x * o;
        by_query += y * o;
      }
      const float factor = D == 1 ? weight[0] : 1.0f;
      const float of_k = total(by_key) * factor, of_q = total(by_query) * factor;
      for (int64_t j = 0; j < V; j += kLanes) {
        Floats a, c, d;
        load_some(u + j, V - j, a);
        load_some(of_query + j, V - j, c);
        store_some(c + of_q * a, V - j, of_query + j);
        if (itself || rows.beta == nullptr) continue;
        load_some(of_key + j, V - j, d);
        store_some(d + of_k * a, V - j, of_key + j);
      }
    };
    for (int64_t a = first; a < end; a++) fold(paths.before[a], a - first < previous ? through : nullptr, false);
    const float* v = rows.value + ((b * z.rows + r) * z.heads + h) * V;
    const float beta = rows.beta == nullptr ? 0.0f : rows.beta[(b * z.rows + r) * z.heads + h];
    for (int64_t j = 0; j < V; j++) update[j] = rows.beta == nullptr ? v[j] : beta * (v[j] - of_key[j]);
    fold(own, nullptr, true);
    std::copy_n(of_query, V, rows.out + ((b * z.rows + r) * z.heads + h) * V);
  }
}

// state' = e^last · state + Σ e^(last − sum) key ⊗ update over the places of a block, in their order.
GSD_CLONES void fold_block(const Sizes& z, const Window& w, int64_t b, int64_t h, int64_t first, const float* from,
                           float* to) {
  const int64_t g = h / (z.heads / z.groups), K = z.key, V = z.value, D = z.decays, ring = z.committed();
  const auto sums = [&](int64_t t) { return w.sums + ((b * z.places + t % ring) * z.heads + h) * D; };
  const float* last = sums(first + z.block - 1);
  Floats e = {};
  for (int64_t i = 0; i < K; i++) {
    if (i < D) {  // one decay serves all channels
      fill(last[i], e);
      exp_lanes(e, e);
    }
    for (int64_t j = 0; j < V; j++) to[i * V + j] = e[0] * from[i * V + j];
  }
  for (int64_t t = first; t < first + z.block; t++) {
    const float* key = w.keys + ((b * z.places + t % ring) * z.groups + g) * K;
    const float* update = w.updates + ((b * z.places + t % ring) * z.heads + h) * V;
    for (int64_t i = 0; i < K; i++) {
      if (i < D) {
        fill(last[i] - sums(t)[i], e);
        exp_lanes(e, e);
      }
      const float x = e[0] * key[i];
      for (int64_t j = 0; j < V; j++) to[i * V + j] += x * update[j];
    }
  }
}

Sizes sizes_of(const Arguments& in) {
  const int64_t decays = in['E'], key = in['D'];
  const Sizes z{in['B'], 0, in['H'], in['G'], key, in['V'], decays, in['k'], in['P']};
  STD_TORCH_CHECK(z.block > 0 && z.places >= z.committed(), "window: no room for ", kBlocks, " blocks");
  STD_TORCH_CHECK(z.groups > 0 && z.heads % z.groups == 0, "window: heads and groups do not go together");
  STD_TORCH_CHECK(decays == 1 || decays == key, "sums: expected one decay, or one a channel of a key");
  return z;
}

Window window_of(Arguments& in) { return {in.at("state"), in.at("keys"), in.at("updates"), in.at("sums")}; }

Paths paths_of(const Sizes& z, const int32_t* parents, const int32_t* depths, int64_t length) {
  STD_TORCH_CHECK(length >= 0, "lengths: expected 0 or more, got ", length);
  Paths paths;
  paths.begin.push_back(0);
  std::vector<int64_t> path;
  for (int64_t r = 0; r < z.first + z.rows; r++) {
    const int64_t depth = depths[r], parent = parents[r];
    STD_TORCH_CHECK(parent >= -1 && parent < r, "parents: row ", r, " follows ", parent);
    STD_TORCH_CHECK(depth == (parent < 0 ? 0 : depths[parent] + 1) && depth <= z.block, "depths: row ", r, " has ", depth,
                    "; expected one more than its parent, and at most ", z.block);
    if (r < z.first) continue;
    const int64_t position = length + depth, boundary = std::max<int64_t>(position / z.block - 1, 0) * z.block;
    for (int64_t t = boundary; t < length; t++) paths.before.push_back(t % z.committed());
    path.clear();
    for (int64_t a = parent; a >= 0; a = parents[a]) path.push_back(z.committed() + a);
    paths.before.insert(paths.before.end(), path.rbegin(), path.rend());
    paths.begin.push_back(static_cast<int64_t>(paths.before.size()));
    paths.in_previous.push_back(position >= z.block ? z.block : 0);
    paths.slot.push_back(boundary / z.block % 2);
  }
  return paths;
}

// Some 0.1 ms of one thread's work.
int64_t heads_at_once(const Sizes& z, int64_t rows) {
  return std::max<int64_t>(1, (1 << 20) / std::max<int64_t>(1, (rows + 2) * z.key * z.value));
}

void state_rows(Arguments& in) {
  Sizes z = sizes_of(in);
  z.rows = in['R'];
  const int64_t all = in['A'];
  z.first = all - z.rows;
  STD_TORCH_CHECK(z.first >= 0, "parents: of ", all, " rows, where ", z.rows, " are given");
  STD_TORCH_CHECK(z.places >= z.committed() + all, "window: no room for ", all, " rows");
  const Window w = window_of(in);
  const int32_t *const parents = in.at("parents"), *const depths = in.at("depths"), *const lengths = in.at("lengths");
  const Rows rows{in.at("query"), in.at("key"), in.at("value"), in.at("decay"), in.at("beta"), in.result()};
  std::vector<Paths> paths;
  for (int64_t b = 0; b < z.batch; b++) {
    const int64_t of = b * all, size = z.groups * z.key;
    paths.push_back(paths_of(z, parents + of, depths + of, lengths[b]));
    std::copy_n(rows.key + b * z.rows * size, z.rows * size, w.keys + (b * z.places + z.place(0)) * size);
  }
  torch::stable::parallel_for(0, z.batch * z.heads, heads_at_once(z, z.rows), [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(static_cast<size_t>(2 * z.rows * (z.key + z.value)));
    for (int64_t i = begin; i < end; i++) {
      head_rows(z, paths[static_cast<size_t>(i / z.heads)], w, rows, i / z.heads, i % z.heads, scratch.data());
    }
  });
}

void state_commit(Arguments& in) {
  const Sizes z = sizes_of(in);
  const Window w = window_of(in);
  const int32_t *const accepted_rows = in.at("accepted_rows"), *const num_accepted = in.at("num_accepted"),
                *const lengths = in.at("lengths");
  const int64_t path = in['A'], room = z.places - z.committed(), block = z.block;

  bool folds = false;
  for (int64_t b = 0; b < z.batch; b++) {
    const int64_t length = lengths[b], count = num_accepted[b];
    STD_TORCH_CHECK(length >= 0 && count >= 0 && count <= path && count <= block + 1, "num_accepted: ", count,
                    " rows of sequence ", b, " do not fit");
    const auto move = [&](float* stored, int64_t size, int64_t place, int64_t row) {
      float* of = stored + b * z.places * size;
      std::copy_n(of + (z.committed() + row) * size, size, of + place * size);
    };
    for (int64_t i = 0; i < count; i++) {
      const int64_t row = accepted_rows[b * path + i], place = (length + i) % z.committed();
      STD_TORCH_CHECK(row >= 0 && row < room, "accepted_rows: ", row, " is no row");
      move(w.keys, z.groups * z.key, place, row);
      move(w.updates, z.heads * z.value, place, row);
      move(w.sums, z.heads * z.decays, place, row);
    }
    folds |= (length + count) / block > length / block;
  }
  if (!folds) return;
  torch::stable::parallel_for(0, z.batch * z.heads, heads_at_once(z, block), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t b = i / z.heads, h = i % z.heads;
      const int64_t length = lengths[b], now = length + num_accepted[b];
      for (int64_t c = length / block + 1; c <= now / block; c++) {
        const auto slot = [&](int64_t s) { return w.state + ((s % 2 * z.batch + b) * z.heads + h) * z.key * z.value; };
        fold_block(z, w, b, h, (c - 1) * block, slot(c - 1), slot(c));
      }
    }
  });
}

}  // namespace
}  // namespace gsd

GSD_OPS(CPU, m) {
  gsd::Op<gsd::state_rows>::add(m, "state_rows");
  gsd::Op<gsd::state_commit>::add(m, "state_commit");
}
