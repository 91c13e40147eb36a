// The structs that Python fills (plugins/backends/cpu/program.py) and the table each ISA variant provides.
//
// Everything here is plain data: no Python, no torch, no C++ types cross the boundary. Tensors of
// an op come in the order of its spec (inputs, then outputs); an absent optional role has data ==
// nullptr. Attributes sit at their index in the spec, integers and reals in separate arrays.
#pragma once

#include <cstddef>
#include <cstdint>
#ifdef LLMCTL_DEBUG
#include <cstdio>
#include <cstdlib>
#endif

// What a kernel relies on and specs and steps were checked for: asked again in debug builds alone.
#ifdef LLMCTL_DEBUG
#define LLMCTL_ASSERT(condition)                                                        \
  ((condition) ? (void)0                                                                \
               : (std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition), \
                  std::abort()))
#else
#define LLMCTL_ASSERT(condition) ((void)0)
#endif

namespace llmctl {

class Pool;
class Ranks;

constexpr int32_t kAbiVersion = 13;  // binding.py holds the same number
constexpr int kMaxTensors = 8;
constexpr int kMaxAttributes = 10;
constexpr int64_t kLinearChunkTokens = 504;  // tokens that a product widens at a time
constexpr int kMaxHeadSize = 512;  // bounds the scratch of attention and rope

enum Dtype : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kF8 = 3, kI8 = 4, kI32 = 5 };

enum Kind : int32_t {
  kEmbedding = 0,
  kRmsNorm = 1,
  kLinear = 2,
  kRopeKvWrite = 3,
  kPagedAttention = 4,
  kSwiglu = 5,
  kQuantize = 6,
  kGatherRows = 7,
  kSilu = 8,
  kRecurrence = 9,
  kConcat = 10,
  kExpandLogits = 11,
  kAllReduce = 12,
  kAllGather = 13,
  kAdd = 14,
  kNumKinds = 15,
};

struct TensorRef {
  void* data;
  int32_t dtype;
  int32_t rank;
  int64_t shape[2];
};

struct Op {
  int32_t kind;
  int32_t uses_rows;  // 1: computes the step's logit rows, 0: its tokens
  TensorRef tensors[kMaxTensors];
  int64_t integers[kMaxAttributes];
  double reals[kMaxAttributes];
};

struct Step {
  int32_t num_tokens, num_requests, num_rows, max_blocks;
  const int32_t* token_ids;
  const int32_t* position_ids;
  const int32_t* cu_q;
  const int32_t* kv_len;
  const int32_t* block_tables;
  const int32_t* slot_mapping;
  const int32_t* logit_rows;
  void* kv_cache;  // [layers, blocks, 2, kv heads, tokens_per_block, head_size]
  int32_t kv_dtype, num_layers, num_kv_heads, tokens_per_block, head_size, path_width;
  int64_t num_blocks;
  const int32_t* tree_start;  // null: no request has a tree
  const int32_t* paths;       // [num_paths, path_width]
  int64_t num_paths;
  const int32_t* tree_roots;  // positions of roots that earlier steps stored; null: none
  int32_t* best_ids;  // [num_rows]: of a step that wants no logits from ranks; null: it does
};

// Where the keys are that one token of a tree sees: after the root's position, those of its own path.
struct Path {
  const int32_t* tokens = nullptr;  // null: keys are stored in the order of their positions
  int64_t root = 0;                 // its position
  int64_t place(int64_t position) const {
    return tokens != nullptr && position >= root ? root + tokens[position - root] : position;
  }
};

// The root's position and the paths of a request's tree; no paths if it has none.
inline Path tree_of(const Step& step, int64_t request) {
  if (step.tree_start == nullptr || step.tree_start[request] < 0) return Path{};
  const int64_t count = step.cu_q[request + 1] - step.cu_q[request];
  const bool is_stored = step.tree_roots != nullptr;
  return Path{step.paths + (int64_t)step.tree_start[request] * step.path_width,
              is_stored ? step.tree_roots[request] : step.kv_len[request] - count};
}

// How one row of logits is sampled: SamplingRow of plugins/ops/sampling/spec.py.
struct SamplingRow {
  double temperature, top_p, min_p;  // top_p >= 1 and min_p 0: no filter
  double repetition_penalty, presence_penalty, frequency_penalty;
  uint64_t seed;
  const int32_t* counts;  // [num_counts]; null without penalties
  const int32_t* banned;  // [num_banned]
  int64_t num_counts;
  uint32_t position, stream;
  int32_t top_k;  // 0: no filter
  int32_t num_banned, is_greedy, reserved;
};

// Rows that a step of a recurrent head leaves for the next one: outputs of both programs, and the
// input of `next` that they are copied to.
struct HandedRows {
  const void* from_first;
  const void* from_next;
  void* to;
  int64_t row_bytes;
};

// A beam search of many requests by a recurrent head: runtime/drafting/redrafter/beams.py says what
// is searched, packing.py how beams become a tree.
struct BeamSearch {
  void* first;  // programs: the first step, and every other
  void* next;
  void* first_rest;  // what only a next step needs of them; null: there is none
  void* next_rest;
  const float* first_logits;  // [first_rows, vocab_size]
  const float* next_logits;   // [next_rows, vocab_size]
  HandedRows handed[2];
  int64_t vocab_size;
  int32_t first_rows, next_rows;
  int32_t num_requests, num_beams;
  const int32_t* rows;     // [num_requests] of the target's last step
  const int32_t* roots;    // the tokens that were drawn from them
  const int32_t* lengths;  // of beams, at least 1
  const int32_t* rooms;    // the most drafts
  float least_kept, least_continued;  // scores below which a draft is left out, a beam ends
  int32_t width, num_steps;           // of the arrays below; how many steps the head ran
  int32_t* tokens;   // [num_requests, width]
  int32_t* parents;  // of drafts; -1: the root
  float* scores;     // of the path to each draft
  int32_t* counts;   // [num_requests]
};

inline int64_t rows_of(const Op& op, const Step& step) {
  return op.uses_rows ? step.num_rows : step.num_tokens;
}

constexpr int64_t dtype_bytes(int32_t dtype) {
  return dtype == kF32 || dtype == kI32 ? 4 : dtype == kF8 || dtype == kI8 ? 1 : 2;
}

// What one op may use besides its tensors: the threads, a buffer shared by them, and other ranks.
struct Context {
  Pool& pool;
  float* shared;  // at least shared_floats(op) of them, 64-byte aligned
  Ranks* ranks;   // null: there is one
};

using Kernel = void (*)(const Op&, const Step&, Context&);

// One instruction-set variant of everything.
struct Kernels {
  Kernel run[kNumKinds];
  void (*argmax)(const float* logits, int64_t rows, int64_t columns, int32_t* out, Pool& pool);
  void (*sample)(const float* logits, int64_t vocab, const SamplingRow* rows, int64_t count,
                 int64_t* out, Pool& pool);
  void (*probs)(const float* logits, int64_t vocab, const SamplingRow* rows, int64_t count,
                double* out, Pool& pool);
  int64_t (*draw)(const double* probs, int64_t vocab, const SamplingRow& row);
  void (*uniforms)(const SamplingRow* rows, int64_t count, double* out);
  void (*log_softmax_at)(const float* logits, int64_t vocab, const int64_t* tokens, int64_t count,
                         double* out, Pool& pool);
  void (*top_log_probs)(const float* logits, int64_t rows, int64_t vocab, int64_t count,
                        int32_t* tokens, float* log_probs, Pool& pool);
  double (*read)(const float* data, int64_t count, Pool& pool);      // sums: read bandwidth
  double (*multiply_add)(int64_t iterations, Pool& pool);            // floating-point operations
};

extern const Kernels kernels_generic;
#if defined(__x86_64__)
extern const Kernels kernels_v3;  // AVX2, FMA, F16C
extern const Kernels kernels_v4;  // AVX-512 F, BW, DQ, VL
#endif

// Floats of Context::shared that this op needs.
inline int64_t shared_floats(const Op& op) {
  if (op.kind != kLinear) return 0;
  const TensorRef& x = op.tensors[0];
  const int64_t tokens = x.shape[0] < kLinearChunkTokens ? x.shape[0] : kLinearChunkTokens;
  return tokens * ((x.shape[1] + 15) / 16 * 16 + 16);
}

}  // namespace llmctl
