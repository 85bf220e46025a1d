// Which instruction sets the products of rows may use: what the processor and the system have, proven on small products.
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../algorithms/elements.h"
#include "instructions.h"
#include "products.h"

#if GSD_X86
#include <cpuid.h>
#endif

namespace gsd {
namespace {

constexpr const char* kVariable = "GSD_KERNELS_CPU_LEVEL";

std::string missing(const char* instructions) { return std::string("this processor has no ") + instructions; }

#if GSD_X86
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}
unsigned leaf_7(int subleaf, int which) {
  unsigned registers[4] = {};
  __get_cpuid_count(7, static_cast<unsigned>(subleaf), &registers[0], &registers[1], &registers[2], &registers[3]);
  return registers[which];
}
bool has_bfloat16() { return has_avx512() && (leaf_7(1, 0) >> 5 & 1u) && (leaf_7(0, 2) >> 11 & 1u); }
bool has_tiles() { return has_bfloat16() && (leaf_7(0, 3) >> 22 & 1u) && (leaf_7(0, 3) >> 24 & 1u); }
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_bfloat16() { return false; }
bool has_tiles() { return false; }
#endif

// Numbers of about one that every float type holds exactly.
float number(int64_t i) { return static_cast<float>((i * 37 + i / 7 * 11) % 33 - 16) / 8.0f; }

struct Small {
  int64_t rows, k, outputs;
};

// Sums of few such products are exact in float32, in whatever order.
bool same_products(const RowKernel& kernel, const RowKernel& portable, Element element, const Small& small) {
  const int64_t elements = small.outputs * small.k, padded = (small.rows + kRowBlock - 1) / kRowBlock * kRowBlock;
  std::vector<float> x(static_cast<size_t>(small.rows * small.k)), wide(static_cast<size_t>(elements));
  for (size_t i = 0; i < x.size(); i++) x[i] = number(static_cast<int64_t>(i));
  for (size_t i = 0; i < wide.size(); i++) wide[i] = number(static_cast<int64_t>(i) + 5);
  std::vector<char> weights(static_cast<size_t>(elements) * sizeof(float));
  write_row(wide.data(), weights.data(), element, elements);
  std::vector<float> found[2], mixed[2];
  for (int i = 0; i < 2; i++) {
    const RowKernel& use = i == 0 ? kernel : portable;
    std::unique_ptr<char[]> packed(new char[static_cast<size_t>(padded * use.row_bytes(small.k))]());
    found[i].assign(static_cast<size_t>(small.rows * small.outputs), 7.0f);
    use.pack(x.data(), small.k, 0, small.rows, small.k, packed.get());
    use.products(packed.get(), small.rows, small.k, weights.data(), small.k, 0, small.outputs, found[i].data(),
                 small.outputs, false);
    std::vector<int64_t> offsets;
    for (int64_t p = 0; p < small.outputs; p++) offsets.push_back(p * small.k);
    mixed[i].assign(static_cast<size_t>(small.rows * small.k), 0.5f);
    use.weighted(x.data(), 1, small.rows, weights.data(), offsets.data(), small.outputs, small.k, mixed[i].data(),
                 small.k);
  }
  const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
    float most = 0.0f, apart = 0.0f;
    for (size_t i = 0; i < a.size(); i++) {
      most = std::fmax(most, std::fabs(b[i]));
      if (!(a[i] == b[i])) apart = std::fmax(apart, std::isnan(a[i] - b[i]) ? INFINITY : std::fabs(a[i] - b[i]));
    }
    return apart <= 1e-5f * most;
  };
  return same(found[0], found[1]) && same(mixed[0], mixed[1]);
}

// Codes of all kinds, and scales of about one.
std::vector<uint8_t> some_codes(int64_t n) {
  std::vector<uint8_t> codes(static_cast<size_t>(n));
  for (size_t i = 0; i < codes.size(); i++) codes[i] = static_cast<uint8_t>((i * 37 + i / 7 * 11) % 61);
  return codes;
}
std::vector<float> some_scales(int64_t n) {
  std::vector<float> scales;
  for (int64_t i = 0; i < n; i++) scales.push_back(number(i) + 0.3f);
  return scales;
}

// Bit for bit.
bool same_decoders(const IsaKernels& level, const IsaKernels& portable, int kind, int element) {
  constexpr int64_t kInputs = 512, kGroups = 16, kBytes = kInputs * static_cast<int64_t>(sizeof(float));
  const std::vector<uint8_t> row = some_codes(kBytes);
  const std::vector<float> scales = some_scales(2 * kGroups);
  std::vector<char> found[2];
  for (int i = 0; i < 2; i++) {
    found[i].assign(static_cast<size_t>(kBytes), 0);
    (i == 0 ? level : portable).decoders.of[kind][element](row.data(), scales.data(), kGroups, kInputs, found[i].data());
  }
  return found[0] == found[1];
}

// Word for word: sums of codes are exact.
bool right_integers(const IntegerProducts& integers, const Small& small) {
  const int64_t bytes = integers.row_bytes(small.k);
  std::vector<int8_t> weights(static_cast<size_t>(small.outputs * small.k)), rows(static_cast<size_t>(small.rows * bytes));
  for (size_t i = 0; i < weights.size(); i++) weights[i] = static_cast<int8_t>(i * 37 + i / 7 * 11);
  for (int64_t r = 0; r < small.rows; r++) {
    for (int64_t k = 0; k < small.k; k++) rows[static_cast<size_t>(r * bytes + k)] = static_cast<int8_t>(r * 29 + k * 31 - 128);
  }
  std::vector<float> found(static_cast<size_t>(small.rows * small.outputs));
  integers.products(rows.data(), small.rows, small.k, weights.data(), small.k, 0, small.outputs, found.data(),
                    small.outputs, false);
  for (int64_t j = 0; j < small.rows * small.outputs; j++) {
    const int8_t *row = rows.data() + j / small.outputs * bytes, *of = weights.data() + j % small.outputs * small.k;
    int32_t sum = 0;
    for (int64_t k = 0; k < small.k; k++) sum += row[k] * (of[k] + integers.offset);
    if (memcmp(&sum, &found[static_cast<size_t>(j)], sizeof sum) != 0) return false;
  }
  return true;
}

constexpr Small kSmall[] = {{1, 33, 5}, {17, 160, 37}, {3, 16, 4}, {50, 70, 33}};

// Whether rows have the same bits over packed weights as over the dense ones that those stand for.
bool same_unpacking(const IsaKernels& level, int kind) {
  constexpr int64_t kInputs = 512, kGroups = 8, kOutputs = 21, kMost = 17;
  const RowKernel& dense = level.large[static_cast<int>(Element::kBfloat16)];
  const Kind of = static_cast<Kind>(kind);
  const int64_t bytes = kInputs / block_weights(of) * block_bytes(of), groups = beside(of) > 0 ? kGroups : 0;
  const std::vector<uint8_t> packed = some_codes(kOutputs * bytes);
  const std::vector<float> scales = some_scales(kOutputs * groups * beside(of));
  const Weights w{reinterpret_cast<const char*>(packed.data()), kOutputs, kInputs, bytes, of,
                  level.decoders.of[kind][static_cast<int>(Element::kBfloat16)], scales.data(), groups};
  std::vector<uint16_t> weights(static_cast<size_t>(kOutputs * kInputs));
  for (int64_t n = 0; n < kOutputs; n++) decode_weights(Element::kBfloat16, w, n, weights.data() + n * kInputs);
  std::vector<float> x(static_cast<size_t>(kMost * kInputs));
  for (size_t i = 0; i < x.size(); i++) x[i] = number(static_cast<int64_t>(i) + 3);
  for (const int64_t rows : {int64_t{1}, kMost}) {
    std::unique_ptr<char[]> arranged(new char[static_cast<size_t>(2 * kRowBlock * dense.row_bytes(kInputs))]());
    dense.pack(x.data(), kInputs, 0, rows, kInputs, arranged.get());
    std::vector<float> found[2];
    for (std::vector<float>& one : found) one.assign(static_cast<size_t>(rows * kOutputs), 7.0f);
    multiply(level, Element::kBfloat16, w, arranged.get(), rows, 0, kOutputs, found[0].data(), kOutputs);
    dense.products(arranged.get(), rows, kInputs, weights.data(), kInputs, 0, kOutputs, found[1].data(), kOutputs, false);
    if (memcmp(found[0].data(), found[1].data(), found[0].size() * sizeof(float)) != 0) return false;
  }
  return true;
}

std::string proof(const IsaKernels& level) {
  const IsaKernels& portable = *portable_kernels();
  const char* names[] = {"float32", "bfloat16", "float16"};
  for (int e = 0; e < 3; e++) {
    for (const Small& small : kSmall) {
      const Element element = static_cast<Element>(e);
      if (!same_products(level.large[e], portable.large[e], element, small) ||
          !same_products(level.small[e], portable.small[e], element, small)) {
        return std::string("its products of ") + names[e] + " differ from the portable ones";
      }
    }
  }
  for (const Small& small : kSmall) {
    if (!right_integers(level.integers, small)) return "its products of integers are not exact";
  }
  for (int kind = 0; kind < kKinds; kind++) {
    for (int e = 0; e < 3; e++) {
      if (!same_decoders(level, portable, kind, e)) {
        return "its packed weights of kind " + std::to_string(kind) + " differ from the portable ones";
      }
    }
    if (level.unpacking.of[kind] != nullptr && !same_unpacking(level, kind)) {
      return "its products with packed weights of kind " + std::to_string(kind) + " differ from the dense ones";
    }
  }
  return "";
}

struct Known {
  std::vector<IsaState> states;
  std::vector<const IsaKernels*> kernels;  // null where the state has a reason
  const IsaKernels* best;
};

const Known& known() {
  static const Known found = [] {
    Known all;
    const auto add = [&](const char* name, const IsaKernels* kernels, std::string reason) {
      if (reason.empty() && kernels == nullptr) reason = "the library was compiled without it";
      if (reason.empty()) reason = proof(*kernels);
      all.states.push_back({name, reason});
      all.kernels.push_back(reason.empty() ? kernels : nullptr);
      if (reason.empty()) all.best = kernels;
    };
    add("portable", portable_kernels(), "");
    add("avx2", avx2_kernels(), has_avx2() ? "" : missing("AVX2 with FMA and F16C"));
    add("avx512", avx512_kernels(), has_avx512() ? "" : missing("AVX-512 F, BW and VL"));
    add("avx512_bf16", avx512_bf16_kernels(), has_bfloat16() ? "" : missing("AVX512_BF16 with AVX512_VNNI"));
    add("amx", amx_kernels(), has_tiles() ? amx_permission() : missing("AMX tiles for bfloat16"));
    return all;
  }();
  return found;
}

// What a name stands for, or null and why.
const IsaKernels* named(const std::string& name, std::string& reason) {
  const Known& all = known();
  if (name == soft_amx_kernels()->name) return soft_amx_kernels();
  std::string names;
  for (size_t i = 0; i < all.states.size(); i++) {
    if (all.states[i].name == name) {
      reason = "level " + name + " cannot run: " + all.states[i].reason;
      return all.kernels[i];
    }
    names += (i ? ", " : "") + all.states[i].name;
  }
  reason = "expected one of " + names + ", got " + name;
  return nullptr;
}

std::atomic<const IsaKernels*> chosen{nullptr};

}  // namespace

const std::vector<IsaState>& levels() { return known().states; }

const IsaKernels& kernels() {
  const IsaKernels* use = chosen.load(std::memory_order_relaxed);
  if (use != nullptr) return *use;
  use = known().best;
  const char* asked = std::getenv(kVariable);
  if (asked != nullptr && *asked != '\0') {
    std::string reason;
    use = named(asked, reason);
    // Not a check of torch's, which would put this file and line before a message that is for the user.
    if (use == nullptr) {
      throw std::invalid_argument(std::string(kVariable) + ": " + reason + "; unset it to let the best be chosen");
    }
  }
  chosen.store(use, std::memory_order_relaxed);
  return *use;
}

std::string use_level(const std::string& name) {
  std::string reason;
  const IsaKernels* use = name.empty() ? known().best : named(name, reason);
  if (use == nullptr) return reason;
  chosen.store(use, std::memory_order_relaxed);
  return "";
}

}  // namespace gsd

// For Python's ctypes; texts stay valid until the thread's next call.
extern "C" {
__attribute__((visibility("default"))) const char* gsd_cpu_levels() {
  static thread_local std::string text;
  text.clear();
  for (const gsd::IsaState& level : gsd::levels()) text += level.name + "\t" + level.reason + "\n";
  return text.c_str();
}

__attribute__((visibility("default"))) const char* gsd_cpu_level() {
  static thread_local std::string text;
  try {
    text = gsd::kernels().name;
  } catch (const std::exception& error) {
    text = std::string("\t") + error.what();
  }
  return text.c_str();
}

__attribute__((visibility("default"))) const char* gsd_cpu_use_level(const char* name) {
  static thread_local std::string text;
  text = gsd::use_level(name);
  return text.c_str();
}
}
