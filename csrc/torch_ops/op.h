// An op from its halves: a function that picks from arguments that were held against the op's line what the algorithm
// takes (the prepare_… of this folder's headers), and one that does the work.
#pragma once

#include "arguments.h"

namespace gsd {

// A call of an op that works on every sequence by itself.
template <class Sizes, class Args>
struct Call {
  Sizes sizes;
  Args args;  // of the first sequence
  int64_t batch;
};

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

// Without the second half the first one does all.
template <auto prepare, auto... perform>
struct Op : NamedOp<Op<prepare, perform...>> {
  static void boxed(StableIValue* stack, uint64_t, uint64_t) {
    Arguments arguments(Op::line(), stack);
    if constexpr (sizeof...(perform) == 0) {
      prepare(arguments);
    } else {
      (perform(prepare(arguments)), ...);
    }
    arguments.give(stack);
  }
};

// What a call returns where there is no line: its outputs, or nothing.
template <class Call>
auto outputs_of(const Call& call, int) -> decltype(call.outputs) {
  return call.outputs;
}
template <class Call>
void outputs_of(const Call&, long) {}

// The same where the op's arguments are those of `prepare`.
template <auto prepare, auto perform>
struct TypedOp;

template <class Call, class... Arguments, Call (*prepare)(Arguments...), auto perform>
struct TypedOp<prepare, perform> {
  static auto call(Arguments... arguments) {
    const Call call = prepare(arguments...);
    perform(call);
    return outputs_of(call, 0);
  }
};

}  // namespace gsd
