// The launches of csrc/cuda as grids of blocks: `run(warps, blocks, arena bytes, body)` runs body(machine, b) for each.
#pragma once

#include "../../csrc/algorithms/path_end.h"
#include "../../csrc/algorithms/rows_product.h"
#include "../../csrc/algorithms/rows_turn.h"
#include "fiber_machine.h"

namespace gsd {

template <class Block, class Run>
void run_product(const RowsProduct& a, int outputs, const Run& run) {
  const RowsCut cut(a, outputs);
  const int rows = a.row_blocks(), tiles = rows * cut.output_blocks;
  run(Block::kWarps, tiles * cut.splits, Block::kArenaBytes, [&](FiberMachine& m, int b) {
    Block::run(m, a, cut, b % rows, b % tiles / rows, b / tiles);
  });
}

template <class Element, int kRows, class Run>
void run_product(const RowsProduct& a, bool wide, const Run& run) {
  if constexpr (kRows > 16) {
    if (wide) return run_product<ProductBlock<Element, kRows, kWideOutputs>>(a, kWideOutputs, run);
  }
  a.packed() ? run_product<ProductBlock<Element, kRows, kTileOutputs, true>>(a, kTileOutputs, run)
             : run_product<ProductBlock<Element, kRows>>(a, kTileOutputs, run);
}

// Blocks of 64 rows as wide as a launch would make them, or not: the bits may not tell.
template <class Element, class Run>
void run_product(const RowsProduct& a, bool wide, const Run& run) {
  const bool heads = a.wide_heads(), either = !a.packed() && a.end != RowsEnd::kTurn;
  switch (a.tile_rows()) {
    case 16:
      return run_product<Element, 16>(a, false, run);
    case 32:
      return run_product<Element, 32>(a, heads, run);
    default:
      return run_product<Element, kMostTileRows>(a, heads || (wide && either), run);
  }
}

template <class Element, class Run>
void run_turn(const RowsTurn& a, const Run& run) {
  const int heads = a.heads + 2 * a.kv_heads;
  run(1, a.batch * a.rows * heads, 0, [&](FiberMachine& m, int b) {
    a.head_dim == 64 ? turn_head<Element, 64>(m, a, b / heads, b % heads)
                     : turn_head<Element, 128>(m, a, b / heads, b % heads);
  });
}

template <class Element, int kHeadDim, int kWarps, class Run>
void run_prefix(const PathAttentionArgs& a, const PathAttentionSizes& s, const Run& run) {
  using Prefix = PathPrefix<Element, kHeadDim, kWarps>;
  const int heads = s.batch * s.kv_heads, rows = Prefix::Tiles::kRows, parts = (s.query_rows() + rows - 1) / rows;
  run(kWarps, parts * heads * s.splits(), Prefix::Tiles::kArenaBytes, [&](FiberMachine& m, int b) {
    Prefix::run(m, a, s, b % parts, b / parts % heads, b / parts / heads);
  });
}

template <class Element, int kHeadDim, class Run>
void run_prefix(const PathAttentionArgs& a, const PathAttentionSizes& s, const Run& run) {
  s.query_rows() <= 16 ? run_prefix<Element, kHeadDim, 1>(a, s, run) : run_prefix<Element, kHeadDim, 4>(a, s, run);
}

template <class Element, int kHeadDim, class Run>
void run_end(const PathAttentionArgs& a, const PathAttentionSizes& s, const Run& run) {
  using End = PathEnd<Element, kHeadDim>;
  const int blocks = End::blocks(s);
  run(End::kWarps, blocks * s.batch * s.kv_heads, End::kArenaBytes,
      [&](FiberMachine& m, int b) { End::run(m, a, s, b % blocks, b / blocks); });
}

}  // namespace gsd
