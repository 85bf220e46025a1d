// The layers of a LLaMA-like decoder over rows of a token graph.
#pragma once

#include <initializer_list>
#include <vector>

#include "lines.h"
#include "path_attention.h"
#include "row_forms.h"
#include "team.h"

namespace gsd {

struct DecoderSizes {
  int64_t batch, rows, hidden, heads, kv_heads, head_dim, inner;
  float eps, rope_scale;

  int64_t count() const { return batch * rows; }
  int64_t q_size() const { return heads * head_dim; }
  int64_t kv_size() const { return kv_heads * head_dim; }
};

// One weight matrix and its bias, empty if there is none.
struct Projection {
  Weights weights;
  std::vector<float> bias;

  int64_t outputs() const { return weights.outputs; }
};

struct DecoderLayer {
  std::vector<float> input_norm, second_norm, q_norm, k_norm;  // the last two are empty where there are none
  Projection q, k, v, o, gate, up, down;
  CacheTensor keys, values;
  Element cache_element;
  int64_t window;  // 0: none
};

// What a drafter reads beside the embeddings: one vector a row.
struct Features {
  Matrix rows;  // [batch · rows, hidden]
  std::vector<float> norm, token_norm;
  bool first;            // before the embeddings, side by side
  bool normed_residual;  // the residual begins as they are normed, or as they are
};

struct DecoderRows {
  const int32_t *tokens, *positions, *slots;  // [batch, rows]
  const int32_t *kv_len, *kv_start;           // [batch]
  const float* inv_freq;                      // [head_dim / 2]
  float* spoiled;                             // [batch, rows] or null: gets NaN where a key or value is not finite
};

// The hidden state of all rows, which goes from layer to layer in float32.
class Decoder {
 public:
  // `element` is the dtype that the weight matrices are multiplied in, `embedding` one of them.
  Decoder(Team& team, const DecoderSizes& sizes, const DecoderRows& rows, const Paths& paths,
          Element element, const Weights& embedding);

  // Keys and values of all rows, and the state of no more than the last `keep` of every sequence.
  void forward(const DecoderLayer& layer, int64_t keep);

  // The first layer of an EAGLE-3 drafter (arXiv 2503.01840): queries, keys and values read normed embeddings and normed
  // features side by side; `keep` as above.
  void forward_paired(const DecoderLayer& layer, const Features& features, int64_t keep);

  // The state that multi-token prediction (arXiv 2412.19437) begins with: such pairs times a matrix.
  void project_pairs(const Projection& projection, const Features& features);

  // Every layer's keys and values of the features as they are, and nothing else; of block drafters (arXiv 2602.06036).
  void store_features(const std::vector<DecoderLayer>& layers, const Matrix& features);

  // What the next layer reads of the rows that are kept, [batch · rows, hidden].
  void copy_state(float* out);

  // The same through the norm behind the last layer.
  void norm_state(const std::vector<float>& norm, float* out);

  // No more than the last `keep` rows of every sequence from here on.
  void keep_last(int64_t keep);

  // The rows that were kept: normed, [batch · keep, hidden], and times the output matrix, rounded to `element`.
  void finish(const std::vector<float>& norm, const Projection& head, float* normed, Element element, void* logits);

 private:
  typedef std::initializer_list<const Projection*> Readers;  // that the packed rows are multiplied with

  int64_t count() const { return s_.batch * kept_; }
  int64_t strip() const;
  void norm_and_pack(const std::vector<float>& norm, Readers readers);
  void pair_and_pack(const Features& features, Readers readers);
  void forward_packed(const DecoderLayer& layer, int64_t keep);
  template <class Before>
  void pack(const float* x, int64_t k, Readers readers, const Before& before);
  void pack(const float* x, int64_t k, Readers readers);
  void multiply(const Projection& p, int64_t rows, int64_t begin, int64_t end, float* out, int64_t out_stride);
  void project_and_add(const Projection& p);
  void project_heads(const DecoderLayer& layer, bool queries);
  void turn_and_store(const DecoderLayer& layer, bool queries);
  void attend(const DecoderLayer& layer);
  void feed_forward(const DecoderLayer& layer);

  Team& team_;
  DecoderSizes s_;
  DecoderRows r_;
  const Paths& paths_;
  Element element_;
  const IsaKernels& kernels_;
  const RowKernel& kernel_;
  int64_t kept_;  // rows of a sequence that have a state and queries: its last ones, one behind the other
  Lines<float> x_, added_, q_, k_, v_, attended_, inner_, cos_, sin_, strips_;
  Lines<char> packed_[kRowForms];
};

}  // namespace gsd
