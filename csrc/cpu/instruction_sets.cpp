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
#include "row_forms.h"

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
bool has_bfloat16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_bfloat16() { return false; }
#endif

// Numbers of about one that every float type holds exactly.
float number(int64_t i) { return static_cast<float>((i * 37 + i / 7 * 11) % 33 - 16) / 8.0f; }

struct Small {
  int64_t rows, k, outputs;
};
constexpr Small kSmall[] = {{1, 33, 5}, {17, 160, 37}, {3, 16, 4}, {50, 70, 33}};

std::vector<float> numbers(int64_t n, int64_t first) {
  std::vector<float> found;
  for (int64_t i = 0; i < n; i++) found.push_back(number(first + i));
  return found;
}

std::unique_ptr<char[]> bytes(int64_t n) { return std::unique_ptr<char[]>(new char[static_cast<size_t>(n)]()); }

// Sums of few such products are exact in float32, in whatever order.
bool same_products(const RowKernel& kernel, const RowKernel& portable, Element element, const Small& small) {
  const int64_t elements = small.outputs * small.k;
  const std::vector<float> x = numbers(small.rows * small.k, 0), wide = numbers(elements, 5);
  const auto weights = bytes(elements * bytes_of(element));
  write_row(wide.data(), weights.get(), element, elements);
  std::vector<int64_t> offsets;
  for (int64_t p = 0; p < small.outputs; p++) offsets.push_back(p * small.k);
  std::vector<float> found[2], mixed[2];
  for (int i = 0; i < 2; i++) {
    const RowKernel& use = i == 0 ? kernel : portable;
    const auto packed = bytes((small.rows + kRowBlock) * use.row_bytes(small.k));
    found[i].assign(static_cast<size_t>(small.rows * small.outputs), 7.0f);
    use.pack(x.data(), small.k, 0, small.rows, small.k, packed.get());
    use.products(packed.get(), small.rows, small.k, weights.get(), small.k, 0, small.outputs, found[i].data(),
                 small.outputs, false);
    mixed[i].assign(x.size(), 0.5f);
    if (kernel.weighted == nullptr) continue;
    use.weighted(x.data(), 1, small.rows, weights.get(), offsets.data(), small.outputs, small.k, mixed[i].data(),
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

std::vector<float> multiplied(const IsaKernels& level, Element element, RowForm form, const Weights& w,
                              const std::vector<float>& x) {
  const int64_t k = w.inputs, rows = static_cast<int64_t>(x.size()) / k;
  const auto packed = bytes((rows + kRowBlock) * packed_row_bytes(level, element, form, k));
  pack_rows(level, element, form, x.data(), k, 0, rows, k, packed.get());
  std::vector<float> found(static_cast<size_t>(rows * w.outputs));
  multiply(level, element, w, packed.get(), rows, 0, w.outputs, found.data(), w.outputs);
  return found;
}

// Whether packed weights, of all codes and of scales of about one, are decoded as the portable level does it, and rows have
// the same bits over them as over the dense ones that they stand for; over codes, whose sums are exact, as that level's.
bool same_packed(const IsaKernels& level, const IsaKernels& portable, Kind kind, Element element) {
  constexpr int64_t kOutputs = 21, kGroups = 8;
  const RowForm form = form_of(kind);
  const bool codes = has_codes(form);
  const int64_t inputs = codes ? 483 : 512, groups = beside(kind) == 0 ? 0 : codes ? 1 : kGroups, size = bytes_of(element);
  const int64_t row = inputs / block_weights(kind) * block_bytes(kind);
  std::vector<uint8_t> packed;
  for (int64_t i = 0; i < kOutputs * row; i++) packed.push_back(static_cast<uint8_t>((i * 37 + i / 7 * 11) % 61));
  std::vector<float> scales = numbers(kOutputs * groups * beside(kind), 0);
  for (float& scale : scales) scale += 0.3f;
  const auto weights = [&](const IsaKernels& of) -> Weights {
    return {reinterpret_cast<const char*>(packed.data()), kOutputs, inputs, row, kind,
            of.decoders.of[static_cast<int>(kind)][static_cast<int>(element)], scales.data(), groups};
  };
  const auto decoded = bytes(kOutputs * inputs * size), expected = bytes(kOutputs * inputs * size);
  for (int64_t n = 0; n < kOutputs; n++) {
    decode_weights(element, weights(level), n, decoded.get() + n * inputs * size);
    decode_weights(element, weights(portable), n, expected.get() + n * inputs * size);
  }
  if (memcmp(decoded.get(), expected.get(), static_cast<size_t>(kOutputs * inputs * size)) != 0) return false;
  const Weights dense{decoded.get(), kOutputs, inputs, inputs * size, static_cast<Kind>(element), nullptr, nullptr, 0};
  for (const int64_t rows : {1, 17}) {
    const std::vector<float> x = numbers(rows * inputs, 3);
    const std::vector<float> found = multiplied(level, element, form, weights(level), x);
    const std::vector<float> right = codes ? multiplied(portable, element, form, weights(portable), x)
                                           : multiplied(level, element, form, dense, x);
    if (memcmp(found.data(), right.data(), found.size() * sizeof(float)) != 0) return false;
  }
  return true;
}

std::string proof(const IsaKernels& level) {
  const IsaKernels& portable = *portable_kernels();
  const char* names[] = {"float32", "bfloat16", "float16"};
  for (int e = 0; e < 3; e++) {
    const Element element = static_cast<Element>(e);
    for (const Small& small : kSmall) {
      if (!same_products(level.large[e], portable.large[e], element, small) ||
          !same_products(level.small[e], portable.small[e], element, small)) {
        return std::string("its products of ") + names[e] + " differ from the portable ones";
      }
    }
    for (int kind = 3; kind < kKinds; kind++) {  // behind the floats
      if (!same_packed(level, portable, static_cast<Kind>(kind), element)) {
        return "its packed weights of kind " + std::to_string(kind) + " in " + names[e] + " differ from dense ones";
      }
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
    add("amx", amx_kernels(), has_bfloat16() ? amx_permission() : missing("AVX512_BF16 beside tiles"));
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
