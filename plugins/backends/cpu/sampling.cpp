// The C functions that Python calls for sampling (plugins/backends/cpu/sampling.py).
#include <new>

#include "exports.h"
#include "pool.h"

using namespace llmctl;

namespace {

// Runs f(kernels, pool) while nothing else uses the pool.
template <class F>
int32_t with_kernels(int64_t rows, F&& f) {
  Pool& pool = Pool::instance();
  std::lock_guard<std::mutex> lock(pool.step_mutex());
  try {
    f(kernels(), pool);
  } catch (const std::bad_alloc&) {
    return fail_for_memory("scratch to sample %lld rows", rows);
  }
  return kDone;
}

}  // namespace

LLMCTL_EXPORT int32_t llmctl_argmax(const float* logits, int64_t rows, int64_t columns,
                                    int32_t* out) {
  return with_kernels(rows, [&](const Kernels& table, Pool& pool) {
    table.argmax(logits, rows, columns, out, pool);
  });
}

LLMCTL_EXPORT int32_t llmctl_sample(const float* logits, int64_t vocab, const SamplingRow* rows,
                                    int64_t count, int64_t* out) {
  return with_kernels(count, [&](const Kernels& table, Pool& pool) {
    table.sample(logits, vocab, rows, count, out, pool);
  });
}

LLMCTL_EXPORT int32_t llmctl_probs(const float* logits, int64_t vocab, const SamplingRow* rows,
                                   int64_t count, double* out) {
  return with_kernels(count, [&](const Kernels& table, Pool& pool) {
    table.probs(logits, vocab, rows, count, out, pool);
  });
}

LLMCTL_EXPORT int64_t llmctl_draw(const double* probs, int64_t vocab, const SamplingRow* row) {
  return kernels().draw(probs, vocab, *row);
}

LLMCTL_EXPORT void llmctl_uniforms(const SamplingRow* rows, int64_t count, double* out) {
  kernels().uniforms(rows, count, out);
}

LLMCTL_EXPORT int32_t llmctl_log_softmax_at(const float* logits, int64_t vocab,
                                            const int64_t* tokens, int64_t count, double* out) {
  return with_kernels(count, [&](const Kernels& table, Pool& pool) {
    table.log_softmax_at(logits, vocab, tokens, count, out, pool);
  });
}
