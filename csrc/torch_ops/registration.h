// Registration of ops in a namespace that whoever loads the library names (gsd_kernels/compiled.py): so several versions
// of this package, each with ops of its own, live in one process, even where they share one file.
#pragma once

#include "op.h"

namespace gsd {

// A file's ops for one device. They wait in a list until the library is told where they belong.
struct Implementations {
  using Library = torch::stable::detail::StableLibrary;

  Implementations(const char* device, void (*add)(Library&)) : device(device), add(add), next(first) { first = this; }

  const char* device;
  void (*add)(Library&);
  Implementations* next;
  inline static Implementations* first = nullptr;
};

}  // namespace gsd

// For Python's ctypes: implements the ops of `ops` (torch.ops.<ops>), for the rest of the process.
extern "C" __attribute__((used, visibility("default"))) inline void gsd_register(const char* ops) {
  using Init = torch::stable::detail::StableTorchLibraryInit;
  for (const gsd::Implementations* i = gsd::Implementations::first; i != nullptr; i = i->next) {
    new Init(gsd::Implementations::Library::Kind::IMPL, i->add, ops, i->device, __FILE__, __LINE__);
  }
}

// The same: what the arguments of an op are.
extern "C" __attribute__((used, visibility("default"))) inline void gsd_line(const char* op, const char* line) {
  gsd::Line::tell(op, line);
}

// In place of STABLE_TORCH_LIBRARY_IMPL, once a file: GSD_OPS(CPU, m) { Op<row_linear>::add(m, "row_linear"); }
#define GSD_OPS(device, m)                                                              \
  static void add_ops_of_this_file(gsd::Implementations::Library&);                     \
  static const gsd::Implementations ops_of_this_file(#device, &add_ops_of_this_file);   \
  static void add_ops_of_this_file(gsd::Implementations::Library& m)
