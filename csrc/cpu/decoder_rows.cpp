// A decoder's forward over graph rows in one call: embedding, layers, norm and output matrix; and that of a drafter which
// reads a feature a row besides.
//
// Called module by module, a forward of few rows reads its weights far slower than memory gives them, and its rounding
// depends on how many rows there are. gsd_kernels/ops/decoder_rows/reference.py is the specification, and that in
// feature_rows.
#include <algorithm>

#include "../torch_ops/decoder_rows.h"
#include "../torch_ops/registration.h"
#include "../torch_ops/weights.h"
#include "decoder.h"

namespace gsd {
namespace {

// Of the embedding, the output matrix and q, k, v, o, gate, up, down of every layer: how each is packed. Both are empty
// where all are dense, in one dtype.
struct Packing {
  const Numbers& kinds;
  const Tensors& scales;
  Element element;

  // Empty where an optional tensor is.
  std::vector<float> vector(const char* name, const Tensor& t, int64_t size, bool optional = false) const {
    if (!has_vector(name, t, size, optional)) return {};
    std::vector<float> values(static_cast<size_t>(size));
    read_row({t.const_data_ptr(), size, element_of(name, t.scalar_type())}, 0, values.data(), size);
    return values;
  }

  Projection projection(const char* name, size_t number, const Tensor& t, const Tensor& bias, int64_t outputs,
                        int64_t inputs) const {
    return {of(name, number, t, outputs, inputs), vector("bias", bias, outputs, true)};
  }

  Weights of(const char* name, size_t number, const Tensor& t, int64_t outputs, int64_t inputs) const {
    if (kinds.empty()) {
      STD_TORCH_CHECK(element_of(name, t.scalar_type()) == element, name, ": expected the dtype of the embedding");
      return weights_of(name, t, kDense, nullptr, outputs, inputs, element);
    }
    return weights_of(name, t, kinds[number], &scales[number], outputs, inputs, element);
  }
};

CacheTensor cache(const Tensor& t, const DecoderSizes& s, int64_t capacity, ScalarType dtype) {
  const CacheTensor found = cache_tensor(t, s.batch);
  STD_TORCH_CHECK(t.size(1) == s.kv_heads && t.size(2) == capacity && t.size(3) == s.head_dim &&
                      t.scalar_type() == dtype,
                  "k_caches, v_caches: expected [", s.batch, ", ", s.kv_heads, ", ", capacity, ", ", s.head_dim,
                  "] of one dtype");
  return found;
}

void check_ranges(const DecoderRows& r, const DecoderSizes& s, int64_t capacity, int64_t vocab) {
  for (int64_t b = 0; b < s.batch; b++) {
    STD_TORCH_CHECK(r.kv_start[b] >= 0 && r.kv_start[b] <= capacity && r.kv_len[b] >= 0 && r.kv_len[b] <= capacity,
                    "kv_len: the prefix ", r.kv_start[b], " ... ", r.kv_len[b], " is outside the cache's ", capacity);
  }
  for (int64_t m = 0; m < s.count(); m++) {
    STD_TORCH_CHECK(r.tokens[m] >= 0 && r.tokens[m] < vocab, "token_ids: ", r.tokens[m],
                    " is outside the vocabulary of ", vocab);
    STD_TORCH_CHECK(r.slots[m] >= 0 && r.slots[m] < capacity, "slots: ", r.slots[m], " is outside the cache's ",
                    capacity);
  }
}

// What both ops are given, checked and unpacked, and what both return.
struct Call {
  DecoderSizes s{};
  Packing packing;
  size_t depth;
  int64_t keep;  // of the last rows logits and the normed state are returned
  DecoderRows rows{};
  Weights embedding{};
  std::vector<DecoderLayer> layers;
  std::vector<float> norm;
  Projection head;
  std::unique_ptr<const Paths> paths;
  Tensors& outputs;
  const Tensor& final_norm;

  // `inputs`: of the first layer's queries, keys and values, in hidden sizes; `rounded`: logits are of the weights' dtype.
  Call(Arguments& in, int64_t inputs, bool rounded)
      : packing{in.numbers("kinds"), in.list("scales"), Element::kFloat32},
        depth(check_decoder(in)),
        keep(in['k']),
        outputs(in.results),
        final_norm(in.tensor("final_norm")) {
    const Tensors &tensors = in.list("layers"), &k_caches = in.list("k_caches"), &v_caches = in.list("v_caches");
    const Tensor& like = packing.kinds.empty() ? in.tensor("embedding") : final_norm;
    packing.element = element_of(packing.kinds.empty() ? "embedding" : "final norm", like.scalar_type());
    s.batch = in['B'], s.rows = in['R'];
    const int64_t vocab = in['V'], out_vocab = in['O'], capacity = k_caches[0].size(2);
    s.hidden = in['H'], s.head_dim = 2 * in['D'], s.inner = tensors[6].size(0);
    s.heads = in['h'], s.kv_heads = k_caches[0].size(1);
    s.eps = static_cast<float>(in.real('e')), s.rope_scale = static_cast<float>(in.real('s'));

    embedding = packing.of("embedding", 0, in.tensor("embedding"), vocab, s.hidden);
    rows = {in.at("token_ids"), in.at("positions"), in.at("slots"), in.at("kv_len"), in.at("kv_start"),
            in.at("inv_freq"),  nullptr};
    check_ranges(rows, s, capacity, vocab);
    layers.reserve(depth);
    for (size_t l = 0; l < depth; l++) {
      layers.push_back(layer_of<DecoderLayer>(packing, tensors.data() + l * kTensorsPerLayer, l, s,
                                              (l == 0 ? inputs : 1) * s.hidden));
      const ScalarType dtype = k_caches[l].scalar_type();
      DecoderLayer& layer = layers.back();
      layer.keys = cache(k_caches[l], s, capacity, dtype), layer.values = cache(v_caches[l], s, capacity, dtype);
      layer.cache_element = element_of("k_caches", dtype), layer.window = in.numbers("windows")[l];
    }
    norm = packing.vector("final norm", final_norm, s.hidden);
    head = {packing.of("head", 1, in.tensor("head"), out_vocab, s.hidden), {}};
    paths = std::make_unique<const Paths>(in.at("ancestor_mask"), in.at("node_depths"), s.batch, s.rows, in['W'], in['N'],
                                          rows.kv_len, rows.kv_start, capacity);
    give({s.batch, keep, out_vocab}, rounded ? like.scalar_type() : ScalarType::Float);
    give({s.batch, keep, s.hidden});
  }

  void give(std::initializer_list<int64_t> shape, ScalarType dtype = ScalarType::Float) {
    outputs.push_back(torch::stable::new_empty(final_norm, shape, dtype));
  }

  // Done before other threads are awake.
  bool is_small() const {
    const int64_t layer = s.hidden * (2 * s.q_size() + 2 * s.kv_size() + 3 * s.inner);
    return (static_cast<int64_t>(layers.size()) * layer + head.outputs() * s.hidden) * s.count() < 1 << 20;
  }

  template <class Body>
  void run(const Body& body) const {
    Team::run(is_small(), [&](Team& team) {
      Decoder decoder(team, s, rows, *paths, packing.element, embedding);
      body(decoder);
      const Tensor& logits = outputs[0];
      const Element element = logits.scalar_type() == ScalarType::Float ? Element::kFloat32 : packing.element;
      decoder.finish(norm, head, written<float>(outputs[1]), element, logits.mutable_data_ptr());
    });
  }
};

struct DecoderCall : Call {
  const Numbers& states;
  bool every_row;  // whether one is behind the last norm

  explicit DecoderCall(Arguments& in) : Call(in, 1, true), states(in.numbers("states")) {
    rows.spoiled = in.at("spoiled");
    const auto last = static_cast<int64_t>(depth);
    for (const int64_t state : states) {
      STD_TORCH_CHECK(state >= 0 && state <= last, "states: expected layers 0 ... ", last, ", got ", state);
    }
    every_row = std::count(states.begin(), states.end(), last) > 0;
    give({static_cast<int64_t>(states.size()), s.batch, s.rows, s.hidden});
  }
};

void decoder_rows(Arguments& in) {
  const DecoderCall call(in);
  const DecoderSizes& s = call.s;
  const size_t depth = call.depth;
  call.run([&](Decoder& decoder) {
    for (size_t l = 0; l <= depth; l++) {
      for (size_t i = 0; i < call.states.size(); i++) {
        if (call.states[i] != static_cast<int64_t>(l)) continue;
        float* out = written<float>(call.outputs[2]) + static_cast<int64_t>(i) * s.count() * s.hidden;
        l < depth ? decoder.copy_state(out) : decoder.norm_state(call.norm, out);
      }
      if (l < depth) decoder.forward(call.layers[l], l + 1 < depth || call.every_row ? s.rows : call.keep);
    }
    decoder.keep_last(call.keep);
  });
}

struct FeatureCall : Call {
  bool stores;
  Features features;
  Projection first{};  // of pairs; without inputs: the first layer reads them

  FeatureCall(Arguments& in, const FeatureInputs& of)
      : Call(in, of.projects() || of.stores() ? 1 : 2, false), stores(of.stores()) {
    const Tensor& t = of.features;
    features = {{in.at("features"), s.hidden, element_of("features", t.scalar_type())},
                packing.vector("feature norm", of.feature_norm, s.hidden, true),
                of.projects() ? packing.vector("token norm", of.projection[1], s.hidden) : layers[0].input_norm,
                of.feature_first,
                of.normed_residual};
    if (of.projects()) {
      first = {weights_of("projection", of.projection[0], kDense, nullptr, s.hidden, 2 * s.hidden, packing.element),
               packing.vector("projection bias", of.projection[2], s.hidden, true)};
    }
    give({s.batch, keep, s.hidden});
  }
};

void feature_rows(Arguments& in) {
  const FeatureCall call(in, FeatureInputs(in));
  const size_t depth = call.depth;
  call.run([&](Decoder& decoder) {
    if (call.stores) return decoder.store_features(call.layers, call.features.rows);
    const int64_t rows = depth > 1 ? call.s.rows : call.keep;
    if (call.first.weights.inputs > 0) {
      decoder.project_pairs(call.first, call.features);
      decoder.forward(call.layers[0], rows);
    } else {
      decoder.forward_paired(call.layers[0], call.features, rows);
    }
    for (size_t l = 1; l < depth; l++) decoder.forward(call.layers[l], l + 1 < depth ? call.s.rows : call.keep);
    decoder.copy_state(written<float>(call.outputs[2]));
  });
}

}  // namespace
}  // namespace gsd

GSD_OPS(CPU, m) {
  using namespace gsd;
  Op<decoder_rows>::add(m, "decoder_rows");
  Op<feature_rows>::add(m, "feature_rows");
}
