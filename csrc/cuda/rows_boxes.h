// Where the boxes of rows_group_product.h come from, as a tensor map says it.
#pragma once

#include "../algorithms/rows_group_product.h"

namespace gsd {

// Five dimensions, the first of numbers that lie side by side. They are inputs, then rows; or of outputs in two parts eight
// of a part, the parts, eights of a part, heads.
struct RowsBoxes {
  static constexpr uint32_t kDimensions = 5;
  const uint16_t* from;
  uint64_t sizes[kDimensions], bytes[kDimensions - 1];  // bytes: to the next, from the second dimension on
  uint32_t box[kDimensions];

  // Of rows, so many in a box.
  static RowsBoxes rows(const uint16_t* from, uint64_t inputs, uint64_t count, uint32_t in_box) {
    const uint64_t row = 2 * inputs;
    return {from, {inputs, count, 1, 1, 1}, {row, row, row, row}, {kTileInputs, in_box, 1, 1, 1}};
  }

  // The weights of matrix i, or of gate and up together.
  static RowsBoxes weights(const RowsProduct& a, int i) {
    const RowsMatrix &m = a.matrices[ups_first(a) ? 1 : i], &other = a.matrices[ups_first(a) ? 0 : 1];
    if (!outputs_paired(a)) return rows(m.weight, a.inputs, m.outputs, kWideOutputs);
    const bool gate = a.end == RowsEnd::kGate;
    const uint32_t outputs = m.outputs, part = gate ? outputs : a.turn.head_dim / 2;
    const uint32_t heads = gate ? 1 : outputs / (2 * part), heads_of_box = gate ? 1 : kWideOutputs / (2 * part);
    const uint64_t inputs = a.inputs, row = 2 * inputs, to_other = gate ? 2 * (other.weight - m.weight) : part * row;
    return {m.weight,
            {inputs, 8, 2, part / 8, heads},
            {row, to_other, 8 * row, 2 * part * row},
            {kTileInputs, 8, 2, kWideOutputs / 16 / heads_of_box, heads_of_box}};
  }
};

}  // namespace gsd
