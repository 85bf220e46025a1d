// Instructions beyond the baseline for the functions of one translation unit, after all its headers.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define GSD_X86 1
#include <immintrin.h>
#define GSD_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define GSD_BEGIN_TARGET(names) GSD_PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
#define GSD_END_TARGET GSD_PRAGMA(clang attribute pop)
#else
// GCC 12 warns of the registers that its own AVX-512 headers leave undefined on purpose.
#define GSD_BEGIN_TARGET(names)                                                              \
  GSD_PRAGMA(GCC diagnostic push) GSD_PRAGMA(GCC diagnostic ignored "-Wmaybe-uninitialized") \
  GSD_PRAGMA(GCC diagnostic ignored "-Wuninitialized") GSD_PRAGMA(GCC push_options) GSD_PRAGMA(GCC target(names))
#define GSD_END_TARGET GSD_PRAGMA(GCC pop_options) GSD_PRAGMA(GCC diagnostic pop)
#endif
#else
#define GSD_X86 0
#endif
