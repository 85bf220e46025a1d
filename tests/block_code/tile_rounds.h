// What the programs share that run attention in random rounds: numbers, tensors, and the fault named on the command line.
#pragma once

#include <algorithm>
#include <random>
#include <utility>

#include "fiber_machine.h"

namespace gsd {

constexpr int kWrong = 3;

inline int between(std::mt19937& random, int low, int high) {
  return low + static_cast<int>(random() % (high - low + 1));
}

template <class Element>
void fill(std::vector<uint16_t>& values, size_t size, std::mt19937& random) {
  std::normal_distribution<float> normal;
  values.resize(size);
  for (uint16_t& value : values) value = Element::round(normal(random));
}

// Of PROGRAM ROUNDS SEED [--drop BARRIER | --hurry WAIT | --misplace-copy NAME | --misplace-load NAME |
// --no-await NAME].
inline std::pair<Faults, MachineFaults> faults_of(int argc, char** argv) {
  std::pair<Faults, MachineFaults> found;
  if (argc < 5) return found;
  auto& [faults, machine_faults] = found;
  if (strcmp(argv[3], "--drop") == 0) faults.dropped_barrier = argv[4];
  if (strcmp(argv[3], "--hurry") == 0) machine_faults.hurried_wait = argv[4];
  if (strcmp(argv[3], "--misplace-copy") == 0) machine_faults.misplaced_copy = argv[4];
  if (strcmp(argv[3], "--misplace-load") == 0) machine_faults.misplaced_load = argv[4];
  if (strcmp(argv[3], "--no-await") == 0) machine_faults.not_awaited = argv[4];
  return found;
}

}  // namespace gsd
