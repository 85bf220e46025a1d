// What is asked of the runtime about kernels is asked once a kernel and device, by any number of threads at once; an
// error is not kept.
#include "../../csrc/cuda/kernel_facts.h"

#include <atomic>
#include <thread>
#include <vector>

int main() {
  gsd::KernelFacts<int> facts;
  const int kernels[2] = {};
  std::atomic<int> asked = 0, wrong = 0;
  int fact = -1;
  if (facts.find(0, &kernels[0], fact, [](int&) { return 98; }) != 98) return 3;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; t++) {
    threads.emplace_back([&] {
      for (int i = 0; i < 40; i++) {
        const int device = i % 2, kernel = i / 2 % 2, expected = 10 * device + kernel;
        int found = -1;
        wrong += facts.find(device, &kernels[kernel], found, [&](int& value) {
          asked++, value = expected;
          return 0;
        }) != 0 || found != expected;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return asked == 4 && wrong == 0 ? 0 : 3;
}
