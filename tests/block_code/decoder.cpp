// The forward of rows of csrc/cpu, linked without PyTorch: for the sanitizers, and to count what it allocates.
//
// decoder ROWS HIDDEN INNER LAYERS: bits on one thread, on three, and on three of which two come too late are the same (3
// if not), and those of a third of the rows when no others are kept (4 if not); a team does every piece once, also after
// a piece that failed (5 if not). Prints the most bytes that were allocated at a time on one thread.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "../../csrc/cpu/decoder.h"

namespace {
int threads = 1;
bool late = false;  // threads that help begin when all is done
std::atomic<long> held{0}, most{0};
}  // namespace

#ifdef GSD_COUNT
namespace {
constexpr size_t kHeader = 64;
void* counted(size_t size) {
  char* at = static_cast<char*>(std::malloc(size + kHeader));
  if (at == nullptr) throw std::bad_alloc();
  std::memcpy(at, &size, sizeof size);
  const long now = held += static_cast<long>(size);
  for (long seen = most; now > seen && !most.compare_exchange_weak(seen, now);) {
  }
  return at + kHeader;
}
void uncounted(void* at) {
  if (at == nullptr) return;
  size_t size;
  std::memcpy(&size, static_cast<char*>(at) - kHeader, sizeof size);
  held -= static_cast<long>(size);
  std::free(static_cast<char*>(at) - kHeader);
}
}  // namespace
void* operator new(size_t size) { return counted(size); }
void* operator new[](size_t size) { return counted(size); }
void operator delete(void* at) noexcept { uncounted(at); }
void operator delete[](void* at) noexcept { uncounted(at); }
void operator delete(void* at, size_t) noexcept { uncounted(at); }
void operator delete[](void* at, size_t) noexcept { uncounted(at); }
#endif

// PyTorch's, with threads that start and end here, so that a sanitizer sees what orders them.
extern "C" AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain,
                                             void (*work)(int64_t, int64_t, void*), void* context) {
  const int64_t shares = std::max<int64_t>(1, std::min<int64_t>(threads, (end - begin) / std::max<int64_t>(1, grain)));
  const auto first = [&](int64_t share) { return begin + (end - begin) * share / shares; };
  std::vector<std::thread> running;
  const auto help = [&] {
    for (int64_t i = 1; i < shares; i++) running.emplace_back(work, first(i), first(i + 1), context);
  };
  if (!late) help();
  if (begin < end) work(begin, first(1), context);
  if (late) help();
  for (std::thread& thread : running) thread.join();
  return 0;
}
extern "C" AOTITorchError torch_get_num_threads(uint32_t* out) {
  *out = static_cast<uint32_t>(threads);
  return 0;
}

namespace gsd {
const IsaKernels* avx2_kernels() { return nullptr; }
const IsaKernels* avx512_kernels() { return nullptr; }
const IsaKernels* avx512_bf16_kernels() { return nullptr; }
const IsaKernels* amx_kernels() { return nullptr; }
const IsaKernels* soft_amx_kernels() { return portable_kernels(); }
std::string amx_permission() { return "not here"; }
}  // namespace gsd

namespace {

constexpr int64_t kBatch = 2, kHeads = 4, kKvHeads = 2, kHeadDim = 10, kVocab = 61, kPrefix = 21;

std::vector<uint16_t> bfloat16s(int64_t n, std::mt19937& gen) {
  std::normal_distribution<float> normal(0.0f, 0.1f);
  std::vector<float> wide(static_cast<size_t>(n));
  for (float& x : wide) x = normal(gen);
  std::vector<uint16_t> out(static_cast<size_t>(n));
  gsd::write_row(wide.data(), out.data(), gsd::Element::kBfloat16, n);
  return out;
}

struct Problem {
  int64_t rows, hidden, inner, layers;
  std::vector<std::vector<uint16_t>> weights;  // embedding, q, k, v, o, gate, up, down
  std::vector<int32_t> tokens, positions, slots, kv_len, kv_start, mask, depths;
  std::vector<float> norm, inv_freq;

  Problem(int64_t rows, int64_t hidden, int64_t inner, int64_t layers)
      : rows(rows), hidden(hidden), inner(inner), layers(layers), kv_len(kBatch, kPrefix), kv_start{0, 3} {
    std::mt19937 gen(1);
    const int64_t q = kHeads * kHeadDim, kv = kKvHeads * kHeadDim;
    for (const int64_t n : {kVocab * hidden, q * hidden, kv * hidden, kv * hidden, hidden * q, inner * hidden,
                            inner * hidden, hidden * inner}) {
      weights.push_back(bfloat16s(n, gen));
    }
    norm.assign(static_cast<size_t>(hidden), 1.0f), inv_freq.assign(kHeadDim / 2, 0.1f);
    const int64_t words = (rows + 31) / 32;
    mask.assign(static_cast<size_t>(kBatch * rows * words), 0);
    for (int64_t b = 0; b < kBatch; b++) {
      for (int64_t r = 0; r < rows; r++) {
        tokens.push_back(static_cast<int32_t>((b * 7 + r * 5) % kVocab));
        positions.push_back(static_cast<int32_t>(kPrefix - kv_start[static_cast<size_t>(b)] + r));
        slots.push_back(static_cast<int32_t>(kPrefix + r)), depths.push_back(static_cast<int32_t>(r));
        for (int64_t seen = r % 3; seen <= r; seen += 3) {
          mask[static_cast<size_t>((b * rows + r) * words + seen / 32)] |= static_cast<int32_t>(1u << (seen % 32));
        }
      }
    }
  }

  std::vector<float> logits(int of, int64_t keep) {
    threads = of;
    const int64_t capacity = kPrefix + rows, head = capacity * kHeadDim, element = 2;
    std::mt19937 gen(2);
    std::vector<uint16_t> keys = bfloat16s(kBatch * kKvHeads * head, gen), values = keys;
    const auto cache = [&](std::vector<uint16_t>& t) -> gsd::CacheTensor {
      return {reinterpret_cast<char*>(t.data()), kKvHeads * head * element, head * element, kHeadDim * element,
              kKvHeads, capacity, kHeadDim * element};
    };
    const auto matrix = [&](int at, int64_t outputs) -> gsd::Weights {
      const std::vector<uint16_t>& w = weights[static_cast<size_t>(at)];
      const int64_t inputs = static_cast<int64_t>(w.size()) / outputs;
      return {reinterpret_cast<const char*>(w.data()), outputs, inputs, inputs * element, gsd::Kind::kBfloat16,
              nullptr, nullptr, 0};
    };
    const auto part = [&](int at, int64_t outputs) -> gsd::Projection { return {matrix(at, outputs), {}}; };
    gsd::DecoderLayer layer{};
    layer.input_norm = layer.second_norm = norm;
    layer.q = part(1, kHeads * kHeadDim), layer.k = part(2, kKvHeads * kHeadDim), layer.v = part(3, kKvHeads * kHeadDim);
    layer.o = part(4, hidden), layer.gate = part(5, inner), layer.up = part(6, inner), layer.down = part(7, hidden);
    layer.keys = cache(keys), layer.values = cache(values), layer.cache_element = gsd::Element::kBfloat16;
    std::vector<float> normed(static_cast<size_t>(kBatch * keep * hidden));
    std::vector<float> out(static_cast<size_t>(kBatch * keep * kVocab));
    const gsd::DecoderSizes sizes{kBatch, rows, hidden, kHeads, kKvHeads, kHeadDim, inner, 1e-5f, 1.0f};
    const gsd::DecoderRows given{tokens.data(), positions.data(), slots.data(),
                                 kv_len.data(), kv_start.data(),  inv_freq.data()};
    const gsd::Weights embedding = matrix(0, kVocab);
    const long before = held;
    most = before;
    {
      const gsd::Paths paths(mask.data(), depths.data(), kBatch, rows, (rows + 31) / 32, rows, kv_len.data(),
                             kv_start.data(), capacity);
      gsd::Team::run(false, [&](gsd::Team& team) {
        gsd::Decoder decoder(team, sizes, given, paths, gsd::Element::kBfloat16, embedding);
        for (int64_t i = 1; i < layers; i++) decoder.forward(layer, rows);
        decoder.forward(layer, keep);
        decoder.finish(norm, part(0, kVocab), normed.data(), gsd::Element::kFloat32, out.data());
      });
    }
    if (of == 1) std::fprintf(stderr, "%ld\n", most - before);
    return out;
  }
};

bool team_is_right() {
  threads = 3;
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

int main(int, char** arguments) {
  Problem problem(std::atol(arguments[1]), std::atol(arguments[2]), std::atol(arguments[3]), std::atol(arguments[4]));
  gsd::kernels();  // levels prove themselves once
  const int64_t rows = problem.rows, keep = (rows + 2) / 3;
  const std::vector<float> one = problem.logits(1, rows), three = problem.logits(3, rows), few = problem.logits(3, keep);
  late = true;
  const std::vector<float> alone = problem.logits(3, rows);
  late = false;
  for (const auto& other : {three, alone}) {
    if (std::memcmp(one.data(), other.data(), one.size() * sizeof(float)) != 0) return 3;
  }
  for (int64_t b = 0; b < kBatch; b++) {
    const float* last = one.data() + (b * rows + rows - keep) * kVocab;
    if (std::memcmp(few.data() + b * keep * kVocab, last, static_cast<size_t>(keep * kVocab) * sizeof(float)) != 0) {
      return 4;
    }
  }
  return team_is_right() ? 0 : 5;
}
