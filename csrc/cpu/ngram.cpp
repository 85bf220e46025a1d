// The table of remembered continuations on the CPU, and mixing what it knows with what the draft model says.
// gsd_kernels/ops/ngram/reference.py is the specification.
#include <algorithm>
#include <cmath>

#include "../torch_ops.h"

namespace gsd {
namespace {

constexpr int64_t kMostContext = 16;

// A hash for every length of a context, nearest token first; 0 where it is too short.
void context_keys(const int32_t* context, int64_t lengths, bool valid, int64_t* keys) {
  uint64_t key = 0;
  bool whole = valid;
  for (int64_t i = 0; i < lengths; i++) {
    key = (key ^ static_cast<uint64_t>(static_cast<int64_t>(context[i]) + 1)) * 0x9E3779B97F4A7C15u;
    key ^= static_cast<uint64_t>(static_cast<int64_t>(key) >> 29);
    whole = whole && context[i] >= 0;
    keys[i] = whole ? static_cast<int64_t>((key + static_cast<uint64_t>(i)) | 1) : 0;
  }
}

struct Table {
  int64_t batch, slots, width;  // slots: a power of two; one more is spare
  int64_t* keys;
  int32_t* tokens;
  float* log_probs;

  Table(const Tensor& k, const Tensor& t, const Tensor& p) {
    check("keys", k, ScalarType::Long, {kAny, kAny});
    batch = k.size(0), slots = k.size(1) - 1;
    check("table_tokens", t, ScalarType::Int, {batch, slots + 1, kAny});
    width = t.size(2);
    check("table_log_probs", p, ScalarType::Float, {batch, slots + 1, width});
    STD_TORCH_CHECK(slots > 0 && (slots & (slots - 1)) == 0, "keys: expected a power of two and one, got ", slots + 1);
    keys = static_cast<int64_t*>(k.mutable_data_ptr());
    tokens = static_cast<int32_t*>(t.mutable_data_ptr());
    log_probs = static_cast<float*>(p.mutable_data_ptr());
  }

  int64_t slot(int64_t b, int64_t key) const { return b * (slots + 1) + ((key >> 17) & (slots - 1)); }
};

void check_contexts(const Tensor& contexts, int64_t batch, int64_t max_context) {
  check("contexts", contexts, ScalarType::Int, {batch, kAny, kAny});
  STD_TORCH_CHECK(max_context >= 1 && max_context <= std::min(contexts.size(2), kMostContext),
                  "contexts: expected at least ", max_context, " tokens of each, got ", contexts.size(2));
}

void ngram_insert(const Tensor& keys, const Tensor& table_tokens, const Tensor& table_log_probs,
                  const Tensor& contexts, const Tensor& tokens, const Tensor& log_probs, const Tensor& valid,
                  int64_t max_context) {
  const Table table(keys, table_tokens, table_log_probs);
  check_contexts(contexts, table.batch, max_context);
  const int64_t entries = contexts.size(1), size = contexts.size(2);
  check("tokens", tokens, ScalarType::Int, {table.batch, entries, table.width});
  check("log_probs", log_probs, ScalarType::Float, {table.batch, entries, table.width});
  check("valid", valid, ScalarType::Bool, {table.batch, entries});
  int64_t found[kMostContext];
  for (int64_t i = 0; i < table.batch * entries; i++) {  // in order: the last one stays
    context_keys(read<int32_t>(contexts) + i * size, max_context, read<bool>(valid)[i], found);
    for (int64_t length = 0; length < max_context; length++) {
      if (found[length] == 0) continue;
      const int64_t slot = table.slot(i / entries, found[length]);
      table.keys[slot] = found[length];
      std::copy_n(read<int32_t>(tokens) + i * table.width, table.width, table.tokens + slot * table.width);
      std::copy_n(read<float>(log_probs) + i * table.width, table.width, table.log_probs + slot * table.width);
    }
  }
}

std::tuple<Tensor, Tensor, Tensor> ngram_lookup(const Tensor& keys, const Tensor& table_tokens,
                                                const Tensor& table_log_probs, const Tensor& contexts,
                                                int64_t max_context) {
  const Table table(keys, table_tokens, table_log_probs);
  check_contexts(contexts, table.batch, max_context);
  const int64_t count = contexts.size(1), size = contexts.size(2);
  Tensor tokens = new_int32(contexts, {table.batch, count, table.width});
  Tensor log_probs = torch::stable::new_empty(table_log_probs, {table.batch, count, table.width});
  Tensor matched = new_int32(contexts, {table.batch, count});
  int64_t found[kMostContext];
  for (int64_t i = 0; i < table.batch * count; i++) {
    context_keys(read<int32_t>(contexts) + i * size, max_context, true, found);
    int64_t length = max_context;
    while (length > 0 && (found[length - 1] == 0 ||
                          table.keys[table.slot(i / count, found[length - 1])] != found[length - 1])) {
      length--;
    }
    written<int32_t>(matched)[i] = static_cast<int32_t>(length);
    int32_t* to = written<int32_t>(tokens) + i * table.width;
    float* prob = written<float>(log_probs) + i * table.width;
    if (length == 0) {
      std::fill_n(to, table.width, -1);
      std::fill_n(prob, table.width, negative_infinity());
    } else {
      const int64_t slot = table.slot(i / count, found[length - 1]);
      std::copy_n(table.tokens + slot * table.width, table.width, to);
      std::copy_n(table.log_probs + slot * table.width, table.width, prob);
    }
  }
  return {tokens, log_probs, matched};
}

std::tuple<Tensor, Tensor> mix_candidates(const Tensor& tokens, const Tensor& log_probs, const Tensor& other_tokens,
                                          const Tensor& other_log_probs, const Tensor& weight) {
  check("tokens", tokens, ScalarType::Int, {kAny, kAny, kAny});
  const int64_t batch = tokens.size(0), rows = tokens.size(1), k = tokens.size(2);
  check("log_probs", log_probs, ScalarType::Float, {batch, rows, k});
  check("other_tokens", other_tokens, ScalarType::Int, {batch, rows, kAny});
  const int64_t others = other_tokens.size(2);
  check("other_log_probs", other_log_probs, ScalarType::Float, {batch, rows, others});
  check("weight", weight, ScalarType::Float, {batch, rows});
  Tensor mixed = new_int32(tokens, {batch, rows, k});
  Tensor mixed_log_probs = torch::stable::new_empty(log_probs, {batch, rows, k});
  struct Candidate {
    float prob;
    int32_t token;
  };
  std::vector<Candidate> all(static_cast<size_t>(k + others));
  for (int64_t i = 0; i < batch * rows; i++) {
    const float w = read<float>(weight)[i];
    for (int64_t j = 0; j < k; j++) {
      const int32_t token = read<int32_t>(tokens)[i * k + j];
      all[j] = {token >= 0 ? std::exp(read<float>(log_probs)[i * k + j]) * (1.0f - w) : 0.0f, token};
    }
    for (int64_t j = 0; j < others; j++) {
      const int32_t token = read<int32_t>(other_tokens)[i * others + j];
      const float prob = token >= 0 ? std::exp(read<float>(other_log_probs)[i * others + j]) * w : 0.0f;
      all[k + j] = {prob, token};
      for (int64_t same = 0; same < k && token >= 0; same++) {
        if (all[same].token != token) continue;
        all[same].prob += prob;
        all[k + j].prob = 0.0f;
      }
    }
    std::stable_sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) {
      return a.prob > b.prob || (a.prob != a.prob && b.prob == b.prob);  // NaN first, as torch.sort has it
    });
    for (int64_t j = 0; j < k; j++) {
      written<int32_t>(mixed)[i * k + j] = all[j].prob == 0.0f ? -1 : all[j].token;
      written<float>(mixed_log_probs)[i * k + j] = std::log(all[j].prob);
    }
  }
  return {mixed, mixed_log_probs};
}

}  // namespace
}  // namespace gsd

STABLE_TORCH_LIBRARY_IMPL(gsd_kernels, CPU, m) {
  m.impl("ngram_insert", TORCH_BOX(&gsd::ngram_insert));
  m.impl("ngram_lookup", TORCH_BOX(&gsd::ngram_lookup));
  m.impl("mix_candidates", TORCH_BOX(&gsd::mix_candidates));
}
