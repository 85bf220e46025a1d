// The team of threads that shares out a call's work on a CPU, linked without PyTorch: it does every piece once, also after a
// piece that failed and where its threads come late. Run under ThreadSanitizer; status 3: it does not.
#include "../../csrc/cpu/team.h"

#include <algorithm>
#include <new>
#include <thread>

namespace {
constexpr int64_t kThreads = 3;
bool late = false;  // threads that help begin when all is done
}  // namespace

// PyTorch's, with threads that start and end here, so that the sanitizer sees what orders them.
extern "C" AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t,
                                             void (*work)(int64_t, int64_t, void*), void* context) {
  std::vector<std::thread> running;
  const auto help = [&] {
    for (int64_t i = begin + 1; i < end; i++) running.emplace_back(work, i, i + 1, context);
  };
  if (!late) help();
  work(begin, begin + 1, context);
  if (late) help();
  for (std::thread& thread : running) thread.join();
  return 0;
}
extern "C" AOTITorchError torch_get_num_threads(uint32_t* out) {
  *out = static_cast<uint32_t>(kThreads);
  return 0;
}

namespace {

bool team_is_right() {
  bool right = true;
  gsd::Team::run(false, [&](gsd::Team& team) {
    for (int64_t n = 0; n < 400; n++) {
      const int64_t piece = 1 + n % 7, fails = n % 5 == 4 ? n / 2 : -1;
      std::vector<int> done(static_cast<size_t>(n), 0);
      bool failed = false;
      try {
        team.share(n, piece, [&](int64_t, int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; i++) {
            if (i == fails) throw std::bad_alloc();
            done[static_cast<size_t>(i)]++;
          }
        });
      } catch (const std::bad_alloc&) {
        failed = true;
      }
      right &= failed == (fails >= 0);
      for (const int times : done) right &= failed || times == 1;
    }
  });
  try {
    gsd::Team::run(false, [](gsd::Team&) { throw std::bad_alloc(); });
    return false;
  } catch (const std::bad_alloc&) {
    return right;
  }
}

}  // namespace

int main() {
  for (const bool they_come_late : {false, true}) {
    late = they_come_late;
    if (!team_is_right()) return 3;
  }
  return 0;
}
