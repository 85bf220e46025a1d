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

// By Kind and Element.
#define GSD_DECODER(F) {decode_packed<F, ToFloat32>, decode_packed<F, ToBfloat16>, decode_packed<F, ToFloat16>}
#define GSD_DECODERS {{GSD_FLOATS(kFloat32), GSD_FLOATS(kBfloat16), GSD_FLOATS(kFloat16), GSD_FORMATS(GSD_DECODER)}}
