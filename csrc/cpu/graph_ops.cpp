// merge, flatten, verify and commit_kv on CPU tensors: the graph algorithms run by a group of one thread a sequence.
#include <algorithm>

#include "../torch_ops/graph_ops.h"
#include "../torch_ops/registration.h"
#include "sequences.h"

namespace gsd {
namespace {

void check_merged(const MergeCall& call) {
  const int32_t needed = *std::max_element(call.args.first.num_nodes, call.args.first.num_nodes + call.batch);
  STD_TORCH_CHECK(needed <= call.sizes.capacity, "merge: the level needs ", needed, " nodes, the graph holds ",
                  call.sizes.capacity);
}

void commit_kv(const CommitCall& call) {
  const std::vector<CacheTensor>& caches = call.caches;
  const int64_t batch = call.batch, width = call.path;
  const int32_t *rows = call.accepted_rows, *accepted = call.num_accepted;
  int32_t* lengths = call.kv_len;
  for (int64_t b = 0; b < batch; b++) {
    STD_TORCH_CHECK(accepted[b] >= 0 && accepted[b] <= width, "num_accepted: ", accepted[b], " of ", width, " rows");
    for (int64_t i = 0; i < accepted[b]; i++) {
      const int64_t last = lengths[b] + std::max<int64_t>(rows[b * width + i], i);
      for (const CacheTensor& cache : caches) {
        STD_TORCH_CHECK(lengths[b] >= 0 && last < cache.slots, "commit_kv: position ", last, " is outside the cache's ",
                        cache.slots);
      }
    }
  }

  constexpr int64_t kCopiesPerThread = 64;
  torch::stable::parallel_for(
      0, static_cast<int64_t>(caches.size()) * batch, kCopiesPerThread, [&](int64_t begin, int64_t end) {
        std::vector<char> moved;  // a head's accepted rows: all are read before any is written
        for (int64_t item = begin; item < end; item++) {
          const CacheTensor& cache = caches[item / batch];
          const int64_t b = item % batch, bytes = cache.row_bytes;
          int64_t stay = 0;  // leading rows that already lie in their place
          while (stay < accepted[b] && rows[b * width + stay] == stay) stay++;
          moved.resize(static_cast<size_t>((accepted[b] - stay) * bytes));
          for (int64_t head = 0; head < cache.heads; head++) {
            char* slots = cache.data + b * cache.batch_stride + head * cache.head_stride +
                          lengths[b] * cache.slot_stride;
            for (int64_t i = stay; i < accepted[b]; i++) {
              const int64_t row = std::max<int64_t>(rows[b * width + i], 0);
              memcpy(moved.data() + (i - stay) * bytes, slots + row * cache.slot_stride, static_cast<size_t>(bytes));
            }
            for (int64_t i = stay; i < accepted[b]; i++) {
              memcpy(slots + i * cache.slot_stride, moved.data() + (i - stay) * bytes, static_cast<size_t>(bytes));
            }
          }
        }
      });
  for (int64_t b = 0; b < batch; b++) lengths[b] += accepted[b];
}

}  // namespace
}  // namespace gsd

GSD_OPS(CPU, m) {
  using namespace gsd;
  Op<prepare_merge, &run_sequences, check_merged>::add(m, "merge");
  Op<prepare_flatten, &run_sequences>::add(m, "flatten");
  Op<prepare_verify, &run_sequences>::add(m, "verify");
  Op<prepare_commit, commit_kv>::add(m, "commit_kv");
}
