// Before everything else in a program of which a test has changed the source in several ways (-include): which of them
// is in force, by GSD_MUTATION of the environment; 0 is none.
#pragma once

#include <cstdlib>

inline int mutation() {
  static const char* const given = std::getenv("GSD_MUTATION");
  static const int number = given == nullptr ? 0 : std::atoi(given);
  return number;
}
