// sample_rows, draft_candidates and warped_log_probs on CPU tensors. A thread takes whole rows.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "../algorithms/sampling.h"
#include "../torch_ops/common.h"
#include "../torch_ops/registration.h"
#include "model_math.h"
#include "row_math.h"

namespace gsd {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// The warpers' parameters, one for all sequences or one each.
class WarperTable {
 public:
  WarperTable(double temperature, int64_t top_k, double top_p, double min_p, const MaybeTensor& temperatures,
              const MaybeTensor& top_ks, const MaybeTensor& top_ps,
              const MaybeTensor& min_ps, int64_t batch)
      : shared_{static_cast<float>(temperature), static_cast<float>(top_k), static_cast<float>(top_p),
                static_cast<float>(min_p)},
        temperatures_(values(temperatures, batch)),
        top_ks_(values(top_ks, batch)),
        top_ps_(values(top_ps, batch)),
        min_ps_(values(min_ps, batch)) {}

  Warpers of(int64_t sequence) const {
    return {temperatures_ ? temperatures_[sequence] : shared_.temperature, top_ks_ ? top_ks_[sequence] : shared_.top_k,
            top_ps_ ? top_ps_[sequence] : shared_.top_p, min_ps_ ? min_ps_[sequence] : shared_.min_p};
  }

 private:
  static const float* values(const MaybeTensor& t, int64_t batch) {
    if (!t) return nullptr;
    check("warpers", *t, ScalarType::Float, {batch});
    return read<float>(*t);
  }

  Warpers shared_;
  const float *temperatures_, *top_ks_, *top_ps_, *min_ps_;
};

// Logits [B, R, V] of any floating dtype, read row by row as float32.
class LogitRows {
 public:
  explicit LogitRows(const Tensor& logits) : dtype_(logits.scalar_type()), data_(logits.const_data_ptr()) {
    STD_TORCH_CHECK(logits.dim() == 3 && logits.size(2) >= 1, "logits: expected [batch, rows, vocabulary]");
    STD_TORCH_CHECK(logits.is_contiguous(), "logits: must be contiguous");
    STD_TORCH_CHECK(dtype_ == ScalarType::Float || dtype_ == ScalarType::Half || dtype_ == ScalarType::BFloat16 ||
                        dtype_ == ScalarType::Double,
                    "logits: expected float64, float32, float16 or bfloat16");
    STD_TORCH_CHECK(logits.size(2) <= (1 << 30), "logits: vocabulary too large");
    vocab_ = static_cast<int>(logits.size(2));
    padded_ = (vocab_ + kBlock - 1) / kBlock * kBlock;
  }

  int vocab() const { return vocab_; }
  int padded() const { return padded_; }

  // Tokens begin … begin + n − 1 of a row; `buffer` holds them unless they are float32 already.
  const float* read_part(int64_t row, int begin, int n, float* buffer) const {
    const int64_t at = row * vocab_ + begin;
    if (dtype_ == ScalarType::Float) return static_cast<const float*>(data_) + at;
    if (dtype_ == ScalarType::Double) {
      std::copy_n(static_cast<const double*>(data_) + at, n, buffer);
    } else {
      const Element element = dtype_ == ScalarType::Half ? Element::kFloat16 : Element::kBfloat16;
      read_row({static_cast<const uint16_t*>(data_) + at, 0, element}, 0, buffer, n);
    }
    return buffer;
  }

  // The whole row, padded with −inf.
  void copy(int64_t row, float* to) const {
    const float* from = read_part(row, 0, vocab_, to);
    if (from != to) memcpy(to, from, sizeof(float) * static_cast<size_t>(vocab_));
    std::fill(to + vocab_, to + padded_, kNegInf);
  }

 private:
  ScalarType dtype_;
  const void* data_;
  int vocab_, padded_;
};

// One thread's working memory.
struct Scratch {
  std::vector<float> row, weights, block_max;
  std::vector<std::pair<float, float>> boundary;  // (logit, weight)

  explicit Scratch(int padded)
      : row(static_cast<size_t>(padded)), block_max(static_cast<size_t>(padded / kBlock)) {}
};

// Lowest id of the largest logit; −1 if there is a NaN. Reads every logit once.
int argmax_row(const LogitRows& logits, int64_t row) {
  constexpr int kPart = 1024;
  float buffer[kPart];
  float best = kNegInf;
  int best_begin = 0;
  const auto part_of = [&](int begin) { return std::min(kPart, logits.vocab() - begin); };
  for (int begin = 0; begin < logits.vocab(); begin += kPart) {
    const int n = part_of(begin);
    const Extremes found = extremes(logits.read_part(row, begin, n, buffer), n);
    if (found.has_nan) return -1;
    if (found.max > best) best = found.max, best_begin = begin;
  }
  const float* part = logits.read_part(row, best_begin, part_of(best_begin), buffer);
  return best_begin + static_cast<int>(std::find(part, part + part_of(best_begin), best) - part);
}

// Selection without sorting the vocabulary: a histogram over the leading bits of the logits finds the part of the row
// where the boundary lies, and only that part is sorted.
constexpr int kBinBits = 12;
constexpr int kBins = 1 << kBinBits;
int bin_of(float x) { return static_cast<int>(descending(x) >> (32 - kBinBits)); }

// The k-th largest logit.
float kth_largest(const float* x, int vocab, int k) {
  std::vector<int> count(kBins);
  for (int i = 0; i < vocab; i++) count[bin_of(x[i])]++;
  int bin = 0, before = 0;
  while (before + count[bin] < k) before += count[bin++];
  std::vector<float> part;
  part.reserve(count[bin]);
  for (int i = 0; i < vocab; i++) {
    if (bin_of(x[i]) == bin) part.push_back(x[i]);
  }
  const auto nth = part.begin() + (k - before - 1);
  std::nth_element(part.begin(), nth, part.end(), std::greater<float>());
  return *nth;
}

// The smallest logit of which the more probable tokens together have less than p, among logits ≥ floor.
float nucleus_floor(const LogitRows& logits, Scratch& scratch, float max, float floor, float p) {
  const float* x = scratch.row.data();
  scratch.weights.resize(scratch.row.size());
  exp_shifted(x, scratch.weights.data(), logits.padded(), max);
  std::vector<double> mass(kBins);
  double total = 0.0;
  for (int i = 0; i < logits.vocab(); i++) {
    if (x[i] >= floor && scratch.weights[i] > 0.0f) mass[bin_of(x[i])] += scratch.weights[i];
  }
  for (const double m : mass) total += m;

  double before = 0.0;
  int bin = 0;
  while (bin + 1 < kBins && before + mass[bin] < p * total) before += mass[bin++];
  scratch.boundary.clear();
  for (int i = 0; i < logits.vocab(); i++) {
    if (x[i] >= floor && scratch.weights[i] > 0.0f && bin_of(x[i]) == bin) {
      scratch.boundary.emplace_back(x[i], scratch.weights[i]);
    }
  }
  std::sort(scratch.boundary.begin(), scratch.boundary.end(), std::greater<>());
  float cut = max;  // the most probable token always stays
  for (const auto& [logit, weight] : scratch.boundary) {
    if (before >= p * total) break;
    cut = std::min(cut, logit);
    before += weight;
  }
  // Rounding can leave the whole mass below p·total: then nothing is cut.
  return before < p * total ? floor : std::max(cut, floor);
}

// The lowest logit that survives temperature → top-k → top-p → min-p. `scratch.row` is divided by the temperature.
float warper_floor(const LogitRows& logits, Scratch& scratch, const Warpers& w, float max) {
  float floor = kNegInf;
  const int k = w.top_k >= 1.0f ? static_cast<int>(std::min(w.top_k, static_cast<float>(logits.vocab()))) : 0;
  if (k > 0 && k < logits.vocab()) floor = kth_largest(scratch.row.data(), logits.vocab(), k);
  if (w.top_p < 1.0f) floor = nucleus_floor(logits, scratch, max, floor, w.top_p);
  if (w.min_p > 0.0f) floor = std::max(floor, max + std::log(w.min_p));
  return floor;
}

// argmax of x + g over x ≥ floor; scratch holds the scaled row and its block maxima.
//
// Noise is drawn only where it can matter. With the best score S so far, token x wins only if g > S − x, that is
// u < 1 − exp(−exp(x − S)) ≤ exp(x − S): one exp a block turns that into a comparison of raw random bits, and logarithms
// are taken for the few tokens that pass.
int gumbel_argmax(const LogitRows& logits, const Scratch& scratch, const NoiseStream& stream, float max, float floor) {
  const float* x = scratch.row.data();
  int best_token = static_cast<int>(std::find(x, x + logits.vocab(), max) - x);
  if (best_token == logits.vocab() || max == kNegInf) return 0;
  uint32_t bits[kBlock];
  random_words(stream, best_token / 4, bits);
  float best = max + gumbel_from(bits[best_token % 4]);
  for (int block = 0; block < logits.padded() / kBlock; block++) {
    const float block_max = scratch.block_max[block];
    if (block_max < floor || block_max + kMaxGumbel < best) continue;
    random_block(stream, block, bits);
    // Of 2³¹ values; a little more, so that rounding never hides a winner.
    const float bound = std::exp(std::min(block_max - best, 0.0f)) * 2147483648.0f * 1.0001f + 2.0f;
    const uint32_t limit = bound < 2147483648.0f ? static_cast<uint32_t>(bound) : 0x7FFFFFFFu;
    for (int i = 0; i < kBlock; i++) {
      if (bits[i] >> 1 > limit || x[block * kBlock + i] < floor) continue;
      const float score = x[block * kBlock + i] + gumbel_from(bits[i]);
      const int token = block * kBlock + i;
      if (score > best || (score == best && token < best_token)) {
        best = score;
        best_token = token;
      }
    }
  }
  return best_token;
}

int sample_row(const LogitRows& logits, int64_t row, const Warpers& w, const NoiseStream& stream, Scratch& scratch) {
  logits.copy(row, scratch.row.data());
  const Extremes found =
      scale_and_block_maxima(scratch.row.data(), logits.padded(), w.temperature, scratch.block_max.data());
  if (found.has_nan || !(found.max > kNegInf && found.max < -kNegInf)) return -1;  // nothing to draw from
  return gumbel_argmax(logits, scratch, stream, found.max, warper_floor(logits, scratch, w, found.max));
}

// The `branch` largest logits, best first, lowest id first at ties.
struct Largest {
  int32_t* tokens;
  float* scores;
  int branch, kept = 0;

  float least() const { return kept == branch ? scores[branch - 1] : kNegInf; }

  // A block of tokens from `first` on, after those before them.
  void take(const float* x, int first) {
    for (int i = 0; i < kBlock; i++) {
      if (!(x[i] > least())) continue;
      int at = kept < branch ? kept++ : branch - 1;
      for (; at > 0 && scores[at - 1] < x[i]; at--) {
        scores[at] = scores[at - 1];
        tokens[at] = tokens[at - 1];
      }
      scores[at] = x[i];
      tokens[at] = first + i;
    }
  }

  // Then the lowest of the remaining ids.
  void fill(int vocab) {
    const int found = kept;
    for (int token = 0; token < vocab && kept < branch; token++) {
      if (std::find(tokens, tokens + found, token) != tokens + found) continue;
      tokens[kept] = token;
      scores[kept++] = kNegInf;
    }
    for (; kept < branch; kept++) {
      tokens[kept] = -1;
      scores[kept] = kNegInf;
    }
  }

  // log_softmax of the scores; a constant that all of them share would cancel, so log q needs no normalising first.
  void normalise(const Extremes& found, double sum) {
    const float log_sum = static_cast<float>(std::log(sum));
    for (int i = 0; i < branch; i++) {
      if (found.has_nan) scores[i] = std::numeric_limits<float>::quiet_NaN();
      if (scores[i] > kNegInf) scores[i] = scores[i] - found.max - log_sum;
    }
  }
};

// Candidates of a row of which nothing is cut and no noise is drawn: logits are read once, in parts that stay near.
void read_candidates(const LogitRows& logits, int64_t row, float temperature, Largest largest) {
  constexpr int kPart = 16 * kBlock;
  float buffer[kPart], block_max[kPart / kBlock];
  Extremes all{kNegInf, false};
  double sum = 0.0;
  for (int begin = 0; begin < logits.vocab(); begin += kPart) {
    const int n = std::min(kPart, logits.vocab() - begin), padded = (n + kBlock - 1) / kBlock * kBlock;
    const float* from = logits.read_part(row, begin, n, buffer);
    if (from != buffer) std::copy_n(from, n, buffer);
    std::fill(buffer + n, buffer + padded, kNegInf);
    const Extremes found = scale_and_block_maxima(buffer, padded, temperature, block_max);
    all.has_nan = all.has_nan || found.has_nan;
    if (found.max == kNegInf) continue;
    if (found.max > all.max) {
      sum *= std::exp(static_cast<double>(all.max) - found.max);
      all.max = found.max;
    }
    sum += sum_exp(buffer, padded, all.max);
    for (int block = 0; block < padded; block += kBlock) {
      if (block_max[block / kBlock] > largest.least()) largest.take(buffer + block, begin + block);
    }
  }
  largest.fill(logits.vocab());
  largest.normalise(all, sum);
}

void draft_row(const LogitRows& logits, int64_t row, const Warpers& w, const NoiseStream& stream, bool noisy,
               int branch, Scratch& scratch, int32_t* tokens, float* log_probs) {
  Largest largest{tokens, log_probs, branch};
  const bool greedy = w.temperature <= 0.0f, cuts = w.top_k >= 1.0f || w.top_p < 1.0f || w.min_p > 0.0f;
  const float temperature = greedy ? 1.0f : w.temperature;
  if (greedy || (!cuts && !noisy)) return read_candidates(logits, row, temperature, largest);
  float* x = scratch.row.data();
  logits.copy(row, x);
  Extremes found = scale_and_block_maxima(x, logits.padded(), temperature, scratch.block_max.data());
  if (!found.has_nan) {
    const float floor = warper_floor(logits, scratch, w, found.max);
    if (floor > kNegInf) cut_below(x, logits.padded(), floor);
    uint32_t bits[kBlock];
    for (int block = 0; noisy && block < logits.padded() / kBlock; block++) {
      if (scratch.block_max[block] < floor) continue;
      random_block(stream, block, bits);
      add_gumbel(x + block * kBlock, bits);
    }
    found = scale_and_block_maxima(x, logits.padded(), 1.0f, scratch.block_max.data());
  }
  for (int block = 0; block < logits.padded() / kBlock; block++) {
    if (scratch.block_max[block] > largest.least()) largest.take(x + block * kBlock, block * kBlock);
  }
  largest.fill(logits.vocab());
  largest.normalise(found, sum_exp(x, logits.padded(), found.max));
}

// Log-probabilities of a whole row after the warpers; NaN where there is no distribution, as PyTorch's log_softmax.
void log_probs_row(const LogitRows& logits, int64_t row, const Warpers& w, Scratch& scratch, float* out) {
  float* x = scratch.row.data();
  logits.copy(row, x);
  const bool greedy = w.temperature <= 0.0f;
  const Extremes found =
      scale_and_block_maxima(x, logits.padded(), greedy ? 1.0f : w.temperature, scratch.block_max.data());
  if (found.has_nan || !(found.max > kNegInf && found.max < -kNegInf)) {
    std::fill(out, out + logits.vocab(), std::numeric_limits<float>::quiet_NaN());
    return;
  }
  const float floor = greedy ? kNegInf : warper_floor(logits, scratch, w, found.max);
  if (floor > kNegInf) cut_below(x, logits.padded(), floor);
  const float log_sum = static_cast<float>(std::log(sum_exp(x, logits.padded(), found.max)));
  for (int i = 0; i < logits.vocab(); i++) out[i] = x[i] - found.max - log_sum;
}

// Calls work(row, sequence, scratch) for every row, rows shared out among threads where there are many: on a machine that
// has other work, waiting for a thread that was sent away costs more than a few rows.
template <class Work>
void for_each_row(const LogitRows& logits, int64_t batch, int64_t rows, const Work& work) {
  constexpr int64_t kTokensPerThread = 1 << 15, kFewTokens = 1 << 18;
  const bool few = batch * rows * logits.padded() <= kFewTokens;
  const int64_t grain = few ? batch * rows : std::max<int64_t>(1, kTokensPerThread / logits.padded());
  torch::stable::parallel_for(0, batch * rows, grain, [&](int64_t begin, int64_t end) {
    Scratch scratch(logits.padded());
    for (int64_t row = begin; row < end; row++) work(row, row / rows, scratch);
  });
}

// Calls work(row, sequence, stream, scratch) for every row, rows shared out among threads.
template <class Work>
void for_each_row(const LogitRows& logits, const Tensor& positions, const Tensor& seed, const Tensor& sequence_ids,
                  const Work& work) {
  const int64_t batch = positions.size(0), rows = positions.size(1);
  const int32_t* position = read<int32_t>(positions);
  const int32_t* sequence = read<int32_t>(sequence_ids);
  const int64_t key = *read<int64_t>(seed);
  for_each_row(logits, batch, rows, [&](int64_t row, int64_t b, Scratch& scratch) {
    work(row, b, noise_stream(key, position[row], sequence[b]), scratch);
  });
}

void check_sampling(const Tensor& logits, const Tensor& positions, const Tensor& seed, const Tensor& sequence_ids) {
  check("positions", positions, ScalarType::Int, {logits.size(0), logits.size(1)});
  check("seed", seed, ScalarType::Long, {});
  check("sequence_ids", sequence_ids, ScalarType::Int, {logits.size(0)});
}

Tensor sample_rows(const Tensor& logits, const Tensor& positions, const Tensor& seed, const Tensor& sequence_ids,
                   double temperature, int64_t top_k, double top_p, double min_p,
                   const MaybeTensor& temperatures, const MaybeTensor& top_ks,
                   const MaybeTensor& top_ps, const MaybeTensor& min_ps) {
  const LogitRows rows(logits);
  check_sampling(logits, positions, seed, sequence_ids);
  const WarperTable warpers(temperature, top_k, top_p, min_p, temperatures, top_ks, top_ps, min_ps, logits.size(0));
  Tensor picked = fresh<int32_t>(positions, {positions.size(0), positions.size(1)});
  int32_t* out = written<int32_t>(picked);
  for_each_row(rows, positions, seed, sequence_ids,
               [&](int64_t row, int64_t sequence, const NoiseStream& stream, Scratch& scratch) {
                 const Warpers w = warpers.of(sequence);
                 out[row] = w.temperature <= 0.0f ? argmax_row(rows, row) : sample_row(rows, row, w, stream, scratch);
               });
  return picked;
}

std::tuple<Tensor, Tensor> draft_candidates(const Tensor& logits, const Tensor& positions, int64_t branch,
                                            const Tensor& seed, const Tensor& sequence_ids, double temperature,
                                            int64_t top_k, double top_p, double min_p,
                                            const MaybeTensor& temperatures,
                                            const MaybeTensor& top_ks, const MaybeTensor& top_ps,
                                            const MaybeTensor& min_ps, bool noise) {
  const LogitRows rows(logits);
  check_sampling(logits, positions, seed, sequence_ids);
  STD_TORCH_CHECK(branch >= 1 && branch <= 1024, "branch: expected 1 ... 1024, got ", branch);
  const WarperTable warpers(temperature, top_k, top_p, min_p, temperatures, top_ks, top_ps, min_ps, logits.size(0));
  Tensor tokens = fresh<int32_t>(positions, {positions.size(0), positions.size(1), branch});
  Tensor log_probs = torch::stable::new_empty(positions, {positions.size(0), positions.size(1), branch},
                                              ScalarType::Float);
  int32_t* out_tokens = written<int32_t>(tokens);
  float* out_log_probs = written<float>(log_probs);
  for_each_row(rows, positions, seed, sequence_ids,
               [&](int64_t row, int64_t sequence, const NoiseStream& stream, Scratch& scratch) {
                 draft_row(rows, row, warpers.of(sequence), stream, noise, static_cast<int>(branch), scratch,
                           out_tokens + row * branch, out_log_probs + row * branch);
               });
  return {tokens, log_probs};
}

Tensor warped_log_probs(const Tensor& logits, double temperature, int64_t top_k, double top_p, double min_p,
                        const MaybeTensor& temperatures, const MaybeTensor& top_ks,
                        const MaybeTensor& top_ps, const MaybeTensor& min_ps) {
  const LogitRows rows(logits);
  const WarperTable warpers(temperature, top_k, top_p, min_p, temperatures, top_ks, top_ps, min_ps, logits.size(0));
  Tensor log_probs = torch::stable::new_empty(logits, logits.sizes(), ScalarType::Float);
  float* out = written<float>(log_probs);
  for_each_row(rows, logits.size(0), logits.size(1), [&](int64_t row, int64_t sequence, Scratch& scratch) {
    log_probs_row(rows, row, warpers.of(sequence), scratch, out + row * rows.vocab());
  });
  return log_probs;
}

}  // namespace
}  // namespace gsd

GSD_OPS(CPU, m) {
  m.impl("sample_rows", TORCH_BOX(&gsd::sample_rows));
  m.impl("draft_candidates", TORCH_BOX(&gsd::draft_candidates));
  m.impl("warped_log_probs", TORCH_BOX(&gsd::warped_log_probs));
}
