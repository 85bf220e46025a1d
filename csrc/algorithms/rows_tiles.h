// What blocks of a RowsProduct share, whatever multiplies in them: which outputs a block has, and what becomes of its sums
// (the epilogue).
#pragma once

#include "attention_tiles.h"
#include "rows.h"

namespace gsd {

// The outputs of a block among those that lie side by side. Of gate and up half of the block each, from `first` on.
struct RowsTile {
  int matrix, first, outputs;  // outputs: of the matrix

  GSD_HD RowsTile(const RowsProduct& a, int block, int tile) : matrix(0), outputs(a.matrices[0].outputs) {
    const bool gate = a.end == RowsEnd::kGate;
    GSD_UNROLL
    for (int i = 1; i < kMaxMatrices; i++) {  // no index into the arguments: that would be a copy on the stack
      const int before = (outputs + tile - 1) / tile;
      if (gate || matrix != i - 1 || block < before || i >= a.count) continue;
      block -= before;
      matrix = i, outputs = a.matrices[i].outputs;
    }
    first = block * (gate ? tile / 2 : tile);
  }

  GSD_HD RowsMatrix of(const RowsProduct& a) const {
    RowsMatrix found = a.matrices[0];
    GSD_UNROLL
    for (int i = 1; i < kMaxMatrices; i++) {
      if (matrix == i) found = a.matrices[i];
    }
    return found;
  }
};

// A thread's share of what comes ahead, of so many threads.
template <class Machine>
GSD_HD void fetch_ahead(Machine& machine, const RowsAhead& ahead, int thread, int threads) {
  const int pieces = ahead.pieces();
  GSD_ROLLED
  for (int i = thread; i < pieces; i += threads) {
    int size;
    const char* from = ahead.piece(i, size);
    machine.prefetch(from, size);
  }
}

// A thread's sums of kRowTiles times eight rows: two rows of two outputs each. Number 2 m + c of tile j is output
// `output + m · second` of `row + 8 j + c`, below `rows`; with gates m = 0 is the gate, m = 1 the up of the one output.
template <class Element, int kRowTiles>
struct RowsSums {
  template <class Machine>
  static GSD_HD void finish(Machine& machine, const RowsProduct& a, const RowsTile& tile, int output, int second, int row,
                            int rows, const float (&own)[kRowTiles][4]) {
    if (a.end == RowsEnd::kGate) {
      if (output < tile.outputs) gate(machine, a, row, rows, output, own);
      return;
    }
    const uint16_t* biases = a.matrices[0].bias;
    float* out = a.matrices[0].out;
    GSD_UNROLL
    for (int i = 1; i < kMaxMatrices; i++) {
      if (tile.matrix == i) biases = a.matrices[i].bias, out = a.matrices[i].out;
    }
    GSD_UNROLL
    for (int m = 0; m < 2; m++) {
      const int n = output + m * second;
      if (n >= tile.outputs) continue;
      const float bias = biases != nullptr ? Element::widen(biases[n]) : 0.0f;
      if (a.end == RowsEnd::kRound) {
        GSD_UNROLL
        for (int j = 0; j < 2 * kRowTiles; j++) {
          const int later = 8 * (j / 2) + j % 2;
          if (row + later >= rows) continue;
          a.rounded[(row + later) * a.out_stride + n] =
              static_cast<uint16_t>(Element::pack(own[j / 2][2 * m + j % 2] + bias, 0.0f));
        }
        continue;
      }
      float* to = out + row * a.out_stride + n;
      float values[kRowTiles][2] = {};
      if (a.end == RowsEnd::kAdd) {  // all of them before the first is written, or each would wait for the one before
        GSD_UNROLL
        for (int j = 0; j < 2 * kRowTiles; j++) {
          const int later = 8 * (j / 2) + j % 2;
          if (row + later < rows) values[j / 2][j % 2] = to[later * a.out_stride];
        }
      }
      GSD_UNROLL
      for (int j = 0; j < 2 * kRowTiles; j++) {
        const int later = 8 * (j / 2) + j % 2;
        const float sum = own[j / 2][2 * m + j % 2] + bias;  // of kStore with the sign of its zero, as heads that turn
        if (row + later < rows) to[later * a.out_stride] = a.end == RowsEnd::kAdd ? values[j / 2][j % 2] + sum : sum;
      }
    }
  }

 private:
  // silu(gate) · up of one output, rounded.
  template <class Machine>
  static GSD_HD void gate(Machine& machine, const RowsProduct& a, int row, int rows, int output,
                          const float (&own)[kRowTiles][4]) {
    const uint16_t *gate_bias = a.matrices[0].bias, *up_bias = a.matrices[1].bias;
    const float to_gate = gate_bias != nullptr ? Element::widen(gate_bias[output]) : 0.0f;
    const float to_up = up_bias != nullptr ? Element::widen(up_bias[output]) : 0.0f;
    GSD_UNROLL
    for (int j = 0; j < 2 * kRowTiles; j++) {
      const int later = 8 * (j / 2) + j % 2;
      const float g = own[j / 2][j % 2] + to_gate, up = own[j / 2][2 + j % 2] + to_up;
      const float decay = machine.exp2((g < 0.0f ? g : -g) * kLog2E);  // at most 1, so nothing overflows
      const float value = g * machine.divide(g < 0.0f ? decay : 1.0f, 1.0f + decay) * up;
      if (row + later >= rows) continue;
      a.rounded[(row + later) * a.out_stride + output] =
          static_cast<uint16_t>(Element::pack(value, 0.0f));
    }
  }
};

}  // namespace gsd
