// What the files of exported C functions share.
#pragma once

#include "abi.h"
#include "ranks.h"

#define LLMCTL_EXPORT extern "C" __attribute__((visibility("default")))

namespace llmctl {

// What an exported function returns; llmctl_message() says more in the calling thread.
enum Status : int { kDone = 0, kBadStep = 1, kOutOfMemory = 2, kUnsupported = 3, kRankLost = 4 };

// The instruction-set variant in use.
const Kernels& kernels();

// kOutOfMemory, with a message; `what` holds one %lld.
int fail_for_memory(const char* what, long long count);

// kBadStep, with a message; `what` holds two %lld.
int fail_for_step(const char* what, long long found, long long limit);

// kRankLost, with a message.
int fail_for_rank(const RankLost& lost);

}  // namespace llmctl
