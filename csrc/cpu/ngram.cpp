// The n-gram table's ops on CPU tensors: csrc/algorithms/ngram.h run by a group of one thread a sequence.

#include "../torch_ops/ngram.h"
#include "../torch_ops/op.h"
#include "../torch_ops/registration.h"
#include "sequences.h"

namespace gsd {
namespace {

void insert(const NgramInsertCall& call) {
  for_each_sequence(call.batch, NgramArena::bytes(call.sizes), [&](int64_t b, char* arena) {
    SerialGroup group;
    insert_rows(group, call.args.at(call.sizes, b), call.sizes, arena);
  });
}

void look_up(const NgramLookupCall& call) {
  for_each_sequence(call.batch, 0, [&](int64_t b, char*) {
    SerialGroup group;
    look_up_rows(group, call.args.at(call.sizes, b), call.sizes);
  });
}

void perturb_rows(const PerturbCall& call) {
  for (int64_t row = 0; row < call.rows; row++) perturb_row(call.args, row);
}

void mix(const MixCall& call) {
  for_each_sequence(call.batch, MixArena::bytes(call.sizes), [&](int64_t row, char* arena) {
    SerialGroup group;
    mix_row(group, call.args.at(call.sizes, row), call.sizes, arena);
  });
}

}  // namespace
}  // namespace gsd

GSD_OPS(CPU, m) {
  gsd::Op<gsd::prepare_ngram_insert, gsd::insert>::add(m, "ngram_insert");
  gsd::Op<gsd::prepare_ngram_lookup, gsd::look_up>::add(m, "ngram_lookup");
  gsd::Op<gsd::prepare_perturb, gsd::perturb_rows>::add(m, "perturb_candidates");
  gsd::Op<gsd::prepare_mix, gsd::mix>::add(m, "mix_candidates");
}
