// decoder_rows of the CUDA library with its kernels run on the CPU, as an operator of tensors there:
//
//     gsd_block_code::decoder_rows   as gsd_kernels::decoder_rows; blocks in any order
//     gsd_block_code::feature_rows   as gsd_kernels::feature_rows, likewise
//     gsd_block_code::dag_attention  as gsd_kernels::dag_attention, likewise
//     gsd_block_code::feature_launches  its arguments, and what `launches` returns
//     gsd_block_code::launches       as decoder_rows; what is launched, as numbers of Kernel, in order
//     gsd_block_code::kinds          the same arguments; of every product and attention which code it takes, six numbers
//
// The tensors go through the glue's own checks, and the launches through its own sequence.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>

#include "../../csrc/algorithms/rows_group_product.h"
#include "../../csrc/cuda/rows_tensors.h"
#include "../../csrc/torch_ops/dag_attention.h"
#include "../../csrc/torch_ops/registration.h"
#include "fiber_machine.h"
#include "warpgroup_machine.h"

namespace gsd {
namespace {

enum Kernel : int32_t { kEmbed, kNorm, kProduct, kTurn, kAttend, kCombine, kPair };

struct Recorder {
  bool group;
  std::vector<int32_t> launched{}, kinds{};

  int add(std::initializer_list<int32_t> kernels) {
    launched.insert(launched.end(), kernels);
    return 0;
  }
  int operator()(const RowsEmbed&) { return add({kEmbed}); }
  int operator()(const RowsPair&) { return add({kPair}); }
  int operator()(const RowsNorm&) { return add({kNorm}); }
  int operator()(const RowsProduct& a) {
    const bool groups = group && a.grouped(), norms = a.end == RowsEnd::kTurn && a.turn.q_norm != nullptr;
    kinds.insert(kinds.end(), {kProduct, groups ? a.group_rows() : -a.tile_rows(), groups ? 0 : a.tile_outputs(),
                               static_cast<int>(a.end), a.splits() > 1, norms});
    return add({kProduct});
  }
  int operator()(const RowsTurn& a) {
    kinds.insert(kinds.end(), {kTurn, a.q_norm != nullptr, 0, 0, 0, 0});
    return add({kTurn});
  }
  int operator()(const PathAttentionArgs& a, const PathAttentionSizes& s) {
    kinds.insert(kinds.end(), {kAttend, s.query_rows() <= 16, a.window > 0, s.splits() > 2 * kSplitsPerSize, 0, 0});
    return add({kAttend, kCombine});
  }
};

// Runs body(machine, block) for all blocks in an order of its own: nothing may depend on it.
constexpr auto run_blocks = [](int warps, int blocks, size_t arena, const auto& body) {
  static std::mt19937 random(1);
  std::vector<int> order(static_cast<size_t>(blocks));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  run_grid(warps, blocks, arena,
           [&](FiberMachine& machine, int block) { body(machine, order[static_cast<size_t>(block)]); });
};

template <class Element>
struct BlockLaunches {
  bool group;

  int operator()(const RowsEmbed& a) const {
    run_blocks(kRowWarps, a.rows, 0, [&](FiberMachine& m, int block) { embed_row<Element>(m, a, block); });
    return 0;
  }
  int operator()(const RowsPair& a) const {
    run_blocks(kRowWarps, a.rows, kNormArenaBytes,
               [&](FiberMachine& m, int block) { pair_row<Element>(m, a, block); });
    return 0;
  }
  int operator()(const RowsNorm& a) const {
    run_blocks(kRowWarps, a.batch * a.keep, kNormArenaBytes,
               [&](FiberMachine& m, int block) { norm_row<Element>(m, a, block); });
    return 0;
  }
  int operator()(const RowsProduct& a) const {
    static bool wide = false;
    if (group && a.grouped()) {
      return a.group_rows() == 64 ? grouped<64>(a) : a.group_rows() == 128 ? grouped<128>(a) : grouped<256>(a);
    }
    run_product<Element>(a, wide = !wide, run_blocks);
    return 0;
  }
  int operator()(const RowsTurn& a) const {
    run_turn<Element>(a, run_blocks);
    return 0;
  }
  int operator()(const PathAttentionArgs& a, const PathAttentionSizes& s) const {
    return s.head_dim == 64 ? attend<64>(a, s) : attend<128>(a, s);
  }

 private:
  template <int kHeadDim>
  int attend(const PathAttentionArgs& a, const PathAttentionSizes& s) const {
    run_prefix<Element, kHeadDim>(a, s, run_blocks);
    run_end<Element, kHeadDim>(a, s, run_blocks);
    return 0;
  }
  template <int kRows>
  int grouped(const RowsProduct& a) const {
    using Group = GroupProduct<Element, kRows>;
    const GroupLaunch launch(a, Group::kOutputs, kRows, 2);
    Previous previous;
    previous.write = [] {};
    static bool clustered = false;
    clustered = !clustered;
    run_clusters(
        launch.blocks, launch.cut.splits, clustered, Group::kArenaBytes, Group::kBarriers, launch.sources, previous,
        [&](GroupMachine& m, int block) { Group::run(m, a, launch.cut, block, launch.blocks); });
    return 0;
  }
};

// dag_attention's launches.
template <class Element, int kHeadDim, int kWarps>
void attend(const AttentionArgs& a, const AttentionSizes& s) {
  using Tiles = AttentionTiles<Element, kHeadDim, kWarps>;
  const int rows = s.query_rows(), heads = s.batch * s.kv_heads, parts = (rows + Tiles::kRows - 1) / Tiles::kRows;
  run_blocks(kWarps, parts * heads * s.splits(), Tiles::kArenaBytes, [&](FiberMachine& m, int b) {
    SplitAttention<Element, kHeadDim, kWarps>::run(m, a, s, b % parts, b / parts % heads, b / parts / heads);
  });
  run_blocks(1, heads * rows, 0, [&](FiberMachine& m, int b) { combine_row<Element, kHeadDim>(m, a, s, b / rows, b % rows); });
}
template <class Element, int kHeadDim>
void attend(const AttentionArgs& a, const AttentionSizes& s) {
  switch (attention_block_rows(s.query_rows())) {
    case 16:
      return attend<Element, kHeadDim, 1>(a, s);
    case 32:
      return attend<Element, kHeadDim, 2>(a, s);
    default:
      return attend<Element, kHeadDim, 4>(a, s);
  }
}
template <class Element>
void attend(const AttentionArgs& a, const AttentionSizes& s) {
  s.head_dim == 64 ? attend<Element, 64>(a, s) : attend<Element, 128>(a, s);
}

void attended(Arguments& in) {
  AttentionCall call = prepare_attention(in);
  choose_splits(call.sizes, 12);
  const size_t outputs = static_cast<size_t>(call.sizes.batch) * call.sizes.kv_heads * call.sizes.splits() * call.sizes.query_rows();
  std::vector<float> out(outputs * call.sizes.head_dim, NAN), lse(outputs, NAN);
  call.args.partial_out = out.data(), call.args.partial_lse = lse.data();
  call.bfloat16 ? attend<Bfloat16>(call.args, call.sizes) : attend<Half>(call.args, call.sizes);
}

// With fewer bytes for states than a call would have, where the environment says so.
RowsDecoder limited(const RowsCall& call) {
  RowsDecoder decoder = call.decoder;
  if (const char* bytes = std::getenv("GSD_BLOCK_STATE_BYTES")) decoder.state_bytes = std::atoll(bytes);
  return decoder;
}

void launched(const RowsCall& call) {
  const RowsDecoder decoder = limited(call);
  const RowsForward forward(decoder);
  std::vector<char> memory(static_cast<size_t>(forward.bytes()) + 256, static_cast<char>(0xA5));
  char* const begin = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256);
  memset(begin, 0, static_cast<size_t>(forward.cleared_bytes()));
  BlockLaunches<Half> half{call.decoder.group};
  BlockLaunches<Bfloat16> bfloat16{call.decoder.group};
  const bool is_half = call.outputs[0].scalar_type() == ScalarType::Half;
  const int error = is_half ? forward.run(begin, half) : forward.run(begin, bfloat16);
  STD_TORCH_CHECK(error == 0, "launch failed");
  const auto left = std::count_if(begin, begin + forward.cleared_bytes(), [](char c) { return c != 0; });
  STD_TORCH_CHECK(left == 0, "counters are not left at 0");
  call.repeat_states();
}

template <std::vector<int32_t> Recorder::* numbers>
void recorded(const RowsCall& call) {
  const RowsDecoder decoder = limited(call);
  Recorder recorder{decoder.group};
  RowsForward(decoder).run(nullptr, recorder);
  const std::vector<int32_t>& noted = recorder.*numbers;
  call.outputs = {fresh<int32_t>(call.outputs[0], {static_cast<int64_t>(noted.size())})};
  std::copy(noted.begin(), noted.end(), written<int32_t>(call.outputs[0]));
}
constexpr auto launches = recorded<&Recorder::launched>, kinds = recorded<&Recorder::kinds>;

}  // namespace
}  // namespace gsd

STABLE_TORCH_LIBRARY_IMPL(gsd_block_code, CPU, m) {
  using namespace gsd;
  Op<decoder_call, launched>::add(m, "decoder_rows");
  Op<attended>::add(m, "dag_attention");
  Op<feature_call, launched>::add(m, "feature_rows");
  Op<decoder_call, launches>::add(m, "launches");
  Op<feature_call, launches>::add(m, "feature_launches");
  Op<decoder_call, kinds>::add(m, "kinds");
}
