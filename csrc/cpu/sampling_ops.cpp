// sample_rows, draft_candidates and warped_log_probs on CPU tensors. A thread takes whole rows.
#include <algorithm>
#include <cmath>
#include <limits>

#include "../torch_ops/registration.h"
#include "../torch_ops/sampling.h"
#include "model_math.h"
#include "row_math.h"

namespace gsd {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

constexpr int padded_to_blocks(int n) { return (n + kBlock - 1) / kBlock * kBlock; }

// Logits [B, R, V] of any floating dtype, read row by row as float32.
class LogitRows {
 public:
  explicit LogitRows(const PickCall& call)
      : type_(call.type), data_(call.args.logits), vocab_(call.sizes.vocab), padded_(padded_to_blocks(vocab_)) {}

  int vocab() const { return vocab_; }
  int padded() const { return padded_; }

  // Tokens begin … begin + n − 1 of a row; `buffer` holds them unless they are float32 already.
  const float* read_part(int64_t row, int begin, int n, float* buffer) const {
    const int64_t at = row * vocab_ + begin;
    if (type_ == LogitType::kFloat32) return static_cast<const float*>(data_) + at;
    if (type_ == LogitType::kFloat64) {
      std::copy_n(static_cast<const double*>(data_) + at, n, buffer);
    } else {
      const Element element = type_ == LogitType::kFloat16 ? Element::kFloat16 : Element::kBfloat16;
      read_row({static_cast<const uint16_t*>(data_) + at, 0, element}, 0, buffer, n);
    }
    return buffer;
  }

  // The same, padded with −inf.
  void copy(int64_t row, int begin, int n, float* to) const {
    const float* from = read_part(row, begin, n, to);
    if (from != to) std::copy_n(from, n, to);
    std::fill(to + n, to + padded_to_blocks(n), kNegInf);
  }

 private:
  LogitType type_;
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
// are taken for the few tokens that pass. (Not inlined: among a caller's variables the best score is kept in memory, and
// a row takes half as long again.)
[[gnu::noinline]] int gumbel_argmax(const LogitRows& logits, const Scratch& scratch, const NoiseStream& stream,
                                    float max, float floor) {
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
  logits.copy(row, 0, logits.vocab(), scratch.row.data());
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
    const int n = std::min(kPart, logits.vocab() - begin), padded = padded_to_blocks(n);
    logits.copy(row, begin, n, buffer);
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
  logits.copy(row, 0, logits.vocab(), x);
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
  logits.copy(row, 0, logits.vocab(), x);
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

// Calls work(logits, row, warpers, scratch) for every row, rows shared out among threads where there are many: on a machine
// that has other work, waiting for a thread that was sent away costs more than a few rows.
template <class Work>
void for_each_row(const PickCall& call, const Work& work) {
  constexpr int64_t kTokensPerThread = 1 << 15, kFewTokens = 1 << 18;
  const LogitRows logits(call);
  const bool few = call.rows * logits.padded() <= kFewTokens;
  const int64_t grain = few ? call.rows : std::max<int64_t>(1, kTokensPerThread / logits.padded());
  torch::stable::parallel_for(0, call.rows, grain, [&](int64_t begin, int64_t end) {
    Scratch scratch(logits.padded());
    for (int64_t row = begin; row < end; row++) work(logits, row, call.args.warpers(row / call.args.rows), scratch);
  });
}

void sample_rows(const PickCall& call) {
  for_each_row(call, [&](const LogitRows& logits, int64_t row, const Warpers& w, Scratch& scratch) {
    call.args.tokens[row] = w.temperature <= 0.0f ? argmax_row(logits, row)
                                                  : sample_row(logits, row, w, call.args.noise(row), scratch);
  });
}

void draft_candidates(const PickCall& call) {
  const int branch = call.sizes.branch;
  for_each_row(call, [&](const LogitRows& logits, int64_t row, const Warpers& w, Scratch& scratch) {
    draft_row(logits, row, w, call.args.noise(row), call.sizes.noisy, branch, scratch, call.args.tokens + row * branch,
              call.args.log_probs + row * branch);
  });
}

void warped_log_probs(const PickCall& call) {
  for_each_row(call, [&](const LogitRows& logits, int64_t row, const Warpers& w, Scratch& scratch) {
    log_probs_row(logits, row, w, scratch, call.args.scores + row * logits.vocab());
  });
}

}  // namespace
}  // namespace gsd

GSD_OPS(CPU, m) {
  gsd::Op<gsd::prepare_sample, gsd::sample_rows>::add(m, "sample_rows");
  gsd::Op<gsd::prepare_draft, gsd::draft_candidates>::add(m, "draft_candidates");
  gsd::Op<gsd::prepare_log_probs, gsd::warped_log_probs>::add(m, "warped_log_probs");
}
