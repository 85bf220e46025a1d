// What the problems of block code over thread groups share: their numbers, their memory, and how they are run.
#pragma once

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <memory>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "fiber_group.h"

namespace gsd {

// One random problem. Every array lies in memory of exactly its size, so that AddressSanitizer sees the first byte beyond.
// A wild problem has values of no meaning: what runs is to stay inside of its memory, and to end.
class Case {
 public:
  const int threads;
  const bool wild;

  Case(int threads, bool wild, std::mt19937& random) : threads(threads), wild(wild), random(random) {}

  int between(int low, int high) { return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1)); }
  bool once_in(int times) { return between(1, times) == 1; }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[random() % values.size()];
  }

  // Ids, parents, rows; wild: round the limits, and far from them.
  int32_t id(int low, int high) {
    if (!wild) return between(low, high);
    if (once_in(4)) return one_of({INT32_MIN, INT32_MIN + 1, -100, -2, -1, 1 << 16, 1 << 30, INT32_MAX});
    return between(low - 1, high + 2);
  }
  // A length or depth.
  int32_t count(int low, int high) {
    if (!wild) return between(low, high);
    return once_in(8) ? between(-1000, 1000000) : between(low - 1, high + 2);
  }
  // A log-probability on a coarse grid, so that ties are common.
  float score() {
    if (wild && !once_in(3)) {
      return one_of({NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e-6f, 3.0f, 88.0f, 1e30f, 3.4e38f, -1e30f, -3.4e38f, 1e-40f,
                     -1e-40f, -1.0f, -0.5f});
    }
    return once_in(12) ? -INFINITY : -0.25f * static_cast<float>(between(0, 11));
  }
  int32_t* ids(int n, int low, int high) { return made<int32_t>(n, [&] { return id(low, high); }); }
  int32_t* counts(int n, int low, int high) { return made<int32_t>(n, [&] { return count(low, high); }); }
  float* scores(int n) { return made<float>(n, [&] { return score(); }); }
  bool* flags(int n) { return made<bool>(n, [&] { return !once_in(8); }); }

  template <class T, class Value>
  T* made(int n, const Value& value) {
    blocks.push_back({std::make_unique<char[]>(sizeof(T) * static_cast<size_t>(n)), sizeof(T) * static_cast<size_t>(n),
                      std::is_same_v<T, float>});
    T* const values = reinterpret_cast<T*>(blocks.back().memory.get());
    for (int i = 0; i < n; i++) values[i] = static_cast<T>(value());
    return values;
  }
  template <class T>
  T* filled(int n, T value) {
    return made<T>(n, [&] { return value; });
  }
  // An output or working memory: poisoned, as a GPU's is.
  template <class T>
  T* out(int n) {
    T poison;
    memset(&poison, 0xA5, sizeof poison);
    return filled(n, poison);
  }
  // In a wild problem ids, or scores, of no meaning in the place of some of an array's.
  template <class T>
  void spoil(T* values, int n, int high) {
    for (int i = 0; wild && i < n; i++) {
      if (once_in(2)) continue;
      if constexpr (std::is_same_v<T, float>) {
        values[i] = score();
      } else {
        values[i] = id(0, high);
      }
    }
  }

  // Runs algorithm(group, arena) by one thread and by a block; whether both leave the same everywhere, floats within
  // `tolerance`. `bytes`: of the arena, or of that for so many threads. A wild problem is run by a block alone.
  template <class Bytes, class Algorithm>
  bool agrees(const Bytes& bytes, const Algorithm& algorithm, float tolerance = 0.0f) {
    if (wild && threads > 1) return in_a_block(bytes, algorithm), true;
    const std::vector<std::vector<char>> before = contents();
    alone(bytes, algorithm);
    if (wild) return true;
    const std::vector<std::vector<char>> expected = contents();
    for (size_t i = 0; i < blocks.size(); i++) std::copy(before[i].begin(), before[i].end(), blocks[i].memory.get());
    in_a_block(bytes, algorithm);
    for (size_t i = 0; i < blocks.size(); i++) {
      if (std::equal(expected[i].begin(), expected[i].end(), blocks[i].memory.get())) continue;
      if (tolerance == 0.0f || !blocks[i].floats) return false;
      const float* const got = reinterpret_cast<const float*>(blocks[i].memory.get());
      const float* const wanted = reinterpret_cast<const float*>(expected[i].data());
      for (size_t n = 0; n < blocks[i].bytes / sizeof(float); n++) {
        if (got[n] != wanted[n] && !(fabsf(got[n] - wanted[n]) < tolerance)) return false;
      }
    }
    return true;
  }

  template <class Bytes, class Algorithm>
  void in_a_block(const Bytes& bytes, const Algorithm& algorithm) {
    std::vector<char> arena = arena_of(bytes, threads);
    run_block(threads, [&](FiberGroup& group) { algorithm(group, arena.data()); });
  }

 private:
  struct Block {
    std::unique_ptr<char[]> memory;
    size_t bytes;
    bool floats;
  };

  template <class Bytes>
  static std::vector<char> arena_of(const Bytes& bytes, int threads) {
    constexpr char kPoison = static_cast<char>(0xA5);
    if constexpr (std::is_invocable_v<Bytes, int>) return std::vector<char>(bytes(threads), kPoison);
    else return std::vector<char>(static_cast<size_t>(bytes), kPoison);
  }
  template <class Bytes, class Algorithm>
  void alone(const Bytes& bytes, const Algorithm& algorithm) {
    SerialGroup group;
    std::vector<char> arena = arena_of(bytes, 1);
    algorithm(group, arena.data());
  }
  std::vector<std::vector<char>> contents() const {
    std::vector<std::vector<char>> found;
    for (const Block& block : blocks) found.emplace_back(block.memory.get(), block.memory.get() + block.bytes);
    return found;
  }

  std::mt19937& random;
  std::vector<Block> blocks;
};

}  // namespace gsd
