// The rows' path attention on the machine of fibers: every row of random texts has the contract's bits, in any company and
// at any place. With GSD_ONE_TYPE a type has one head size.
#include "problems.h"

using namespace gsd;

namespace {

#ifdef GSD_ONE_TYPE
constexpr int kOneHeadDim = std::is_same_v<One, Half> ? 64 : 128;
#endif

struct Shape {
  int head_dim, batch, kv_heads, group, rows, window;  // window 0: none
  int heads() const { return kv_heads * group; }
};

// A sequence: its prefix and a tree of nodes. Rows are the first nodes.
struct Text {
  int prefix;
  std::vector<int> parents, depths;  // of nodes; parents come first, −1 is the prefix
  std::vector<uint16_t> q, k, v;     // [rows, heads, D], [prefix + nodes, kv heads, D] twice

  int nodes() const { return static_cast<int>(parents.size()); }
  // Nodes that the row sees, the oldest first.
  std::vector<int> path(int row) const {
    std::vector<int> found;
    for (int node = row; node >= 0; node = parents[node]) found.insert(found.begin(), node);
    return found;
  }
  int position(int row) const { return prefix + depths[row]; }
};

template <class Element>
Text make_text(const Shape& s, int prefix, int nodes, bool chain, std::mt19937& random) {
  Text t{prefix, {}, {}, {}, {}, {}};
  for (int node = 0; node < nodes; node++) {
    const int parent = chain ? node - 1 : std::max(-1, node - between(random, 1, 5));
    t.parents.push_back(parent);
    t.depths.push_back(parent < 0 ? 0 : t.depths[parent] + 1);
  }
  const size_t slots = static_cast<size_t>(prefix + nodes) * s.kv_heads * s.head_dim;
  t.q = drawn<Element>(static_cast<size_t>(s.rows) * s.heads() * s.head_dim, random);
  t.k = drawn<Element>(slots, random);
  t.v = drawn<Element>(slots, random);
  return t;
}

// Where one sequence of a call lies: some rows of a text, of whose path `committed` nodes are in the prefix already.
struct Place {
  const Text* text;
  std::vector<int> rows;
  int committed, start;
  std::vector<int> node_of_slot;  // behind the prefix; −1: nobody's
};

// Nodes in any order, with gaps between them.
Place place(const Text& text, std::vector<int> rows, int committed, int start, bool shuffled, std::mt19937& random) {
  Place p{&text, rows, committed, start, {}};
  std::vector<bool> done(text.nodes());
  const std::vector<int> first = text.path(rows[0]);  // rows have the committed part in common
  for (int i = 0; i < committed; i++) done[first[i]] = true;
  for (int row : rows) {
    for (int node : text.path(row)) {
      if (!done[node]) p.node_of_slot.push_back(node);
      done[node] = true;
    }
  }
  if (shuffled) {
    for (int gap = between(random, 0, 40); gap > 0; gap--) p.node_of_slot.push_back(-1);
    std::shuffle(p.node_of_slot.begin(), p.node_of_slot.end(), random);
  }
  return p;
}

// A call in memory. Slots that no row sees hold NaN; tensors end where they are read last.
template <class Element>
struct Call {
  Shape shape;
  std::vector<uint16_t> q, k, v, out, written;  // written: the queries, once the launch before is over
  std::vector<int32_t> mask, node_depths, kv_len, kv_start, positions, slots, lengths;
  std::vector<float> scratch;
  AncestorListArgs list{};
  PathAttentionSizes sizes{};
  PathAttentionArgs args{};
  static constexpr int kPad = 8;  // elements between rows of queries and outputs

  Call(const Shape& s, const std::vector<Place>& places, int capacity, bool positions_first) : shape(s) {
    const int batch = static_cast<int>(places.size()), rows = static_cast<int>(places[0].rows.size());
    size_t width = 1;
    for (const Place& p : places) width = std::max(width, p.node_of_slot.size());
    const int words = words_for(static_cast<int>(width));
    shape.batch = batch, shape.rows = rows;
    sizes = {batch, s.kv_heads, s.group, rows, s.head_dim, capacity};

    const size_t cache = static_cast<size_t>(batch) * s.kv_heads * capacity * s.head_dim;
    k.assign(cache, Element::round(NAN)), v.assign(cache, Element::round(INFINITY));
    const int64_t slot = positions_first ? s.kv_heads * s.head_dim : s.head_dim;
    const int64_t head = positions_first ? s.head_dim : int64_t{capacity} * s.head_dim;
    args.k_slot = args.v_slot = static_cast<int>(slot);
    args.k_head = args.v_head = head;
    args.k_batch = args.v_batch = int64_t{capacity} * s.kv_heads * s.head_dim;
    args.q_row = args.out_row = s.heads() * s.head_dim + kPad;
    q.assign(batch * rows * args.q_row - kPad, Element::round(NAN)), out.assign(batch * rows * args.out_row, 0xA5A5);

    for (int b = 0; b < batch; b++) {
      const Place& p = places[b];
      const Text& t = *p.text;
      const int prefix = t.prefix + p.committed;
      kv_start.push_back(p.start), kv_len.push_back(p.start + prefix);
      const auto put = [&](int from, int to) {
        for (int h = 0; h < s.kv_heads; h++) {
          const size_t source = (static_cast<size_t>(from) * s.kv_heads + h) * s.head_dim;
          const size_t target = b * args.k_batch + h * args.k_head + to * args.k_slot;
          std::copy_n(&t.k[source], s.head_dim, &k[target]);
          std::copy_n(&t.v[source], s.head_dim, &v[target]);
        }
      };
      int oldest = INT32_MAX;
      for (int row : p.rows) oldest = std::min(oldest, s.window == 0 ? 0 : t.position(row) - (s.window - 1));
      const std::vector<int> path = t.path(p.rows[0]);
      for (int i = std::max(oldest, 0); i < prefix; i++) {
        put(i < t.prefix ? i : t.prefix + path[i - t.prefix], p.start + i);
      }
      for (size_t i = 0; i < width; i++) {
        const int node = i < p.node_of_slot.size() ? p.node_of_slot[i] : -1;
        node_depths.push_back(node < 0 ? static_cast<int>(i % 3) : t.depths[node] - p.committed);
        if (node >= 0) put(t.prefix + node, kv_len[b] + static_cast<int>(i));
      }
      for (int r = 0; r < rows; r++) {
        const std::vector<int> seen = t.path(p.rows[r]);
        positions.push_back(t.position(p.rows[r]));
        mask.resize(mask.size() + words);
        for (size_t i = 0; i < p.node_of_slot.size(); i++) {
          if (std::find(seen.begin(), seen.end(), p.node_of_slot[i]) == seen.end()) continue;
          mask[mask.size() - words + i / 32] |= static_cast<int32_t>(1u << i % 32);
        }
        std::copy_n(&t.q[static_cast<size_t>(p.rows[r]) * s.heads() * s.head_dim], s.heads() * s.head_dim,
                    &q[(b * rows + r) * args.q_row]);
      }
    }
    list = {mask.data(), node_depths.data(), kv_len.data(), nullptr, nullptr,
            batch, rows, words, static_cast<int>(width), capacity};
    slots.assign(static_cast<size_t>(batch) * rows * list.width(), -1), lengths.assign(batch * rows, -1);
    list.slots = slots.data(), list.lengths = lengths.data();
    written = q, q.assign(q.size(), Element::round(NAN));
    scratch.assign(path_scratch_floats(sizes), NAN);
    args.q = q.data(), args.k = k.data(), args.v = v.data(), args.out = out.data(), args.scratch = scratch.data();
    args.slots = slots.data(), args.lengths = lengths.data(), args.path = list.width();
    args.kv_len = kv_len.data(), args.kv_start = kv_start.data(), args.positions = positions.data();
    args.window = s.window;
    args.scale = kLog2E / std::sqrt(static_cast<float>(s.head_dim));
  }
  Call(const Call&) = delete;

  template <int kHeadDim>
  void attend() {
    for (int row = 0; row < list.batch * list.rows; row++) {
      count_ancestors(list, row);
      for (int node = 0; node < list.width(); node++) list_ancestor(list, row, node);
    }
    run_prefix<Element, kHeadDim>(args, sizes, after([&] { q = written; }));
    const std::vector<float> states = scratch;
    std::fill(scratch.begin(), scratch.end(), NAN);
    run_end<Element, kHeadDim>(args, sizes, after([&] { scratch = states; }));
  }

  void attend() {
#ifdef GSD_ONE_TYPE
    attend<kOneHeadDim>();
#else
    shape.head_dim == 128 ? attend<128>() : attend<64>();
#endif
  }

  const uint16_t* output(int b, int row) const { return &out[(b * sizes.rows + row) * args.out_row]; }

  // What a row's outputs are rounded from: a bit that a state lost would rarely be seen in 16 of them.
  std::vector<double> unrounded(int b, int row) const {
    const PathText text(args, sizes, b);
    const int end = text.prefix + lengths[b * sizes.rows + row], d = shape.head_dim;
    const int64_t states = sizes.partials();
    std::vector<double> result;
    for (int head = 0; head < shape.heads(); head++) {
      std::vector<double> sums(d + 1);
      double best = -INFINITY;
      for (const bool summing : {false, true}) {
        for (int split = path_split_of(text.first); split <= path_split_of(end - 1); split++) {
          const int64_t at = (static_cast<int64_t>(b * sizes.kv_heads + head / sizes.group) * sizes.splits() + split) *
                                 sizes.query_rows() + row * sizes.group + head % sizes.group;
          const double highest = scratch[states * (d + 4) + at], share = summing ? std::exp2(highest - best) : 0;
          if (!summing) best = std::max(best, highest);
          for (int i = 0; summing && i < d; i++) sums[i] += share * scratch[at * d + i];
          for (int i = 0; summing && i < 4; i++) sums[d] += share * scratch[states * d + 4 * at + i];
        }
      }
      result.insert(result.end(), sums.begin(), sums.end());
    }
    return result;
  }
};

bool same(const std::vector<double>& a, const std::vector<double>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); });
}

// What the contract of path_attention.h makes of a row, number by number: no lanes, no stages, no other rows. The sums that
// Call::unrounded takes of the states, and the outputs.
template <class Element>
std::vector<double> contracted(const Shape& s, const Text& t, int row, std::vector<uint16_t>& outputs) {
  constexpr int kSixteen = 16;
  struct State {
    float best = kEmpty, totals[4] = {};
    std::vector<float> out;
  };
  const int end = t.position(row) + 1, oldest = s.window == 0 ? 0 : t.position(row) - (s.window - 1), d = s.head_dim;
  const std::vector<int> path = t.path(row);
  const Factor none = factor<Element>(0);
  std::vector<double> result;
  for (int head = 0; head < s.heads(); head++) {
    const auto number = [&](const std::vector<uint16_t>& of, int i, int dimension) {
      if (i < oldest || i >= end) return none;
      const size_t at = static_cast<size_t>(i < t.prefix ? i : t.prefix + path[i - t.prefix]);
      return factor<Element>(of[(at * s.kv_heads + head / s.group) * d + dimension]);
    };
    const auto chained = [&](float sum, int count, const auto& left, const auto& right) {
      for (int first = 0; first < count; first += kSixteen) {
        Factor a[kSixteen], b[kSixteen];
        const Factor *pa[kSixteen], *pb[kSixteen];
        for (int k = 0; k < kSixteen; k++) a[k] = left(first + k), b[k] = right(first + k), pa[k] = &a[k], pb[k] = &b[k];
        sum = dot_add(sum, pa, pb);
      }
      return sum;
    };
    std::vector<State> splits(path_split_of(end - 1) + 1, State{kEmpty, {}, std::vector<float>(d)});
    for (int tile = 0; tile < end; tile += kTileColumns) {
      State& state = splits[path_split_of(tile)];
      float scores[kTileColumns], highest = state.best;
      for (int c = 0; c < kTileColumns; c++) {
        const uint16_t* q = &t.q[(static_cast<size_t>(row) * s.heads() + head) * d];
        const float sum = chained(0.0f, d, [&](int k) { return factor<Element>(q[k]); },
                                  [&](int k) { return number(t.k, tile + c, k); });
        const bool seen = tile + c < end && tile + c >= oldest;
        scores[c] = seen ? sum * (kLog2E / std::sqrt(static_cast<float>(d))) : -INFINITY;
        highest = std::fmax(highest, scores[c]);
      }
      const float decay = std::exp2(state.best - highest);
      state.best = highest;
      for (int lane = 0; lane < 4; lane++) {
        float sum = 0.0f;
        for (int n = 0; n < 4; n++) {
          for (int e = 0; e < 2; e++) {
            float& score = scores[8 * n + 2 * lane + e];
            sum += score = std::exp2(score - highest);
          }
        }
        state.totals[lane] = std::fma(state.totals[lane], decay, sum);
      }
      for (int i = 0; i < d; i++) {
        state.out[i] = chained(state.out[i] * decay, kTileColumns,
                               [&](int c) { return factor<Element>(Element::round(scores[c])); },
                               [&](int c) { return number(t.v, tile + c, i); });
      }
    }
    float best = kEmpty, total = 0.0f;
    for (const State& state : splits) best = std::max(best, state.best);
    std::vector<double> sums(d + 1);
    std::vector<float> out(d);
    for (const State& state : splits) {
      const double exact = std::exp2(state.best - static_cast<double>(best));
      const float share = std::exp2(state.best - best), *t4 = state.totals;
      for (int i = 0; i < d; i++) sums[i] += exact * state.out[i], out[i] = std::fma(share, state.out[i], out[i]);
      for (const float part : state.totals) sums[d] += exact * part;
      total = std::fma(share, t4[0] + t4[1] + (t4[2] + t4[3]), total);
    }
    result.insert(result.end(), sums.begin(), sums.end());
    for (const float number : out) outputs.push_back(Element::round(number * (1.0f / total)));
  }
  return result;
}

// Rows of random texts in any company and place: beside other rows and sequences, in any slots, behind padding, with some of
// their ancestors committed, in caches of any size and layout. The contract knows of none of it.
template <class Element>
bool round_is_right(const Shape& s, int round, std::mt19937& random) {
  std::vector<Text> texts;
  for (int b = 0; b < s.batch; b++) {
    // Short; ending beside the second split's begin, so that paths reach into it; within the third split.
    const int kinds[] = {between(random, 0, 70), between(random, 117, 128), between(random, 257, 310)};
    texts.push_back(make_text<Element>(s, kinds[(round + b) % 3], s.rows + between(random, 0, 3), round % 4 == 1, random));
    Text& t = texts.back();
    if (round % 4 >= 2) {  // not finite, for those who see it
      const size_t row = static_cast<size_t>(t.prefix + random() % s.rows) * s.kv_heads * s.head_dim;
      t.v[row + random() % s.head_dim] = Element::round(round % 2 == 0 ? NAN : INFINITY);
    }
  }
  std::vector<Place> places;
  int capacity = 0;
  for (const Text& t : texts) {
    std::vector<int> first = t.path(between(random, 0, s.rows - 1)), rows;
    first.resize(round % 3 == 1 ? 0 : random() % (first.size() + 1));  // what is committed
    for (int row = 0; rows.size() < static_cast<size_t>(s.rows); row = (row + 1) % s.rows) {
      const std::vector<int> path = t.path(row);
      if (std::mismatch(first.begin(), first.end(), path.begin(), path.end()).first == first.end()) rows.push_back(row);
    }
    const int start = random() % 2 == 0 ? 0 : between(random, 0, 50);
    places.push_back(place(t, rows, static_cast<int>(first.size()), start, random() % 2 == 0, random));
    const Place& p = places.back();
    capacity = std::max(capacity, start + t.prefix + p.committed + static_cast<int>(p.node_of_slot.size()));
  }
  Call<Element> call(s, places, capacity + (random() % 2 == 0 ? 0 : between(random, 1, 300)), random() % 2 == 0);
  call.attend();
  for (int at = 0; at < s.batch * s.rows; at++) {
    const int b = at / s.rows, row = places[b].rows[at % s.rows];
    std::vector<uint16_t> outputs;
    const bool kept = same(call.unrounded(b, at % s.rows), contracted<Element>(s, texts[b], row, outputs));
    const auto finite = [](uint16_t bits) { return std::isfinite(Element::widen(bits)); };
    const uint16_t* const got = call.output(b, at % s.rows);
    const bool right = std::all_of(outputs.begin(), outputs.end(), finite)
                           ? kept && std::equal(outputs.begin(), outputs.end(), got)
                           : !std::all_of(got, got + outputs.size(), finite);
    if (!right) return fprintf(stderr, "row %d is not the contract's, %d committed\n", row, places[b].committed), false;
  }
  return true;
}

bool attended(int round, std::mt19937& random) {
  Shape s{};
  s.head_dim = round / 2 % 2 == 0 ? 64 : 128;
  s.batch = between(random, 1, 2);
  s.kv_heads = between(random, 1, 2);
  s.group = round % 3 == 0 ? 1 : between(random, 2, 8);
  s.rows = between(random, 1, 6);
  if (round % 4 == 1) s.rows = 46, s.batch = s.kv_heads = 1, s.group = 2;  // a path of two tiles behind a split's end
  if (round % 8 == 4) s.rows = s.batch = s.kv_heads = 1, s.group = 70;  // more heads than a warp takes
  s.window = round % 3 == 2 ? between(random, 1, 90) : 0;
#ifdef GSD_ONE_TYPE
  s.head_dim = kOneHeadDim;
#endif
  return round % 2 == 1 ? round_is_right<Other>(s, round, random) : round_is_right<One>(s, round, random);
}

const Listed listed({{"path", attended}});

}  // namespace
