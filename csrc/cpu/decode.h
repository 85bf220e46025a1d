// Decoders of a row of packed weights into the model's dtype, step by step, over a level's Machine and Strip: Strip<F, To,
// kNormal>::hold(numbers, step), what weights are made by; ::put(held, codes, to), 32 of them. kNormal: no value is a subnormal
// number. After plain.h and, where a level has vectors, decode_vectors.h.

template <class F, class To, bool kNormal>
GSD_TILE int64_t decode_whole(const uint8_t* from, const float* beside, int64_t size, typename To::Stored* to) {
  typedef Strip<F, To, kNormal> S;
  const auto held = S::hold(F::template numbers<Machine>(beside), 0);
  int64_t i = 0;
  for (; i + 32 <= size; i += 32) S::put(held, F::template codes<Machine>(from + i / F::kWeights, 0), to + i);
  return i;
}

template <class F, class To>
void decode_packed(const void* row, const float* scales, int64_t groups, int64_t inputs, void* out) {
  const uint8_t* from = static_cast<const uint8_t*>(row);
  typename To::Stored* to = static_cast<typename To::Stored*>(out);
  if constexpr (F::kBeside == 0) {
    typedef Strip<F, To, F::kNormal> S;
    for (int64_t i = 0; i < inputs; i += F::kWeights, from += F::kBytes) {
      const auto numbers = F::template numbers<Machine>(from);
      GSD_UNROLL
      for (int step = 0; step < F::kWeights / 32; step++) {
        S::put(S::hold(numbers, step), F::template codes<Machine>(from, step), to + i + 32 * step);
      }
    }
  } else {
    const int64_t size = inputs / groups;
    const bool normal = Machine::all_normal(scales, groups * F::kBeside);
    for (int64_t g = 0; g < groups; g++, scales += F::kBeside, from += size / F::kWeights, to += size) {
      const int64_t done = normal ? decode_whole<F, To, true>(from, scales, size, to)
                                  : decode_whole<F, To, false>(from, scales, size, to);
      if (done == size) continue;
      const int left = static_cast<int>(size - done);
      uint8_t rest[32] = {};
      float values[32];
      for (int i = 0; i < left / F::kWeights; i++) rest[i] = from[done / F::kWeights + i];
      plain_values<F>(F::template codes<Plain>(rest, 0), F::template numbers<Plain>(scales), 0, values);
      To::store(values, left, to + done);
    }
  }
}

template <class Number, class To>
void decode_floats(const void* row, const float*, int64_t, int64_t inputs, void* out) {
  const typename Number::Stored* from = static_cast<const typename Number::Stored*>(row);
  typename To::Stored* to = static_cast<typename To::Stored*>(out);
  for (int64_t i = 0; i < inputs; i += 32) {
    float values[32];
    const int n = static_cast<int>(fewer(32, inputs - i));
    for (int j = 0; j < n; j++) values[j] = Number::widen(from[i + j]);
    To::store(values, n, to + i);
  }
}
struct PlainFloat32 {
  typedef float Stored;
  GSD_TILE float widen(float x) { return x; }
};
struct PlainBfloat16 {
  typedef uint16_t Stored;
  GSD_TILE float widen(uint16_t bits) { return Bfloat16::widen(bits); }
};
struct PlainFloat16 {
  typedef uint16_t Stored;
  GSD_TILE float widen(uint16_t bits) { return Half::widen(bits); }
};

// By Kind and Element.
#define GSD_OF_ELEMENTS(decode, From) {decode<From, ToFloat32>, decode<From, ToBfloat16>, decode<From, ToFloat16>}
#define GSD_DECODER(F) GSD_OF_ELEMENTS(decode_packed, F)
#define GSD_DECODERS                                                                                     \
  {{GSD_OF_ELEMENTS(decode_floats, PlainFloat32), GSD_OF_ELEMENTS(decode_floats, PlainBfloat16),         \
    GSD_OF_ELEMENTS(decode_floats, PlainFloat16), GSD_FORMATS(GSD_DECODER)}}
