// dag_attention of random problems on the machine of fibers, against double precision.
#include "../../csrc/algorithms/attention.h"
#include "problems.h"

using namespace gsd;

namespace {

struct Shape {
  bool bfloat16, positions_first;  // caches stored [B, S, Hkv, D]
  int head_dim, batch, kv_heads, group, rows, nodes, capacity;
  float softcap;  // 0: none
  int window;     // 0: none
  int chunk;      // 0: none
  bool sinks;
};

struct Call {
  Shape shape;
  std::vector<uint16_t> q, k, v;
  std::vector<int32_t> mask, kv_len, kv_start, row_depths, node_depths;
  std::vector<float> sinks;
  AttentionSizes sizes{};
  AttentionArgs args{};

  int words() const { return words_for(shape.nodes); }
  int heads() const { return shape.kv_heads * shape.group; }
  size_t cache_at(int b, int head, int position) const {
    const size_t row = shape.positions_first
                           ? (static_cast<size_t>(b) * shape.capacity + position) * shape.kv_heads + head
                           : (static_cast<size_t>(b) * shape.kv_heads + head) * shape.capacity + position;
    return row * shape.head_dim;
  }
  // Whether a row's window or chunk reaches back to a depth, both counted from kv_len.
  bool reaches(int b, int row, int depth) const {
    const int own = row_depths[b * shape.rows + row], begin = kv_len[b] - kv_start[b];
    if (shape.chunk != 0) return (begin + depth) / shape.chunk >= (begin + own) / shape.chunk;
    return shape.window == 0 || own - depth < shape.window;
  }
  bool sees(int b, int row, int position) const {
    const int node = position - kv_len[b];
    if (node < 0) return position >= kv_start[b] && reaches(b, row, node);
    if (node >= 32 * words()) return false;
    const uint32_t word = static_cast<uint32_t>(mask[(b * shape.rows + row) * words() + node / 32]);
    return (word >> node % 32 & 1) != 0 && reaches(b, row, node_depths[b * shape.nodes + node]);
  }
};

struct Result {
  std::vector<uint16_t> out;  // [B, R, Hq, D]
  std::vector<float> lse;     // [B, Hq, R]
};

// Caches end with the last node of the longest sequence: AddressSanitizer sees what lies beyond.
template <class Element>
Call make_call(const Shape& shape, std::mt19937& random) {
  Call p{};
  p.shape = shape;
  const size_t cache = static_cast<size_t>(shape.batch) * shape.kv_heads * shape.capacity * shape.head_dim;
  p.q = drawn<Element>(static_cast<size_t>(shape.batch) * p.heads() * shape.rows * shape.head_dim, random);
  p.k = drawn<Element>(cache, random);
  p.v = drawn<Element>(cache, random);
  std::normal_distribution<float> normal(3.0f, 2.0f);
  for (int head = 0; head < p.heads(); head++) p.sinks.push_back(normal(random));
  for (int b = 0; b < shape.batch; b++) {
    const int longest = shape.capacity - shape.nodes;
    p.kv_len.push_back(b == 0 ? longest : between(random, 0, longest));
    p.kv_start.push_back(b == 0 ? 0 : between(random, 0, p.kv_len[b]));
    const int held = b == 0 ? shape.nodes : between(random, 0, shape.nodes);  // nodes of this graph
    for (int r = 0; r < shape.rows; r++) {
      const bool blind = random() % 8 == 0;  // no node at all; with an empty prefix nothing
      for (int w = 0; w < p.words(); w++) {
        const int bits = std::clamp(held - 32 * w, 0, 32);
        const uint32_t nodes = bits == 32 ? ~0u : (1u << bits) - 1;
        p.mask.push_back(blind ? 0 : static_cast<int32_t>(random() & random() & nodes));
      }
      p.row_depths.push_back(between(random, 0, 6));
    }
    for (int n = 0; n < shape.nodes; n++) p.node_depths.push_back(between(random, 0, 6));
  }
  return p;
}

// NaN or infinity wherever no row looks; returns the cache rows that some rows see and others do not.
template <class Element>
std::vector<std::pair<int, int>> spoil_unseen(Call& p, std::mt19937& random) {
  std::vector<std::pair<int, int>> partly;
  for (int b = 0; b < p.shape.batch; b++) {
    for (int position = 0; position < p.shape.capacity; position++) {
      int seen = 0;
      for (int r = 0; r < p.shape.rows; r++) seen += p.sees(b, r, position);
      if (seen > 0 && seen < p.shape.rows) partly.push_back({b, position});
      if (seen > 0) continue;
      for (int h = 0; h < p.shape.kv_heads; h++) {
        for (int d = 0; d < p.shape.head_dim; d++) {
          const uint16_t bits = Element::round(random() % 2 == 0 ? NAN : -INFINITY);
          p.k[p.cache_at(b, h, position) + d] = bits;
          p.v[p.cache_at(b, h, position) + d] = bits;
        }
      }
    }
  }
  return partly;
}

void bind(Call& p) {
  const Shape& s = p.shape;
  p.sizes = {s.batch, s.kv_heads, s.group, s.rows, s.head_dim, p.words(), s.capacity, 0, 0, 0};
  choose_splits(p.sizes, 12);
  AttentionArgs& a = p.args;
  a.q = p.q.data(), a.k = p.k.data(), a.v = p.v.data();
  a.ancestor_mask = p.mask.data();
  a.kv_len = p.kv_len.data(), a.kv_start = p.kv_start.data();
  a.q_row = s.head_dim, a.q_head = a.q_row * s.rows, a.q_batch = a.q_head * p.heads();
  const int64_t slots = s.capacity;
  const int heads = s.kv_heads;
  a.k_slot = s.positions_first ? s.head_dim * heads : s.head_dim;
  a.k_head = s.positions_first ? s.head_dim : s.head_dim * slots;
  a.k_batch = s.head_dim * slots * heads;
  a.v_slot = a.k_slot, a.v_head = a.k_head, a.v_batch = a.k_batch;
  a.mask_row = p.words(), a.mask_batch = a.mask_row * s.rows;
  if (s.window != 0 || s.chunk != 0) {
    a.row_depths = p.row_depths.data(), a.node_depths = p.node_depths.data();
    a.node_depths_batch = a.nodes = s.nodes;
    a.window = s.window, a.chunk = s.chunk;
  }
  if (s.sinks) a.sinks = p.sinks.data();
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  a.softcap = s.softcap * kLog2E;
  a.scale = s.softcap == 0 ? scale * kLog2E : scale / s.softcap;
}

template <class Element, int kHeadDim, int kWarps>
Result attend(Call& p) {
  using Split = SplitAttention<Element, kHeadDim, kWarps>;
  using Tiles = AttentionTiles<Element, kHeadDim, kWarps>;
  bind(p);
  const AttentionSizes& s = p.sizes;
  const int rows = s.query_rows(), heads = s.batch * s.kv_heads, m_blocks = (rows + Tiles::kRows - 1) / Tiles::kRows;
  const size_t outputs = static_cast<size_t>(heads) * s.splits() * rows;
  std::vector<float> partial_out(outputs * kHeadDim, NAN), partial_lse(outputs, NAN);
  Result result{std::vector<uint16_t>(p.q.size(), 0xA5A5), std::vector<float>(p.q.size() / kHeadDim, NAN)};
  p.args.partial_out = partial_out.data(), p.args.partial_lse = partial_lse.data();
  p.args.out = result.out.data(), p.args.lse = result.lse.data();
  run_grid(kWarps, m_blocks * heads * s.splits(), Tiles::kArenaBytes,
           [&](FiberMachine& machine, int block) {
             Split::run(machine, p.args, s, block % m_blocks, block / m_blocks % heads, block / m_blocks / heads);
           });
  run_grid(1, heads * rows, 0, [&](FiberMachine& machine, int block) {
    combine_row<Element, kHeadDim>(machine, p.args, s, block / rows, block % rows);
  });
  return result;
}

template <class Element, int kHeadDim>
Result attend(Call& p) {
  switch (attention_block_rows(p.shape.group * p.shape.rows)) {
    case 16:
      return attend<Element, kHeadDim, 1>(p);
    case 32:
      return attend<Element, kHeadDim, 2>(p);
    default:
      return attend<Element, kHeadDim, 4>(p);
  }
}

// One row in double precision; false if it sees a value that is not finite, which may spoil all of it.
template <class Element>
bool exact_row(const Call& p, int b, int head, int row, std::vector<double>& out, double& lse) {
  const Shape& s = p.shape;
  const auto value = [](uint16_t bits) { return static_cast<double>(Element::widen(bits)); };
  const uint16_t* q = p.q.data() + ((static_cast<size_t>(b) * p.heads() + head) * s.rows + row) * s.head_dim;
  std::vector<double> scores;
  std::vector<const uint16_t*> values;
  for (int position = 0; position < s.capacity; position++) {
    if (!p.sees(b, row, position)) continue;
    const size_t at = p.cache_at(b, head / s.group, position);
    double score = 0;
    for (int d = 0; d < s.head_dim; d++) score += value(q[d]) * value(p.k[at + d]);
    score /= std::sqrt(static_cast<double>(s.head_dim));
    scores.push_back(s.softcap == 0 ? score : s.softcap * std::tanh(score / s.softcap));
    values.push_back(p.v.data() + at);
  }
  out.assign(s.head_dim, 0.0);
  lse = -INFINITY;
  for (const double score : scores) lse = std::max(lse, score);
  if (scores.empty()) return true;
  double total = 0;
  for (const double score : scores) total += std::exp(score - lse);
  lse += std::log(total);
  bool finite = true;
  for (size_t i = 0; i < scores.size(); i++) {
    for (int d = 0; d < s.head_dim; d++) {
      finite = finite && std::isfinite(value(values[i][d]));
      out[d] += std::exp(scores[i] - lse) * value(values[i][d]);
    }
  }
  for (double& x : out) x *= s.sinks ? 1 / (1 + std::exp(p.sinks[head] - lse)) : 1;
  return finite;
}

template <class Element>
bool right(const Call& p, const Result& got) {
  const Shape& s = p.shape;
  // A weight and an output are rounded once each.
  double error = 0, norm = 0;
  std::vector<double> expected;
  for (int b = 0; b < s.batch; b++) {
    for (int head = 0; head < p.heads(); head++) {
      for (int row = 0; row < s.rows; row++) {
        double lse;
        const bool finite = exact_row<Element>(p, b, head, row, expected, lse);
        const uint16_t* out =
            got.out.data() + ((static_cast<size_t>(b) * s.rows + row) * p.heads() + head) * s.head_dim;
        if (!finite) {
          if (!std::isnan(Element::widen(out[0]))) return fprintf(stderr, "row %d lost a NaN\n", row), false;
          continue;
        }
        const float got_lse = got.lse[(static_cast<size_t>(b) * p.heads() + head) * s.rows + row];
        if (std::isinf(lse) ? got_lse != -INFINITY : !(std::abs(got_lse - lse) < 1e-4)) {
          return fprintf(stderr, "row %d: log-sum-exp %g instead of %g\n", row, got_lse, lse), false;
        }
        double row_error = 0, row_norm = 0;
        for (int d = 0; d < s.head_dim; d++) {
          const double value = Element::widen(out[d]);
          row_error += (value - expected[d]) * (value - expected[d]);
          row_norm += expected[d] * expected[d];
        }
        if (!(std::sqrt(row_error) <= 2 * unit<Element>() * std::sqrt(row_norm))) {
          return fprintf(stderr, "row %d: error %g\n", row, std::sqrt(row_error / row_norm)), false;
        }
        error += row_error, norm += row_norm;
      }
    }
  }
  const bool close = std::sqrt(error) <= unit<Element>() * std::sqrt(norm);
  if (!close) fprintf(stderr, "error %g\n", std::sqrt(error / norm));
  return close;
}

// Row 0 keeps every bit when all other rows' queries, masks and nodes change, even to NaN.
template <class Element, int kHeadDim>
bool rows_are_independent(Call& p, const Result& before) {
  const Shape& s = p.shape;
  Call changed = p;
  for (int b = 0; b < s.batch; b++) {
    for (int r = 1; r < s.rows; r++) {
      for (int w = 0; w < p.words(); w++) changed.mask[(b * s.rows + r) * p.words() + w] = -1;
      for (int head = 0; head < p.heads(); head++) {
        const size_t at = ((static_cast<size_t>(b) * p.heads() + head) * s.rows + r) * s.head_dim;
        for (int d = 0; d < s.head_dim; d++) changed.q[at + d] = Element::round(NAN);
      }
    }
    for (int position = p.kv_len[b]; position < s.capacity; position++) {
      if (p.sees(b, 0, position)) continue;
      for (int h = 0; h < s.kv_heads; h++) {
        for (int d = 0; d < s.head_dim; d++) {
          changed.k[p.cache_at(b, h, position) + d] = Element::round(NAN);
          changed.v[p.cache_at(b, h, position) + d] = Element::round(NAN);
        }
      }
    }
  }
  const Result after = attend<Element, kHeadDim>(changed);
  const size_t row_size = static_cast<size_t>(p.heads()) * s.head_dim;
  for (int b = 0; b < s.batch; b++) {
    const size_t at = b * s.rows * row_size;
    if (memcmp(&before.out[at], &after.out[at], 2 * row_size) != 0) return fprintf(stderr, "rows mix\n"), false;
  }
  return true;
}

template <class Element, int kHeadDim>
bool round_is_right(const Shape& shape, int round, std::mt19937& random) {
  Call p = make_call<Element>(shape, random);
  const auto partly = spoil_unseen<Element>(p, random);
  if (round % 4 == 3 && !partly.empty()) {  // one value that some rows see
    const auto [b, position] = partly[random() % partly.size()];
    p.v[p.cache_at(b, 0, position) + random() % kHeadDim] = Element::round(round % 8 == 3 ? NAN : INFINITY);
  }
  const Result got = attend<Element, kHeadDim>(p);
  if (!right<Element>(p, got)) return false;
  return round % 3 != 0 || rows_are_independent<Element, kHeadDim>(p, got);
}

bool attended(int round, std::mt19937& random) {
  Shape s{};
  s.bfloat16 = round % 2 == 1;
  s.head_dim = round / 2 % 2 == 0 ? 64 : 128;
  s.positions_first = random() % 2 == 0;
  s.batch = between(random, 1, 2);
  s.kv_heads = between(random, 1, 2);
  s.group = round % 3 == 0 ? 1 : between(random, 2, 4);
  s.rows = between(random, 1, round % 5 == 4 ? 20 : 9);  // up to 80 query rows: two blocks of four warps
  s.nodes = between(random, 1, 70);
  s.capacity = s.nodes + (random() % 5 == 0 ? 0 : between(random, 1, round % 7 == 6 ? 600 : 150));
  s.softcap = round % 5 == 1 ? 1.5f : 0.0f;
  const int sight = round % 4 == 2 || round % 8 == 3 ? between(random, 1, 90) : 0;
  (random() % 2 == 0 ? s.window : s.chunk) = sight;
  s.sinks = random() % 2 == 0;
  return s.bfloat16
          ? (s.head_dim == 64 ? round_is_right<Other, 64>(s, round, random)
                              : round_is_right<Other, 128>(s, round, random))
          : (s.head_dim == 64 ? round_is_right<Half, 64>(s, round, random)
                              : round_is_right<Half, 128>(s, round, random));
}

const Listed listed({{"attention", attended}});

}  // namespace
