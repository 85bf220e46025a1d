// What may follow a node, by all that is remembered: one mixture over the candidates of every source and "none of them".
// gsd_kernels/ops/history/reference.py is the specification: sums are those of doubles, in its order.
//
// A source names candidates; each adds to a candidate's score what the mixture's weights say of it. The chance of a
// candidate is the softmax of the scores, that of "none" among them.
#pragma once

#include <cmath>

#include "ngram.h"

namespace gsd {

// Of gsd_kernels/ops/history/records.py, and the layout of the weights there.
constexpr int kHistoryOrders = 4;    // contexts of the text, 1 … 4 tokens
constexpr int kLearnedOrders = 3;    // contexts of what was learned before
constexpr int kRemembered = 8;       // continuations of an entry that are read
constexpr int kCopyContext = 5;      // tokens from which on a match is looked for in the text itself
constexpr int kCopyMost = 48;        // tokens of a match that are counted
constexpr int kCopyVisits = 64;      // places of the text that are compared
constexpr int kCopies = 2;           // different tokens that followed a match
constexpr int kCopyBuckets = 7, kDepthBuckets = 6;
constexpr int kLists = kHistoryOrders + kLearnedOrders + 1, kListFeatures = 8;
constexpr int kHistoryCandidates = kLists * kRemembered + kCopies;
constexpr double kLeastEvidence = -10.0, kLeastRemaining = 1e-3;

// Where the weights of each part begin.
constexpr int kCopyWeights = kLists * kListFeatures;
constexpr int kPaceWeights = kCopyWeights + kCopies * kCopyBuckets;     // the copy's, the longest context's
constexpr int kNoneWeights = kPaceWeights + 4;
constexpr int kNoneText = kNoneWeights + 1;
constexpr int kNoneLearned = kNoneText + kHistoryOrders + 1;
constexpr int kNoneCopy = kNoneLearned + kLearnedOrders + 1;
constexpr int kNoneDepth = kNoneCopy + kCopyBuckets + 1;
constexpr int kNonePace = kNoneDepth + kDepthBuckets;
constexpr int kNoneRest = kNonePace + 2;  // by order of the text, of what was learned, of the runners-up
constexpr int kNoneRunner = kNoneRest + kHistoryOrders + 2;
constexpr int kHistoryWeights = kNoneRunner + 1;

// A text in which the places of every five tokens in a row are linked, the newest first; and where its last step ended.
struct CopyIndex {
  int32_t* text;      // [S], −1 between texts
  int32_t* length;    // [1]
  int32_t* heads;     // [H], 1 + the last place of a hash, 0 for none
  int32_t* previous;  // [S], 1 + the place before of the same hash, 0 for none
  int32_t* runners;         // [G], what nearly was the root, best first
  float* runner_log_probs;  // [G]
  int32_t* emitted;         // [1], tokens of the step
};

struct CopySizes {
  int room, hashes, runners;  // S, H, G

  // A hash of the five tokens that `token(i)` gives, the nearest first; −1 where one is none.
  template <class Token>
  GSD_HD int hash(const Token& token) const {
    ContextKeys keys;
    int64_t key = 0;
    for (int i = 0; i < kCopyContext; i++) key = keys.next(token(i));
    return key == 0 ? -1 : static_cast<int>((key >> 17) & (hashes - 1));
  }
};

constexpr int kAppended = 128;  // tokens at a time

GSD_HD size_t append_bytes() { return arena_bytes(kAppended, sizeof(int32_t)); }

// Append as many of the tokens as there is room for.
template <class Group>
GSD_HD void append_copies(Group& group, const CopyIndex& index, const CopySizes& s, const int32_t* tokens, int count,
                          char* memory) {
  int32_t* hashes = reinterpret_cast<int32_t*>(memory);  // [kAppended], −1 for none
  const int rank = group.rank(), step = group.size(), start = *index.length;
  if (start < 0 || start >= s.room) return;
  count = min_int(count, s.room - start);
  for (int first = 0; first < count; first += kAppended) {
    const int n = min_int(count - first, kAppended), begin = start + first;
    for (int i = rank; i < n; i += step) {
      const int place = begin + i;
      index.text[place] = tokens[first + i];
      const auto back = [&](int k) {
        return place - k >= start ? tokens[place - k - start] : index.text[place - k];
      };
      hashes[i] = place + 1 < kCopyContext ? -1 : s.hash(back);
    }
    group.sync("history: hashes known");
    for (int i = rank; i < n; i += step) {
      int before = i - 1;
      while (before >= 0 && hashes[before] != hashes[i]) before--;
      index.previous[begin + i] = hashes[i] < 0 ? 0 : before < 0 ? index.heads[hashes[i]] : begin + before + 1;
    }
    group.sync("history: places linked");
    for (int i = rank; i < n; i += step) {
      int behind = i + 1;
      while (behind < n && hashes[behind] != hashes[i]) behind++;
      if (hashes[i] >= 0 && behind == n) index.heads[hashes[i]] = begin + i + 1;
    }
    group.sync("history: last places known");
  }
  if (rank == 0 && count > 0) *index.length = start + count;
}

// The tensors of a History of gsd_kernels/ops/history/records.py, in the order of its `tensors()`.
struct HistoryArgs {
  NgramTable table;  // of the text
  CopyIndex copies;
  const double* weights;  // [kHistoryWeights]
  NgramTable learned;     // of all sequences; keys null: nothing
};

// The noise that the target will draw with.
struct PickNoise {
  const int32_t* first_pick;    // [1], index of the token after the root; null: none, and so the next two
  const int64_t* seed;          // of all sequences
  const int32_t* sequence_ids;  // [1]
};

// All that is known, and what is asked: R nodes of the N of a graph.
struct HistoryRecall {
  HistoryArgs known;
  const int32_t* token_ids;  // [N]
  const int32_t* parents;    // [N]
  const int32_t* contexts;   // [N, C], the tokens before each, nearest first
  const int32_t* depths;     // [N]
  const int32_t* nodes;      // [R], −1 for padding
  PickNoise noise;
  int32_t* tokens;   // [R, wanted], −1 for none
  float* log_probs;  // [R, wanted], −inf for none
  int32_t* matched;  // [R]
};

// Those of the text's table, with the rows that are asked for.
struct HistorySizes : NgramSizes {
  NgramSizes learned;
  CopySizes copies;
  int nodes, wanted;  // N, of K continuations
};

// What a step leaves: the tokens that it emitted and, where it drafted, what the target found likely at its rows.
struct FollowArgs {
  NgramTable table;
  CopyIndex copies;
  const int32_t* tokens;  // [P]
  const int32_t* counts;  // [1], of P
  NgramTree tree;
  const int32_t* accepted_rows;  // [Q]; null, as the tree and the next two: nothing was drafted
  const int32_t* seen;           // [R, K]
  const float* log_probs;        // [R, K]
};

// Without lengths nothing was drafted.
struct FollowSizes : NgramSizes {
  CopySizes copies;
  int given, path;  // P, Q
};

GSD_HD size_t follow_bytes(const NgramSizes& s) {
  const size_t seen = s.lengths == 0 ? 0 : NgramArena::bytes(s);
  return seen > append_bytes() ? seen : append_bytes();
}

template <class Group>
GSD_HD void follow_step(Group& group, const FollowArgs& a, const FollowSizes& s, char* memory) {
  const int count = min_int(*a.counts, s.given);
  if (count > 0) {
    int row = -1;
    if (a.accepted_rows != nullptr) row = min_int(max_int(a.accepted_rows[min_int(count, s.path) - 1], 0), s.rows - 1);
    for (int k = group.rank(); k < s.copies.runners; k += group.size()) {
      const bool known = row >= 0 && k < s.branch;
      a.copies.runners[k] = known ? a.seen[static_cast<int64_t>(row) * s.branch + k] : -1;
      if (known) a.copies.runner_log_probs[k] = a.log_probs[static_cast<int64_t>(row) * s.branch + k];
    }
    if (group.rank() == 0) *a.copies.emitted = count;
    append_copies(group, a.copies, s.copies, a.tokens, count, memory);
  }
  if (a.accepted_rows == nullptr) return;
  insert_rows(group, {a.table, nullptr, a.seen, a.log_probs, nullptr}, a.tree, s, memory);
}

constexpr int kListed = kLists * kRemembered;
constexpr int kRunners = kLists - 1;  // the list of the runners-up, behind those of the text and of what was learned

// All that is known of one node, found by a group.
struct HistoryArena : Arena<HistoryArena> {
  double *votes, *scores, *parts;  // [kHistoryCandidates] each
  double* rests;                   // [3], the logarithm of what the longest lists leave, see below
  double* pace;                    // [1], the logarithm of the tokens that the step before emitted
  double* none;                    // [1], its score
  double* sums;                    // [2], the highest score, the logarithm of the sum of all chances
  int32_t* named;                  // [kHistoryCandidates], tokens in the order in which sources name them
  int32_t* tokens;                 // [kListed], list by list, −1 for none
  float* log_probs;                // [kListed]
  int32_t* sizes;                  // [kLists], entries of a list that is known, else 0
  int32_t* context;                // [kCopyMost], the last tokens at the node, its own first
  int32_t* places;                 // [kCopyVisits], what follows five tokens like the node's last
  int32_t* matches;                // [kCopyVisits], lengths of the matches there; 0 for none
  int32_t* counts;                 // [3], of context, places and named

  template <class Carve>
  GSD_HD void lay(Carve& carve) {
    carve(votes, kHistoryCandidates);
    carve(scores, kHistoryCandidates);
    carve(parts, kHistoryCandidates);
    carve(rests, 3);
    carve(pace, 1);
    carve(none, 1);
    carve(sums, 2);
    carve(named, kHistoryCandidates);
    carve(tokens, kListed);
    carve(log_probs, kListed);
    carve(sizes, kLists);
    carve(context, kCopyMost);
    carve(places, kCopyVisits);
    carve(matches, kCopyVisits);
    carve(counts, 3);
  }

  GSD_HD void find_top() const {
    double top = *none;
    for (int i = 0; i < counts[2]; i++) top = scores[i] > top ? scores[i] : top;
    sums[0] = top;
  }

  GSD_HD void add_up() const {
    double total = std::exp(*none - sums[0]);
    for (int i = 0; i < counts[2]; i++) total += scores[i] == scores[i] ? parts[i] : 0.0;
    sums[1] = sums[0] + std::log(total);
  }

  // Of a candidate among all, of which the best `wanted` have one; `wanted` for none.
  GSD_HD int place_of(int candidate, int wanted) const {
    const double score = scores[candidate];
    if (!(score == score)) return wanted;
    int better = 0;
    for (int i = 0; i < counts[2] && better < wanted; i++) {
      better += scores[i] > score || (i < candidate && scores[i] == score) ? 1 : 0;
    }
    return better;
  }
};

GSD_HD int copy_bucket(int length) {
  return length < 7 ? length - 5 : length < 9 ? 2 : length < 13 ? 3 : length < 21 ? 4 : length < 41 ? 5 : 6;
}

GSD_HD int depth_bucket(int depth) {
  return depth < 3 ? max_int(depth, 0) : depth < 5 ? 3 : depth < 9 ? 4 : 5;
}

GSD_HD double clipped(double log_prob) {
  return log_prob > kLeastEvidence ? (log_prob < 0.0 ? log_prob : 0.0) : kLeastEvidence;  // NaN: the least
}

struct HistoryNode {
  const HistoryRecall& a;
  const HistorySizes& s;
  const HistoryArena& m;
  const int node, depth = a.depths[node];
  const HistoryArgs& h = a.known;

  // One list: what a table holds of one length of the context, with the noise that the target will draw with; or the
  // runners-up, behind the root.
  GSD_HD void read_list(int list) const {
    int32_t* tokens = m.tokens + list * kRemembered;
    float* log_probs = m.log_probs + list * kRemembered;
    m.sizes[list] = 0;
    if (list == kRunners) {
      if (depth == 0 && s.copies.runners > 0 && h.copies.runners[0] >= 0) {
        m.sizes[list] = take(h.copies.runners, h.copies.runner_log_probs, s.copies.runners, tokens, log_probs);
      }
      return;
    }
    const bool own = list < kHistoryOrders;
    const NgramTable table = own ? h.table : h.learned;
    const NgramSizes sizes = own ? s : s.learned;
    const int order = own ? list : list - kHistoryOrders;
    if (table.keys == nullptr || order >= sizes.lengths) return;
    const int32_t* before = a.contexts + static_cast<int64_t>(node) * s.context;
    ContextKeys keys;
    int64_t key = 0;
GSD_ROLLED
    for (int i = 0; i <= order; i++) key = keys.next(i == 0 ? a.token_ids[node] : before[i - 1]);
    const int64_t entry = entry_of(table, sizes, key), at = entry * sizes.branch;
    if (entry < 0) return;
    m.sizes[list] = take(table.tokens + at, table.log_probs + at, sizes.branch, tokens, log_probs);
    if (a.noise.first_pick == nullptr) return;
    const uint32_t position = static_cast<uint32_t>(*a.noise.first_pick) + static_cast<uint32_t>(depth);
    const NoiseStream noise = noise_stream(*a.noise.seed, static_cast<int32_t>(position), *a.noise.sequence_ids);
    perturb(noise, tokens, log_probs, log_probs, m.sizes[list]);
  }

  static GSD_HD int take(const int32_t* from, const float* claimed, int most, int32_t* tokens, float* log_probs) {
    const int size = min_int(most, kRemembered);
GSD_ROLLED
    for (int k = 0; k < size; k++) {
      tokens[k] = from[k];
      log_probs[k] = from[k] >= 0 ? claimed[k] : negative_infinity();
    }
    return size;
  }

  // The last tokens at the node, up the graph, then on in the text before the root; and the places of the text that end
  // in five like them.
  GSD_HD void find_places() const {
    int known = 0, at = node;
    for (; at >= 0 && at < s.nodes && known < kCopyMost; at = a.parents[at]) m.context[known++] = a.token_ids[at];
    for (int place = *h.copies.length - 2; at < 0 && place >= 0 && known < kCopyMost; place--) {
      if (place >= s.copies.room || h.copies.text[place] < 0) break;
      m.context[known++] = h.copies.text[place];
    }
    int visits = 0;
    const int hash = known < kCopyContext ? -1 : s.copies.hash([&](int i) { return m.context[i]; });
    int place = hash < 0 ? 0 : h.copies.heads[hash];
    for (; visits < kCopyVisits && place > 0 && place <= s.copies.room; place = h.copies.previous[place - 1]) {
      m.places[visits++] = place;
    }
    m.counts[0] = known, m.counts[1] = visits;
    *m.pace = std::log(static_cast<double>(max_int(*h.copies.emitted, 1)));
  }

  GSD_HD void measure(int visit) const {
    const int place = m.places[visit], most = min_int(m.counts[0], place);
    int same = 0;
    if (place < *h.copies.length && place < s.copies.room && h.copies.text[place] >= 0) {  // else nothing follows yet
      while (same < most && h.copies.text[place - 1 - same] == m.context[same]) same++;
    }
    m.matches[visit] = same < kCopyContext ? 0 : same;
  }

  // Of some lists in a row the last that is known, counted from 1; 0 for none.
  GSD_HD int longest(int first, int lists) const {
    int found = 0;
    for (int i = 0; i < lists; i++) found = m.sizes[first + i] > 0 ? i + 1 : found;
    return found;
  }

  GSD_HD double weight_by_depth(int first) const { return h.weights[first + (depth > 0 ? 1 : 0)]; }

  GSD_HD bool skipped(int list, int32_t token) const {
    return token < 0 || (list == kRunners && token == a.token_ids[node]);
  }

  // What a list says of one of its candidates; of the first of the longest context more, where the last steps say how
  // easy the text is.
  GSD_HD double vote(int entry) const {
    const int list = entry / kRemembered, k = entry % kRemembered;
    const int32_t* tokens = m.tokens + list * kRemembered;
    if (k >= m.sizes[list] || skipped(list, tokens[k])) return 0.0;
    const double* w = h.weights + list * kListFeatures;
    const double log_prob = clipped(m.log_probs[entry]);
    const bool alone = m.sizes[list] < 2 || tokens[1] < 0;
    bool first = true;
    for (int i = 0; i < k; i++) first = first && skipped(list, tokens[i]);
    double score = w[0] + w[1] * log_prob + (first ? w[2] : 0.0) + (alone ? w[3] : 0.0);
    const bool own = list < kHistoryOrders;
    const int order = own ? longest(0, kHistoryOrders) : longest(kHistoryOrders, kLearnedOrders) + kHistoryOrders;
    if (list == kRunners || list + 1 != order) return score;
    const double more = own && first ? weight_by_depth(kPaceWeights + 2) * *m.pace : 0.0;
    score += w[4] + w[5] * log_prob + (first ? w[6] + more : 0.0) + (alone ? w[7] : 0.0);
    return score;
  }

  // The logarithm of what a list leaves to all other tokens: 0 the longest of the text, 1 the longest learned, 2 the
  // runners-up.
  GSD_HD void measure_rest(int which) const {
    const int begin = which == 0 ? 0 : which == 1 ? kHistoryOrders : kRunners;
    const int list = which == 2 ? kRunners : begin + longest(begin, which == 0 ? kHistoryOrders : kLearnedOrders) - 1;
    double rest = 1.0;
GSD_ROLLED
    for (int k = 0; list >= begin && k < m.sizes[list]; k++) {
      const int entry = list * kRemembered + k;
      if (m.tokens[entry] >= 0) rest -= std::exp(clipped(m.log_probs[entry]));
    }
    m.rests[which] = std::log(rest > kLeastRemaining ? rest : kLeastRemaining);
  }

  GSD_HD void name(int32_t token, double vote) const {
    const int at = m.counts[2]++;
    m.named[at] = token;
    m.votes[at] = vote;
  }

  GSD_HD void name_lists(int first, int lists) const {
    for (int list = first; list < first + lists; list++) {
      for (int k = 0; k < m.sizes[list]; k++) {
        const int entry = list * kRemembered + k;
        if (!skipped(list, m.tokens[entry])) name(m.tokens[entry], m.parts[entry]);
      }
    }
  }

  // What followed the places of the text that end like the context: of different tokens the two longest matches, of
  // equal lengths the newest. Returns the bucket of the longest, −1 for none.
  GSD_HD int name_copies() const {
    int32_t token = -1, next = -1;
    int length = 0, shorter = 0;
    for (int visit = 0; visit < m.counts[1]; visit++) {
      const int same = m.matches[visit];
      if (same <= shorter) continue;
      const int32_t following = h.copies.text[m.places[visit]];
      if (same > length) {
        if (following != token) next = token, shorter = length;
        token = following, length = same;
      } else if (following != token) {
        next = following, shorter = same;
      }
    }
    if (length == 0) return -1;
    name(token, h.weights[kCopyWeights + copy_bucket(length)] + weight_by_depth(kPaceWeights) * *m.pace);
    if (shorter > 0) name(next, h.weights[kCopyWeights + kCopyBuckets + copy_bucket(shorter)]);
    return copy_bucket(length);
  }

  // All candidates in order and the score of none; returns what the source's statistics tell apart.
  GSD_HD int name_all() const {
    const double* w = h.weights;
    const int own = longest(0, kHistoryOrders), learned = longest(kHistoryOrders, kLearnedOrders);
    m.counts[2] = 0;
    double none = w[kNoneWeights] + w[kNoneText + own] + w[kNoneDepth + depth_bucket(depth)] +
                  weight_by_depth(kNonePace) * *m.pace;
    name_lists(0, kHistoryOrders);
    if (own > 0) none += w[kNoneRest + own - 1] * m.rests[0];
    name_lists(kRunners, 1);
    if (m.sizes[kRunners] > 0) {
      none += w[kNoneRest + kHistoryOrders + 1] * m.rests[2] +
              w[kNoneRunner] * clipped(m.log_probs[kRunners * kRemembered]);
    }
    const int copied = name_copies();
    none += w[kNoneCopy + 1 + copied];
    name_lists(kHistoryOrders, kLearnedOrders);
    none += w[kNoneLearned + learned];
    if (learned > 0) none += w[kNoneRest + kHistoryOrders] * m.rests[1];
    *m.none = none;
    return copied >= 0 ? kHistoryOrders + 1 : own > 0 ? own : m.counts[2] > 0 ? kHistoryOrders + 2 : 0;
  }

  // What all that name a candidate say of it; NaN where another place stands for it.
  GSD_HD double score(int i) const {
    int at = 0;
    while (m.named[at] != m.named[i]) at++;
    if (at < i) return NAN;
    double sum = m.votes[i];
    for (at = i + 1; at < m.counts[2]; at++) {
      if (m.named[at] == m.named[i]) sum += m.votes[at];
    }
    return sum;
  }
};

// The best candidates of the nodes of some rows, `count` from `first` on, best first, of equal ones that which was named
// first. The rows lie side by side in memory: whatever is done of a node is done of all before the next barrier.
template <class Group>
GSD_HD void recall_history(Group& group, const HistoryRecall& a, const HistorySizes& s, int first, int count, char* memory) {
  const int rank = group.rank(), step = group.size();
  const auto arena_of = [&](int row) { return HistoryArena::in(memory + row * HistoryArena::bytes()); };
  const auto node_of = [&](int row, const HistoryArena& m) -> HistoryNode {
    return {a, s, m, min_int(max_int(a.nodes[first + row], 0), s.nodes - 1)};
  };
  // work(node, number, row) for so many numbers of every row's node.
  const auto each = [&](int numbers, const auto& work) {
    for (int i = rank; i < count * numbers; i += step) {
      const HistoryArena m = arena_of(i / numbers);
      work(node_of(i / numbers, m), i % numbers, i / numbers);
    }
  };
  int32_t* tokens = a.tokens + static_cast<int64_t>(first) * s.wanted;
  float* log_probs = a.log_probs + static_cast<int64_t>(first) * s.wanted;
  for (int k = rank; k < count * s.wanted; k += step) tokens[k] = -1, log_probs[k] = negative_infinity();
  each(kLists, [](const HistoryNode& node, int list, int) { node.read_list(list); });
  for (int row = step - 1 - rank; row < count; row += step) {  // the last threads, which have no list
    const HistoryArena m = arena_of(row);
    node_of(row, m).find_places();
  }
  group.sync("history: lists and places read");
  each(kListed, [](const HistoryNode& node, int entry, int) { node.m.parts[entry] = node.vote(entry); });
  each(kCopyVisits, [](const HistoryNode& node, int visit, int) {
    if (visit < node.m.counts[1]) node.measure(visit);
  });
  each(3, [](const HistoryNode& node, int which, int) { node.measure_rest(which); });
  group.sync("history: votes known");
  each(1, [&](const HistoryNode& node, int, int row) { a.matched[first + row] = node.name_all(); });
  group.sync("history: candidates named");
  each(kHistoryCandidates, [](const HistoryNode& node, int at, int) {
    if (at < node.m.counts[2]) node.m.scores[at] = node.score(at);
  });
  group.sync("history: scores known");
  each(1, [](const HistoryNode& node, int, int) { node.m.find_top(); });
  group.sync("history: tops known");
  each(kHistoryCandidates, [](const HistoryNode& node, int at, int) {
    if (at < node.m.counts[2]) node.m.parts[at] = std::exp(node.m.scores[at] - node.m.sums[0]);
  });
  group.sync("history: chances known");
  each(1, [](const HistoryNode& node, int, int) { node.m.add_up(); });
  group.sync("history: sums known");
  each(kHistoryCandidates, [&](const HistoryNode& node, int at, int row) {
    const int place = at < node.m.counts[2] ? node.m.place_of(at, s.wanted) : s.wanted;
    if (place >= s.wanted) return;
    tokens[row * s.wanted + place] = node.m.named[at];
    log_probs[row * s.wanted + place] = static_cast<float>(node.m.scores[at] - node.m.sums[1]);
  });
}

GSD_GROUP_WORK(HistoryRecall, HistoryArena::bytes(),
               recall_history(group, all[number / s.rows], s, number % s.rows, 1, memory))  // of one node
GSD_GROUP_WORK(FollowArgs, follow_bytes(s), follow_step(group, all[number], s, memory))

}  // namespace gsd
