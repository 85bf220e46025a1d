// The proposals and tables of learn_source.
#pragma once

#include "../algorithms/learn.h"
#include "op.h"

namespace gsd {

using LearnCall = Call<LearnSizes, LearnArgs>;  // all sequences in place of one

inline LearnCall prepare_learn(Arguments& in) {
  static const Line line("node_ids[B,W] tokens[B,W,K] log_probs[B,W,K] index?[B,W] first_tokens[B,W,K] first_log_probs[B,W,K]");
  const size_t parts = line.entries.size(), levels = in.list("asked").size() / parts;
  STD_TORCH_CHECK(levels >= 1 && levels <= kMostLevels && levels * parts == in.list("asked").size(), "asked: expected ",
                  parts, " tensors of each of 1 ... ", kMostLevels, " levels");
  STD_TORCH_CHECK(in['E'] >= 1, "start: expected at least one entry");
  LearnCall call{{}, {}, 1};
  LearnArgs& a = call.args;
  for (size_t i = 0; i < levels; i++) {
    Tensors some;
    for (size_t part = 0; part < parts; part++) some.push_back(in.list("asked")[part * levels + i]);
    Arguments level(line, in, "BK", some.data());
    a.levels[i] = level.fill<LearnLevel, 6>();
    a.levels[i].width = level.size('W');
    in.set('K', level['K']);
  }
  call.sizes = {in.size('B'), in.size('P'), in.size('K'), narrow(levels), in.size('E')};
  a.nodes = in.next(), a.picked = in.next(), a.start = in.next();
  a.shares = in.next(), a.counts = in.next(), a.weights = in.next();
  a.entry = in.scratch<int32_t>(call.sizes.nodes()), a.parts = in.scratch<float>(call.sizes.nodes());
  a.prior_count = static_cast<float>(in.real('c')), a.memory = static_cast<float>(in.real('m'));
  return call;
}

}  // namespace gsd
