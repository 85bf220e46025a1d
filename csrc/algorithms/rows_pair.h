// What a drafter reads at first: a token's embedding and a feature, normed and side by side.
#pragma once

#include "rows_turn.h"

namespace gsd {

// Rows of embeddings and features, each normed by itself. Tokens outside the vocabulary read its nearest end.
struct RowsPair {
  const int32_t* tokens;       // [rows]
  RowsMatrix embedding;        // [vocab, hidden]
  const uint16_t* features;    // [rows, hidden]; null: there are none
  const uint16_t *token_norm, *feature_norm;  // [hidden]
  uint16_t* out;               // [rows, 2 hidden], rounded: of every row the embedding and the feature
  float* x;                    // [rows, hidden]: where the residual begins, or null
  bool feature_first;          // in `out`
  bool normed_residual;        // the residual begins as the normed feature; else as the feature
  int rows, hidden;            // hidden: a multiple of 8
  float eps;
  RowsOnce once;
};

// Eight numbers times what their row is divided by and a norm's weights, rounded to `out`; `value` is left unrounded.
template <class Element>
GSD_HD void store_normed(const uint16_t* norm, float by, float (&value)[8], uint16_t* out) {
  float weight[8];
  widen_chunk<Element>(*reinterpret_cast<const Chunk*>(norm), weight);
  Chunk rounded;
  GSD_UNROLL
  for (int j = 0; j < 8; j++) value[j] = value[j] * by * weight[j];
  GSD_UNROLL
  for (int j = 0; j < 4; j++) rounded.words[j] = Element::pack(value[2 * j], value[2 * j + 1]);
  *reinterpret_cast<Chunk*>(out) = rounded;
}

// One block: a row, and what all layers read of it.
template <class Element, class Machine>
GSD_HD void pair_row(Machine& machine, const RowsPair& a, int row) {
  machine.await_previous("pair");
  machine.release_next();
  store_once(machine, a.once, row);
  const RowsMatrix& m = a.embedding;
  const int token = max_int(min_int(a.tokens[row], m.outputs - 1), 0);
  const int64_t start = static_cast<int64_t>(row) * a.hidden;
  const auto feature = [&](int i, float (&to)[8]) {
    widen_chunk<Element>(*reinterpret_cast<const Chunk*>(a.features + start + i), to);
  };
  with_format(m.kind, [&](auto format) {
    using Format = decltype(format);
    const auto embedded = [&](int i, float (&to)[8]) {
      widen_chunk<Element>(chunk_of<Element, Format>(machine, Format::load(m, a.hidden, token, i)), to);
    };
    float value[8], sums[2] = {0.0f, 0.0f};
    for (int i = 8 * machine.thread(); i < a.hidden; i += 8 * kRowThreads) {
      embedded(i, value);
      GSD_UNROLL
      for (int j = 0; j < 8; j++) sums[0] += value[j] * value[j];
      feature(i, value);
      GSD_UNROLL
      for (int j = 0; j < 8; j++) sums[1] += value[j] * value[j];
    }
    sums[0] = sum_of_lanes(machine, sums[0]), sums[1] = sum_of_lanes(machine, sums[1]);
    if (machine.lane() == 0) machine.write(16 * machine.warp(), {{float_bits(sums[0]), float_bits(sums[1]), 0, 0}});
    machine.sync("both squares added");
    float total[2] = {0.0f, 0.0f};
    GSD_UNROLL
    for (int w = 0; w < kRowWarps; w++) {
      const Chunk part = machine.read(16 * w);
      total[0] += float_from_bits(part.words[0]), total[1] += float_from_bits(part.words[1]);
    }
    const float width = static_cast<float>(a.hidden);
    const float by_token = machine.inverse_root(total[0] / width + a.eps);
    const float by_feature = machine.inverse_root(total[1] / width + a.eps);
    uint16_t *token_out = a.out + 2 * start, *feature_out = token_out;
    (a.feature_first ? token_out : feature_out) += a.hidden;
    for (int i = 8 * machine.thread(); i < a.hidden; i += 8 * kRowThreads) {
      embedded(i, value);
      store_normed<Element>(a.token_norm + i, by_token, value, token_out + i);
      feature(i, value);
      if (a.x != nullptr && !a.normed_residual) store_eight(machine, a.x + start + i, value);
      store_normed<Element>(a.feature_norm + i, by_feature, value, feature_out + i);
      if (a.x != nullptr && a.normed_residual) store_eight(machine, a.x + start + i, value);
    }
  });
}

}  // namespace gsd
