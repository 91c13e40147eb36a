// One instruction-set variant: every operator's kernel, compiled once per LLMCTL_ISA.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own AVX-512 header warns about its deliberately undefined registers (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include "../../ops/add/cpu.cpp"
#include "../../ops/all_reduce/cpu.cpp"
#include "../../ops/beam_search/cpu.cpp"
#include "../../ops/concat/cpu.cpp"
#include "../../ops/embedding/cpu.cpp"
#include "../../ops/expand_logits/cpu.cpp"
#include "../../ops/gather_rows/cpu.cpp"
#include "../../ops/linear/cpu.cpp"
#include "../../ops/paged_attention/cpu.cpp"
#include "../../ops/quantize/cpu.cpp"
#include "../../ops/recurrence/cpu.cpp"
#include "../../ops/rms_norm/cpu.cpp"
#include "../../ops/rope_kv_write/cpu.cpp"
#include "../../ops/sampling/cpu.cpp"
#include "../../ops/all_gather/cpu.cpp"  // chooses with the function of sampling
#include "../../ops/silu/cpu.cpp"
#include "../../ops/swiglu/cpu.cpp"
#include "measure.cpp"

#define LLMCTL_JOIN(a, b) a##b
#define LLMCTL_TABLE(isa) LLMCTL_JOIN(kernels_, isa)

namespace llmctl {

const Kernels LLMCTL_TABLE(LLMCTL_ISA) = {
    {
        LLMCTL_ISA::run_embedding,
        LLMCTL_ISA::run_rms_norm,
        LLMCTL_ISA::run_linear,
        LLMCTL_ISA::run_rope_kv_write,
        LLMCTL_ISA::run_paged_attention,
        LLMCTL_ISA::run_swiglu,
        LLMCTL_ISA::run_quantize,
        LLMCTL_ISA::run_gather_rows,
        LLMCTL_ISA::run_silu,
        LLMCTL_ISA::run_recurrence,
        LLMCTL_ISA::run_concat,
        LLMCTL_ISA::run_expand_logits,
        LLMCTL_ISA::run_all_reduce,
        LLMCTL_ISA::run_all_gather,
        LLMCTL_ISA::run_add,
    },
    LLMCTL_ISA::argmax_rows,
    LLMCTL_ISA::sample_rows,
    LLMCTL_ISA::processed_probs,
    LLMCTL_ISA::draw_from_probs,
    LLMCTL_ISA::uniforms,
    LLMCTL_ISA::log_softmax_at,
    LLMCTL_ISA::top_log_probs,
    LLMCTL_ISA::read_memory,
    LLMCTL_ISA::multiply_add,
};

}  // namespace llmctl
