// Problems by name, and what those share that run on the machine of fibers: random numbers, and comparing.
#pragma once

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "fiber_machine.h"

namespace gsd {

// The program of all problems:
//
//     block_code PROBLEM ROUNDS SEED [FAULT NAME]   fault: `planted`
//     block_code pick ARGUMENTS...                  see groups.cpp
//
// Exit status: 0 right, 3 wrong, 4 divergent or stuck, 5 bank conflict, 6 a source that changes while it is copied, 7 … 10
// what else a machine says; sanitizers have their own.
struct Problem {
  const char* name;
  bool (*right)(int round, std::mt19937& random);
};
inline std::vector<Problem> all_problems;

// A variable of a file's whose construction lists what the file has.
struct Listed {
  Listed(std::initializer_list<Problem> problems) { all_problems.insert(all_problems.end(), problems); }
};

// Rounds of two element types in turn.
template <auto one, auto other>
bool by_turns(int round, std::mt19937& random) {
  return round % 2 == 0 ? one(round, random) : other(round, random);
}

#ifdef GSD_ONE_TYPE  // half of the code, and the same accesses
using One = GSD_ONE_TYPE;
using Other = GSD_ONE_TYPE;
#else
using One = Half;
using Other = Bfloat16;
#endif

inline int between(std::mt19937& random, int low, int high) { return low + static_cast<int>(random() % (high - low + 1)); }

inline std::vector<float> drawn_floats(size_t size, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(size);
  for (float& value : values) value = normal(random);
  return values;
}

template <class Element>
std::vector<uint16_t> drawn(size_t size, std::mt19937& random) {
  std::vector<uint16_t> values;
  for (const float value : drawn_floats(size, random)) values.push_back(Element::round(value));
  return values;
}

template <class Element>
constexpr double unit() {  // half the distance from 1 to the next number
  return std::is_same_v<Element, Half> ? 0x1p-11 : 0x1p-8;
}

inline bool close(double got, double expected, double allowed, const char* what, int row, int column) {
  if (std::abs(got - expected) <= allowed) return true;
  fprintf(stderr, "%s of row %d, column %d: %g instead of %g\n", what, row, column, got, expected);
  return false;
}

// What the launch before writes: numbers that are not there before.
template <class T>
struct Awaited {
  std::vector<T> values, there;

  explicit Awaited(std::vector<T> numbers) : values(std::move(numbers)), there(values.size()) { leave(); }
  void arrive() { std::copy(values.begin(), values.end(), there.begin()); }
  void leave() { std::fill_n(reinterpret_cast<unsigned char*>(there.data()), sizeof(T) * there.size(), 0xFF); }  // NaN
};

// A launch behind one that does `write`, so many blocks together.
template <class Write>
auto after(const Write& write, int together = 1) {
  return [=](int warps, int blocks, size_t arena, const auto& body) {
    Previous previous;
    previous.write = write;
    run_grid(warps, blocks, arena, body, together, &previous);
  };
}

}  // namespace gsd
