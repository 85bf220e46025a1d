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

// A text in which the places of every five tokens in a row are linked, the newest first.
struct CopyIndex {
  int32_t* text;      // [S], −1 between texts
  int32_t* length;    // [1]
  int32_t* heads;     // [H], 1 + the last place of a hash, 0 for none
  int32_t* previous;  // [S], 1 + the place before of the same hash, 0 for none
  int room, hashes;   // S, H

  GSD_HD CopyIndex at(int64_t b) const {
    return {text + b * room, length + b, heads + b * hashes, previous + b * room, room, hashes};
  }

  // A hash of the five tokens that `token(i)` gives, the nearest first; −1 where one is none.
  template <class Token>
  GSD_HD int hash(const Token& token) const {
    ContextKeys keys;
    int64_t key = 0;
    for (int i = 0; i < kCopyContext; i++) key = keys.next(token(i));
    return key == 0 ? -1 : static_cast<int>((key >> 17) & (hashes - 1));
  }

  GSD_HD void append(int32_t token) {
    const int place = *length;
    if (place < 0 || place >= room) return;
    text[place] = token;
    previous[place] = 0;
    *length = place + 1;
    if (place + 1 < kCopyContext) return;
    const int at = hash([&](int i) { return text[place - i]; });
    if (at < 0) return;
    previous[place] = heads[at];
    heads[at] = place + 1;
  }
};

struct HistoryArgs {
  NgramTable table;               // of the text
  NgramTable learned;             // of all sequences; keys null: nothing
  CopyIndex copies;
  const int32_t* runners;         // [G], what nearly was the root, best first
  const float* runner_log_probs;  // [G]
  const int32_t* emitted;         // [1], tokens of the step before
  const double* weights;          // [kHistoryWeights]
  const int32_t* parents;         // [M]
  NgramSizes learned_sizes;
  int num_runners;

  GSD_HD HistoryArgs at(const NgramSizes& s, int64_t b, int graph_nodes) const {
    HistoryArgs mine = *this;
    mine.table = table.at(s, b);
    mine.copies = copies.at(b);
    mine.runners = runners + b * num_runners;
    mine.runner_log_probs = runner_log_probs + b * num_runners;
    mine.emitted = emitted + b;
    mine.parents = parents + b * graph_nodes;
    return mine;
  }
};

// Candidates of one node and their scores.
struct Candidates {
  int32_t tokens[kHistoryCandidates];
  double scores[kHistoryCandidates];
  int size = 0;

  GSD_HD void add(int32_t token, double score) {
    int i = 0;
    while (i < size && tokens[i] != token) i++;
    if (i == size) {
      tokens[size] = token;
      scores[size++] = 0.0;
    }
    scores[i] += score;
  }
};

// An entry's continuations with the noise that the target will draw with.
struct Evidence {
  int32_t tokens[kRemembered];
  float log_probs[kRemembered];
  int size = 0;

  GSD_HD void read(const int32_t* from, const float* claimed, int most) {
    size = most < kRemembered ? most : kRemembered;
    for (int k = 0; k < size; k++) {
      tokens[k] = from[k];
      log_probs[k] = from[k] >= 0 ? claimed[k] : negative_infinity();
    }
  }

  GSD_HD double clipped(int k) const {
    const double log_prob = log_probs[k];
    return log_prob > kLeastEvidence ? (log_prob < 0.0 ? log_prob : 0.0) : kLeastEvidence;  // NaN: the least
  }

  // The logarithm of what they leave to all other tokens.
  GSD_HD double log_rest() const {
    double rest = 1.0;
    for (int k = 0; k < size; k++) rest -= tokens[k] >= 0 ? std::exp(clipped(k)) : 0.0;
    return std::log(rest > kLeastRemaining ? rest : kLeastRemaining);
  }

  // `pace`: more for the best, where the last steps say how easy the text is. `skipped`: a token that is none of them.
  GSD_HD void vote(const double* w, bool longest, double pace, int32_t skipped, Candidates* found) const {
    const bool alone = size < 2 || tokens[1] < 0;
    bool first = true;
    for (int k = 0; k < size; k++) {
      if (tokens[k] < 0 || tokens[k] == skipped) continue;
      double score = w[0] + w[1] * clipped(k) + (first ? w[2] : 0.0) + (alone ? w[3] : 0.0);
      if (longest) score += w[4] + w[5] * clipped(k) + (first ? w[6] + pace : 0.0) + (alone ? w[7] : 0.0);
      found->add(tokens[k], score);
      first = false;
    }
  }
};

GSD_HD int copy_bucket(int length) {
  return length < 7 ? length - 5 : length < 9 ? 2 : length < 13 ? 3 : length < 21 ? 4 : length < 41 ? 5 : 6;
}

GSD_HD int depth_bucket(int depth) {
  return depth < 3 ? max_int(depth, 0) : depth < 5 ? 3 : depth < 9 ? 4 : 5;
}

// What followed the places of the text that end like `context`: of different tokens the longest matches, of equal
// lengths the newest. Returns how many.
GSD_HD int find_copies(const CopyIndex& index, const int32_t* context, int known, int32_t* tokens, int* lengths) {
  int found = 0;
  const int at = known < kCopyContext ? -1 : index.hash([&](int i) { return context[i]; });
  int place = at < 0 ? 0 : index.heads[at];
  for (int visit = 0; visit < kCopyVisits && place > 0 && place <= index.room; visit++, place = index.previous[place - 1]) {
    if (place >= *index.length || index.text[place] < 0) continue;  // nothing follows yet
    int same = 0;
    while (same < known && same < place && index.text[place - 1 - same] == context[same]) same++;
    if (same < kCopyContext) continue;
    const int32_t token = index.text[place];
    int i = 0;
    while (i < found && tokens[i] != token) i++;
    if (i < found && lengths[i] >= same) continue;
    if (i == found) {
      if (found == kCopies && lengths[found - 1] >= same) continue;
      found = min_int(found + 1, kCopies);
      i = found - 1;
    }
    for (; i > 0 && lengths[i - 1] < same; i--) tokens[i] = tokens[i - 1], lengths[i] = lengths[i - 1];
    tokens[i] = token, lengths[i] = same;
  }
  return found;
}

struct HistoryNode {
  const HistoryArgs& h;
  const NgramRecallArgs& a;
  const NgramSizes& s;
  const int node;
  const NoiseStream* noise;  // null: none

  int32_t context[kCopyMost];
  int known = 0, depth = 0;

  GSD_HD HistoryNode(const HistoryArgs& history, const NgramRecallArgs& args, const NgramSizes& sizes, int id,
                     const NoiseStream* stream)
      : h(history), a(args), s(sizes), node(id), noise(stream) {}

  // The last tokens at the node, its own first: up the graph, then on in the text before the root.
  GSD_HD void read_context() {
    depth = a.depths[node];
    int at = node;
    for (; at >= 0 && at < a.graph_nodes && known < kCopyMost; at = h.parents[at]) context[known++] = a.token_ids[at];
    for (int place = *h.copies.length - 2; at < 0 && place >= 0 && known < kCopyMost; place--) {
      if (place >= h.copies.room || h.copies.text[place] < 0) break;
      context[known++] = h.copies.text[place];
    }
  }

  // What a table holds of every length of the context; the longest of them, 0 for none.
  GSD_HD int look_up(const NgramTable& table, const NgramSizes& sizes, int orders, Evidence* found) const {
    const int32_t* before = a.contexts + static_cast<int64_t>(node) * s.context;
    ContextKeys keys;
    int longest = 0;
    for (int i = 0; i < orders; i++) {
      const int64_t key = keys.next(i == 0 ? a.token_ids[node] : before[i - 1]);
      if (key == 0) break;
      const int64_t set = static_cast<int64_t>(set_of(key, sizes)) * sizes.ways;
      for (int way = 0; way < sizes.ways; way++) {
        if (table.keys[set + way] != key) continue;
        const int64_t at = (set + way) * sizes.branch;
        found[i].read(table.tokens + at, table.log_probs + at, sizes.branch);
        if (noise != nullptr) perturb(*noise, found[i].tokens, found[i].log_probs, found[i].log_probs, found[i].size);
        longest = i + 1;
        break;
      }
    }
    return longest;
  }

  // The candidates' scores; returns that of none, and in `matched` what the source's statistics tell apart.
  GSD_HD double weigh(Candidates* found, int* matched) {
    read_context();
    const double* w = h.weights;
    Evidence text[kHistoryOrders], learned[kLearnedOrders], runners;
    const int longest = look_up(h.table, s, min_int(s.lengths, kHistoryOrders), text);
    const double pace = std::log(static_cast<double>(max_int(*h.emitted, 1)));
    const int deeper = depth > 0 ? 1 : 0;
    double none = w[kNoneWeights] + w[kNoneText + longest] + w[kNoneDepth + depth_bucket(depth)] +
                  w[kNonePace + deeper] * pace;
    for (int i = 0; i < kHistoryOrders; i++) {
      text[i].vote(w + i * kListFeatures, i + 1 == longest, w[kPaceWeights + 2 + deeper] * pace, -1, found);
    }
    if (longest > 0) none += w[kNoneRest + longest - 1] * text[longest - 1].log_rest();
    if (depth == 0 && h.num_runners > 0 && h.runners[0] >= 0) {
      runners.read(h.runners, h.runner_log_probs, h.num_runners);
      runners.vote(w + (kLists - 1) * kListFeatures, false, 0.0, a.token_ids[node], found);
      none += w[kNoneRest + kHistoryOrders + 1] * runners.log_rest() + w[kNoneRunner] * runners.clipped(0);
    }
    int32_t tokens[kCopies];
    int lengths[kCopies];
    const int copies = find_copies(h.copies, context, known, tokens, lengths);
    none += w[kNoneCopy + (copies > 0 ? 1 + copy_bucket(lengths[0]) : 0)];
    for (int i = 0; i < copies; i++) {
      const double more = i == 0 ? w[kPaceWeights + deeper] * pace : 0.0;
      found->add(tokens[i], w[kCopyWeights + i * kCopyBuckets + copy_bucket(lengths[i])] + more);
    }
    const int lengths_learned = h.learned.keys == nullptr ? 0 : min_int(h.learned_sizes.lengths, kLearnedOrders);
    const int elsewhere = look_up(h.learned, h.learned_sizes, lengths_learned, learned);
    for (int i = 0; i < kLearnedOrders; i++) {
      learned[i].vote(w + (kHistoryOrders + i) * kListFeatures, i + 1 == elsewhere, 0.0, -1, found);
    }
    none += w[kNoneLearned + elsewhere];
    if (elsewhere > 0) none += w[kNoneRest + kHistoryOrders] * learned[elsewhere - 1].log_rest();
    *matched = copies > 0 ? kHistoryOrders + 1 : longest > 0 ? longest : found->size > 0 ? kHistoryOrders + 2 : 0;
    return none;
  }
};

// The best candidates of each node, best first, of equal ones that which was named first.
template <class Group>
GSD_HD void recall_history(Group& group, const NgramRecallArgs& a, const HistoryArgs& h, const NgramSizes& s) {
  for (int row = group.rank(); row < s.rows; row += group.size()) {
    const int node = min_int(max_int(a.nodes[row], 0), a.graph_nodes - 1);
    NoiseStream noise;
    if (a.first_pick != nullptr) {
      const uint32_t position = static_cast<uint32_t>(*a.first_pick) + static_cast<uint32_t>(a.depths[node]);
      noise = noise_stream(*a.seed, static_cast<int32_t>(position), *a.sequence_ids);
    }
    HistoryNode asked(h, a, s, node, a.first_pick != nullptr ? &noise : nullptr);
    Candidates found;
    const double none = asked.weigh(&found, a.matched + row);
    double top = none, total = 0.0;
    for (int i = 0; i < found.size; i++) top = found.scores[i] > top ? found.scores[i] : top;
    total = std::exp(none - top);
    for (int i = 0; i < found.size; i++) total += std::exp(found.scores[i] - top);
    const double log_total = top + std::log(total);
    for (int k = 0; k < a.wanted; k++) {
      int best = -1;
      for (int i = 0; i < found.size; i++) {
        if (found.tokens[i] >= 0 && (best < 0 || found.scores[i] > found.scores[best])) best = i;
      }
      const int64_t at = static_cast<int64_t>(row) * a.wanted + k;
      a.tokens[at] = best < 0 ? -1 : found.tokens[best];
      a.log_probs[at] = best < 0 ? negative_infinity() : static_cast<float>(found.scores[best] - log_total);
      if (best >= 0) found.tokens[best] = -1;  // taken
    }
  }
}

}  // namespace gsd
