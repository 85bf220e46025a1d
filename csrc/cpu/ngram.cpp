// The n-gram table's ops on CPU tensors: csrc/algorithms/ngram.h.
#include "../torch_ops/ngram.h"

#include "../torch_ops/registration.h"
#include "sequences.h"

GSD_OPS(CPU, m) {
  using namespace gsd;
  Op<prepare_ngram<NgramInsertArgs>, &run_sequences>::add(m, "ngram_insert");
  Op<prepare_ngram<NgramLookupArgs>, &run_sequences>::add(m, "ngram_lookup");
  Op<prepare_perturb, &run_in_turn>::add(m, "perturb_candidates");
  Op<prepare_mix, &run_sequences>::add(m, "mix_candidates");
}
