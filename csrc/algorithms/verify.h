// Accept the path of rows on which every drafted token is what the target picked at its parent row.
//
// Nothing is walked: a row is accepted when all rows of its ancestor mask agree, which is one comparison of bit masks.
#pragma once

#include "group.h"

namespace gsd {

// R rows, E end tokens, D deepest row.
struct VerifySizes {
  int rows, num_eos, max_path;

  GSD_HD int words() const { return words_for(rows); }
};

struct VerifyArgs {
  const int32_t* token_ids;      // [R]
  const int32_t* parent_rows;    // [R]
  const int32_t* depths;         // [R]
  const int32_t* ancestor_mask;  // [R, R/32]
  const int32_t* num_rows;       // [1]
  const int32_t* sampled;        // [R]: the target's token after each row
  const int32_t* eos_ids;        // [E], shared by all sequences
  const int32_t* remaining;      // [1]
  const bool* done;              // [1]
  int32_t* accepted_rows;        // [D + 1], −1 padded
  int32_t* num_accepted;         // [1]
  int32_t* next_token;           // [1]
};

struct VerifyArena : Arena<VerifyArena> {
  uint32_t* agrees;  // [R/32]: the row's token is the target's pick at its parent

  template <class Carve>
  GSD_HD void lay(Carve& carve, const VerifySizes& s) {
    carve(agrees, s.words());
  }
};

// Row 0, the root, always agrees. A row after an end token or beyond the remaining length never does.
GSD_HD bool row_agrees(const VerifyArgs& a, const VerifySizes& s, int row) {
  if (row == 0) return true;
  const int parent = a.parent_rows[row];
  if (parent < 0 || parent >= s.rows || a.depths[row] >= *a.remaining) return false;
  const int32_t picked = a.sampled[parent];
  if (picked != a.token_ids[row]) return false;
  for (int i = 0; i < s.num_eos; i++) {
    if (picked == a.eos_ids[i]) return false;
  }
  return true;
}

template <class Group>
GSD_HD void verify_rows(Group& group, const VerifyArgs& a, const VerifySizes& s, char* memory) {
  const auto arena = VerifyArena::in(memory, s);
  const int rank = group.rank(), step = group.size(), words = s.words();
  const int real_rows = min_int(*a.num_rows, s.rows);

  for (int i = rank; i < words; i += step) arena.agrees[i] = 0;
  for (int i = rank; i <= s.max_path; i += step) a.accepted_rows[i] = -1;
  group.sync("verify: cleared");

  for (int row = rank; row < real_rows; row += step) {
    if (row_agrees(a, s, row)) group.atomic_or(&arena.agrees[row / 32], 1u << row % 32);
  }
  group.sync("verify: agreement known");

  for (int row = rank; row < real_rows && !*a.done; row += step) {
    bool accepted = true;
    for (int w = 0; w < words; w++) {
      const uint32_t bits = s.rows - 32 * w >= 32 ? ~0u : (1u << (s.rows - 32 * w)) - 1;
      const uint32_t path = static_cast<uint32_t>(a.ancestor_mask[row * words + w]) & bits;
      accepted = accepted && (path & ~arena.agrees[w]) == 0;
    }
    if (!accepted) continue;
    // Siblings have different tokens, so there is one accepted row at a depth.
    if (a.depths[row] >= 0 && a.depths[row] <= s.max_path) a.accepted_rows[a.depths[row]] = row;
  }
  group.sync("verify: path known");

  if (rank == 0) {
    int count = 0;
    while (count <= s.max_path && a.accepted_rows[count] >= 0) count++;
    *a.num_accepted = count;
    *a.next_token = a.sampled[count > 0 ? a.accepted_rows[count - 1] : 0];
  }
}

GSD_GROUP_WORK(VerifyArgs, VerifyArena::bytes(s), verify_rows(group, all[number], s, memory))

}  // namespace gsd
