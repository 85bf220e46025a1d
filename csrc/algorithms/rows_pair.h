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

// One block: a row, and what all layers read of it.
template <class Element, class Machine>
GSD_HD void pair_row(Machine& machine, const RowsPair& a, int row) {
  machine.await_previous("pair");
  machine.release_next();
  store_once(machine, a.once, row);
  const RowsMatrix& m = a.embedding;
  const int token = clamped(a.tokens[row], m.outputs - 1);
  const int64_t start = static_cast<int64_t>(row) * a.hidden;
  const auto feature = [&](int i, float (&to)[8]) {
    widen_chunk<Element>(*reinterpret_cast<const Chunk*>(a.features + start + i), to);
  };
  with_format(m.kind, [&](auto format) {
    using Format = decltype(format);
    const auto embedded = [&](int i, float (&to)[8]) {
      widen_chunk<Element>(chunk_of<Element, Format>(machine, Format::load(m, a.hidden, token, i)), to);
    };
    float value[8], by[2] = {0.0f, 0.0f};  // of token and feature
    for (int i = 8 * machine.thread(); i < a.hidden; i += 8 * kRowThreads) {
      embedded(i, value);
      add_squares(value, by[0]);
      feature(i, value);
      add_squares(value, by[1]);
    }
    norms_of_row(machine, a, by);
    uint16_t *token_out = a.out + 2 * start, *feature_out = token_out;
    (a.feature_first ? token_out : feature_out) += a.hidden;
    for (int i = 8 * machine.thread(); i < a.hidden; i += 8 * kRowThreads) {
      embedded(i, value);
      store_normed<Element>(a.token_norm + i, by[0], value, token_out + i);
      feature(i, value);
      if (a.x != nullptr && !a.normed_residual) store_eight(machine, a.x + start + i, value);
      store_normed<Element>(a.feature_norm + i, by[1], value, feature_out + i);
      if (a.x != nullptr && a.normed_residual) store_eight(machine, a.x + start + i, value);
    }
  });
}

}  // namespace gsd
