// An op from its parts: a function that picks from arguments that were held against the op's line what the algorithm
// takes (the prepare_… of this folder's headers), and those that do the work.
#pragma once

#include "arguments.h"

namespace gsd {

// A call of an op that works on every sequence by itself.
template <class Sizes, class Args>
struct Call {
  Sizes sizes;
  Each<Args> args;
  int64_t batch;
};
template <class Sizes, class Args>
Call(Sizes, Each<Args>, int64_t) -> Call<Sizes, Args>;

// An op and its name, by which its line is found.
template <class Self>
struct NamedOp {
  static void add(torch::stable::detail::StableLibrary& library, const char* op) {
    name = op;
    library.impl(op, Self::boxed);
  }
  static const Line& line() {
    static const Line found = Line::of(name);
    return found;
  }
  inline static const char* name = nullptr;
};

// Pointers to what does the work. Without them the first one does all.
template <auto prepare, auto... perform>
struct Op : NamedOp<Op<prepare, perform...>> {
  static void boxed(StableIValue* stack, uint64_t, uint64_t) {
    Arguments arguments(Op::line(), stack);
    if constexpr (sizeof...(perform) == 0) {
      prepare(arguments);
    } else {
      const auto call = prepare(arguments);
      ((*perform)(call), ...);
    }
    arguments.give(stack);
  }
};

}  // namespace gsd
