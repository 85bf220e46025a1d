// One row of sample_rows, draft_candidates or warped_log_probs, for a thread group: the GPU's form of these ops. (The CPU ops draw noise
// only where it can win, csrc/cpu/sampling_ops.cpp; a GPU has arithmetic to spare and draws all of it.)
//
// Whatever must not depend on the order of the threads is integer arithmetic: picks are the least 64-bit (score, token)
// key, and top-k and top-p descend four 8-bit digits of the logit through histograms of integer counts or masses.
#pragma once

#include "elements.h"
#include "random.h"
#include "sort.h"

namespace gsd {

constexpr int kPickThreads = 512;                // of the CUDA block
constexpr int kDigits = 256;                   // histogram bins
constexpr float kMassUnit = 1099511627776.0f;  // 2⁴⁰: the most probable token's mass; 2²³ tokens sum below 2⁶⁴

struct Warpers {
  float temperature, top_k, top_p, min_p;  // neutral: 0 (greedy), 0, 1, 0
};

// What sample_rows (log_probs null, K = 1), draft_candidates and warped_log_probs (K = 0, scores is the result) are given.
enum class LogitType { kFloat32, kFloat16, kBfloat16, kFloat64 };
struct PickBatch {
  const void* logits;  // [B, R, V]
  Warpers shared;      // for all sequences, where there is no tensor [B]
  const float *temperatures, *top_ks, *top_ps, *min_ps;
  int rows;
  const int32_t* positions = nullptr;     // [B, R]; null, as the next two, where no noise is drawn
  const int64_t* seed = nullptr;          // [1]
  const int32_t* sequence_ids = nullptr;  // [B]
  int32_t* tokens = nullptr;              // [B, R, K]
  float* log_probs = nullptr;             // [B, R, K] or null
  float* scores = nullptr;                // [B, R, V], working memory of a GPU

  GSD_HD Warpers warpers(int64_t b) const {
    return {temperatures != nullptr ? temperatures[b] : shared.temperature, top_ks != nullptr ? top_ks[b] : shared.top_k,
            top_ps != nullptr ? top_ps[b] : shared.top_p, min_ps != nullptr ? min_ps[b] : shared.min_p};
  }
  GSD_HD NoiseStream noise(int64_t row) const {
    return seed != nullptr ? noise_stream(*seed, positions[row], sequence_ids[row / rows]) : NoiseStream{};
  }
};

// Logits as stored, read as float32.
template <class Float>
struct FloatLogit {
  Float bits;
  GSD_HD float value() const { return static_cast<float>(bits); }
};
template <class Element>
struct ShortLogit {
  uint16_t bits;
  GSD_HD float value() const { return Element::widen(bits); }
};

template <class Logit>
struct PickArgs {
  const Logit* logits;   // [V]
  float* scores;         // [V], working memory; with branch 0 the log-probabilities of all tokens
  int32_t* tokens;       // [K], best first
  float* log_probs;      // [K], or null: K = 1 and a row without a pick gives token −1
  Warpers warpers;
  NoiseStream noise;
};

struct PickSizes {
  int vocab, branch;   // branch 0: nothing is picked, the distribution itself is wanted
  bool noisy = true;  // else what is likely is ranked, rather than what will be drawn
};

struct PickArena : Arena<PickArena> {
  uint64_t* partial;  // [threads]: reductions
  uint64_t* bins;     // [256]

  template <class Carve>
  GSD_HD void lay(Carve& carve, int threads) {
    carve(partial, threads);
    carve(bins, kDigits);
  }
};

// Combines one value of every thread in a fixed tree; all threads get the result. The group's size is a power of two.
template <class Group, class Combine>
GSD_HD uint64_t reduce(Group& group, uint64_t* partial, uint64_t value, const Combine& combine) {
  partial[group.rank()] = value;
  group.sync("reduce: values written");
  for (int stride = group.size() / 2; stride > 0; stride /= 2) {
    if (group.rank() < stride) {
      partial[group.rank()] = combine(partial[group.rank()], partial[group.rank() + stride]);
    }
    group.sync("reduce: step done");
  }
  const uint64_t result = partial[0];
  group.sync("reduce: result read");
  return result;
}

struct Least {
  GSD_HD uint64_t operator()(uint64_t a, uint64_t b) const { return a < b ? a : b; }
};
struct FloatSum {
  GSD_HD uint64_t operator()(uint64_t a, uint64_t b) const {
    return float_bits(float_from_bits(static_cast<uint32_t>(a)) + float_from_bits(static_cast<uint32_t>(b)));
  }
};

// The largest float of the group, NaN left out.
template <class Group>
GSD_HD float reduce_max(Group& group, uint64_t* partial, float value) {
  return score_of(static_cast<uint32_t>(reduce(group, partial, descending(value), Least{})));
}

GSD_HD uint64_t mass_of(float x, float max) { return static_cast<uint64_t>(expf(x - max) * kMassUnit); }

// Going down the logits from the largest, the first at which the weight (of it and all larger ones) reaches `target`.
// Weight is 1 a token, or its probability mass. Equal logits count together, which keeps ties at the cut.
template <class Group>
GSD_HD float descend_to(Group& group, const PickArena& arena, const float* x, int vocab, float floor, float max,
                        bool by_mass, uint64_t target) {
  uint32_t prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = group.rank(); i < kDigits; i += group.size()) arena.bins[i] = 0;
    group.sync("descend: bins cleared");
    for (int i = group.rank(); i < vocab; i += group.size()) {
      const uint32_t word = descending(x[i]);
      // The digits above this one must be those chosen so far.
      if (!(x[i] >= floor) || static_cast<uint64_t>(word ^ prefix) >> (shift + 8) != 0) continue;
      group.atomic_add64(&arena.bins[word >> shift & 0xFF], by_mass ? mass_of(x[i], max) : 1);
    }
    group.sync("descend: bins filled");
    int digit = 0;
    uint64_t above = 0;
    while (digit < kDigits - 1 && above + arena.bins[digit] < target) above += arena.bins[digit++];
    target -= above;
    prefix |= static_cast<uint32_t>(digit) << shift;
    group.sync("descend: digit chosen");
  }
  return score_of(prefix);
}

// The lowest logit that survives temperature → top-k → top-p → min-p.
template <class Group>
GSD_HD float warper_floor(Group& group, const PickArena& arena, const float* x, int vocab, const Warpers& w,
                          float max) {
  float floor = negative_infinity();
  if (w.top_k >= 1.0f && w.top_k < static_cast<float>(vocab)) {
    floor = descend_to(group, arena, x, vocab, floor, max, false, static_cast<uint64_t>(w.top_k));
  }
  if (w.top_p < 1.0f) {
    // All masses are integers, so their sum and the point where it reaches p·sum do not depend on any order.
    for (int i = group.rank(); i < kDigits; i += group.size()) arena.bins[i] = 0;
    group.sync("floor: total cleared");
    uint64_t mine = 0;
    for (int i = group.rank(); i < vocab; i += group.size()) mine += x[i] >= floor ? mass_of(x[i], max) : 0;
    group.atomic_add64(&arena.bins[0], mine);
    group.sync("floor: total known");
    const double reached = static_cast<double>(w.top_p) * static_cast<double>(arena.bins[0]);
    group.sync("floor: total read");
    const uint64_t target = reached < 1.0 ? 1 : static_cast<uint64_t>(ceil(reached));
    floor = descend_to(group, arena, x, vocab, floor, max, true, target);
  }
  if (w.min_p > 0.0f) {
    const float least = max + logf(w.min_p);
    floor = least > floor ? least : floor;
  }
  return floor;
}

template <class Group, class Logit>
GSD_HD void pick_tokens(Group& group, const PickArgs<Logit>& a, const PickSizes& s, char* memory) {
  const auto arena = PickArena::in(memory, group.size());
  const int rank = group.rank(), step = group.size(), blocks = (s.vocab + 3) / 4;
  const bool greedy = a.warpers.temperature <= 0.0f;

  // A thread always handles the same four neighbours: those of one Philox counter.
  const auto each = [&](const auto& work) {
    for (int block = rank; block < blocks; block += step) {
      for (int i = 4 * block; i < min_int(4 * block + 4, s.vocab); i++) work(i);
    }
  };

  // 1. Logits over temperature.
  float my_max = negative_infinity();
  bool my_nan = false;
  each([&](int i) {
    const float logit = a.logits[i].value();
    const float x = greedy ? logit : logit / a.warpers.temperature;
    my_nan = my_nan || x != x;
    my_max = x > my_max ? x : my_max;
    a.scores[i] = x;
  });
  const bool has_nan = reduce(group, arena.partial, my_nan ? 0 : 1, Least{}) == 0;
  float max = reduce_max(group, arena.partial, my_max);
  // A row to draw from needs a largest logit that is finite.
  const bool no_pick = has_nan || (!greedy && !(max > negative_infinity() && max < -negative_infinity()));

  // 2. Cut what the warpers cut, and add the noise.
  if (!greedy && !has_nan && max > negative_infinity()) {
    const float floor = warper_floor(group, arena, a.scores, s.vocab, a.warpers, max);
    my_max = negative_infinity();
    for (int block = rank; block < blocks; block += step) {
      uint32_t bits[4];
      random_words(a.noise, block, bits);
      GSD_UNROLL
      for (int word = 0; word < 4; word++) {
        const int i = 4 * block + word;
        if (i >= s.vocab) continue;
        const float noise = s.noisy ? gumbel_from(bits[word]) : 0.0f;
        const float score = a.scores[i] >= floor ? a.scores[i] + noise : negative_infinity();
        a.scores[i] = score;
        my_max = score > my_max ? score : my_max;
      }
    }
    max = reduce_max(group, arena.partial, my_max);
  }

  // 3. log Σ exp(score)
  float log_sum = 0.0f;
  if (a.log_probs != nullptr || s.branch == 0) {
    float sum = 0.0f;
    each([&](int i) { sum += expf(a.scores[i] - max); });
    log_sum = logf(float_from_bits(static_cast<uint32_t>(reduce(group, arena.partial, float_bits(sum), FloatSum{}))));
  }

  if (s.branch == 0) return each([&](int i) { a.scores[i] = a.scores[i] - max - log_sum; });

  // 4. The best tokens, one at a time: the least key above the last one.
  uint64_t last = 0;
  for (int k = 0; k < s.branch; k++) {
    uint64_t mine = kAbsent;
    each([&](int i) {
      const uint64_t key = score_key(a.scores[i], i);
      if ((k == 0 || key > last) && key < mine) mine = key;
    });
    last = reduce(group, arena.partial, mine, Least{});
    if (rank != 0) continue;
    const bool found = last != kAbsent;
    const float score = found ? score_of(static_cast<uint32_t>(last >> 32)) : negative_infinity();
    a.tokens[k] = found ? static_cast<int32_t>(last & 0xFFFFFFFF) : -1;
    if (a.log_probs == nullptr) {
      if (no_pick) a.tokens[k] = -1;
    } else {
      const float not_a_number = float_from_bits(0x7FC00000u);
      a.log_probs[k] = has_nan ? not_a_number : score > negative_infinity() ? score - max - log_sum : score;
    }
  }
}

}  // namespace gsd
