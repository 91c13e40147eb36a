// The arithmetic of epilogue.cuh, where the macros are documented. A kernel with several epilogues
// includes this file once for each, in separate namespaces.

// Optional inputs are null pointers where they are absent.
struct Epilogue {
  OUT_TYPE::Storage* out;                // [tokens, width]
  const float* weight_scale;             // [packed rows] or null
  const float* x_scale;                  // [1] or [tokens] or null
  const MODEL_TYPE::Storage* bias;       // [packed rows] or null
  int x_scale_stride;                    // 0: one scale for all tokens
  int tokens;                            // of this step
  int width;                             // columns of out
#if EPILOGUE == 1
  const float* scale;                    // [1] or null: out is FP8, divided by it
#elif EPILOGUE == 2
  const float* rotary;                   // [positions, HEAD_SIZE]: cosines, then sines
  const int* positions;                  // [tokens]
  const int* slots;                      // [tokens]; -1: store no key and value
  KV_TYPE::Storage* kv_cache;            // [blocks, 2, NUM_KV_HEADS, tokens_per_block, HEAD_SIZE]
  const float* k_scale;                  // [1] or null
  const float* v_scale;
  int tokens_per_block;
#elif EPILOGUE == 3
  Bases bases;         // buffers of all ranks
  const State* state;  // of this rank's launches
  int rank;
  long long slot_bytes;
#elif EPILOGUE == 4
  u64* keys;  // [tokens], 0 before; `out` is not written
#endif
};

// A warp holds 16 rows; a thread rows lane / 4 and lane / 4 + 8 of them, and per eight tokens the
// two tokens 2 (lane % 4) and the next. Constants of the rows may be read before the wait; those of
// tokens are loaded in two steps, the second once the first have arrived.
struct RowConstants {
  float scale[2], bias[2];
};

DEVICE RowConstants load_rows(const Epilogue& e, int group) {  // group: of 16 packed rows
  const int row = 16 * group + (threadIdx.x & 31) / 4;
  RowConstants rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows.scale[half] = e.weight_scale ? __ldg(e.weight_scale + row + 8 * half) : 1.0f;
    // without a bias, the value whose addition changes nothing
    rows.bias[half] = e.bias ? MODEL_TYPE::unpack(__ldg(e.bias + row + 8 * half)) : -0.0f;
  }
  return rows;
}

DEVICE float load_x_scale(const Epilogue& e, int token) {
  return e.x_scale && token < e.tokens ? e.x_scale[token * e.x_scale_stride] : 1.0f;
}

// The value of the unfused product: float32, not yet rounded.
DEVICE float finish(const Epilogue& e, const RowConstants& rows, int half, float x_scale,
                    float sum) {
  return __fadd_rn(__fmul_rn(sum, __fmul_rn(x_scale, rows.scale[half])), rows.bias[half]);
}

#if EPILOGUE == 0

struct TokenConstants {
  float x_scale;
};

DEVICE TokenConstants load_token(const Epilogue& e, int group, int token) {
  return {load_x_scale(e, token)};
}

DEVICE void complete_token(const Epilogue&, int, TokenConstants&) {}

DEVICE OUT_TYPE::Storage finish_one(const Epilogue& e, const RowConstants& rows,
                                    const TokenConstants& t, int half, float sum) {
  return OUT_TYPE::pack(finish(e, rows, half, t.x_scale, sum));
}

DEVICE void store_pair(const Epilogue& e, const RowConstants& rows, const TokenConstants& t,
                       int group, int token, float first, float second) {
  if (token >= e.tokens) return;
  const int row = 16 * group + (threadIdx.x & 31) / 4;
  OUT_TYPE::Storage* out = e.out + (long long)token * e.width;
  if (row < e.width) out[row] = finish_one(e, rows, t, 0, first);
  if (row + 8 < e.width) out[row + 8] = finish_one(e, rows, t, 1, second);
}

#elif EPILOGUE == 1

struct TokenConstants {
  float x_scale, scale;
};

DEVICE TokenConstants load_token(const Epilogue& e, int group, int token) {
  return {load_x_scale(e, token), e.scale ? __ldg(e.scale) : 1.0f};
}

// x / (1 + exp(-x)); the approximate power and quotient are off by 2^-16 at most, far below half a
// unit in the last place of the model type.
DEVICE float silu(float x) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(x, -1.44269504f)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(__fadd_rn(1.0f, power)));
  return __fmul_rn(x, inverse);
}

// From the sums of a gate row and its up row, of the model type.
DEVICE float swiglu(const Epilogue& e, const RowConstants& rows, float x_scale, float gate_sum,
                    float up_sum) {
  const float gate = round_to<MODEL_TYPE>(finish(e, rows, 0, x_scale, gate_sum));
  const float up = round_to<MODEL_TYPE>(finish(e, rows, 1, x_scale, up_sum));
  const float activated = round_to<MODEL_TYPE>(silu(gate));
  return round_to<MODEL_TYPE>(__fmul_rn(activated, up));
}

DEVICE void complete_token(const Epilogue&, int, TokenConstants&) {}

DEVICE OUT_TYPE::Storage finish_pair(const Epilogue& e, const RowConstants& rows,
                                     const TokenConstants& t, float gate_sum, float up_sum) {
  float y = swiglu(e, rows, t.x_scale, gate_sum, up_sum);
  if (e.scale) y = __fdiv_rn(y, t.scale);
  return OUT_TYPE::pack(y);
}

DEVICE void store_pair(const Epilogue& e, const RowConstants& rows, const TokenConstants& t,
                       int group, int token, float first, float second) {
  const int column = 8 * group + (threadIdx.x & 31) / 4;
  if (token >= e.tokens || column >= e.width) return;
  e.out[(long long)token * e.width + column] = finish_pair(e, rows, t, first, second);
}

#elif EPILOGUE == 3

struct TokenConstants {
  u32 half;  // of the buffers: that of the next launch that counts, which takes the sums
};

DEVICE TokenConstants load_token(const Epilogue& e, int, int) {
  return {half_of(read_begun(e.state))};
}

DEVICE void complete_token(const Epilogue&, int, TokenConstants&) {}

// As `out` has them, in this rank's slot of every other rank.
DEVICE void store_pair(const Epilogue& e, const RowConstants&, const TokenConstants& t, int group,
                       int token, float first, float second) {
  if (token >= e.tokens) return;
  const float sums[2] = {first, second};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 16 * group + (threadIdx.x & 31) / 4 + 8 * i;
    if (row >= e.width) continue;
    const long long at = (long long)token * e.width + row;
    e.out[at] = sums[i];
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      u32* const slot = (u32*)(e.bases.of[r] + (t.half * RANKS + e.rank) * e.slot_bytes);
      if (r != e.rank) put(slot + at, inverted(__float_as_uint(sums[i])));
    }
  }
}

#elif EPILOGUE == 2

struct TokenConstants {
  float x_scale, cos, sin, kv_scale;
  KV_TYPE::Storage* row;  // of the cache; null: store no key or value
  int position, slot;
};

DEVICE bool is_value(int group) {
  return group >= (NUM_HEADS + NUM_KV_HEADS) * (HEAD_SIZE / 16);
}

// The cosine for this thread's row of a query or key head; the sine is HEAD_SIZE / 2 further.
DEVICE const float* rotation(const Epilogue& e, int group, int position) {
  const int dim = 8 * (group % (HEAD_SIZE / 16)) + (threadIdx.x & 31) / 4;
  return e.rotary + (long long)position * HEAD_SIZE + dim;
}

DEVICE void load_rotation(const Epilogue& e, int group, int position, TokenConstants& t) {
  const float* factors = rotation(e, group, position);
  t.cos = round_to<MODEL_TYPE>(__ldg(factors));
  t.sin = round_to<MODEL_TYPE>(__ldg(factors + HEAD_SIZE / 2));
}

// Dimensions d and d + HEAD_SIZE / 2 of the model type; the results are not yet rounded.
DEVICE void rotate(const TokenConstants& t, float& left, float& right) {
  const float a = left, b = right;
  left = __fsub_rn(round_to<MODEL_TYPE>(__fmul_rn(a, t.cos)),
                   round_to<MODEL_TYPE>(__fmul_rn(b, t.sin)));
  right = __fadd_rn(round_to<MODEL_TYPE>(__fmul_rn(b, t.cos)),
                    round_to<MODEL_TYPE>(__fmul_rn(a, t.sin)));
}

// Keys (kv 0) and values (kv 1) at `slot`; dim is within the head.
DEVICE KV_TYPE::Storage* cache_row(const Epilogue& e, int slot, int kv, int head) {
  const int block = slot / e.tokens_per_block, offset = slot % e.tokens_per_block;
  const long long row =
      (((long long)block * 2 + kv) * NUM_KV_HEADS + head) * e.tokens_per_block + offset;
  return e.kv_cache + row * HEAD_SIZE;
}

DEVICE TokenConstants load_token(const Epilogue& e, int group, int token) {
  TokenConstants t = {1.0f, 1.0f, 0.0f, 1.0f, nullptr, 0, -1};
  if (token >= e.tokens) return t;
  t.x_scale = load_x_scale(e, token);
  t.position = e.positions[token];
  t.slot = e.slots[token];
  const float* scale = is_value(group) ? e.v_scale : e.k_scale;
  if (scale) t.kv_scale = __ldg(scale);
  return t;
}

// Constants that depend on what load_token read. Rotations are as stored in memory.
DEVICE void complete_token(const Epilogue& e, int group, TokenConstants& t) {
  const int head = group / (HEAD_SIZE / 16);
  if (!is_value(group)) {
    const float* factors = rotation(e, group, t.position);
    t.cos = __ldg(factors);
    t.sin = __ldg(factors + HEAD_SIZE / 2);
  }
  if (t.slot >= 0 && head >= NUM_HEADS && head < NUM_HEADS + 2 * NUM_KV_HEADS) {
    t.row = cache_row(e, t.slot, is_value(group), (head - NUM_HEADS) % NUM_KV_HEADS);
  }
}

// Two dimensions of a head, rotated unless they are of a value head: `dim`, and the one `apart` further.
struct Rotated {
  int head, dim, apart;
  float left, right;
};

// The position of this thread's two results of a group.
DEVICE Rotated place_of(int group) {
  constexpr int GROUPS = HEAD_SIZE / 16;  // of a head
  const int first = (is_value(group) ? 16 : 8) * (group % GROUPS);
  const int apart = is_value(group) ? 8 : HEAD_SIZE / 2;
  return {group / GROUPS, first + (threadIdx.x & 31) / 4, apart, 0.0f, 0.0f};
}

DEVICE Rotated finish_pair(const Epilogue& e, const RowConstants& rows, const TokenConstants& t,
                           int group, float first, float second) {
  float left = round_to<MODEL_TYPE>(finish(e, rows, 0, t.x_scale, first));
  float right = round_to<MODEL_TYPE>(finish(e, rows, 1, t.x_scale, second));
  if (!is_value(group)) {
    TokenConstants rounded = t;
    rounded.cos = round_to<MODEL_TYPE>(t.cos);
    rounded.sin = round_to<MODEL_TYPE>(t.sin);
    rotate(rounded, left, right);
    left = round_to<MODEL_TYPE>(left);
    right = round_to<MODEL_TYPE>(right);
  }
  Rotated y = place_of(group);
  y.left = left, y.right = right;
  return y;
}

DEVICE void store_pair(const Epilogue& e, const RowConstants& rows, const TokenConstants& t,
                       int group, int token, float first, float second) {
  if (token >= e.tokens) return;
  const Rotated x = finish_pair(e, rows, t, group, first, second);
  if (x.head < NUM_HEADS) {
    OUT_TYPE::Storage* q = e.out + (long long)token * e.width + x.head * HEAD_SIZE + x.dim;
    q[0] = OUT_TYPE::pack(x.left);
    q[x.apart] = OUT_TYPE::pack(x.right);
  } else if (t.row) {  // a scale of 1 changes nothing
    t.row[x.dim] = KV_TYPE::pack(__fdiv_rn(x.left, t.kv_scale));
    t.row[x.dim + x.apart] = KV_TYPE::pack(__fdiv_rn(x.right, t.kv_scale));
  }
}

#endif
