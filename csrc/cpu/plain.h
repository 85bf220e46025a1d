// Floats and codes one by one, in loops that compilers make vectors of: the portable level's machine of weight_formats.h, and
// every level's for what is left of a group behind its whole steps. Inside the target; no other include may stand here.

#define GSD_FORMAT GSD_TILE
#include "../algorithms/weight_formats.h"
#undef GSD_FORMAT

struct Plain {
  typedef float Number;
  struct Codes {
    uint8_t of[32];
  };
  template <class Of>
  GSD_TILE Codes each(const Of& of) {
    Codes codes;
    for (int i = 0; i < 32; i++) codes.of[i] = static_cast<uint8_t>(of(i));
    return codes;
  }
  GSD_TILE Codes nibbles(const uint8_t* from) {
    return each([=](int i) { return i < 16 ? from[i] & 15 : from[i - 16] >> 4; });
  }
  GSD_TILE Codes either_nibbles(const uint8_t* from, int high) {
    return each([=](int i) { return from[i] >> 4 * high & 15; });
  }
  template <bool kHighFirst>
  GSD_TILE Codes half_bytes(const uint8_t* from) {
    return each([=](int i) { return from[i / 2] >> (i % 2 == (kHighFirst ? 0 : 1) ? 4 : 0) & 15; });
  }
  GSD_TILE Codes bytes(const uint8_t* from) {
    return each([=](int i) { return from[i]; });
  }
  GSD_TILE Codes six_bits(const uint8_t* block, int half, int part) {
    const uint8_t *low = block + 64 * half + 32 * (part % 2), *high = block + 128 + 32 * half;
    return each([=](int i) { return ((low[i] >> part / 2 * 4 & 15) | (high[i] >> 2 * part & 3) << 4) - 32; });
  }
  GSD_TILE Codes bits_at(const uint8_t* from) {
    uint32_t bits;
    __builtin_memcpy(&bits, from, sizeof bits);
    return each([=](int i) { return bits >> i & 1u; });
  }
  GSD_TILE Codes bits_of(const uint8_t* from, int which) {
    return each([=](int i) { return from[i] >> which & 1; });
  }
  GSD_TILE Codes with_fifth(const Codes& codes, const Codes& bits) {
    return each([&](int i) { return codes.of[i] | bits.of[i] << 4; });
  }

  GSD_TILE float half(const uint8_t* block, int at) {
    uint16_t bits;
    __builtin_memcpy(&bits, block + at, sizeof bits);
    return float_from_half(bits);
  }
  GSD_TILE float exponent(const uint8_t* block) {
    const uint32_t bits = block[0] > 0 ? static_cast<uint32_t>(block[0]) << 23 : 0x00400000u;
    float found;
    __builtin_memcpy(&found, &bits, sizeof found);
    return found;
  }
  GSD_TILE void six_bit_pairs(const uint8_t* block, float* to) {
    const uint8_t* s = block + 4;
    for (int j = 0; j < 4; j++) {
      to[j] = s[j] & 63, to[8 + j] = s[j + 4] & 63;
      to[4 + j] = static_cast<float>((s[j + 8] & 15) | s[j] >> 6 << 4);
      to[12 + j] = static_cast<float>(s[j + 8] >> 4 | s[j + 4] >> 6 << 4);
    }
    for (int j = 0; j < 16; j++) to[j] *= half(block, j < 8 ? 0 : 2);
  }
  GSD_TILE void scaled_bytes(const uint8_t* d, const uint8_t* bytes, float* to) {
    for (int j = 0; j < 16; j++) to[j] = half(d, 0) * static_cast<float>(static_cast<int8_t>(bytes[j]));
  }

  GSD_TILE float same(float x) { return x; }
  GSD_TILE float times(float a, float b) { return a * b; }
  GSD_TILE float plus(float a, float b) { return a + b; }
  GSD_TILE float minus(float a, float b) { return a - b; }
  GSD_TILE float times_plus(float a, float b, float c) { return a * b + c; }
  GSD_TILE float times_minus(float a, float b, float c) { return a * b - c; }
  GSD_TILE bool all_normal(const float*, int64_t) { return true; }
};

// A step's weights.
template <class F, class N>
GSD_TILE void plain_values(const Plain::Codes& codes, const N& numbers, int step, float* to) {
  for (int half = 0; half < 2; half++) {
    const float d = numbers.d(step, half), m = numbers.m(step);
    for (int i = 16 * half; i < 16 * half + 16; i++) to[i] = F::value(Plain{}, F::level(codes.of[i]), d, m);
  }
}

// Floats into the model's dtype.
struct ToFloat32 {
  typedef float Stored;
  GSD_TILE void store(const float* from, int n, Stored* to) {
    for (int i = 0; i < n; i++) to[i] = from[i];
  }
};
struct ToBfloat16 {
  typedef uint16_t Stored;
  GSD_TILE void store(const float* from, int n, Stored* to) {
    for (int i = 0; i < n; i++) to[i] = Bfloat16::round(from[i]);
  }
};
struct ToFloat16 {
  typedef uint16_t Stored;
  GSD_TILE void store(const float* from, int n, Stored* to) {
    for (int i = 0; i < n; i++) to[i] = Half::round(from[i]);
  }
};
