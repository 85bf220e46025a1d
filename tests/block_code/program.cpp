// The program of problems.h.
#include "problems.h"

using namespace gsd;

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  for (const Tool& tool : all_tools) {
    if (strcmp(argv[1], tool.name) == 0) return tool.print(argc - 2, argv + 2), 0;
  }
  if (argc < 4) return 2;
  if (argc > 5) planted = {argv[4], argv[5]};
  std::mt19937 random(static_cast<unsigned>(atoi(argv[3])));
  for (const Problem& problem : all_problems) {
    if (strcmp(argv[1], problem.name) != 0) continue;
    for (int round = 0; round < atoi(argv[2]); round++) {
      if (!problem.right(round, random)) return fprintf(stderr, "round %d is wrong\n", round), kWrong;
    }
    return 0;
  }
  return 2;
}
