// An op's arguments and results as one line says them, in the order of its schema; gsd_kernels/ops/table.py tells it when
// the op is defined (gsd_line):
//
//     "graph!{ token_ids[B,N] scores:float32[B,N] } slots?[B,R] x:float[...] level:int=v -> [B,R/32] float32[D+1]"
//
// A letter is one size, or one number, wherever it stands; R/32: the words of a mask over R; D+1: one more. `?`: may be
// absent. Braces: a list of tensors, which may end before those that may be absent; `...` at its end: any number of them,
// which are all asked for by the list's name. `=`: a number, or as many as there are letters; `ints` without: any number
// of them. Behind the arrow: results. dtypes are those of the pointers that are picked, which are into memory without
// gaps; Python reads dtypes here.
#pragma once

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <type_traits>

#include "../algorithms/group.h"
#include "common.h"

namespace gsd {

class Line {
 public:
  struct Size {
    char letter;  // 0: none
    int64_t added;
    bool words;
  };

  struct Entry {  // a tensor: an argument, one of a list, or a result
    std::string name;
    std::vector<Size> sizes;
    bool optional, any_shape;
  };

  enum class Kind { kTensor, kMaybe, kList, kNumber, kMaybeNumber, kNumbers };

  struct Argument {
    Kind kind;
    std::string name, letters;  // of numbers
    size_t most, least;         // tensors of a list, or how many numbers
    bool any = false;           // of them
  };

  // What an op's line is; threads tell it, and look for it, at any time.
  static void tell(const char* op, const char* line) {
    const std::lock_guard<std::mutex> guard(mutex_);
    told_.emplace(op, line);
  }
  static Line of(const char* op) {
    const std::lock_guard<std::mutex> guard(mutex_);
    return Line(told_.at(op));
  }

  explicit Line(const std::string& text) {
    std::istringstream words(text);
    bool in_list = false, behind_arrow = false;
    for (std::string word; words >> word;) {
      const std::string name = word.substr(0, word.find_first_of("?!:[{"));
      const std::string rest = word.substr(std::min(word.size(), word.find_first_of("[={")));
      const bool optional = word.find('?') != std::string::npos;
      if (word == "->" || word == "}") {
        behind_arrow = word == "->", in_list = false;
      } else if (rest == "{") {
        arguments.push_back({Kind::kList, name, "", 0, 0}), in_list = true;
      } else if (word == "...") {
        arguments.back().any = true;
      } else if (rest.empty()) {
        arguments.push_back({Kind::kNumbers, name, "", 0, 0, true});
      } else if (rest[0] == '=') {
        const size_t count = rest.size() - 1;
        const Kind one = optional ? Kind::kMaybeNumber : Kind::kNumber;
        if (count == 1) arguments.push_back({one, name, rest.substr(1), 0, 0});
        if (count > 1) arguments.push_back({Kind::kNumbers, name, rest.substr(1), count, count});
      } else {
        const bool any_shape = rest == "[...]";
        entries.push_back({name, any_shape ? std::vector<Size>() : sizes_of(rest), optional, any_shape});
        if (behind_arrow) {
          results++;
        } else if (in_list) {
          arguments.back().most++, arguments.back().least += !optional;
        } else {
          arguments.push_back({optional ? Kind::kMaybe : Kind::kTensor, name, "", 0, 0});
        }
      }
    }
  }

  std::vector<Argument> arguments;
  std::vector<Entry> entries;  // results behind all others
  size_t results = 0;

 private:
  inline static std::mutex mutex_;
  inline static std::map<std::string, std::string> told_;

  static std::vector<Size> sizes_of(const std::string& brackets) {
    std::vector<Size> sizes;
    std::istringstream parts(brackets.substr(brackets.find('[') + 1));
    for (std::string part; std::getline(parts, part, ',') && part != "]";) {
      const bool letter = std::isalpha(part[0]), words = part[1] == '/';
      const std::string number = part.substr(!letter ? 0 : part[1] == '+' ? 2 : part.size());
      sizes.push_back({letter ? part[0] : '\0', number.empty() ? 0 : std::stoll(number), words});
    }
    return sizes;
  }
};

class Arguments {
 public:
  // Takes the arguments of a boxed call from its stack. Raises unless they are as the line says.
  Arguments(const Line& line, StableIValue* stack) : line_(line) {
    tensors.reserve(line.entries.size());
    results.reserve(line.results);
    const Line::Argument* uneven = nullptr;
    size_t got = 0;
    for (const Line::Argument& argument : line.arguments) {  // all are taken before any is refused: they are owned here
      const size_t given = take(argument, *stack++);
      if (!argument.any && given != argument.most && given != argument.least) uneven = &argument, got = given;
    }
    if (uneven != nullptr) {
      const std::string fewer = uneven->least < uneven->most ? " or " + std::to_string(uneven->least) : "";
      STD_TORCH_CHECK(false, uneven->name, ": expected ", uneven->most, fewer,
                      uneven->kind == Line::Kind::kList ? " tensors" : "", ", got ", got);
    }
    for (size_t i = 0; i < tensors.size(); i++) {
      if (tensors[i]) hold(line.entries[i], *tensors[i]);
    }
  }

  // Some tensors of a list, held against a line of their own, in which `letters` are what they are outside. One that may
  // be absent is so where it is empty.
  Arguments(const Line& line, const Arguments& outside, const char* letters, const Tensor* some) : line_(line) {
    for (; *letters != '\0'; letters++) {
      if (outside.has(*letters)) set(*letters, outside[*letters]);
    }
    for (const Line::Entry& entry : line.entries) {
      const bool absent = entry.optional && some->numel() == 0;
      tensors.push_back(absent ? MaybeTensor() : MaybeTensor(*some));
      if (!absent) hold(entry, *some);
      some++;
    }
  }

  // What a letter stands for; 0 where nothing said it.
  int64_t operator[](char letter) const { return sizes_[static_cast<int>(letter)]; }
  int size(char letter) const { return narrow((*this)[letter]); }
  double real(char letter) const {
    double number;
    std::memcpy(&number, &sizes_[static_cast<int>(letter)], sizeof(number));
    return number;
  }
  void set(char letter, int64_t size) {
    sizes_[static_cast<int>(letter)] = size;
    known_[static_cast<int>(letter)] = true;
  }

  bool has(char letter) const { return known_[static_cast<int>(letter)]; }

  const Tensor& tensor(const char* name) const { return *tensors[place(name)]; }
  bool has(const char* name) const { return tensors[place(name)].has_value(); }
  const Tensors& list(const char* name) const { return lists.at(name); }
  const std::vector<int64_t>& numbers(const char* name) const { return numbers_.at(name); }

  // Raises unless `count` tensors from the one of that name on are all there, or none.
  void together(const char* name, size_t count) const {
    std::string names = name;
    bool alike = true;
    for (size_t i = place(name) + 1; count > 1; i++, count--) {
      names += ", " + line_.entries[i].name;
      alike = alike && tensors[i].has_value() == has(name);
    }
    STD_TORCH_CHECK(alike, names, ": expected all or none");
  }

  // A tensor's memory, of the type that is asked for, any for void; null where it is absent. `step` is told how many bytes
  // lie from the elements of one `unit` to those of the next.
  struct Memory {
    Arguments* arguments;
    size_t place;
    const char* unit = "";
    int32_t* step = nullptr;
    template <class T>
    operator T*() const {
      T* const memory = arguments->pick<T>(place);
      if constexpr (!std::is_void_v<T>) {
        if (step != nullptr && memory != nullptr) *step = arguments->step(place, unit, sizeof(T));
      }
      return memory;
    }
  };
  Memory at(const char* name) { return {this, place(name)}; }
  // The next one; behind the arguments a result's, which is allocated then.
  Memory next() { return {this, next_++}; }
  Memory result() { return {this, tensors.size()}; }

  // The next result of a dtype that the line does not say.
  Tensor& result(ScalarType dtype) {
    std::vector<int64_t> shape;
    for (const Line::Size& size : line_.entries[tensors.size() + results.size()].sizes) shape.push_back(of(size));
    results.push_back(torch::stable::new_empty(first(), shape, dtype));
    return results.back();
  }

  // Working memory, for as long as the arguments are there; on a GPU for what is launched until then.
  template <class T>
  T* scratch(int64_t count) {
    scratch_.push_back(fresh<T>(first(), {count}));
    return static_cast<T*>(scratch_.back().mutable_data_ptr());
  }

  // A struct of pointers, in the line's order, for each of `unit`: the letters of sizes that come first.
  template <class Struct>
  Each<Struct> each(const char* unit = "B") {
    return each<Struct>(unit, std::make_index_sequence<Each<Struct>::kPointers>());
  }
  // The first of them.
  template <class Struct>
  Struct fill() {
    return each<Struct>().first;
  }

  void give(StableIValue* stack) const {
    for (const Tensor& result : results) *stack++ = torch::stable::detail::from(result);
  }

  const Tensor& first() const {
    size_t i = 0;
    while (!tensors[i]) i++;
    return *tensors[i];
  }

  std::vector<MaybeTensor> tensors;
  std::map<std::string, Tensors> lists;  // those of any number
  Tensors results;

 private:
  size_t place(const char* name) const {
    size_t i = 0;
    while (line_.entries[i].name != name) i++;
    return i;
  }

  // How many tensors a list has, or numbers; 0 for others.
  size_t take(const Line::Argument& argument, StableIValue value) {
    using torch::stable::detail::to;
    switch (argument.kind) {
      case Line::Kind::kTensor:
        tensors.emplace_back(to<Tensor>(value));
        return 0;
      case Line::Kind::kMaybe:
        tensors.push_back(to<MaybeTensor>(value));
        return 0;
      case Line::Kind::kNumber:
        set(argument.letters[0], static_cast<int64_t>(value));
        return 0;
      case Line::Kind::kMaybeNumber:
        if (const auto number = to<std::optional<int64_t>>(value)) set(argument.letters[0], *number);
        return 0;
      case Line::Kind::kNumbers: {
        auto numbers = to<std::vector<int64_t>>(value);
        const size_t given = numbers.size();
        for (size_t i = 0; i < std::min(given, argument.most); i++) set(argument.letters[i], numbers[i]);
        if (argument.any) numbers_.emplace(argument.name, std::move(numbers));
        return given;
      }
      default: {
        Tensors list = to<Tensors>(value);
        const size_t given = list.size();
        for (size_t i = 0; i < argument.most; i++) tensors.push_back(i < given ? MaybeTensor(list[i]) : MaybeTensor());
        if (argument.any) lists.emplace(argument.name, std::move(list));
        return given;
      }
    }
  }

  int64_t of(const Line::Size& size) const {
    const int64_t letters = (*this)[size.letter];
    return size.words ? (letters + 31) / 32 : letters + size.added;
  }

  void hold(const Line::Entry& entry, const Tensor& t) {
    if (!entry.any_shape) {
      const int64_t dims = static_cast<int64_t>(entry.sizes.size());
      STD_TORCH_CHECK(t.dim() == dims, entry.name, ": expected ", dims, " dimensions, got ", t.dim());
    }
    int64_t d = 0;
    for (const Line::Size& size : entry.sizes) {
      const int64_t got = t.size(d);
      if (size.letter != '\0' && !known_[static_cast<int>(size.letter)]) set(size.letter, got);
      STD_TORCH_CHECK(got == of(size), entry.name, ": expected size ", of(size), " in dimension ", d, ", got ", got);
      d++;
    }
  }

  template <class T>
  T* pick(size_t place) {
    if constexpr (!std::is_void_v<T>) {
      constexpr ScalarType dtype = torch::headeronly::CppTypeToScalarType<std::remove_const_t<T>>::value;
      if (place >= tensors.size()) return static_cast<T*>(result(dtype).mutable_data_ptr());
      STD_TORCH_CHECK(!tensors[place] || tensors[place]->scalar_type() == dtype, line_.entries[place].name,
                      ": wrong dtype");
    }
    const MaybeTensor& t = tensors[place];
    if (!t) return nullptr;
    STD_TORCH_CHECK(t->is_contiguous(), line_.entries[place].name, ": must be contiguous");
    if constexpr (std::is_const_v<T>) {
      return static_cast<T*>(t->const_data_ptr());
    } else {
      return static_cast<T*>(t->mutable_data_ptr());
    }
  }

  // Bytes of one unit, of elements of so many; 0 where all share them.
  int32_t step(size_t place, const char* unit, int64_t bytes) const {
    const Line::Entry& entry = line_.entries[place];
    for (const Line::Size& size : entry.sizes) {
      if (*unit == '\0') {
        bytes *= of(size);
      } else if (size.letter != *unit++) {
        return 0;
      }
    }
    if (*unit != '\0') return 0;
    STD_TORCH_CHECK(bytes <= INT32_MAX || (*this)['B'] <= 1, entry.name, ": expected less than 2 GiB a sequence, got ", bytes);
    return static_cast<int32_t>(bytes);
  }

  template <class Struct, size_t... i>
  Each<Struct> each(const char* unit, std::index_sequence<i...>) {
    Each<Struct> all{};
    all.first = Struct{Memory{this, next_++, unit, &all.steps[i]}...};
    return all;
  }

  const Line& line_;
  int64_t sizes_['z' + 1] = {};
  bool known_['z' + 1] = {};
  size_t next_ = 0;
  std::map<std::string, std::vector<int64_t>> numbers_;
  Tensors scratch_;
};

}  // namespace gsd
