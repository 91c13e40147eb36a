// The C functions that Python calls: programs, threads, instruction sets.
//
// Functions return 0, or a code of `Status`; llmctl_message() says more in the calling thread. The
// ops were checked against their specs before they came here. A step's integers are checked here,
// because a wrong one would read or write outside the tensors.
#include <atomic>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "abi.h"
#include "pool.h"
#include "program.h"
#include "step_checks.h"

namespace llmctl {
namespace {

struct Isa {
  const char* name;
  const Kernels* kernels;
};

// Best first.
std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
#if defined(__x86_64__) && !defined(LLMCTL_DEBUG)  // debug builds have the portable variant
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    isas.push_back({"v4", &kernels_v4});
  }
  if (v3) isas.push_back({"v3", &kernels_v3});
#endif
  isas.push_back({"generic", &kernels_generic});
  return isas;
}

std::atomic<const Kernels*> g_kernels{nullptr};

constexpr int64_t kMaxRowFloats = kScratchBytes / 4 - 16;  // a row of a row-wise op in scratch

int check_op(const Op& op, const Ranks* ranks) {
  const TensorRef* t = op.tensors;
  switch (op.kind) {
    case kAllReduce:
    case kAllGather: {
      const int64_t count = ranks == nullptr ? 1 : ranks->count();
      if (op.integers[0] != count) {
        return fail(kUnsupported, "an operator over %lld ranks where %lld run",
                    (long long)op.integers[0], (long long)count);
      }
      if (t[0].shape[1] * dtype_bytes(t[0].dtype) > kSlotBytes) {
        return fail(kUnsupported, "rows of %lld numbers over ranks; the limit is %lld",
                    (long long)t[0].shape[1], (long long)(kSlotBytes / dtype_bytes(t[0].dtype)));
      }
      return kDone;
    }
    case kRmsNorm:
    case kQuantize:
    case kSwiglu: {
      const int64_t width = op.kind == kSwiglu ? t[0].shape[1] / 2 : t[0].shape[1];
      if (width > kMaxRowFloats) {
        return fail(kUnsupported, "rows of %lld elements; the limit is %lld", (long long)width,
                    (long long)kMaxRowFloats);
      }
      return kDone;
    }
    case kRopeKvWrite:
    case kPagedAttention:
      if (op.integers[0] < 0 || op.integers[1] < 1 || op.integers[2] < 1) {
        return fail(kBadStep, "layer %lld of %lld heads and %lld of keys and values",
                    (long long)op.integers[0], (long long)op.integers[1],
                    (long long)op.integers[2]);
      }
      if (op.integers[3] < 2 || op.integers[3] > kMaxHeadSize || op.integers[3] % 2 != 0) {
        return fail(kUnsupported, "head_size %lld; it must be even and at most %d",
                    (long long)op.integers[3], kMaxHeadSize);
      }
      return kDone;
    default: return kDone;
  }
}

int check_step(const Program& program, const Step& step) {
  if (!program.continues) {
    if (int bad = check_range("logit_rows", step.logit_rows, step.num_rows, step.num_tokens)) {
      return bad;
    }
  }
  if (program.uses_cache) {
    if (int bad = check_requests(step)) return bad;
  }
  for (const Op& op : program.ops) {
    const TensorRef* t = op.tensors;
    int bad = kDone;
    if (op.kind == kEmbedding) {
      bad = check_range("token_ids", step.token_ids, step.num_tokens, t[0].shape[0]);
    } else if (op.kind == kRopeKvWrite) {
      bad = check_range("position_ids", step.position_ids, step.num_tokens, t[1].shape[0]);
    }
    if (op.kind == kRopeKvWrite || op.kind == kPagedAttention) {
      const bool has_layer = 0 <= op.integers[0] && op.integers[0] < step.num_layers;
      if (!has_layer || op.integers[2] != step.num_kv_heads ||
          op.integers[3] != step.head_size) {
        bad = fail(kBadStep, "the KV cache has %d layers of %d heads of %d, the engine differs",
                   step.num_layers, step.num_kv_heads, step.head_size);
      }
    }
    const bool is_gather = op.kind == kGatherRows;
    const int64_t capacity = t[op.kind == kEmbedding || is_gather ? 1 : 0].shape[0];
    const int64_t needed = is_gather ? step.num_rows : rows_of(op, step);
    if (bad == kDone && is_gather && step.num_tokens > t[0].shape[0]) {
      bad = fail(kBadStep, "rows of %d tokens in the step are gathered from %lld", step.num_tokens,
                 (long long)t[0].shape[0]);
    }
    if (op.kind == kRecurrence) {
      for (int role = 1; role <= 2 && bad == kDone; ++role) {  // what is continued, if anything is
        if (t[role].data == nullptr) continue;
        bad = check_range("logit_rows", step.logit_rows, step.num_rows, t[role].shape[0]);
      }
      if (bad == kDone && needed > step.num_rows) {
        bad = fail(kBadStep, "%lld rows continue %d", (long long)needed, step.num_rows);
      }
    }
    if (bad == kDone && (op.kind == kConcat || op.kind == kAdd) && needed > t[1].shape[0]) {
      bad = fail(kBadStep, "%lld rows in the step are joined with %lld", (long long)needed,
                 (long long)t[1].shape[0]);
    }
    if (bad == kDone && op.kind == kAllGather && step.best_ids != nullptr && !op.integers[1] &&
        (!op.uses_rows || program.ranks == nullptr)) {
      bad = fail(kBadStep, "best ids of logits that no other rank has parts of");
    }
    if (bad == kDone && needed > capacity) {
      bad = fail(kBadStep, "%lld rows in the step; the engine was built for at most %lld",
                 (long long)needed, (long long)capacity);
    }
    if (bad != kDone) return bad;
  }
  return kDone;
}

}  // namespace

const Kernels& kernels() {
  const Kernels* chosen = g_kernels.load();
  if (chosen == nullptr) {
    chosen = available_isas().front().kernels;
    g_kernels.store(chosen);
  }
  return *chosen;
}

int fail_for_memory(const char* what, long long count) {
  return fail(kOutOfMemory, what, count);
}

int fail_for_step(const char* what, long long found, long long limit) {
  return fail(kBadStep, what, found, limit);
}

Program::~Program() { std::free(shared); }

int run_program(const Program& program, const Step& step, Pool& pool) {
  if (int bad = check_step(program, step)) return bad;
  Context context{pool, program.shared, program.ranks};
  const Kernels& table = kernels();
  try {
    for (const Op& op : program.ops) {
      if ((op.uses_rows ? step.num_rows : step.num_tokens) > 0) {
        table.run[op.kind](op, step, context);
      }
    }
  } catch (const std::bad_alloc&) {
    return fail(kOutOfMemory, "scratch of %d threads", pool.num_threads());
  } catch (const RankLost& lost) {
    return fail_for_rank(lost);
  }
  return kDone;
}

int fail_for_rank(const RankLost& lost) {
  return fail(kRankLost, lost.loss == kLate ? "rank %d is late" : "rank %d has ended", lost.rank);
}

}  // namespace llmctl

using namespace llmctl;

LLMCTL_EXPORT int32_t llmctl_abi_version() { return kAbiVersion; }
LLMCTL_EXPORT const char* llmctl_source_hash() { return LLMCTL_SOURCE_HASH; }
LLMCTL_EXPORT const char* llmctl_message() { return g_message; }

LLMCTL_EXPORT void llmctl_set_num_threads(int32_t count) { Pool::instance().resize(count); }
LLMCTL_EXPORT int32_t llmctl_num_threads() { return Pool::instance().num_threads(); }

// Names of the usable variants, best first, separated by spaces.
LLMCTL_EXPORT const char* llmctl_isas() {
  static const std::string* names = [] {
    auto* text = new std::string;
    for (const Isa& isa : available_isas()) *text += (text->empty() ? "" : " ") + std::string(isa.name);
    return text;
  }();
  return names->c_str();
}

LLMCTL_EXPORT int32_t llmctl_set_isa(const char* name) {
  for (const Isa& isa : available_isas()) {
    if (std::string(isa.name) == name) {
      g_kernels.store(isa.kernels);
      return kDone;
    }
  }
  return fail(kUnsupported, "instruction set %s; this CPU has %s", name, llmctl_isas());
}

LLMCTL_EXPORT int32_t llmctl_program_create(const Op* ops, int64_t count, Ranks* ranks,
                                            void** program) {
  try {
    auto* fresh = new Program;
    fresh->ranks = ranks;
    *program = fresh;
    fresh->ops.assign(ops, ops + count);
    int64_t floats = 0;
    for (const Op& op : fresh->ops) {
      if (int bad = check_op(op, ranks)) {
        delete fresh;
        return bad;
      }
      fresh->uses_cache |= op.kind == kRopeKvWrite || op.kind == kPagedAttention;
      fresh->continues |= op.kind == kRecurrence;
      floats = shared_floats(op) > floats ? shared_floats(op) : floats;
    }
    if (floats > 0) {
      fresh->shared = static_cast<float*>(std::aligned_alloc(64, floats * sizeof(float)));
      if (fresh->shared == nullptr) {
        delete fresh;
        return fail(kOutOfMemory, "%lld bytes of scratch", (long long)floats * 4);
      }
    }
    return kDone;
  } catch (const std::bad_alloc&) {
    return fail(kOutOfMemory, "a program of %lld ops", (long long)count);
  }
}

LLMCTL_EXPORT void llmctl_program_destroy(void* program) { delete static_cast<Program*>(program); }

LLMCTL_EXPORT int32_t llmctl_run(void* program, const Step* step) {
  Pool& pool = Pool::instance();
  std::lock_guard<std::mutex> lock(pool.step_mutex());
  return run_program(*static_cast<const Program*>(program), *step, pool);
}

// Bytes read, for a buffer far larger than the caches.
LLMCTL_EXPORT double llmctl_measure_read(const float* data, int64_t count) {
  Pool& pool = Pool::instance();
  std::lock_guard<std::mutex> lock(pool.step_mutex());
  return kernels().read(data, count, pool);
}

// Floating-point operations done.
LLMCTL_EXPORT double llmctl_measure_multiply_add(int64_t iterations) {
  Pool& pool = Pool::instance();
  std::lock_guard<std::mutex> lock(pool.step_mutex());
  return kernels().multiply_add(iterations, pool);
}
