// An op from its halves: a function that checks its tensors, unpacks them and allocates its outputs (the prepare_… of
// this folder's headers), and one that does the work. The op's arguments are those of the former.
#pragma once

namespace gsd {

// What an op returns: its call's outputs, or nothing.
template <class Call>
auto outputs_of(const Call& call, int) -> decltype(call.outputs) {
  return call.outputs;
}
template <class Call>
void outputs_of(const Call&, long) {}

template <auto prepare, auto perform>
struct Op;

template <class Call, class... Arguments, Call (*prepare)(Arguments...), auto perform>
struct Op<prepare, perform> {
  static auto call(Arguments... arguments) {
    const Call call = prepare(arguments...);
    perform(call);
    return outputs_of(call, 0);
  }
};

}  // namespace gsd
