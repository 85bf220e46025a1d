#include "row_math.h"

#include <cstring>

#include "lanes.h"

namespace gsd {
namespace {

// Cephes' logf for positive normal numbers: relative error 1e-7.
GSD_INLINE void log_lanes(const Floats& x, Floats& out) {
  const Ints bits = (Ints)x;
  const Ints mantissa = (bits & 0x7FFFFF) | 0x3F800000;
  Floats m = (Floats)mantissa;  // 1 … 2
  Ints large;
  sign_of(1.41421356f - m, large);
  const Floats e = __builtin_convertvector((bits >> 23) - 127 - large, Floats);
  choose(large, m * 0.5f, m, m);
  m = m - 1.0f;
  const Floats z = m * m;
  Floats p = m * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  out = m + (m * z * p - e * 2.12194440e-4f - z * 0.5f) + e * 0.693359375f;
}

// −log1p(−u); w − 1 is exactly minus what rounding left of u, which the quotient corrects for.
GSD_INLINE void negative_log1p_lanes(const Floats& u, Floats& out) {
  const Floats w = 1.0f - u;
  Floats log_w;
  Ints below_one;
  log_lanes(w, log_w);
  sign_of(w - 1.0f, below_one);
  choose(below_one, log_w * u / (w - 1.0f), u, out);
}

// As exp_to_one, in half as long a chain.
GSD_INLINE void exp_in_pairs(const Floats& x, Floats& out) {
  Ints small;
  sign_of(x + 87.0f, small);
  const Floats shifted = x * 1.44269504088896341f + 12582912.0f, n = shifted - 12582912.0f;
  const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f, square = r * r;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * square + (r * 8.3334519073e-3f + 4.1665795894e-2f);
  p = p * square + (r * 1.6666665459e-1f + 5.0000001201e-1f);
  p = p * square + (r + 1.0f);
  out = (Floats)(~small & ((Ints)p + ((Ints)shifted << 23)));
}

}  // namespace

GSD_CLONES Extremes extremes(const float* x, int n) {
  constexpr int kChains = 4;  // a maximum waits for the one before it
  Eight best[kChains], seen;
  EightInts nan{};
  for (Eight& chain : best) chain = negative_infinity() - Eight{};
  int i = 0;
  for (; i + kChains * kEight <= n; i += kChains * kEight) {
    for (int chain = 0; chain < kChains; chain++) {
      load(x + i + chain * kEight, seen);
      best[chain] = seen > best[chain] ? seen : best[chain];
      nan |= seen != seen;
    }
  }
  for (const Eight& chain : best) best[0] = chain > best[0] ? chain : best[0];
  float top[kEight];
  store(best[0], top);
  for (int width = kEight / 2; width > 0; width /= 2) {  // and here each of eight would wait for the last
    for (int lane = 0; lane < width; lane++) top[lane] = top[lane + width] > top[lane] ? top[lane + width] : top[lane];
  }
  Extremes result{top[0], false};
  for (int lane = 0; lane < kEight; lane++) result.has_nan |= nan[lane] != 0;
  for (; i < n; i++) {
    result.max = x[i] > result.max ? x[i] : result.max;
    result.has_nan |= x[i] != x[i];
  }
  return result;
}

GSD_CLONES Extremes scale_and_block_maxima(float* x, int padded, float by, float* block_max) {
  Extremes result{negative_infinity(), false};
  EightInts nan{};
  const bool divides = by != 1.0f;  // which is most of this function's time
  for (int block = 0; block < padded / kBlock; block++) {
    Eight best = negative_infinity() - Eight{}, seen;
    for (int i = 0; i < kBlock; i += kEight) {
      load(x + block * kBlock + i, seen);
      nan |= seen != seen;
      if (divides) {
        seen = seen / by;
        store(seen, x + block * kBlock + i);
      }
      best = seen > best ? seen : best;
    }
    float top = negative_infinity();
    for (int lane = 0; lane < kEight; lane++) top = best[lane] > top ? best[lane] : top;
    block_max[block] = top;
    result.max = top > result.max ? top : result.max;
  }
  for (int lane = 0; lane < kEight; lane++) result.has_nan |= nan[lane] != 0;
  return result;
}

GSD_CLONES void cut_below(float* x, int padded, float floor) {
  Eight seen;
  const Eight none = negative_infinity() - Eight{};
  for (int i = 0; i < padded; i += kEight) {
    load(x + i, seen);
    seen = seen >= floor ? seen : none;
    store(seen, x + i);
  }
}

GSD_CLONES double sum_exp(const float* x, int padded, float shift) {
  double total = 0.0;
  for (int block = 0; block < padded; block += kBlock) {
    Floats sum{}, seen, e;
    for (int i = 0; i < kBlock; i += kLanes) {
      load(x + block + i, seen);
      exp_in_pairs(seen - shift, e);
      sum += e;
    }
    for (int lane = 0; lane < kLanes; lane++) total += sum[lane];
  }
  return total;
}

GSD_CLONES void exp_shifted(const float* x, float* out, int padded, float shift) {
  Floats seen, e;
  for (int i = 0; i < padded; i += kLanes) {
    load(x + i, seen);
    exp_lanes(seen - shift, e);
    store(e, out + i);
  }
}

// As random_words, for many counters at a time. The inner loop is long enough that compilers vectorise it instead of
// unrolling it.
GSD_CLONES void random_block(const NoiseStream& stream, int block, uint32_t* bits) {
  constexpr int kCounters = kBlock / 4;
  uint32_t c0[kCounters], c1[kCounters], c2[kCounters], c3[kCounters];
  for (int i = 0; i < kCounters; i++) {
    c0[i] = static_cast<uint32_t>(block * kCounters + i);
    c1[i] = stream.position;
    c2[i] = stream.sequence;
    c3[i] = 0;
  }
  uint32_t k0 = stream.key0, k1 = stream.key1;
  for (int round = 0; round < kPhiloxRounds; round++) {
    for (int i = 0; i < kCounters; i++) {
      const uint64_t p0 = static_cast<uint64_t>(c0[i]) * kPhiloxM0, p1 = static_cast<uint64_t>(c2[i]) * kPhiloxM1;
      c0[i] = static_cast<uint32_t>(p1 >> 32) ^ c1[i] ^ k0;
      c1[i] = static_cast<uint32_t>(p1);
      c2[i] = static_cast<uint32_t>(p0 >> 32) ^ c3[i] ^ k1;
      c3[i] = static_cast<uint32_t>(p0);
    }
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  for (int i = 0; i < kCounters; i++) {
    bits[4 * i] = c0[i];
    bits[4 * i + 1] = c1[i];
    bits[4 * i + 2] = c2[i];
    bits[4 * i + 3] = c3[i];
  }
}

GSD_CLONES void add_gumbel(float* x, const uint32_t* bits) {
  for (int i = 0; i < kBlock; i += kLanes) {
    Ints word;
    memcpy(&word, bits + i, sizeof word);
    word = (word >> 1) & 0x7FFFFFFF;
    Floats u = (__builtin_convertvector(word, Floats) + 0.5f) * 4.656612873077393e-10f;
    const float top = 1.0f - 5.960464477539063e-08f;
    Ints below;
    sign_of(u - top, below);
    choose(below, u, Floats{} + top, u);
    Floats e, log_e, seen;
    negative_log1p_lanes(u, e);
    log_lanes(e, log_e);
    load(x + i, seen);
    seen = seen - log_e;
    store(seen, x + i);
  }
}

}  // namespace gsd
