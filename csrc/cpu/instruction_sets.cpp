// Which instruction sets the products of rows may use: what the processor and the system have, proven on small products.
#include <atomic>
#include <cstdlib>
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
#define GSD_HAS(instructions) __builtin_cpu_supports(instructions)
#else
#define GSD_HAS(instructions) false
#endif
bool has_avx2() { return GSD_HAS("avx2") && GSD_HAS("fma") && GSD_HAS("f16c"); }
bool has_avx512() { return GSD_HAS("avx512f") && GSD_HAS("avx512bw") && GSD_HAS("avx512vl"); }
bool has_bfloat16() { return has_avx512() && GSD_HAS("avx512bf16") && GSD_HAS("avx512vnni"); }

// Numbers of about one that every float type holds exactly, as are sums of few of their products in whatever order.
std::vector<float> numbers(int64_t n, int64_t first) {
  std::vector<float> found;
  for (int64_t i = first; i < first + n; i++) {
    found.push_back(static_cast<float>((i * 37 + i / 7 * 11) % 33 - 16) / 8.0f);
  }
  return found;
}

struct Small {
  int64_t rows, k, outputs;
};
constexpr Small kSmall[] = {{1, 33, 5}, {17, 160, 37}, {3, 16, 4}, {50, 70, 33}};

bool same_products(const RowKernel& kernel, const RowKernel& portable, Element element, const Small& small) {
  const int64_t elements = small.outputs * small.k;
  const std::vector<float> x = numbers(small.rows * small.k, 0), wide = numbers(elements, 5);
  std::vector<char> weights(static_cast<size_t>(elements * bytes_of(element)));
  write_row(wide.data(), weights.data(), element, elements);
  std::vector<int64_t> offsets;
  for (int64_t p = 0; p < small.outputs; p++) offsets.push_back(p * small.k);
  const auto made = [&](const RowKernel& by) {
    std::vector<char> packed(static_cast<size_t>((small.rows + kRowBlock) * by.row_bytes(small.k)));
    std::vector<float> found(static_cast<size_t>(small.rows * small.outputs), 7.0f), mixed(x.size(), 0.5f);
    by.pack(x.data(), small.k, 0, small.rows, small.k, packed.data());
    by.products(packed.data(), small.rows, small.k, weights.data(), small.k, 0, small.outputs, found.data(), small.outputs,
                false);
    if (kernel.weighted != nullptr) {
      by.weighted(x.data(), 1, small.rows, weights.data(), offsets.data(), small.outputs, small.k, mixed.data(), small.k);
    }
    found.insert(found.end(), mixed.begin(), mixed.end());
    return found;
  };
  return made(kernel) == made(portable);
}

std::vector<float> multiplied(const IsaKernels& level, Element element, RowForm form, const Weights& w,
                              const std::vector<float>& x) {
  const int64_t k = w.inputs, rows = static_cast<int64_t>(x.size()) / k;
  std::vector<char> packed(static_cast<size_t>((rows + kRowBlock) * packed_row_bytes(level, element, form, k)));
  pack_rows(level, element, form, x.data(), k, 0, rows, k, packed.data());
  std::vector<float> found(static_cast<size_t>(rows * w.outputs));
  multiply(level, element, w, packed.data(), rows, 0, w.outputs, found.data(), w.outputs);
  return found;
}

// Whether packed weights, of all codes and of scales of about one, are decoded as the portable level does it, and rows have
// the same bits over them as over the dense ones that they stand for; over codes, whose sums are exact, as that level's.
bool same_packed(const IsaKernels& level, const IsaKernels& portable, Kind kind, Element element) {
  constexpr int64_t kOutputs = 21, kGroups = 8;
  const RowForm form = form_of(kind);
  const bool codes = has_codes(form);
  const int64_t inputs = codes ? 483 : 512, groups = beside(kind) == 0 ? 0 : codes ? 1 : kGroups;
  const int64_t row = inputs / block_weights(kind) * block_bytes(kind), dense_row = inputs * bytes_of(element);
  std::vector<char> packed;
  for (int64_t i = 0; i < kOutputs * row; i++) packed.push_back(static_cast<char>((i * 37 + i / 7 * 11) % 61));
  std::vector<float> scales = numbers(kOutputs * groups * beside(kind), 0);
  for (float& scale : scales) scale += 0.3f;
  const auto weights = [&](const IsaKernels& of) -> Weights {
    return {packed.data(), kOutputs, inputs, row, kind,
            of.decoders.of[static_cast<int>(kind)][static_cast<int>(element)], scales.data(), groups};
  };
  const auto decoded = [&](const IsaKernels& by) {
    std::vector<char> made(static_cast<size_t>(kOutputs * dense_row));
    for (int64_t n = 0; n < kOutputs; n++) decode_weights(element, weights(by), n, made.data() + n * dense_row);
    return made;
  };
  const std::vector<char> expected = decoded(portable);
  if (decoded(level) != expected) return false;
  const Weights dense{expected.data(), kOutputs, inputs, dense_row, static_cast<Kind>(element), nullptr, nullptr, 0};
  for (const int64_t rows : {1, 17}) {
    const std::vector<float> x = numbers(rows * inputs, 3);
    if (multiplied(level, element, form, weights(level), x) !=
        (codes ? multiplied(portable, element, form, weights(portable), x) : multiplied(level, element, form, dense, x))) {
      return false;
    }
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

struct Level {
  std::string name, reason;   // reason: why it is left out; empty if it is used or could be
  const IsaKernels* kernels;  // null where there is a reason
};

struct Known {
  std::vector<Level> levels;  // slowest first
  const IsaKernels* best;
};

const Known& known() {
  static const Known found = [] {
    Known all;
    const auto add = [&](const char* name, const IsaKernels* kernels, std::string reason) {
      if (reason.empty() && kernels == nullptr) reason = "the library was compiled without it";
      if (reason.empty()) reason = proof(*kernels);
      all.levels.push_back({name, reason, reason.empty() ? kernels : nullptr});
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
  if (name == soft_amx_kernels()->name) return soft_amx_kernels();
  std::string names;
  for (const Level& level : known().levels) {
    if (level.name == name) {
      reason = "level " + name + " cannot run: " + level.reason;
      return level.kernels;
    }
    names += (names.empty() ? "" : ", ") + level.name;
  }
  reason = "expected one of " + names + ", got " + name;
  return nullptr;
}

std::atomic<const IsaKernels*> chosen{nullptr};

}  // namespace

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

}  // namespace gsd

// For Python's ctypes; texts stay valid until the thread's next call.
extern "C" {
__attribute__((visibility("default"))) const char* gsd_cpu_levels() {
  static thread_local std::string text;
  text.clear();
  for (const gsd::Level& level : gsd::known().levels) text += level.name + "\t" + level.reason + "\n";
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
  text.clear();
  const gsd::IsaKernels* use = *name == '\0' ? gsd::known().best : gsd::named(name, text);
  if (use == nullptr) return text.c_str();
  gsd::chosen.store(use, std::memory_order_relaxed);
  return "";
}
}
