// What the runtime says of a kernel on a GPU, asked once: at every launch it would cost more than the launch.
#pragma once

#include <map>
#include <mutex>
#include <utility>

namespace gsd {

template <class Fact>
class KernelFacts {
 public:
  // The fact of a kernel on a device. `ask(fact)` finds it out, once a pair; its error is returned, and asked for again.
  template <class Ask>
  int find(int device, const void* kernel, Fact& fact, const Ask& ask) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto at = known.find({device, kernel});
    if (at != known.end()) return fact = at->second, 0;
    const int error = ask(fact);
    if (error == 0) known.emplace(std::pair(device, kernel), fact);
    return error;
  }

 private:
  std::mutex mutex;
  std::map<std::pair<int, const void*>, Fact> known;
};

}  // namespace gsd
