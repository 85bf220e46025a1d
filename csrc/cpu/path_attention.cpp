#include "path_attention.h"

#include <algorithm>
#include <cmath>

#include "../algorithms/group.h"
#include "lanes.h"
#include "lines.h"
#include "row_math.h"

namespace gsd {
namespace {

constexpr int64_t kBlockPositions = 256;  // of the text, from its beginning
constexpr int64_t kScores = kBlockPositions + kLanes;  // of a row: no power of two, where columns would meet in one set
constexpr int64_t kSliceRows = 12;        // query vectors that are added to as far as one of them sees

int64_t padded_to_lanes(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// The online softmax of one row, block by block. What was added so far is relative to `best`.
struct OnlineSoftmax {
  float best = negative_infinity(), total = 0.0f;

  // Takes n scores in, padded with −inf, and turns them into weights; what to scale the accumulated by.
  float take(float* scores, int64_t padded) {
    const Extremes found = extremes(scores, static_cast<int>(padded));
    const float top = found.has_nan ? NAN : found.max;
    float decay = 1.0f;
    if (top == negative_infinity()) {
      std::fill(scores, scores + padded, 0.0f);
      return decay;
    }
    if (top > best || top != top) {
      decay = best == negative_infinity() ? 0.0f : std::exp(best - top);
      total *= decay;
      best = top;
    }
    total += exp_row(scores, padded, best);
    return decay;
  }

  float log_sum() const { return best == negative_infinity() ? best : best + std::log(total); }
};

// A query vector and what it sees: from position `low` of the text on, which the window or the chunk leaves to it, `dense`
// positions slot by slot behind the padding, and behind `path_at` what its path lists. Of a row that keeps away from others
// the list lacks what lies before the window, which may begin within the path: positions of the text they are even so.
struct Vector {
  OnlineSoftmax running;
  int64_t row, head, low, dense, path_at, path_length;
  size_t path;
};

// A thread's working memory, which keeps its size: of a step's thousands of items none asks for any, or clears it.
struct Scratch {
  Lines<char> packed;
  Lines<float> queries, acc, fresh, scores, node_scores, tails;
  std::vector<Vector> vectors;
  int64_t offsets[kBlockPositions], tail_offsets[kBlockPositions];

  static Scratch& of_thread() {
    static thread_local Scratch scratch;
    return scratch;
  }
};

// Query vectors of one cache head and sequence: those of a row side by side.
class Item {
 public:
  Item(const PathAttention& a, const RowKernel& kernel, int64_t b, int64_t kv_head, int64_t begin, int64_t count)
      : a_(a), kernel_(kernel), b_(b), count_(count), s_(Scratch::of_thread()) {
    size_ = bytes_of(a.cache_element);
    value_stride_ = a.values.slot_stride / size_;
    start_ = a.kv_start[b];
    prefix_ = std::max<int64_t>(0, a.kv_len[b] - start_);
    keys_ = a.keys.data + b * a.keys.batch_stride + kv_head * a.keys.head_stride;
    values_ = a.values.data + b * a.values.batch_stride + kv_head * a.values.head_stride;
    width_ = padded_to_lanes(a.value_dim);
    s_.acc.make_room(count * width_);
    std::fill_n(s_.acc.data(), count * width_, 0.0f);
    s_.scores.make_room(count * kScores);
    s_.vectors.clear();
    for (int64_t i = begin, group = a.heads / a.kv_heads; i < begin + count; i++) {
      const int64_t row = i / group, graph_row = b * a.graph_rows + a.graph_rows - a.rows + row;
      const size_t* path = a.paths->begin.data() + graph_row;
      const int64_t low = limited() ? oldest_seen(a.positions[graph_row], a.window, a.chunk) : 0;
      const int64_t dense = prefix_ + a.paths->chain[static_cast<size_t>(graph_row)];
      s_.vectors.push_back({{}, row, kv_head * group + i % group, low, dense, alone() ? std::max(dense, low) : dense,
                            static_cast<int64_t>(path[1] - path[0]), path[0]});
    }
    // Where values are arranged before they are read, all at once.
    tall_ = alone() ? 1 : kernel.together > 1 ? count : kSliceRows;
    s_.tails.make_room(tall_ * kBlockPositions);
    if (!finite()) s_.fresh.make_room(tall_ * width_);
  }

  void run() {
    pack_queries();
    score_nodes();
    int64_t most = 0, oldest = INT64_MAX;
    for (const Vector& v : s_.vectors) {
      most = std::max(most, v.path_at + v.path_length);
      oldest = std::min({oldest, v.low, v.dense});  // lists may lack what lies before a window
    }
    for (int64_t first = oldest / kBlockPositions * kBlockPositions; first < most; first += kBlockPositions) {
      block(first, std::max(first, oldest));
    }
    for (int64_t m = 0; m < count_; m++) finish(m);
  }

 private:
  Vector& at(int64_t m) const { return s_.vectors[static_cast<size_t>(m)]; }
  // Positions of the block from `first` on that lie before `end`.
  static int64_t in_block(int64_t end, int64_t first) { return std::clamp<int64_t>(end - first, 0, kBlockPositions); }
  int64_t most_in(int64_t m, int64_t last, int64_t first) const {
    int64_t most = 0;
    for (; m < last; m++) most = std::max(most, in_block(at(m).dense, first));
    return most;
  }
  // Where whole lots of them end that the kernel takes together, counted from the text's beginning, or its own window's for
  // a row that keeps away from others. Those behind go with the path's first nodes, so that it does not matter where the
  // prefix ends.
  int64_t whole(int64_t m, int64_t first) const {
    if (at(m).path_at > at(m).dense) return in_block(at(m).path_at, first);
    const int64_t dense = in_block(at(m).dense, first), begin = alone() ? std::max<int64_t>(0, at(m).low - first) : 0;
    return dense - std::max<int64_t>(0, dense - begin) % kernel_.together;
  }
  // Whether a row has to keep away from what only its neighbours see of the prefix.
  bool alone() const { return limited() && !finite(); }
  bool finite() const { return a_.paths->finite; }
  bool limited() const { return a_.window > 0 || a_.chunk > 0; }

  void pack_queries() {
    s_.packed.make_room((count_ + kRowBlock) * kernel_.row_bytes(a_.head_dim));
    s_.queries.make_room(count_ * a_.head_dim);
    for (int64_t m = 0; m < count_; m++) {
      const int64_t from = b_ * a_.q_batch + at(m).head * a_.q_head + at(m).row * a_.q_row;
      read_row({a_.q + from * bytes_of(a_.element), 0, a_.element}, 0, s_.queries.data() + m * a_.head_dim, a_.head_dim);
    }
    kernel_.pack(s_.queries.data(), a_.head_dim, 0, count_, a_.head_dim, s_.packed.data());
  }

  void score(const char* keys, int64_t positions, float* out, int64_t stride) const {
    kernel_.products(s_.packed.data(), count_, a_.head_dim, keys, a_.keys.slot_stride / size_, 0, positions, out, stride,
                     false);
  }

  // Every query with every slot behind the prefix up to the last that a path lists; a row takes its own.
  void score_nodes() {
    nodes_ = std::min(a_.paths->slots, a_.keys.slots - a_.kv_len[b_]);
    s_.node_scores.make_room(count_ * nodes_);
    if (nodes_ > 0) score(keys_ + a_.kv_len[b_] * a_.keys.slot_stride, nodes_, s_.node_scores.data(), nodes_);
  }

  // Positions first … first + kBlockPositions − 1 of the text; `from` is where the oldest window begins.
  void block(int64_t first, int64_t from) {
    const int64_t most = most_in(0, count_, first);
    const int64_t skipped = std::min(from - first, most) / kernel_.together * kernel_.together;
    const char* keys = keys_ + (start_ + first + skipped) * a_.keys.slot_stride;
    if (skipped < most) score(keys, most - skipped, s_.scores.data() + skipped, kScores);
    for (int64_t p = 0; p < most; p++) s_.offsets[p] = (start_ + first + p) * value_stride_;
    for (int64_t m = 0; m < count_; m += tall_) slice(m, std::min(count_, m + tall_), first, skipped);
  }

  // Part of what a row's path lists that lies in a block: [begin, end) of its nodes.
  std::pair<int64_t, int64_t> path_part(int64_t m, int64_t first) const {
    const int64_t begin = first - at(m).path_at, length = at(m).path_length;
    return {std::clamp<int64_t>(begin, 0, length), std::clamp<int64_t>(begin + kBlockPositions, 0, length)};
  }

  // Rows m … last − 1: what is slot by slot together, up to the last position that one of them sees, then each row's rest.
  void slice(int64_t m, int64_t last, int64_t first, int64_t skipped) {
    const int64_t most = most_in(m, last, first);
    const int64_t from = alone() ? std::max(skipped, at(m).low - first) : skipped;
    for (int64_t row = m; row < last; row++) {
      // A row's own part begins at the nodes that its path lists, together with the positions that the first of them are
      // taken with; where its weights end if there are none.
      const int64_t filled = weigh(row, first, skipped), cut = in_block(at(row).dense, first) == filled ? filled : whole(row, first);
      float* scores = s_.scores.data() + row * kScores;
      std::copy(scores + cut, scores + filled, s_.tails.data() + (row - m) * kBlockPositions);
      if (cut < most) std::fill(scores + cut, scores + most, 0.0f);
    }
    // One chain of additions over a long text rounds thrice as much; a decoder's rows keep theirs, and so their bits.
    float *total = s_.acc.data() + m * width_, *sum = finite() ? total : s_.fresh.data();
    const int64_t numbers = (last - m) * width_;
    if (!finite()) std::fill(sum, sum + numbers, 0.0f);
    if (from < most) {
      kernel_.weighted(s_.scores.data() + m * kScores + from, kScores, last - m, values_,
                       s_.offsets + from, most - from, a_.value_dim, sum, width_);
    }
    for (int64_t i = m, next; i < last; i = next) {  // whose path the heads of a row share
      for (next = i + 1; next < last && at(next).row == at(i).row;) next++;
      add_tail(i, next - i, first, s_.tails.data() + (i - m) * kBlockPositions, sum + (i - m) * width_);
    }
    for (int64_t i = 0; !finite() && i < numbers; i++) total[i] += sum[i];
  }

  // Scores of a row become weights; how many.
  int64_t weigh(int64_t m, int64_t first, int64_t skipped) {
    float* scores = s_.scores.data() + m * kScores;
    const auto [begin, end] = path_part(m, first);
    const int64_t before = in_block(begin < end ? at(m).path_at : at(m).dense, first);
    const int64_t filled = before + end - begin, padded = padded_to_lanes(filled);
    for (int64_t i = begin; i < end; i++) {
      const size_t node = at(m).path + static_cast<size_t>(i);
      scores[before + i - begin] = s_.node_scores[m * nodes_ + a_.paths->nodes[node]];
    }
    scale_row(scores, a_.scale, padded);
    for (int64_t i = 0; a_.softcap > 0.0f && i < filled; i++) scores[i] = a_.softcap * std::tanh(scores[i] / a_.softcap);
    std::fill(scores, scores + std::min(std::max(skipped, at(m).low - first), before), negative_infinity());
    for (int64_t i = begin; limited() && finite() && i < end; i++) {
      const int64_t text = a_.kv_len[b_] - start_ + a_.paths->node_depths[at(m).path + static_cast<size_t>(i)];
      if (text < at(m).low) scores[before + i - begin] = negative_infinity();
    }
    std::fill(scores + filled, scores + padded, negative_infinity());
    const float decay = at(m).running.take(scores, padded);
    if (decay != 1.0f) scale_row(s_.acc.data() + m * width_, decay, width_);
    return filled;
  }

  void add_tail(int64_t m, int64_t rows, int64_t first, const float* weights, float* sum) {
    const auto [begin, end] = path_part(m, first);
    if (begin == end) return;
    const int64_t dense = in_block(at(m).dense, first);
    int64_t* offset = s_.tail_offsets;
    for (int64_t p = whole(m, first); p < dense; p++) *offset++ = s_.offsets[p];
    for (int64_t i = begin; i < end; i++) {
      *offset++ = (a_.kv_len[b_] + a_.paths->nodes[at(m).path + static_cast<size_t>(i)]) * value_stride_;
    }
    kernel_.weighted(weights, kBlockPositions, rows, values_, s_.tail_offsets, offset - s_.tail_offsets,
                     a_.value_dim, sum, width_);
  }

  void finish(int64_t m) {
    const Vector& v = at(m);
    const OnlineSoftmax& r = v.running;
    float inverse = r.best == negative_infinity() ? 0.0f : 1.0f / r.total;  // 0 of a row that sees nothing
    if (a_.sinks != nullptr && inverse != 0.0f) inverse /= 1.0f + std::exp(a_.sinks[v.head] - r.log_sum());
    scale_row(s_.acc.data() + m * width_, inverse, width_);
    const int64_t to = (b_ * a_.rows + v.row) * a_.heads + v.head;
    write_row(s_.acc.data() + m * width_, a_.out + to * a_.value_dim * bytes_of(a_.element), a_.element, a_.value_dim);
    if (a_.lse) a_.lse[(b_ * a_.heads + v.head) * a_.rows + v.row] = r.log_sum();
  }

  const PathAttention& a_;
  const RowKernel& kernel_;
  int64_t b_, count_, size_, value_stride_, start_, prefix_, width_, tall_, nodes_ = 0;
  const char *keys_, *values_;
  Scratch& s_;
};

}  // namespace

Paths::Paths(const int32_t* mask, const int32_t* depths, int64_t batch, int64_t rows, int64_t words,
             int64_t most_depths, const int32_t* kv_len, const int32_t* kv_start, int64_t capacity)
    : finite(depths != nullptr) {
  std::vector<int32_t> order;
  begin.push_back(0);
  for (int64_t row = 0; row < batch * rows; row++) {
    const int64_t b = row / rows, most = std::min({words * 32, most_depths, capacity - kv_len[b]});
    const int32_t* bits = mask + row * words;
    const int32_t* depth = finite ? depths + b * most_depths : nullptr;
    order.clear();
    for (int64_t node = 0; node < most; node++) {
      const uint32_t word = static_cast<uint32_t>(bits[node / 32]);
      if (word == 0) node |= 31;  // on to the next word
      else if (word >> (node % 32) & 1u) order.push_back(static_cast<int32_t>(node));
    }
    if (finite) std::stable_sort(order.begin(), order.end(), [&](int32_t i, int32_t j) { return depth[i] < depth[j]; });
    const int64_t padding = std::max(0, kv_start[b] - kv_len[b]);  // of the rows: nodes that nobody else sees
    size_t next = 0;
    while (finite && next < order.size() && order[next] == padding + static_cast<int64_t>(next) &&
           depth[order[next]] == order[next]) {
      next++;
    }
    chain.push_back(static_cast<int32_t>(next));
    for (; next < order.size(); next++) {
      nodes.push_back(order[next]);
      if (finite) node_depths.push_back(depth[order[next]]);
      slots = std::max<int64_t>(slots, order[next] + 1);
    }
    begin.push_back(nodes.size());
  }
}

void attend_paths(Team& team, const PathAttention& a, const RowKernel& kernel) {
  if (a.batch == 0 || a.rows == 0) return;
  constexpr int64_t kPieceWork = 1 << 17, kItemsPerThread = 3;  // multiplications
  // Query vectors of an item: three heads for two threads are cut into six. Which are read together changes no bits.
  const int64_t heads = a.batch * a.kv_heads, vectors = a.heads / a.kv_heads * a.rows;
  const int64_t even = team.size() == 1 ? vectors : heads * vectors / (kItemsPerThread * team.size());
  const int64_t tall = std::max(std::min(vectors, kSliceRows), std::min(kernel.sharing, even));
  const int64_t cuts = (vectors + tall - 1) / tall;
  const int64_t work = tall * (a.kv_len[0] + a.graph_rows) * (a.head_dim + a.value_dim);
  team.share(heads * cuts, std::max<int64_t>(1, kPieceWork / work),
             [&](int64_t, int64_t begin, int64_t end) {
               for (int64_t item = begin; item < end; item++) {
                 const int64_t b = item / cuts / a.kv_heads, head = item / cuts % a.kv_heads, cut = item % cuts * tall;
                 Item(a, kernel, b, head, cut, std::min(tall, vectors - cut)).run();
               }
             });
}

}  // namespace gsd
