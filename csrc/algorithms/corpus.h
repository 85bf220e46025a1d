// Continuations of a context in a sorted corpus: every position of it by the tokens up to there, the nearest first.
// gsd_kernels/ops/corpus/reference.py is the specification, bit for bit but for the logarithm.
//
// Nothing that an index holds leads outside of its arrays, so that a damaged one costs speed and nothing else.
#pragma once

#include <cmath>

#include "group.h"

namespace gsd {

constexpr int kCorpusContext = 16;  // MAX_MATCH of gsd_kernels/ops/corpus/index.py
constexpr int kCorpusCounted = 64;  // COUNTED: occurrences of one context that are counted
constexpr int kCorpusOrders = 3;    // ORDERS: lengths of context that are mixed
constexpr int kCorpusTokens = kCorpusCounted * kCorpusOrders;

struct CorpusIndex {
  const int32_t* text;       // [T], −1 behind every document
  const int32_t* order;      // [E], positions of the text, sorted by their contexts
  const int32_t* following;  // [E], the token after each
  int64_t length, entries;

  // The token `back` places before a position that an index names; −1 outside of the text.
  GSD_HD int32_t token(int64_t entry, int back) const {
    const int64_t place = static_cast<int64_t>(order[entry]) - back;
    return place >= 0 && place < length ? text[place] : -1;
  }
};

// The graph's node and the text before its root, as one context.
struct CorpusText {
  const int32_t* token_ids;  // [N]
  const int32_t* parents;    // [N]
  const int64_t* tokens;     // [S]
  int64_t end, begin;        // of the emitted text: its root is at end − 1
  int64_t room;              // S
  int nodes;                 // N

  // The last tokens at `node`, its own first; how many there are.
  GSD_HD int context(int32_t node, int32_t* found) const {
    int length = 0;
    if (node < 0 || node >= nodes) return 0;
    for (; node >= 0 && node < nodes && length < kCorpusContext; node = parents[node]) found[length++] = token_ids[node];
    for (int64_t place = end - 2; place >= begin && place >= 0 && place < room && length < kCorpusContext; place--) {
      found[length++] = static_cast<int32_t>(tokens[place]);
    }
    return length;
  }
};

// Tokens that an entry's context has in common with `context`, up to `length`; `before`: whether it sorts before it.
GSD_HD int corpus_common(const CorpusIndex& index, int64_t entry, const int32_t* context, int length, bool* before) {
  for (int i = 0; i < length; i++) {
    const int32_t token = index.token(entry, i);
    if (token == context[i]) continue;
    *before = token < context[i];
    return i;
  }
  *before = false;
  return length;
}

// The first entry of low … high that does not sort before the context's first `length` tokens, or, with `behind`, that
// sorts behind all that begin with them.
GSD_HD int64_t corpus_bound(const CorpusIndex& index, const int32_t* context, int length, bool behind, int64_t low,
                            int64_t high) {
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    bool before;
    const int common = corpus_common(index, middle, context, length, &before);
    if (before || (behind && common == length)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

struct CorpusRange {
  int64_t low, high;
};

// Of a context whose place among the entries is `place`, those that begin with `length` of its tokens: looked for in
// growing steps, since they lie round it and are few.
GSD_HD CorpusRange corpus_range(const CorpusIndex& index, const int32_t* context, int length, int64_t place) {
  bool before;
  int64_t low = place, high = place, step = 8;
  for (; low > 0; step *= 4) {
    const int64_t tried = low > step ? low - step : 0;
    if (corpus_common(index, tried, context, length, &before) < length) {
      low = corpus_bound(index, context, length, false, tried + 1, low);
      break;
    }
    low = tried;
  }
  for (step = 8; high < index.entries; step *= 4) {
    const int64_t tried = index.entries - high > step ? high + step : index.entries;
    if (corpus_common(index, tried - 1, context, length, &before) < length) {
      high = corpus_bound(index, context, length, true, high, tried - 1);
      break;
    }
    high = tried;
  }
  return {low, high};
}

// Tokens that followed, each once, and their probabilities.
struct CorpusCounts {
  int32_t tokens[kCorpusTokens];
  float probs[kCorpusTokens];
  int32_t counts[kCorpusTokens];
  int size = 0;

  // Count what followed the entries of a range, `rest` being the probability that is still to be shared out; what is
  // left of it to shorter contexts.
  GSD_HD float add(const CorpusIndex& index, CorpusRange range, int length, int vocab, float rest, bool* enough) {
    const int64_t size_of_range = range.high - range.low;
    const int64_t counted = size_of_range < kCorpusCounted ? size_of_range : kCorpusCounted;
    for (int i = 0; i < size; i++) counts[i] = 0;
    int total = 0, distinct = 0;
    for (int64_t i = 0; i < counted; i++) {
      const int32_t token = index.following[range.low + i * size_of_range / counted];
      if (token < 0 || token >= vocab) continue;
      int at = 0;
      while (at < size && tokens[at] != token) at++;
      if (at == size) {
        tokens[size] = token;
        probs[size] = 0.0f;
        counts[size++] = 0;
      }
      distinct += counts[at] == 0;
      counts[at]++;
      total++;
    }
    *enough = total >= kCorpusCounted / 2;
    if (total == 0) return rest;
    const float unseen = static_cast<float>(distinct) / static_cast<float>(length);
    const float share = rest / (static_cast<float>(total) + unseen);
    for (int i = 0; i < size; i++) probs[i] = probs[i] + share * static_cast<float>(counts[i]);
    return share * unseen;
  }

  // The most probable one that is left, of equal ones the lowest id; −1 for none. It is taken out.
  GSD_HD int take() {
    int best = -1;
    for (int i = 0; i < size; i++) {
      if (probs[i] < 0.0f) continue;
      if (best < 0 || probs[i] > probs[best] || (probs[i] == probs[best] && tokens[i] < tokens[best])) best = i;
    }
    return best;
  }
};

struct CorpusSizes {
  int nodes, frontier, branch, vocab;  // N, W, K
  int64_t room;                        // S
};

struct CorpusArgs {
  CorpusIndex index;
  const int32_t* token_ids;  // [B, N]
  const int32_t* parents;    // [B, N]
  const int64_t* tokens;     // [B, S]
  const int32_t* out_len;    // [B]
  const int32_t* kv_start;   // [B]
  const int32_t* frontier;   // [B, W]
  int32_t* out_tokens;       // [B, W, K]
  float* out_log_probs;      // [B, W, K]
  int32_t* out_matched;      // [B, W]
};

// Row w of sequence b.
GSD_HD void corpus_recall_row(const CorpusArgs& a, const CorpusSizes& s, int64_t row) {
  const int64_t b = row / s.frontier;
  const CorpusText text{a.token_ids + b * s.nodes, a.parents + b * s.nodes, a.tokens + b * s.room, a.out_len[b],
                        a.kv_start[b], s.room, s.nodes};
  int32_t context[kCorpusContext];
  const int length = text.context(a.frontier[row], context);
  int64_t place = 0;
  int matched = 0;
  if (length > 0) {
    bool before;
    place = corpus_bound(a.index, context, length, false, 0, a.index.entries);
    if (place > 0) matched = corpus_common(a.index, place - 1, context, length, &before);
    if (place < a.index.entries) {
      const int other = corpus_common(a.index, place, context, length, &before);
      matched = other > matched ? other : matched;
    }
  }
  CorpusCounts found;
  float rest = 1.0f;
  bool enough = false;
  int order = 0;
  for (int n = matched; n > 0 && order < kCorpusOrders && !enough; n /= 2, order++) {
    rest = found.add(a.index, corpus_range(a.index, context, n, place), n, s.vocab, rest, &enough);
  }
  for (int k = 0; k < s.branch; k++) {
    const int best = found.take();
    a.out_tokens[row * s.branch + k] = best < 0 ? -1 : found.tokens[best];
    a.out_log_probs[row * s.branch + k] = best < 0 ? -INFINITY : logf(found.probs[best]);
    if (best >= 0) found.probs[best] = -1.0f;
  }
  a.out_matched[row] = found.size == 0 ? 0 : matched;
}

}  // namespace gsd
