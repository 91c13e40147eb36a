// What happens to sums before they leave a packed product: scales, bias, one rounding to the model
// type, and then SwiGLU (EPILOGUE 1) or the rotary embedding and the KV write (EPILOGUE 2). Or nothing: partial sums
// that are handed to other ranks as they are (EPILOGUE 3, of RANKS). Or of logits the best of each token alone
// (EPILOGUE 4, prefill_best.cuh).
//
// Macros: EPILOGUE 0 | 1 | 2 | 3 | 4, MODEL_TYPE (BF16 | FP16), OUT_TYPE (MODEL_TYPE, E4M3 or FP32), and
// for EPILOGUE 2 KV_TYPE, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE. Every kernel uses this epilogue, so
// that equal sums give equal bits. Products are not contracted with additions, because the reference
// rounds each.
#pragma once

#include "backends/cuda/sm90/hopper.cuh"
#if EPILOGUE == 3
#include "ops/all_reduce/meeting.cuh"
#endif
#include "ops/packed_linear/epilogue_values.cuh"

// A kernel that writes the cache lets later kernels start only after its own wait. So these may read the numbers of the
// step and what earlier steps cached before their own wait (verification.cu, tree.cu).
constexpr bool WRITES_CACHE = EPILOGUE == 2;

// The kernel parameters that fill an Epilogue, in the order of `epilogue_arguments` (kernel.py).
#define EPILOGUE_PARAMETERS_ALL                                                              \
  OUT_TYPE::Storage *out, const float *weight_scale, const float *x_scale,                   \
      const MODEL_TYPE::Storage *bias, int x_scale_stride, int tokens, int width
#define EPILOGUE_VALUES_ALL out, weight_scale, x_scale, bias, x_scale_stride, tokens, width
#if EPILOGUE == 0
#define EPILOGUE_PARAMETERS EPILOGUE_PARAMETERS_ALL
#define EPILOGUE_VALUES EPILOGUE_VALUES_ALL
#elif EPILOGUE == 1
#define EPILOGUE_PARAMETERS EPILOGUE_PARAMETERS_ALL, const float *scale
#define EPILOGUE_VALUES EPILOGUE_VALUES_ALL, scale
#elif EPILOGUE == 3
#define EPILOGUE_PARAMETERS \
  EPILOGUE_PARAMETERS_ALL, const long long *bases, const State *state, int rank, long long slot_bytes
#define EPILOGUE_VALUES EPILOGUE_VALUES_ALL, bases, state, rank, slot_bytes
#elif EPILOGUE == 4
#define EPILOGUE_PARAMETERS EPILOGUE_PARAMETERS_ALL, u64 *keys
#define EPILOGUE_VALUES EPILOGUE_VALUES_ALL, keys
#else
#define EPILOGUE_PARAMETERS                                                                  \
  EPILOGUE_PARAMETERS_ALL, const float *rotary, const int *positions, const int *slots,      \
      KV_TYPE::Storage *kv_cache, const float *k_scale, const float *v_scale,                \
      int tokens_per_block
#define EPILOGUE_VALUES \
  EPILOGUE_VALUES_ALL, rotary, positions, slots, kv_cache, k_scale, v_scale, tokens_per_block
#endif
