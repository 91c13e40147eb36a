// The ops of a graph, checked and ready to run: what program.cpp makes and other exports run, too.
#pragma once

#include <vector>

#include "exports.h"
#include "pool.h"

namespace llmctl {

struct Program {
  std::vector<Op> ops;
  float* shared = nullptr;
  bool uses_cache = false;
  bool continues = false;  // rows of what an earlier step left, and not its own
  Ranks* ranks = nullptr;  // null: one
  ~Program();
};

// Check a step and run it; the caller holds the pool's step_mutex. A `Status`.
int run_program(const Program& program, const Step& step, Pool& pool);

}  // namespace llmctl
