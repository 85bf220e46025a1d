#include "decoder.h"

#include <algorithm>
#include <cmath>

namespace gsd {
namespace {

constexpr int64_t kUnit = 32;  // outputs that are not shared out among threads

constexpr int64_t kLeastWeights = 1 << 14, kMostWeights = 1 << 17;  // of up to eight rows, in a piece of a product
constexpr int64_t kPieceElements = 1 << 11;

// work(thread, begin, end) over 0 … n − 1 in pieces of whole units: some for every thread, and enough in each that it
// reads memory in long strips.
template <class Work>
void share_outputs(Team& team, int64_t n, int64_t rows, int64_t k, const Work& work) {
  const int64_t unit = kUnit * k * std::max<int64_t>(1, rows / 8), even = n / (4 * team.size()) / kUnit;
  const int64_t units = std::max(kLeastWeights / unit, std::min(kMostWeights / unit, even));
  team.share(n, kUnit * std::max<int64_t>(1, units), work);
}

// work(begin, end) over rows of `width` in pieces of whole groups.
template <class Work>
void share_rows(Team& team, int64_t rows, int64_t width, int64_t group, const Work& work) {
  team.share(rows, group * std::max<int64_t>(1, kPieceElements / (group * width)),
             [&](int64_t, int64_t begin, int64_t end) { work(begin, end); });
}

// x1, x2 → x1 cos − x2 sin, x2 cos + x1 sin of the two halves of a head.
void rotate(float* x, int64_t head_dim, const float* cos, const float* sin) {
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
}

// One head into its slot, finite: what overflows in one row must not reach those that do not see it. Whether it was not.
bool store(float* x, const CacheTensor& cache, Element element, int64_t b, int64_t h, int64_t slot, int64_t head_dim) {
  const bool changed = make_finite(x, element, head_dim);
  write_row(x, cache.data + b * cache.batch_stride + h * cache.head_stride + slot * cache.slot_stride, element,
            head_dim);
  return changed;
}

}  // namespace

Decoder::Decoder(Team& team, const DecoderSizes& sizes, const DecoderRows& rows, const Paths& paths, Element element,
                 const Weights& embedding)
    : team_(team), s_(sizes), r_(rows), paths_(paths), element_(element), kernels_(kernels()),
      kernel_(kernels_.large[static_cast<int>(element)]), kept_(sizes.rows) {
  const int64_t count = s_.count(), half = s_.head_dim / 2;
  x_.make_room(count * s_.hidden), added_.make_room(count * s_.hidden);
  q_.make_room(count * s_.q_size()), attended_.make_room(count * s_.q_size());
  k_.make_room(count * s_.kv_size()), v_.make_room(count * s_.kv_size());
  inner_.make_room(count * s_.inner);
  cos_.make_room(count * half), sin_.make_room(count * half);
  strips_.make_room(team_.size() * 2 * kept_ * s_.batch * strip());
  share_rows(team_, count, s_.hidden, 1, [&](int64_t first, int64_t last) {
    for (int64_t m = first; m < last; m++) {
      read_weights(element_, embedding, r_.tokens[m], x_.data() + m * s_.hidden);
      for (int64_t i = 0; i < half; i++) {
        const float angle = static_cast<float>(r_.positions[m]) * r_.inv_freq[i];
        cos_[m * half + i] = std::cos(angle) * s_.rope_scale;
        sin_[m * half + i] = std::sin(angle) * s_.rope_scale;
      }
    }
  });
}

void Decoder::forward(const DecoderLayer& layer, int64_t keep) {
  norm_and_pack(layer.input_norm, {&layer.q, &layer.k, &layer.v});
  forward_packed(layer, keep);
}

void Decoder::forward_paired(const DecoderLayer& layer, const Features& features, int64_t keep) {
  pair_and_pack(features, {&layer.q, &layer.k, &layer.v});
  forward_packed(layer, keep);
}

void Decoder::project_pairs(const Projection& projection, const Features& features) {
  pair_and_pack(features, {&projection});
  share_outputs(team_, s_.hidden, count(), projection.weights.inputs, [&](int64_t, int64_t begin, int64_t end) {
    multiply(projection, count(), begin, end, x_.data() + begin, s_.hidden);
  });
}

void Decoder::store_features(const std::vector<DecoderLayer>& layers, const Matrix& features) {
  for (int64_t m = 0; m < count(); m++) read_row(features, m, x_.data() + m * s_.hidden, s_.hidden);
  for (const DecoderLayer& layer : layers) {
    pack(x_.data(), s_.hidden, {&layer.k, &layer.v});
    project_heads(layer, false);
    turn_and_store(layer, false);
  }
  keep_last(0);
}

// From the rows that q, k and v read.
void Decoder::forward_packed(const DecoderLayer& layer, int64_t keep) {
  project_heads(layer, keep > 0);
  turn_and_store(layer, keep > 0);
  keep_last(keep);
  if (keep == 0) return;
  attend(layer);
  pack(attended_.data(), s_.q_size(), {&layer.o});
  project_and_add(layer.o);
  norm_and_pack(layer.second_norm, {&layer.gate, &layer.up});
  feed_forward(layer);
  pack(inner_.data(), s_.inner, {&layer.down});
  project_and_add(layer.down);
}

void Decoder::copy_state(float* out) { std::copy(x_.data(), x_.data() + count() * s_.hidden, out); }

void Decoder::norm_state(const std::vector<float>& norm, float* out) {
  share_rows(team_, count(), s_.hidden, 1, [&](int64_t first, int64_t last) {
    for (int64_t m = first; m < last; m++) {
      rms_norm(x_.data() + m * s_.hidden, norm.data(), s_.eps, out + m * s_.hidden, s_.hidden);
    }
  });
}

void Decoder::finish(const std::vector<float>& norm, const Projection& head, float* normed, Element element,
                     void* logits) {
  const int64_t kept = count();
  if (kept == 0) return;
  norm_state(norm, normed);
  pack(normed, s_.hidden, {&head});
  const char* packed = packed_[static_cast<int>(form_of(head.weights.kind))].data();
  share_outputs(team_, head.outputs(), kept, s_.hidden, [&](int64_t, int64_t begin, int64_t end) {
    multiply_rounded(kernels_, element_, head.weights, packed, kept, begin, end, element, logits, head.outputs());
  });
}

// Rows of x in every form that one of the readers has, once; before(m) makes row m.
template <class Before>
void Decoder::pack(const float* x, int64_t k, Readers readers, const Before& before) {
  bool wanted[kRowForms] = {};
  for (const Projection* p : readers) {
    const RowForm form = form_of(p->weights.kind);
    wanted[static_cast<int>(form)] = true;
    packed_[static_cast<int>(form)].make_room((count() + kRowBlock) * packed_row_bytes(kernels_, element_, form, k));
  }
  share_rows(team_, count(), k, kernel_.group, [&](int64_t first, int64_t last) {
    for (int64_t m = first; m < last; m++) before(m);
    for (int form = 0; form < kRowForms; form++) {
      if (wanted[form]) pack_rows(kernels_, element_, static_cast<RowForm>(form), x, k, first, last, k, packed_[form].data());
    }
  });
}

void Decoder::pack(const float* x, int64_t k, Readers readers) {
  pack(x, k, readers, [](int64_t) {});
}

void Decoder::norm_and_pack(const std::vector<float>& norm, Readers readers) {
  pack(added_.data(), s_.hidden, readers, [&](int64_t m) {
    rms_norm(x_.data() + m * s_.hidden, norm.data(), s_.eps, added_.data() + m * s_.hidden, s_.hidden);
  });
}

void Decoder::pair_and_pack(const Features& features, Readers readers) {
  const int64_t hidden = s_.hidden, width = 2 * hidden;
  Lines<float> pairs;
  pairs.make_room(count() * width);
  pack(pairs.data(), width, readers, [&](int64_t m) {
    float *x = x_.data() + m * hidden, *pair = pairs.data() + m * width;
    float *token = pair + (features.first ? hidden : 0), *feature = pair + (features.first ? 0 : hidden);
    rms_norm(x, features.token_norm.data(), s_.eps, token, hidden);
    read_row(features.rows, m, x, hidden);
    rms_norm(x, features.norm.data(), s_.eps, feature, hidden);
    if (features.normed_residual) std::copy_n(feature, hidden, x);
  });
}

// Outputs begin … end − 1 of the packed rows, with their bias: out[r · out_stride + n − begin].
void Decoder::multiply(const Projection& p, int64_t rows, int64_t begin, int64_t end, float* out,
                       int64_t out_stride) {
  const char* packed = packed_[static_cast<int>(form_of(p.weights.kind))].data();
  gsd::multiply(kernels_, element_, p.weights, packed, rows, begin, end, out, out_stride);
  if (p.bias.empty()) return;
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t n = begin; n < end; n++) out[r * out_stride + n - begin] += p.bias[static_cast<size_t>(n)];
  }
}

void Decoder::project_and_add(const Projection& p) {
  const int64_t outputs = p.outputs();
  share_outputs(team_, outputs, count(), p.weights.inputs, [&](int64_t, int64_t begin, int64_t end) {
    float *x = x_.data(), *added = added_.data();
    multiply(p, count(), begin, end, added + begin, outputs);
    for (int64_t m = 0; m < count(); m++) {
      for (int64_t n = begin; n < end; n++) x[m * outputs + n] += added[m * outputs + n];
    }
  });
}

void Decoder::project_heads(const DecoderLayer& layer, bool queries) {
  const struct {
    const Projection& projection;
    float* out;
  } parts[] = {{layer.q, q_.data()}, {layer.k, k_.data()}, {layer.v, v_.data()}};
  const int64_t before = queries ? 0 : s_.q_size();  // outputs that nobody reads
  const int64_t outputs = s_.q_size() + 2 * s_.kv_size() - before;
  share_outputs(team_, outputs, count(), s_.hidden, [&](int64_t, int64_t begin, int64_t end) {
    int64_t first = -before;
    for (const auto& part : parts) {
      const int64_t outputs = part.projection.outputs();
      const int64_t from = std::max<int64_t>(0, begin - first), to = std::min(outputs, end - first);
      if (from < to) multiply(part.projection, count(), from, to, part.out + from, outputs);
      first += outputs;
    }
  });
}

// Queries turned, keys turned and stored, values stored.
void Decoder::turn_and_store(const DecoderLayer& layer, bool queries) {
  const int64_t half = s_.head_dim / 2;
  const auto turn = [&](float* x, const std::vector<float>& norm, int64_t row) {
    if (!norm.empty()) rms_norm(x, norm.data(), s_.eps, x, s_.head_dim);
    rotate(x, s_.head_dim, cos_.data() + row * half, sin_.data() + row * half);
  };
  share_rows(team_, count(), s_.q_size() + 2 * s_.kv_size(), 1, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
      for (int64_t h = 0; queries && h < s_.heads; h++) turn(q_.data() + row * s_.q_size() + h * s_.head_dim, layer.q_norm, row);
      bool spoiled = false;
      for (int64_t h = 0; h < s_.kv_heads; h++) {
        float *k = k_.data() + row * s_.kv_size() + h * s_.head_dim, *v = v_.data() + row * s_.kv_size() + h * s_.head_dim;
        turn(k, layer.k_norm, row);
        spoiled |= store(k, layer.keys, layer.cache_element, row / s_.rows, h, r_.slots[row], s_.head_dim);
        spoiled |= store(v, layer.values, layer.cache_element, row / s_.rows, h, r_.slots[row], s_.head_dim);
      }
      if (spoiled && r_.spoiled != nullptr) r_.spoiled[row] = NAN;
    }
  });
}

// The state and the queries of every sequence's last rows, moved to the front.
void Decoder::keep_last(int64_t keep) {
  const int64_t skipped = kept_ - keep;
  for (int64_t m = 0; skipped > 0 && m < s_.batch * keep; m++) {
    const int64_t from = m + (m / keep + 1) * skipped;
    std::copy_n(x_.data() + from * s_.hidden, s_.hidden, x_.data() + m * s_.hidden);
    std::copy_n(q_.data() + from * s_.q_size(), s_.q_size(), q_.data() + m * s_.q_size());
  }
  kept_ = keep;
}

void Decoder::attend(const DecoderLayer& layer) {
  PathAttention a{};
  a.batch = s_.batch, a.heads = s_.heads, a.kv_heads = s_.kv_heads, a.head_dim = a.value_dim = s_.head_dim;
  a.graph_rows = s_.rows, a.rows = kept_;
  a.q = reinterpret_cast<const char*>(q_.data());
  a.q_batch = kept_ * s_.q_size(), a.q_head = s_.head_dim, a.q_row = s_.q_size();
  a.element = Element::kFloat32;
  a.keys = layer.keys, a.values = layer.values, a.cache_element = layer.cache_element;
  a.paths = &paths_, a.kv_len = r_.kv_len, a.kv_start = r_.kv_start, a.positions = r_.positions;
  a.window = layer.window;
  a.scale = 1.0f / std::sqrt(static_cast<float>(s_.head_dim));
  a.out = reinterpret_cast<char*>(attended_.data());
  attend_paths(team_, a, kernels_.small[static_cast<int>(layer.cache_element)]);
}

// Outputs of gate and up that are multiplied before they are combined.
int64_t Decoder::strip() const {
  return std::max<int64_t>(64, std::min<int64_t>(256, 8192 / s_.count() / kUnit * kUnit));
}

// silu(gate) · up, strip by strip of outputs.
void Decoder::feed_forward(const DecoderLayer& layer) {
  const int64_t count = this->count(), strip = this->strip();
  share_outputs(team_, s_.inner, 2 * count, s_.hidden, [&](int64_t thread, int64_t begin, int64_t end) {
    float *gate = strips_.data() + thread * 2 * s_.count() * strip, *up = gate + count * strip;
    for (int64_t n = begin; n < end; n += strip) {
      const int64_t outputs = std::min(strip, end - n);
      multiply(layer.gate, count, n, n + outputs, gate, strip);
      multiply(layer.up, count, n, n + outputs, up, strip);
      for (int64_t m = 0; m < count; m++) {
        silu_times(gate + m * strip, up + m * strip, inner_.data() + m * s_.inner + n, outputs);
      }
    }
  });
}

}  // namespace gsd
