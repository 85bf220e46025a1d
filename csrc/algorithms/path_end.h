// The ends of rows: what lies behind the prefix' whole tiles (the tail), and the splits of a row added up (the combine of
// split-KV). See path_attention.h.
//
// A warp takes 16 heads of one row, with tiles of its own, so that warps do not wait for each other.
#pragma once

#include "path_attention.h"

namespace gsd {

// The arithmetic of AttentionTiles by a warp alone, in shared memory for one tile from `arena` on. The next tile's keys
// are asked for before this one's softmax, its values before the next keys are multiplied. Machine::sync_warp is a barrier
// of the warp's lanes.
template <class Element, int kHeadDim>
struct WarpTiles : AttentionTiles<Element, kHeadDim, 1> {
  using Base = AttentionTiles<Element, kHeadDim, 1>;
  using Layout = typename Base::Layout;
  using State = typename Base::State;
  static constexpr int kSteps = Base::kSteps, kArenaBytes = Layout::kStageBytes;

  // As AttentionTiles::run.
  template <class Machine, class Rows>
  static GSD_HD void run(Machine& machine, const Rows& rows, int arena, int begin, int end, State& state) {
    const int lane = machine.lane(), m[2] = {rows.first + lane / 4, rows.first + lane / 4 + 8};
    const int keys = arena + Layout::keys(0), values = arena + Layout::values(0);
    int slot = slot_of(rows, begin + lane, end);
    copy(machine, "end's keys", keys, rows.keys, rows.k_slot, slot);
    machine.commit();
    copy(machine, "end's values", values, rows.values, rows.v_slot, slot);
    machine.commit();
    GSD_ROLLED
    for (int column = begin; column < end; column += kTileColumns) {
      uint32_t q[kSteps][4];
      load_queries(rows, m[0], lane, q);
      machine.template wait<1>("end's keys arrived");
      machine.sync_warp("end's keys arrived");
      float scores[Base::kScoreTiles][4] = {};
      Base::multiply_keys(machine, scores, q, keys);
      machine.sync_warp("end's keys read");
      const bool last = column + kTileColumns >= end;
      slot = slot_of(rows, column + kTileColumns + lane, end);
      if (!last) copy(machine, "end's keys", keys, rows.keys, rows.k_slot, slot);
      machine.commit();
      Base::finish_scores(machine, rows.scale, rows.softcap(), scores);
      uint32_t seen[2] = {0, 0};
      GSD_UNROLL
      for (int i = 0; i < 2; i++) {
        if (m[i] < rows.count) seen[i] = bits_below(end - column) & rows.seen(m[i], column, lane);
      }
      if (rows.masked(column) || last) Base::hide(lane, seen, scores);
      Base::accumulate(machine, scores, state);

      machine.template wait<1>("end's values arrived");
      machine.sync_warp("end's values arrived");
      const uint32_t spoiled = rows.checked ? clean_values(machine, values) : 0;
      GSD_UNROLL
      for (int i = 0; i < 2; i++) {
        if ((seen[i] & spoiled) != 0) state.total[i] = float_from_bits(0x7FC00000u);  // NaN reaches who does see it
      }
      Base::multiply_values(machine, scores, state.out, values);
      machine.sync_warp("end's values read");
      if (!last) copy(machine, "end's values", values, rows.values, rows.v_slot, slot);
      machine.commit();
    }
  }

 private:
  template <class Rows>
  static GSD_HD int slot_of(const Rows& rows, int column, int end) {
    return column < end ? rows.slot(column) : -1;
  }

  // A tile whose column `lane` lies at the lane's slot, below 0: zeros.
  template <class Machine>
  static GSD_HD void copy(Machine& machine, const char* name, int to, const uint16_t* from, int stride, int slot) {
    const int chunk = machine.lane() % Layout::kChunks;
    GSD_UNROLL_BY(4)
    for (int pass = 0; pass < kTileColumns / Base::kRowsPerPass; pass++) {
      const int row = pass * Base::kRowsPerPass + machine.lane() / Layout::kChunks;
      const float bits = float_from_bits(static_cast<uint32_t>(slot));
      const int found = static_cast<int>(float_bits(machine.shuffle(bits, row)));
      const int64_t place = max_int(found, 0);
      machine.copy(name, to + Layout::at(row, chunk), from + place * stride + chunk * 8, found >= 0);
    }
  }

  // Straight from memory, since the tile has no room for them, and for every tile, since registers have none beside the
  // values. Register i of a step is row lane / 4, or 8 later, in dimensions 2 (lane % 4) and the next, or 8 later.
  template <class Rows>
  static GSD_HD void load_queries(const Rows& rows, int m, int lane, uint32_t (&q)[kSteps][4]) {
    const uint16_t* from = rows.query(min_int(m, rows.count - 1)) + 2 * (lane % 4);
    GSD_UNROLL
    for (int i = 0; i < 2; i++) {
      const bool there = m + 8 * i < rows.count;
      GSD_UNROLL
      for (int eight = 0; eight < 2 * kSteps; eight++) {
        const uint16_t* at = from + 8 * (i * kHeadDim + eight);
        q[eight / 2][i + eight % 2 * 2] = there ? *reinterpret_cast<const uint32_t*>(at) : 0;
      }
    }
  }

  // Zeroes what is not finite, which is rare, and returns the columns that held it; a lane looks at its own.
  template <class Machine>
  static GSD_HD uint32_t clean_values(Machine& machine, int values) {
    bool found = false;
    GSD_ROLLED
    for (int chunk = 0; chunk < Layout::kChunks; chunk++) {
      found |= holds_non_finite<Element>(machine.read(values + Layout::at(machine.lane(), chunk)));
    }
    const uint32_t columns = machine.ballot(found);
    GSD_ROLLED
    for (int chunk = 0; found && chunk < Layout::kChunks; chunk++) {
      const int at = values + Layout::at(machine.lane(), chunk);
      machine.write(at, finite_elements<Element>(machine.read(at)));
    }
    machine.sync_warp("end's values cleaned");
    return columns;
  }
};

// The heads of one row, 16 from `first` on.
struct EndRows : PathRows {
  const int64_t flat_row;
  const int start, prefix, oldest;
  const int32_t* path;

  GSD_HD EndRows(const PathAttentionArgs& a, const PathAttentionSizes& s, int first, int batch, int head, int row,
                 const PathText& text)
      : PathRows(a, s, first, s.group, batch, head, 0), flat_row(static_cast<int64_t>(batch) * s.rows + row),
        start(text.start), prefix(text.prefix), oldest(oldest_position(a, flat_row)),
        path(a.slots + flat_row * a.path) {}

  GSD_HD const uint16_t* query(int m) const { return query_of(flat_row, m); }
  GSD_HD int slot(int column) const {
    if (column < oldest) return -1;
    return column < prefix ? start + column : path[column - prefix];
  }
  GSD_HD uint32_t seen(int, int column, int) const { return ~bits_below(oldest - column); }
};

// A block ends the rows of a cache head, a warp 16 heads of one of them.
template <class Element, int kHeadDim>
struct PathEnd {
  static constexpr int kWarps = 4, kThreads = kWarps * kLanes;
  using Tiles = WarpTiles<Element, kHeadDim>;
  using States = PathStates<Tiles, kHeadDim>;
  static constexpr int kArenaBytes = kWarps * Tiles::kArenaBytes;

  static GSD_HD int parts(const PathAttentionSizes& s) { return (s.group + Tiles::kRows - 1) / Tiles::kRows; }
  // Of a cache head.
  static GSD_HD int blocks(const PathAttentionSizes& s) { return (s.rows * parts(s) + kWarps - 1) / kWarps; }

  template <class Machine>
  static GSD_HD void run(Machine& machine, const PathAttentionArgs& a, const PathAttentionSizes& s, int block,
                         int batch_head) {
    machine.await_previous("end");
    machine.release_next();
    const int own = block * kWarps + machine.warp(), row = own / parts(s), m_first = own % parts(s) * Tiles::kRows;
    if (row >= s.rows) return;  // no barrier of the block follows
    int begin = PathText(a, s, batch_head / s.kv_heads).whole;
    GSD_ROLLED
    for (int before = -1; begin != before;) {
      before = begin;
      begin = take_split(machine, a, s, row, batch_head, m_first, begin);
    }
    machine.sync_warp("states written");
    add_splits(machine, a, s, row, batch_head, m_first);
  }

 private:
  static constexpr int kTogether = 4;  // heads, and splits, whose states are on their way at a time

  static GSD_HD int64_t state_at(const PathAttentionSizes& s, int row, int batch_head, int m_first, int split) {
    return (static_cast<int64_t>(batch_head) * s.splits() + split) * s.query_rows() + row * s.group + m_first;
  }

  // Takes what the row sees from `begin` on, the end of a split or of its whole tiles, up to the next end of a split, which
  // is returned; or `begin` itself, behind which there is nothing.
  template <class Machine>
  static GSD_HD int take_split(Machine& machine, const PathAttentionArgs& a, const PathAttentionSizes& s, int row,
                               int batch_head, int m_first, int begin) {
    const PathText text(a, s, batch_head / s.kv_heads);
    const EndRows rows(a, s, m_first, batch_head / s.kv_heads, batch_head % s.kv_heads, row, text);
    const int end = text.prefix + a.lengths[rows.flat_row], split = path_split_of(begin);
    if (begin >= end) return begin;
    const int64_t split_end = path_split_begin(split + 1);
    const int stop = split_end < end ? static_cast<int>(split_end) : end;
    const States states(a, s);
    typename Tiles::State state;
    if (text.first < begin && path_split_begin(split) < begin) {
      states.load(machine, state_at(s, row, batch_head, m_first, split), machine.lane() / 4, s.group - m_first, state);
    }
    Tiles::run(machine, rows, machine.warp() * Tiles::kArenaBytes, begin, stop, state);
    states.save(machine, state_at(s, row, batch_head, m_first, split), machine.lane() / 4, s.group - m_first, state);
    return stop;
  }

  template <class Machine>
  static GSD_HD void add_splits(Machine& machine, const PathAttentionArgs& a, const PathAttentionSizes& s, int row,
                                int batch_head, int m_first) {
    const int batch = batch_head / s.kv_heads, head = batch_head % s.kv_heads * s.group + m_first;
    const int64_t flat_row = static_cast<int64_t>(batch) * s.rows + row;
    const PathText text(a, s, batch);
    const int end = text.prefix + a.lengths[flat_row], first_split = path_split_of(text.first);
    const int splits = end > text.first ? path_split_of(end - 1) + 1 : 0;
    const int heads = min_int(s.group - m_first, Tiles::kRows);
    uint16_t* out = a.out + flat_row * a.out_row + static_cast<int64_t>(head) * kHeadDim;
    GSD_ROLLED
    for (int first = 0; first < heads; first += kTogether) {
      const int64_t at = state_at(s, row, batch_head, m_first + first, 0);
      combine(machine, States(a, s), at, min_int(heads - first, kTogether), s.query_rows(), first_split, splits,
              out + first * kHeadDim);
    }
  }

  // Of `heads` heads out = Σ 2^(b_s − b) out_s / Σ 2^(b_s − b) total_s with b = max b_s, one split after the other. A lane
  // finds the shares of every 32nd split, and adds up its own dimensions of all.
  template <class Machine>
  static GSD_HD void combine(Machine& machine, const States& states, int64_t at, int heads, int64_t stride, int first,
                             int splits, uint16_t* out) {
    constexpr int kOwn = kHeadDim / kLanes;  // dimensions of a lane
    const int lane = machine.lane();
    float best[kTogether], sums[kTogether][kOwn] = {}, total[kTogether] = {};
    GSD_UNROLL
    for (int h = 0; h < kTogether; h++) {
      best[h] = kEmpty;
      GSD_ROLLED
      for (int split = first + lane; h < heads && split < splits; split += kLanes) {
        best[h] = machine.max(best[h], *states.best(at + h + split * stride));
      }
      best[h] = max_of_lanes(machine, best[h]);
    }
    GSD_ROLLED
    for (int begin = first; begin < splits; begin += kLanes) {
      float share[kTogether] = {}, part_total[kTogether] = {};
      GSD_UNROLL
      for (int h = 0; h < kTogether; h++) {
        if (h >= heads || begin + lane >= splits) continue;
        const int64_t from = at + h + (begin + lane) * stride;
        float totals[4];
        machine.load(states.totals(from), totals);
        share[h] = machine.exp2(*states.best(from) - best[h]);
        part_total[h] = totals[0] + totals[1] + (totals[2] + totals[3]);
      }
      const int count = min_int(splits - begin, kLanes);
      GSD_ROLLED
      for (int s = 0; s < count; s += kTogether) {
        float parts[kTogether][kTogether][kOwn] = {};
        GSD_UNROLL
        for (int i = 0; i < kTogether; i++) {
          const float* from = states.out(at + (begin + s + i) * stride) + kOwn * lane;
          GSD_UNROLL
          for (int h = 0; h < kTogether; h++) {
            if (s + i < count && h < heads) machine.load(from + h * kHeadDim, parts[i][h]);
          }
        }
        GSD_UNROLL
        for (int i = 0; i < kTogether; i++) {
          if (s + i >= count) break;
          GSD_UNROLL
          for (int h = 0; h < kTogether; h++) {
            const float by = machine.shuffle(share[h], s + i);
            total[h] = machine.fma(by, machine.shuffle(part_total[h], s + i), total[h]);
            GSD_UNROLL
            for (int d = 0; d < kOwn; d++) sums[h][d] = machine.fma(by, parts[i][h][d], sums[h][d]);
          }
        }
      }
    }
    GSD_UNROLL
    for (int h = 0; h < kTogether; h++) {
      if (h >= heads) continue;
      const float inverse = total[h] != 0.0f ? 1.0f / total[h] : 0.0f;  // 0: the row sees nothing
      uint32_t* target = reinterpret_cast<uint32_t*>(out + h * kHeadDim) + kOwn / 2 * lane;
      GSD_UNROLL
      for (int d = 0; d < kOwn / 2; d++) target[d] = Element::pack(sums[h][2 * d] * inverse, sums[h][2 * d + 1] * inverse);
    }
  }
};

}  // namespace gsd
