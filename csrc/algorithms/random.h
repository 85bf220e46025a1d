// The noise of Gumbel-max sampling: Philox 4x32-10 (Salmon et al., SC 2011) keyed by the seed, counted by token,
// position and sequence, so that a draw depends on nothing else. As gsd_kernels/ops/sampling/philox.py.
#pragma once

#include <cmath>

#include "group.h"

namespace gsd {

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;  // multipliers
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;  // key schedule
constexpr int kPhiloxRounds = 10;

// The largest g is -log(-log1p(-2⁻³²)) = 32·log 2: a score more than this below the best cannot win.
constexpr float kMaxGumbel = 22.1808f;

// What all tokens of one row share.
struct NoiseStream {
  uint32_t key0, key1;  // low and high word of the seed
  uint32_t position, sequence;
};

GSD_HD NoiseStream noise_stream(int64_t seed, int32_t position, int32_t sequence) {
  return {static_cast<uint32_t>(seed), static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32),
          static_cast<uint32_t>(position), static_cast<uint32_t>(sequence)};
}

// The random bits of tokens 4·block … 4·block + 3.
GSD_HD void random_words(const NoiseStream& stream, int block, uint32_t* words) {
  uint32_t c0 = static_cast<uint32_t>(block), c1 = stream.position, c2 = stream.sequence, c3 = 0;
  uint32_t k0 = stream.key0, k1 = stream.key1;
  for (int round = 0; round < kPhiloxRounds; round++) {
    const uint64_t p0 = static_cast<uint64_t>(c0) * kPhiloxM0, p1 = static_cast<uint64_t>(c2) * kPhiloxM1;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// The random bits of one token. (Picked without an index, which would move the words from registers to memory.)
GSD_HD uint32_t random_word(const NoiseStream& stream, int token) {
  uint32_t words[4];
  random_words(stream, token >> 2, words);
  const uint32_t low = token & 1 ? words[1] : words[0], high = token & 1 ? words[3] : words[2];
  return token & 2 ? high : low;
}

// u = (top 31 bits + ½)·2⁻³¹, kept below 1.
GSD_HD float uniform_from(uint32_t bits) {
  const float u = (static_cast<float>(static_cast<int32_t>(bits >> 1)) + 0.5f) * 4.656612873077393e-10f;
  const float top = 1.0f - 5.960464477539063e-08f;
  return u < top ? u : top;
}

// −log(−log1p(−u)): small u is the upper tail.
GSD_HD float gumbel_from(uint32_t bits) { return -logf(-log1pf(-uniform_from(bits))); }

}  // namespace gsd
