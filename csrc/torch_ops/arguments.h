// An op's arguments and results as one line says them, in the order of its schema; gsd_kernels/ops/table.py tells it when
// the op is defined (gsd_line):
//
//     "graph!{ token_ids[B,N] scores:float32[B,N] } slots?[B,R] x:float[...] level:int=v -> [B,R/32] float32[D+1]"
//
// A letter is one size, or one number, wherever it stands; R/32: the words of a mask over R; D+1: one more. `?`: may be
// absent. Braces: a list of tensors, which may end before those that may be absent. `=`: a number, or as many as there
// are letters. Behind the arrow: results. dtypes are those of the pointers that are picked; Python reads them here.
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

  enum class Kind { kTensor, kMaybe, kList, kNumber, kNumbers };

  struct Argument {
    Kind kind;
    std::string name, letters;  // of numbers
    size_t most, least;         // tensors of a list, or how many numbers
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
      if (word == "->" || word == "}") {
        behind_arrow = word == "->", in_list = false;
      } else if (rest == "{") {
        arguments.push_back({Kind::kList, name, "", 0, 0}), in_list = true;
      } else if (rest[0] == '=') {
        const size_t count = rest.size() - 1;
        if (count == 1) arguments.push_back({Kind::kNumber, name, rest.substr(1), 0, 0});
        if (count > 1) arguments.push_back({Kind::kNumbers, name, rest.substr(1), count, count});
      } else {
        const bool optional = word.find('?') != std::string::npos;
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
    results_.reserve(line.results);
    const Line::Argument* uneven = nullptr;
    size_t got = 0;
    for (const Line::Argument& argument : line.arguments) {  // all are taken before any is refused: they are owned here
      const size_t given = take(argument, *stack++);
      if (given != argument.most && given != argument.least) uneven = &argument, got = given;
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

  const Tensor& tensor(const char* name) const { return *tensors[place(name)]; }
  bool has(const char* name) const { return tensors[place(name)].has_value(); }

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

  // The next tensor's memory, of the type that is asked for; null where it is absent. Behind the arguments a result's,
  // which is allocated then.
  struct Next {
    Arguments* arguments;
    template <class T>
    operator T*() const {
      return arguments->pick<T>();
    }
  };
  Next next() { return {this}; }

  // A struct that begins with `count` pointers, in the line's order.
  template <class Struct, size_t count>
  Struct fill() {
    return fill<Struct>(std::make_index_sequence<count>());
  }

  void give(StableIValue* stack) const {
    for (const Tensor& result : results_) *stack++ = torch::stable::detail::from(result);
  }

  const Tensor& first() const {
    size_t i = 0;
    while (!tensors[i]) i++;
    return *tensors[i];
  }

  std::vector<MaybeTensor> tensors;

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
      case Line::Kind::kNumbers: {
        const auto numbers = to<std::vector<int64_t>>(value);
        for (size_t i = 0; i < std::min(numbers.size(), argument.most); i++) set(argument.letters[i], numbers[i]);
        return numbers.size();
      }
      default: {
        Tensors list = to<Tensors>(value);
        for (size_t i = 0; i < argument.most; i++) {
          tensors.push_back(i < list.size() ? MaybeTensor(std::move(list[i])) : MaybeTensor());
        }
        return list.size();
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
    STD_TORCH_CHECK(t.is_contiguous(), entry.name, ": must be contiguous");
  }

  template <class T>
  T* pick() {
    constexpr ScalarType dtype = torch::headeronly::CppTypeToScalarType<std::remove_const_t<T>>::value;
    const Line::Entry& entry = line_.entries[next_];
    if (next_++ >= tensors.size()) {
      std::vector<int64_t> shape;
      for (const Line::Size& size : entry.sizes) shape.push_back(of(size));
      results_.push_back(torch::stable::new_empty(first(), shape, dtype));
      return static_cast<T*>(results_.back().mutable_data_ptr());
    }
    const MaybeTensor& t = tensors[next_ - 1];
    if (!t) return nullptr;
    STD_TORCH_CHECK(t->scalar_type() == dtype, entry.name, ": wrong dtype");
    if constexpr (std::is_const_v<T>) {
      return static_cast<T*>(t->const_data_ptr());
    } else {
      return static_cast<T*>(t->mutable_data_ptr());
    }
  }

  template <class Struct, size_t... i>
  Struct fill(std::index_sequence<i...>) {
    return {(static_cast<void>(i), next())...};
  }

  const Line& line_;
  int64_t sizes_['z' + 1] = {};
  bool known_['z' + 1] = {};
  size_t next_ = 0;
  Tensors results_;
};

}  // namespace gsd
