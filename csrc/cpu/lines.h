// Storage that begins on a line of the cache: a vector or a tile's row that lies on two lines is read at half the speed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gsd {

constexpr int64_t kLineBytes = 64;

template <class T>
class Lines {
 public:
  // At least n elements; it never shrinks.
  void make_room(int64_t n) {
    const auto lines = static_cast<std::size_t>((n * static_cast<int64_t>(sizeof(T)) + kLineBytes - 1) / kLineBytes);
    if (lines_.size() < lines) lines_.resize(lines);
  }
  T* data() { return reinterpret_cast<T*>(lines_.data()); }
  T& operator[](int64_t i) { return data()[i]; }

 private:
  struct alignas(kLineBytes) Line {
    char bytes[kLineBytes];
  };
  std::vector<Line> lines_;
};

}  // namespace gsd
