// Paged attention of requests with few tokens, for the shortest time from the cache to the output.
//
// Computes the same bits as the Triton kernels of this folder (triton_kernel.py says how): tiles of
// KEYS keys at fixed positions, one online softmax per unit of tiles (tiles.py), units merged from
// left to right. The tensor-core instruction, the order of its steps, the order of a row's sum
// (ascending keys of a thread, then lanes 2 and 1 apart) and every fused multiply-add are those.
//
// A cluster of CLUSTER thread blocks has one block of query tokens of one request and KV head. Each
// thread block takes some of the units. Every unit's state is kept apart and sent to the thread
// blocks that own its rows, cut into chunks of 64 dimensions; an owner merges its chunks. What is
// more than PARTS_BYTES hold goes through global memory instead.
//
// Keys and values go from global memory to registers, all of a tile at once, are converted there
// and stored for the tensor cores; the next tile is on its way while one is computed.
//
// Macros: MODEL_TYPE, KV_TYPE, OUT_TYPE (types of hopper.cuh), HEADS (of keys), GROUP (query heads
// for each), SIZE (64 | 128), TOKENS_PER_BLOCK (a power of two), CLUSTER (an even number),
// PARTS_BYTES, UNIT (tiles of the first units), MIN_BLOCKS (for each SM), K_SCALE,
// V_SCALE, STATIC.
// Grid: CLUSTER, KV heads * blocks of tokens, requests.

#include "packed_linear/hopper.cuh"

constexpr int KEYS = 64;
constexpr int THREADS = 128, ROWS = 64;
constexpr int HALVES = SIZE / 64;                    // operands of 64 dimensions: 128 bytes a key
constexpr int HALF_BYTES = KEYS * 128;
constexpr int OPERAND_BYTES = HALVES * HALF_BYTES;
constexpr int PIECES = SIZE * KV_TYPE::bytes / 16;   // of a key, 16 bytes each
constexpr int KEY_STEP = THREADS / PIECES;           // keys that the threads load at once
constexpr int LOADS = KEYS / KEY_STEP;
constexpr int STEPS = SIZE / 16;                     // of a product along the head
constexpr int SHARE = CLUSTER / 2;                   // thread blocks that take the last units
constexpr int CHUNK_BYTES = 256 + 8;                 // 64 dimensions and the row's state
constexpr long long PAGE = (long long)HEADS * TOKENS_PER_BLOCK * SIZE;  // elements of a page's keys
constexpr bool IS_FP8 = KV_TYPE::bytes == 1;
static_assert(UNIT == 1, "the first 16 units are one tile each");
static_assert(KEY_STEP <= KEYS && THREADS % PIECES == 0, "a key is loaded by one pass");

template <bool CONVERTED>
struct InnerType {
  typedef FP16 Type;
};
template <>
struct InnerType<false> {
  typedef MODEL_TYPE Type;
};
typedef InnerType<IS_FP8>::Type Inner;  // of the products' operands

template <class A, class B>
struct Same {
  static constexpr bool value = false;
};
template <class A>
struct Same<A, A> {
  static constexpr bool value = true;
};
constexpr bool NARROWS = !Same<Inner, MODEL_TYPE>::value;  // queries, to float16

DEVICE float minus_infinity() { return __int_as_float(0xff800000); }

DEVICE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float finite(float top) { return top == minus_infinity() ? 0.0f : top; }

// ---- products: left operand in shared memory (logits) or in registers (values) ----

// d[64 x 64] = (add ? d : 0) + a[64 x 16] b[64 x 16]^T; d[64 x N] += a[64 x 16] b[16 x N].
template <class Type>
struct Attention;

#define REGISTER_PRODUCT(NAME, N, TYPES, TRANSPOSED, LIST, A0, A1, A2, A3, B, P, ...)            \
  static DEVICE void NAME(float (&d)[N / 2], const u32* a, u64 b, int add) {                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                              \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32" TYPES " {" LIST "}, {%" #A0  \
                 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, " #TRANSPOSED ";\n}"      \
                 : __VA_ARGS__                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));             \
  }
#define SHARED_PRODUCT(NAME, N, TYPES, LIST, A, B, P, ...)                                      \
  static DEVICE void NAME(float (&d)[N / 2], u64 a, u64 b, int add) {                          \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                              \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32" TYPES " {" LIST "}, %" #A    \
                 ", %" #B ", p, 1, 1, 0, 0;\n}"                                               \
                 : __VA_ARGS__                                                               \
                 : "l"(a), "l"(b), "r"(add));                                                 \
  }
#define ATTENTION(TYPE, TYPES)                                                                 \
  template <>                                                                                  \
  struct Attention<TYPE> {                                                                     \
    SHARED_PRODUCT(logits, 64, TYPES, I32, 32, 33, 34, D32(0))                                  \
    REGISTER_PRODUCT(values, 64, TYPES, 1, I32, 32, 33, 34, 35, 36, 37, D32(0))                 \
    REGISTER_PRODUCT(values, 128, TYPES, 1, I64, 64, 65, 66, 67, 68, 69, D64(0))                \
  };
ATTENTION(BF16, ".bf16.bf16")
ATTENTION(FP16, ".f16.f16")

// Rows of 128 bytes are keys here, and the product runs along them: HALVES operands side by side.
DEVICE u64 transposed_operand(u32 address) {
  return u64((address & 0x3FFFF) >> 4) | (u64(HALF_BYTES >> 4) << 16) | (u64(1024 >> 4) << 32) |
         (u64(1) << 62);
}

DEVICE void shared_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// What follows from x is computed here, not ahead of a loop, where it would take registers.
DEVICE void hold_back(int& x) { asm volatile("" : "+r"(x)); }

// ---- units of tiles ----

DEVICE int highest_bit(int x) { return 31 - __clz(x); }

DEVICE int unit_start(int unit) {
  if (unit < 16) return unit;
  const int octave = (unit - 16) / 8;
  return (16 << octave) + ((unit - 16) % 8) * (2 << octave);
}

DEVICE int count_units(int tiles) {
  const int last = tiles - 1;
  if (last < 16) return tiles;
  const int octave = highest_bit(last) - 4;
  return 16 + 8 * octave + ((last - (16 << octave)) >> (octave + 1)) + 1;
}

// The units of one thread block of a cluster: the last SHARE units, which are half of the work, go
// to one half of the cluster, what is left of them to the other half.
struct Units {
  int unit, step, end, tiles;  // of the request
  int tile, unit_end;

  DEVICE Units(int rank, int tiles_) : tiles(tiles_) {
    const int units = count_units(tiles);
    unit = rank, step = CLUSTER, end = units;
    if (units > CLUSTER) {
      step = SHARE;
      if (rank < SHARE) {
        end = units - SHARE;
      } else {
        unit = units - 1 - (rank - SHARE);
      }
    }
    enter();
  }
  DEVICE bool done() const { return unit >= end; }
  DEVICE bool ends_unit() const { return tile + 1 == unit_end; }
  DEVICE void next() {
    if (!ends_unit()) {
      ++tile;
      return;
    }
    unit += step;
    enter();
  }
  DEVICE void enter() {
    tile = unit_start(unit);
    unit_end = min(unit_start(unit + 1), tiles);
  }
};

// ---- keys and values: global memory, registers, operands ----

DEVICE int load_int(const int* p) { return __ldcg(p); }  // not from L1: others write these

DEVICE void load_piece(uint4& x, const KV_TYPE::Storage* from) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
}

// A thread loads keys `key` + i KEY_STEP of a tile. Where a page holds several of them, they share
// its number.
constexpr int SPAN = TOKENS_PER_BLOCK < KEYS ? TOKENS_PER_BLOCK : KEYS;  // of one page in a tile
constexpr int NUMBERS = SPAN < KEY_STEP ? LOADS : KEYS / SPAN;
constexpr int TILES_PER_PAGE = TOKENS_PER_BLOCK / SPAN;

struct Loader {
  const KV_TYPE::Storage* cache;  // of the thread's piece of the first key that it loads
  const int* table;
  int pages[NUMBERS];

  DEVICE void load_pages(int tile, int end) {  // `end`: table entries
    const int first = tile / TILES_PER_PAGE * (KEYS / SPAN) + threadIdx.x / PIECES / SPAN;
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) {
      const int page = first + (SPAN < KEY_STEP ? i * (KEY_STEP / SPAN) : i);
      pages[i] = 0;
      if (page < end) pages[i] = load_int(table + page);
    }
  }
  DEVICE void load(int tile, int limit, uint4 (&k)[LOADS], uint4 (&v)[LOADS]) const {
    const int left = limit - tile * KEYS - int(threadIdx.x) / PIECES;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int number = SPAN < KEY_STEP ? i : i * KEY_STEP / SPAN;
      const KV_TYPE::Storage* from = cache + pages[number] * (2 * PAGE);
      if (TILES_PER_PAGE > 1) from += tile % TILES_PER_PAGE * (KEYS * SIZE);
      if (SPAN >= KEY_STEP) from += i * KEY_STEP % SPAN * SIZE;
      k[i] = v[i] = {0, 0, 0, 0};
      if (i * KEY_STEP < left) {
        load_piece(k[i], from);
        load_piece(v[i], from + PAGE);
      }
    }
  }
  // The tile `next` is at, and the pages of the tile after it.
  DEVICE void load_next(Units next, int limit, int end, uint4 (&k)[LOADS], uint4 (&v)[LOADS]) {
    load(next.tile, limit, k, v);
    next.next();
    if (!next.done()) load_pages(next.tile, end);
  }
};

DEVICE u32 widen_pair(u32 x) {
  u32 y;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(u16(x)));
  return y;
}

DEVICE void store_shared(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// Pieces of a tile as an operand: 128 bytes a key, 16-byte parts swizzled.
DEVICE void stage(u32 target, const uint4 (&x)[LOADS]) {
  const int piece = threadIdx.x % PIECES;
  int key = threadIdx.x / PIECES;
  hold_back(key);
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int row = key + i * KEY_STEP;
    if (IS_FP8) {
      const int half = piece / 4, part = piece % 4 * 2;
      const u32 to = target + half * HALF_BYTES + row * 128;
      const u32 words[8] = {widen_pair(x[i].x), widen_pair(x[i].x >> 16), widen_pair(x[i].y),
                            widen_pair(x[i].y >> 16), widen_pair(x[i].z), widen_pair(x[i].z >> 16),
                            widen_pair(x[i].w), widen_pair(x[i].w >> 16)};
      const bool swap = half;  // the halves' stores fall on different banks
      const u32* w = words;
      const u32 first = to + (((part + swap) ^ (row & 7)) << 4);
      const u32 second = to + (((part + !swap) ^ (row & 7)) << 4);
      store_shared(first, swap ? w[4] : w[0], swap ? w[5] : w[1], swap ? w[6] : w[2],
                   swap ? w[7] : w[3]);
      store_shared(second, swap ? w[0] : w[4], swap ? w[1] : w[5], swap ? w[2] : w[6],
                   swap ? w[3] : w[7]);
    } else {
      const u32 to = target + piece / 8 * HALF_BYTES + row * 128;
      store_shared(to + ((piece % 8 ^ (row & 7)) << 4), x[i].x, x[i].y, x[i].z, x[i].w);
    }
  }
}

// ---- queries ----

DEVICE u32 to_inner(u32 pair) {
  if (!NARROWS) return pair;
  const float low = MODEL_TYPE::unpack(u16(pair)), high = MODEL_TYPE::unpack(u16(pair >> 16));
  u32 y;  // saturates at 65504; NaN stays NaN
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// Queries, 16 bytes each: rows `threadIdx.x / QUERY_PIECES` + i QUERY_STEP.
constexpr int QUERY_PIECES = SIZE / 8, QUERY_STEP = THREADS / QUERY_PIECES;
constexpr int QUERY_LOADS = ROWS / QUERY_STEP;

DEVICE void load_queries(uint4 (&x)[QUERY_LOADS], const MODEL_TYPE::Storage* q, int token, int head,
                         int num_rows) {
#pragma unroll
  for (int i = 0; i < QUERY_LOADS; ++i) {
    const int row = threadIdx.x / QUERY_PIECES + i * QUERY_STEP;
    const long long at = ((long long)(token + row / GROUP) * HEADS + head) * (GROUP * SIZE) +
                         row % GROUP * SIZE + threadIdx.x % QUERY_PIECES * 8;
    if (row < num_rows) x[i] = __ldcg((const uint4*)(q + at));
  }
}

DEVICE void stage_queries(u32 target, const uint4 (&x)[QUERY_LOADS], int num_rows) {
  const int piece = threadIdx.x % QUERY_PIECES;
#pragma unroll
  for (int i = 0; i < QUERY_LOADS; ++i) {
    const int row = threadIdx.x / QUERY_PIECES + i * QUERY_STEP;
    const u32 to = target + piece / 8 * HALF_BYTES + row * 128;
    if (row < num_rows) {
      store_shared(to + ((piece % 8 ^ (row & 7)) << 4), to_inner(x[i].x), to_inner(x[i].y),
                   to_inner(x[i].z), to_inner(x[i].w));
    }
  }
}

// ---- the state of a unit ----

// The two rows of a product that a thread holds.
DEVICE int own_row(int r) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r; }

struct State {
  float largest[2], total[2];
  float acc[SIZE / 2];

  DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < SIZE / 2; ++i) acc[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) largest[r] = minus_infinity(), total[r] = 0.0f;
  }
};

// Logits to weights, and what was summed before scaled to them.
DEVICE void soften(State& state, float (&s)[32], u32 (&weights)[16], const int (&seen)[2],
                   float scale) {
  const int column = 2 * (threadIdx.x % 4);
  float fade[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int last = seen[r] - column;  // columns up to this one are visible
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[4 * j + 2 * r + e];
        x = 8 * j + e <= last ? x : minus_infinity();
      }
    }
    float top = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
    for (int j = 1; j < 8; ++j) top = fmaxf(top, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(state.largest[r], __fmul_rn(top, scale));
    const float base = finite(top);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float a = exp2(__fmaf_rn(s[4 * j + 2 * r], scale, -base));
      const float b = exp2(__fmaf_rn(s[4 * j + 2 * r + 1], scale, -base));
      sum = __fadd_rn(j == 0 ? a : __fadd_rn(sum, a), b);
      weights[2 * j + r] = Inner::pack_pair(a, b);
    }
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
    fade[r] = exp2(__fsub_rn(state.largest[r], base));
    state.total[r] = __fmaf_rn(state.total[r], fade[r], sum);
    state.largest[r] = top;
  }
#pragma unroll
  for (int i = 0; i < SIZE / 2; ++i) state.acc[i] = __fmul_rn(state.acc[i], fade[i / 2 % 2]);
}

DEVICE void start_logits(float (&s)[32], u32 queries, u32 keys) {
  const u64 a = operand(queries), b = operand(keys);
  keep_order(s);
  product_fence();
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int at = i / 4 * (HALF_BYTES / 16) + i % 4 * 2;
    Attention<Inner>::logits(s, a + at, b + at, i > 0);
  }
  product_commit();
}

DEVICE void start_values(State& state, const u32 (&weights)[16], u32 values) {
  const u64 b = transposed_operand(values);
  keep_order(state.acc);
  product_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Attention<Inner>::values(state.acc, weights + 4 * i, b + i * (2048 / 16), 1);
  }
  product_commit();
}

// ---- units on their way to the owners of their rows ----

// 8 bytes into another block's shared memory, counted by that block's barrier.
DEVICE void store_remote_pair(u32 address, u32 barrier, float a, float b) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          address),
      "f"(a), "f"(b), "r"(barrier)
      : "memory");
}

// A chunk is 64 dimensions of a row, as 16 records of what one thread holds: dimensions 16 i + 2 j,
// the next one, and those 8 further, for record 4 i + j. Thread block c / slots owns chunk c.
struct Parts {
  int units, chunks, slots;  // slots: the most chunks that one thread block owns
  u32 shared, barrier;       // records [units, slots], then states [units, slots]
  float* partial;            // the same in global memory, [units, chunks]
  long long stride;          // of a block of rows
  bool is_shared;

  DEVICE float4* records() const {
    return (float4*)(partial + (blockIdx.z * gridDim.y + blockIdx.y) * stride);
  }
  DEVICE float2* states() const { return (float2*)(records() + units * chunks * 16); }
  DEVICE int owned(int rank) const { return max(min(chunks - rank * slots, slots), 0); }

  DEVICE void send(const State& state, int unit) const {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int row = own_row(r);
      hold_back(row);
      if (row * HALVES >= chunks) continue;
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        const int chunk = row * HALVES + half;
        const int owner = chunk / slots;
        const int at = is_shared ? unit * slots + chunk - owner * slots : unit * chunks + chunk;
        const u32 to = remote_address(shared, owner), arrived = remote_address(barrier, owner);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* x = &state.acc[32 * half + 8 * i + 2 * r];
          const int record = at * 16 + 4 * i + lane;
          if (is_shared) {
            store_remote(to + record * 16, arrived, x[0], x[1], x[4], x[5]);
          } else {
            __stcg(records() + record, make_float4(x[0], x[1], x[4], x[5]));
          }
        }
        if (lane != 0) continue;
        if (is_shared) {
          store_remote_pair(to + units * slots * 256 + at * 8, arrived, state.largest[r],
                            state.total[r]);
        } else {
          __stcg(states() + at, make_float2(state.largest[r], state.total[r]));
        }
      }
    }
  }
};

// From shared or global memory, not from L1.
DEVICE void load_part(float2& state, float4& part, const float2* s, const float4* p) {
  asm volatile("ld.relaxed.gpu.v2.f32 {%0, %1}, [%2];" : "=f"(state.x), "=f"(state.y) : "l"(s));
  asm volatile("ld.relaxed.gpu.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w)
               : "l"(p));
}

struct Merged {
  float largest, total;
  float acc[4];

  DEVICE void append(const float2& state, const float4& part) {
    const float top = fmaxf(largest, state.x), base = finite(top);
    const float left = exp2(__fsub_rn(largest, base)), right = exp2(__fsub_rn(state.x, base));
    total = __fmaf_rn(total, left, __fmul_rn(state.y, right));
    acc[0] = __fmaf_rn(acc[0], left, __fmul_rn(part.x, right));
    acc[1] = __fmaf_rn(acc[1], left, __fmul_rn(part.y, right));
    acc[2] = __fmaf_rn(acc[2], left, __fmul_rn(part.z, right));
    acc[3] = __fmaf_rn(acc[3], left, __fmul_rn(part.w, right));
    largest = top;
  }
};

// ---- the output ----

struct Output {
  OUT_TYPE::Storage* out;
  float value_scale, quanta;

  DEVICE void store(const Merged& m, long long at) const {
    const float factor = __fdiv_rn(value_scale, m.total);
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __fmaf_rn(m.acc[i], factor, 0.0f);  // + 0: no negative zeros
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 pair = MODEL_TYPE::pack_pair(x[2 * i], x[2 * i + 1]);
#if STATIC
      const float low = MODEL_TYPE::unpack(u16(pair)), high = MODEL_TYPE::unpack(u16(pair >> 16));
      *(u16*)(out + at + 8 * i) = E4M3::pack_pair(__fmul_rn(low, quanta), __fmul_rn(high, quanta));
#else
      *(u32*)(out + at + 8 * i) = pair;
#endif
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    generation(const MODEL_TYPE::Storage* q, const float* k_scale, const float* v_scale,
               const float* out_scale, OUT_TYPE::Storage* out, const KV_TYPE::Storage* cache,
               const int* position_ids, const int* cu_q, const int* kv_lens,
               const int* block_tables, float* partial, float softmax_scale, int table_stride,
               int block_tokens, int max_tokens, long long partial_stride) {
  extern __shared__ __align__(1024) u8 memory[];
  const u32 keys = shared_address(memory), values = keys + OPERAND_BYTES;
  const u32 queries = values + OPERAND_BYTES, parts_at = queries + OPERAND_BYTES;
  const u32 barrier = parts_at + PARTS_BYTES;
  launch_dependents();
  if (threadIdx.x == 0) {
    barrier_init(barrier, 1);
    barrier_init_fence();
  }
  __syncwarp();
  cluster_arrive();
  const int rank = blockIdx.x, request = blockIdx.z;
  const int head = blockIdx.y % HEADS, first_token = blockIdx.y / HEADS * block_tokens;
  const float scale = K_SCALE ? __fmul_rn(softmax_scale, *k_scale) : softmax_scale;
  Loader loader;
  loader.cache = cache + (long long)head * (TOKENS_PER_BLOCK * SIZE) +
                 threadIdx.x / PIECES % SPAN * SIZE + threadIdx.x % PIECES * (16 / KV_TYPE::bytes);
  loader.table = block_tables + (long long)request * table_stride;
  wait_for_dependencies();
  // The first tile is this one unless the context is long; its pages need not wait for kv_len.
  const int guess = rank;
  loader.load_pages(guess, table_stride);
  const int start = load_int(cu_q + request), count = load_int(cu_q + request + 1) - start;
  const int limit = load_int(kv_lens + request);
  if (count > max_tokens || first_token >= count || limit <= 0) {
    cluster_wait();
    return;
  }
  const int num_rows = min(block_tokens, count - first_token) * GROUP;
  Units units(rank, (limit + KEYS - 1) / KEYS);
  const int pages_end = (limit + TOKENS_PER_BLOCK - 1) / TOKENS_PER_BLOCK;
  if (units.tile != guess) loader.load_pages(units.tile, pages_end);
  uint4 k[LOADS], v[LOADS];
  const bool works = !units.done();
  if (works) loader.load(units.tile, limit, k, v);

  int bound[2];  // the last key that each of the thread's rows sees
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = own_row(r), token = start + first_token + row / GROUP;
    bound[r] = row < num_rows ? min(load_int(position_ids + token), limit - 1) : -1;
  }
  Parts parts;
  parts.units = count_units(units.tiles);
  parts.chunks = num_rows * HALVES;
  parts.slots = (parts.chunks + CLUSTER - 1) / CLUSTER;
  parts.shared = parts_at, parts.barrier = barrier;
  parts.is_shared = parts.units * parts.slots * CHUNK_BYTES <= PARTS_BYTES;
  parts.partial = partial, parts.stride = partial_stride;
  const int owned = parts.owned(rank);
  if (parts.is_shared && threadIdx.x == 0 && owned > 0) {
    barrier_expect(barrier, parts.units * owned * CHUNK_BYTES);
  }

  bool has_met = false;
  if (works) {
    uint4 x[QUERY_LOADS];
    load_queries(x, q, start + first_token, head, num_rows);
    State state;
    Units next = units;
    next.next();
    if (!next.done()) loader.load_pages(next.tile, pages_end);
    stage_queries(queries, x, num_rows);
    bool is_last = false;
#pragma unroll 1
    while (!is_last) {  // units
      const int unit = units.unit;
      state.clear();
      bool ends_unit;
#pragma unroll 1
      do {  // tiles
        stage(keys, k);
        shared_fence();
        __syncthreads();
        float s[32];
        start_logits(s, queries, keys);
        stage(values, v);
        if (!is_last) loader.load_next(next, limit, pages_end, k, v);
        is_last = next.done();
        shared_fence();
        product_wait<0>();
        keep_order(s);
        __syncthreads();
        const int seen[2] = {bound[0] - units.tile * KEYS, bound[1] - units.tile * KEYS};
        u32 weights[16];
        soften(state, s, weights, seen, scale);
        start_values(state, weights, values);
        product_wait<0>();
        keep_order(state.acc);
        ends_unit = units.ends_unit();
        units = next;
        next.next();
      } while (!ends_unit);
      if (!has_met) cluster_wait();  // every thread block of the cluster has its barrier
      has_met = true;
      parts.send(state, unit);
    }
  }
  const Output output = {out, V_SCALE ? *v_scale : 1.0f,
                         STATIC ? __fdiv_rn(1.0f, *out_scale) : 1.0f};
  if (!has_met) cluster_wait();
  if (!parts.is_shared) {
    cluster_arrive();
    cluster_wait();
  } else if (owned > 0) {
    barrier_wait_cluster(barrier, 0);
  }
  const float4* records = parts.records();
  const float2* states = parts.states();
  if (parts.is_shared) {
    records = (const float4*)(memory + (parts_at - keys));
    states = (const float2*)(records + parts.units * parts.slots * 16);
  }
  for (int i = threadIdx.x; i < owned * 16; i += THREADS) {
    const int slot = i / 16, record = i % 16;
    const int chunk = rank * parts.slots + slot, row = chunk / HALVES;
    Merged merged = {minus_infinity(), 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}};
    const int first = parts.is_shared ? slot : chunk;
    const int stride = parts.is_shared ? parts.slots : parts.chunks;
    for (int unit = 0; unit < parts.units; unit += 8) {
      float2 state[8];
      float4 part[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int at = (unit + j) * stride + first;
        state[j] = {minus_infinity(), 0.0f}, part[j] = {0.0f, 0.0f, 0.0f, 0.0f};  // no change
        if (unit + j < parts.units) {
          load_part(state[j], part[j], states + at, records + at * 16 + record);
        }
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) merged.append(state[j], part[j]);
    }
    const long long token = start + first_token + row / GROUP;
    output.store(merged, (token * HEADS + head) * (GROUP * SIZE) + row % GROUP * SIZE +
                             chunk % HALVES * 64 + record / 4 * 16 + record % 4 * 2);
  }
}
