// The tensors of decoder_rows and feature_rows: checked by name, unpacked to pointers, outputs allocated. Nothing is read
// from them.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <string>

#include "../torch_ops/decoder_rows.h"
#include "rows_forward.h"

namespace gsd {

// Takes pointers for 16-byte copies, of one dtype, and packed matrices that stand for such of it. kinds, scales: of
// DecoderWeights.packing, both empty or one for every matrix.
class RowsTensors {
 public:
  RowsTensors(ScalarType dtype, const Numbers& kinds, const Tensors& scales)
      : dtype(dtype), kinds(kinds), scales(scales) {
    STD_TORCH_CHECK(dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
                    "final norm: expected float16 or bfloat16");
  }

  // Without bias and output. `number`: in DecoderWeights.matrices.
  RowsMatrix matrix(const char* name, size_t number, const Tensor& t, int64_t outputs, int64_t inputs) const {
    RowsMatrix m{};
    m.outputs = static_cast<int>(outputs);
    if (!kinds.empty()) m.kind = kind_of(name, kinds[number]);
    const ScalarType bytes = m.kind == RowsKind::kInt8 ? ScalarType::Char : ScalarType::Byte;
    const ScalarType own = m.kind == RowsKind::kDense ? dtype : bytes;
    const int64_t columns = row_elements(name, m.kind, inputs);
    STD_TORCH_CHECK(t.scalar_type() == own, name, ": expected the dtype of the norms, or bytes of a packed matrix");
    STD_TORCH_CHECK(t.dim() == 2 && t.size(0) == outputs && t.size(1) == columns && t.is_contiguous(), name,
                    ": expected [", outputs, ", ", columns, "], contiguous");
    m.weight = static_cast<const uint16_t*>(aligned(name, t));
    if (m.kind != RowsKind::kDense && m.kind != RowsKind::kQ8_0) take_scales(name, scales[number], inputs, m);
    return m;
  }

  // Null where an optional tensor is empty.
  const uint16_t* vector(const char* name, const Tensor& t, int64_t size, bool optional = false) const {
    return has_vector(name, t, size, optional) ? halves(name, t) : nullptr;
  }

  RowsMatrix projection(const char* name, size_t number, const Tensor& t, const Tensor& bias, int64_t outputs,
                        int64_t inputs) const {
    RowsMatrix m = matrix(name, number, t, outputs, inputs);
    m.bias = vector((std::string(name) + " bias").c_str(), bias, outputs, true);
    return m;
  }

  uint16_t* cache(const char* name, const Tensor& t, const RowsDecoder& d, int64_t& batch, int64_t& head,
                  int64_t& slot) const {
    STD_TORCH_CHECK(t.dim() == 4 && t.size(0) == d.batch && t.size(1) == d.kv_heads && t.size(2) == d.capacity &&
                        t.size(3) == d.head_dim && t.stride(3) == 1,
                    name, ": expected [", d.batch, ", ", d.kv_heads, ", ", d.capacity, ", ", d.head_dim,
                    "], the last dimension with stride 1");
    batch = t.stride(0), head = t.stride(1), slot = t.stride(2);
    int64_t steps = 0;
    for (int64_t i = 0; i < 3; i++) steps |= t.size(i) > 1 ? t.stride(i) : 0;
    STD_TORCH_CHECK(steps % 8 == 0 && slot < (int64_t{1} << 30), name,
                    ": expected rows that begin at multiples of 16 bytes");
    return const_cast<uint16_t*>(halves(name, t));
  }

  const uint16_t* halves(const char* name, const Tensor& t) const {
    STD_TORCH_CHECK(t.scalar_type() == dtype, name, ": expected the dtype of the norms");
    return static_cast<const uint16_t*>(aligned(name, t));
  }

 private:
  static RowsKind kind_of(const char* name, int64_t number) {
    using Kinds = RowsKind;
    for (const Kinds kind : {Kinds::kDense, Kinds::kQ8_0, Kinds::kInt8, Kinds::kUint8, Kinds::kInt4, Kinds::kInt4Offset}) {
      if (static_cast<int64_t>(kind) == number) return kind;
    }
    STD_TORCH_CHECK(false, name, ": packed weights of kind ", number, " are not multiplied on a GPU");
  }

  static int64_t row_elements(const char* name, RowsKind kind, int64_t inputs) {
    STD_TORCH_CHECK(kind != RowsKind::kQ8_0 || inputs % 32 == 0, name, ": expected inputs in blocks of 32, got ", inputs);
    if (kind == RowsKind::kQ8_0) return inputs / 32 * 34;
    return kind == RowsKind::kInt4 || kind == RowsKind::kInt4Offset ? inputs / 2 : inputs;
  }

  static void take_scales(const char* name, const Tensor& t, int64_t inputs, RowsMatrix& m) {
    const bool pairs = m.kind != RowsKind::kInt8;
    STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.dim() == (pairs ? 3 : 2) && t.size(0) == m.outputs &&
                        t.size(1) > 0 && inputs % (8 * t.size(1)) == 0 && (!pairs || t.size(2) == 2) &&
                        t.is_contiguous(),
                    name, ": expected scales, float32 [", m.outputs, ", groups of a multiple of 8 inputs",
                    pairs ? ", 2]" : "]");
    m.groups = static_cast<int>(t.size(1));
    m.scales = static_cast<const float*>(aligned(name, t));
  }

  static const void* aligned(const char* name, const Tensor& t) {
    STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0, name,
                    ": expected an address that is a multiple of 16 bytes");
    return t.const_data_ptr();
  }

  ScalarType dtype;
  const Numbers& kinds;
  const Tensors& scales;
};

// What this thread's calls do whatever the environment says; below 0: as it says. So that no call has to change the
// environment, which other threads read.
struct RowsForced {
  int overlap = -1, ahead = -1, group = -1;
};
inline thread_local RowsForced rows_forced;

// A setting: forced, or of the environment, which is asked at every call, and by a graph when it is captured.
inline int rows_setting(const char* name, int forced, int otherwise, int most = 1) {
  const char* value = std::getenv(name);
  int said = value == nullptr ? otherwise : 0;
  while (value != nullptr && said <= most && value != std::to_string(said)) said++;
  STD_TORCH_CHECK(said <= most, name, ": expected 0 ", most == 1 ? "or " : "... ", most, ", got '", value,
                  "'; or unset it");
  return forced < 0 ? said : forced;
}

// Sizes that kernels count in 32 bits.
inline int rows_size(const char* name, int64_t size, int64_t most = int64_t{1} << 30) {
  STD_TORCH_CHECK(size >= 0 && size < most, name, ": ", size, " is too large");
  return static_cast<int>(size);
}

// Sizes, numbers and what is no weight.
inline RowsDecoder rows_decoder(Arguments& in) {
  const int64_t batch = in['B'], rows = in['R'];
  const Tensor& keys = in.list("k_caches")[0];
  RowsDecoder d{};
  d.batch = rows_size("token_ids", batch), d.rows = rows_size("token_ids", rows);
  rows_size("token_ids", batch * rows, int64_t{1} << 20);
  d.keep = in.size('k');
  d.hidden = rows_size("embedding", in['H'], int64_t{1} << 20);
  d.inner = rows_size("gate", in.list("layers")[6].size(0), int64_t{1} << 20);
  d.heads = rows_size("heads", in['h'], int64_t{1} << 16);
  d.kv_heads = rows_size("k_caches", keys.size(1), int64_t{1} << 16);
  d.head_dim = rows_size("inv_freq", 2 * in['D']);
  d.capacity = rows_size("k_caches", keys.size(2));
  d.words = rows_size("ancestor_mask", in['W'], int64_t{1} << 20);
  d.nodes = rows_size("node_depths", in['N'], int64_t{1} << 25);
  STD_TORCH_CHECK(d.head_dim == 64 || d.head_dim == 128, "q: expected heads of 64 or 128, got ", d.head_dim);
  STD_TORCH_CHECK(batch * d.kv_heads <= 65535, "k_caches: ", batch, " sequences of ", d.kv_heads,
                  " heads are more than a launch takes");
  STD_TORCH_CHECK(d.hidden % 8 == 0 && d.inner % 8 == 0,
                  "embedding, gate: expected sizes that are multiples of 8, got ", d.hidden, " and ", d.inner);
  // All asked in any case, so that a wrong value is refused. Without proof on a GPU groups of warps multiply on request.
  d.overlap = rows_setting("GSD_KERNELS_ROWS_OVERLAP", rows_forced.overlap, 1) != 0;
  d.group = rows_setting("GSD_KERNELS_ROWS_GROUP", rows_forced.group, 0) != 0;
  d.ahead = int64_t{rows_setting("GSD_KERNELS_ROWS_AHEAD", rows_forced.ahead, 24, 64)} << 20;
  d.eps = static_cast<float>(in.real('e')), d.rope_scale = static_cast<float>(in.real('s'));
  d.tokens = in.at("token_ids"), d.positions = in.at("positions"), d.slots = in.at("slots");
  d.mask = in.at("ancestor_mask"), d.depths = in.at("node_depths");
  d.kv_len = in.at("kv_len"), d.kv_start = in.at("kv_start"), d.inv_freq = in.at("inv_freq");
  return d;
}

struct RowsCall {
  size_t depth;
  RowsDecoder decoder;
  Tensors& outputs;
  std::vector<std::pair<int64_t, int64_t>> repeated;  // states that were asked for before, and where

  // `paired`: the first layer reads embedding and feature side by side. The third output is its caller's to add.
  RowsCall(Arguments& in, bool paired) : depth(check_decoder(in)), decoder(rows_decoder(in)), outputs(in.results) {
    RowsDecoder& d = decoder;
    const Tensor &embedding = in.tensor("embedding"), &final_norm = in.tensor("final_norm");
    const RowsTensors of(final_norm.scalar_type(), in.numbers("kinds"), in.list("scales"));
    d.embedding = of.matrix("embedding", 0, embedding, rows_size("embedding", in['V']), d.hidden);
    for (size_t l = 0; l < depth; l++) {
      const bool both = paired && l == 0;
      d.layers.push_back(layer_of<RowsLayer>(of, in.list("layers").data() + l * kTensorsPerLayer, l, d,
                                             (both ? 2 : 1) * d.hidden));
      RowsLayer& layer = d.layers.back();
      layer.paired = both;
      layer.keys = of.cache("k_caches", in.list("k_caches")[l], d, layer.k_batch, layer.k_head, layer.k_slot);
      layer.values = of.cache("v_caches", in.list("v_caches")[l], d, layer.v_batch, layer.v_head, layer.v_slot);
      constexpr int64_t kNarrow = 1 << 30;  // wider ones hide nothing
      const int64_t window = in.numbers("windows")[l];
      layer.window = window > 0 && window < kNarrow ? static_cast<int>(window) : 0;
    }
    d.final_norm = of.vector("final norm", final_norm, d.hidden);
    const int vocab = rows_size("head", in['O']);
    d.head = of.matrix("head", 1, in.tensor("head"), vocab, d.hidden);
    outputs.push_back(torch::stable::new_empty(embedding, {d.batch, d.keep, vocab}, final_norm.scalar_type()));
    d.logits = written<uint16_t>(outputs[0]);
    d.last = give({d.batch, d.keep, d.hidden});
  }

  float* give(std::initializer_list<int64_t> shape) {
    outputs.push_back(fresh<float>(outputs[0], shape));
    return written<float>(outputs.back());
  }

  // Behind the launches: a layer's input is where it was computed, and there once.
  void repeat_states() const {
    Tensor read_by = outputs[2];
    for (const auto& [to, from] : repeated) {
      Tensor place = torch::stable::narrow(read_by, 0, to, 1);
      torch::stable::copy_(place, torch::stable::narrow(read_by, 0, from, 1));
    }
  }

};

inline RowsCall decoder_call(Arguments& in) {
  RowsCall call(in, false);
  RowsDecoder& d = call.decoder;
  const Numbers& states = in.numbers("states");
  d.spoiled = in.at("spoiled");
  float* const read_by = call.give({static_cast<int64_t>(states.size()), d.batch, d.rows, d.hidden});
  for (size_t i = 0; i < states.size(); i++) {
    STD_TORCH_CHECK(states[i] >= 0 && states[i] <= static_cast<int64_t>(call.depth), "states: expected layers 0 ... ",
                    call.depth, ", got ", states[i]);
    const size_t at = static_cast<size_t>(states[i]);
    float*& state = at < call.depth ? d.layers[at].state : d.normed;
    if (state != nullptr) {
      call.repeated.push_back({i, std::find(states.begin(), states.end(), states[i]) - states.begin()});
      continue;
    }
    state = read_by + static_cast<int64_t>(i) * d.batch * d.rows * d.hidden;
  }
  return call;
}

// The third output is what the final norm reads.
inline RowsCall feature_call(Arguments& in) {
  const FeatureInputs given(in);
  RowsCall call(in, !given.projects() && !given.stores());
  RowsDecoder& d = call.decoder;
  const Numbers dense;
  const Tensors nothing;
  const RowsTensors of(in.tensor("final_norm").scalar_type(), dense, nothing);
  const uint16_t* features = of.halves("features", given.features);
  STD_TORCH_CHECK(given.features.is_contiguous(), "features: must be contiguous");
  d.state = call.give({d.batch, d.keep, d.hidden});
  if (given.stores()) {
    d.stored = features;
    return call;
  }
  d.pair.tokens = d.tokens, d.pair.embedding = d.embedding;
  d.pair.features = features;
  d.pair.feature_norm = of.vector("feature norm", given.feature_norm, d.hidden);
  d.pair.token_norm = given.projects() ? of.vector("token norm", given.projection[1], d.hidden) : d.layers[0].input_norm;
  d.pair.feature_first = given.feature_first, d.pair.normed_residual = given.normed_residual;
  d.pair.rows = d.batch * d.rows, d.pair.hidden = d.hidden, d.pair.eps = d.eps;
  if (given.projects()) {
    d.projection = of.projection("projection", 0, given.projection[0], given.projection[2], d.hidden, 2 * d.hidden);
  }
  return call;
}

}  // namespace gsd
