// How a warp of batch.cu copies and multiplies a tile. shared/units.cuh says where tiles are stored.
//
// Products are mma.sync with the tile as A operand, 16 keys (or 16 dimensions of the values) high, and the query rows as
// its 8 columns. A column's bits are those of a row of the wgmma products of the other kernels: the same 16 products at a
// time, in the same order.
#pragma once

#include "ops/paged_attention/shared/widen.cuh"

constexpr bool IS_BYTE = KV_TYPE::bytes == 1;
constexpr int LINE = SIZE * KV_TYPE::bytes;  // bytes of a key
constexpr int CHUNKS = LINE / 16;            // of a key, 16 bytes each
constexpr int TILE_BYTES = KEYS * LINE;      // keys or values of a tile
constexpr int KEY_STEP = 32 / CHUNKS;        // keys that a warp copies at once
constexpr int STEPS = SIZE / 16;             // products along the head, or blocks of dimensions
constexpr int BLOCKS = KEYS / 16;
constexpr int COLUMN_BLOCKS = COLUMNS / 8;
static_assert(SIZE % 64 == 0 && 32 % CHUNKS == 0, "a lane copies the same chunk of every key");
static_assert(TOKENS_PER_BLOCK >= KEY_STEP, "what a warp copies at once is of one page");
static_assert(COLUMNS % 8 == 0, "columns of a product");

// ---- tiles in shared memory ----

// The address of a chunk of a key: chunks of eight keys that are read together fall on all banks. The address
// of another chunk is that `^ (chunk << 4)`, and keys a multiple of 16 further have addresses as far apart.
DEVICE int place(int key, int chunk) {
  if (LINE == 64) return key / 2 * 128 + (((key % 2 * 4 + chunk) ^ (key / 2 % 8)) << 4);
  return key * LINE + ((chunk ^ (key % 8)) << 4);
}

// L2 is not told to fetch the neighbouring line as well: where requests are many, that takes 4 to 6 % of the time.
DEVICE void copy_chunk(u32 target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}
DEVICE void copy_or_clear_chunk(u32 target, const void* source, bool is_real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(is_real ? 16 : 0)
               : "memory");
}
// The same for what is read once (stream_chunk).
DEVICE void stream_or_clear_chunk(u32 target, const void* source, bool is_real) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(target), "l"(source),
               "r"(is_real ? 16 : 0), "l"(EVICT_FIRST)
               : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Copies tiles into a ring of slots, keys and values alternately.
struct Copier {
  const KV_TYPE::Storage* source;  // the lane's chunk of the first key of the head's page 0
  const int* table;
  int num_entries;      // of the table that the request uses
  int limit;            // keys
  int first, now, next;  // 32 entries from `first` on, and the next 32, one per lane

  // The first entries, read before the request's length is known; `stride`: entries of the table.
  DEVICE int guess(int tile, int stride) const {
    const int at = tile / TILES_PER_PAGE * TILE_PAGES + lane_id();
    return at < stride ? load_int_now(table + at) : 0;
  }
  DEVICE void start(int tile, int guessed) {
    first = tile / TILES_PER_PAGE * TILE_PAGES;
    now = first + lane_id() < num_entries ? guessed : 0, next = entry(first + 32);
  }
  DEVICE int entry(int at) const {
    at += lane_id();
    return at < num_entries ? load_int(table + at) : 0;
  }
  static DEVICE int own_place() { return place(lane_id() / CHUNKS, lane_id() % CHUNKS); }  // in a slot
  // Tiles are copied in order. `to`: the lane's place in a slot.
  DEVICE void copy(u32 to, int tile, bool is_values) {
    const int at = tile / TILES_PER_PAGE * TILE_PAGES;
    if (at >= first + 32) {
      first += 32;
      now = next, next = entry(first + 32);
    }
    if (limit - tile * KEYS >= KEYS) {
      copy_pages<true>(to, at, tile, is_values);
    } else {
      copy_pages<false>(to, at, tile, is_values);
    }
  }
  // IS_WHOLE: all keys of the tile exist; where they do not, zeros are stored.
  template <bool IS_WHOLE>
  DEVICE void copy_pages(u32 own, int at, int tile, bool is_values) const {
    const int inside = TILES_PER_PAGE > 1 ? tile % TILES_PER_PAGE * (KEYS * SIZE) : 0;
    const int key = lane_id() / CHUNKS, left = limit - tile * KEYS - key;
#pragma unroll
    for (int page = 0; page < TILE_PAGES; ++page) {
      const long long number = __shfl_sync(~0u, now, at - first + page);
      const KV_TYPE::Storage* from = source + number * (2 * PAGE) + (is_values ? PAGE : 0) + inside;
#pragma unroll
      for (int i = 0; i < SPAN / KEY_STEP; ++i) {
        const int its = page * SPAN + i * KEY_STEP;
        const u32 to = (own ^ ((LINE == 64 ? its / 2 : its) % 8 << 4)) + its * LINE;
        if (IS_WHOLE) {
          stream_chunk(to, from + i * (KEY_STEP * SIZE));
        } else {
          stream_or_clear_chunk(to, from + i * (KEY_STEP * SIZE), its < left);
        }
      }
    }
  }
};

// Four matrices of 8 keys by 16 bytes: keys 0 to 7, 8 to 15, and both again one chunk further. Each lane
// has the address of a row of one of them.
DEVICE void load_matrices(u32 (&x)[4], u32 lane_at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(lane_at)
               : "memory");
}
DEVICE void load_transposed(u32 (&x)[4], u32 lane_at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(lane_at)
               : "memory");
}
DEVICE void load_one_transposed(u32 (&x)[4], u32 lane_at) {  // the first two
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(x[0]), "=r"(x[1])
               : "r"(lane_at)
               : "memory");
}
// Where a tile's matrices are read: `at` is the lane's address for keys 16 block on, and a chunk.
struct TileKeys {
  u32 first;  // of the first 16 keys, and chunk 0

  DEVICE explicit TileKeys(u32 slot) : first(slot + place(lane_id() % 16, lane_id() / 16)) {}
  DEVICE u32 at(int block, int chunk) const { return (first ^ (chunk << 4)) + block * 16 * LINE; }
};
DEVICE u32 transpose(u32 x) {  // of an 8 x 8 matrix of 16-bit numbers
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// ---- products ----

template <class Type>
struct Multiply;
#define MULTIPLY(TYPE, TYPES)                                                                     \
  template <>                                                                                     \
  struct Multiply<TYPE> {                                                                         \
    static DEVICE void add(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {       \
      asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPES ".f32 {%0, %1, %2, %3}, "       \
                   "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                \
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                               \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                       \
    }                                                                                             \
  };
MULTIPLY(BF16, "bf16.bf16")
MULTIPLY(FP16, "f16.f16")

// The dimensions that a lane holds of step i of queries: two pairs. With 8-bit types a lane has four adjacent.
DEVICE int query_dimension(int i, int pair) {
  return 16 * i + lane_id() % 4 * (IS_BYTE ? 4 : 2) + pair * (IS_BYTE ? 2 : 8);
}
// The dimension of the values of sums 0 and 1 (half 0), or 2 and 3, of block i.
DEVICE int value_dimension(int i, int half) {
  const int row = lane_id() / 4;
  return 16 * i + (IS_BYTE ? 2 * row + half : row + 8 * half);
}

// Both pairs of every step of a lane's queries: in registers or, if these are too few, in shared
// memory.
template <bool IS_SHARED>
struct QueriesIn {
  u32 pairs[COLUMN_BLOCKS][STEPS][2];
  DEVICE void start(u32) {}
  DEVICE void store(int n, int i, u32 first, u32 second) {
    pairs[n][i][0] = first, pairs[n][i][1] = second;
  }
  DEVICE void load(int n, int i, u32& first, u32& second) const {
    first = pairs[n][i][0], second = pairs[n][i][1];
  }
};
template <>
struct QueriesIn<true> {
  u32 at;
  DEVICE void start(u32 address) { at = address + lane_id() * 8; }
  DEVICE void store(int n, int i, u32 first, u32 second) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at + (n * STEPS + i) * 256), "r"(first),
                 "r"(second)
                 : "memory");
  }
  DEVICE void load(int n, int i, u32& first, u32& second) const {  // a lane reads what it wrote
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(first), "=r"(second)
                 : "r"(at + (n * STEPS + i) * 256)
                 : "memory");
  }
};
typedef QueriesIn<(QUERY_BYTES > 0)> Queries;
static_assert(QUERY_BYTES == 0 || QUERY_BYTES == COLUMN_BLOCKS * STEPS * 256, "room for queries");

// logits[keys, columns] of N blocks of 16 keys: sums 0, 1 are columns 2 (lane % 4) and the next of key
// lane / 4 of a block, sums 2 and 3 those of the key 8 further.
template <int N, int C = COLUMN_BLOCKS>
using LogitsOf = float[C][N][4];
typedef LogitsOf<BLOCKS> Logits;

template <int N, int C, class Keys>
DEVICE void multiply_keys(LogitsOf<N, C>& logits, const Queries& queries, const Keys& keys,
                          int first = 0) {
#pragma unroll
  for (int block = 0; block < N; ++block) {
#pragma unroll
    for (int n = 0; n < C; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) logits[n][block][i] = 0.0f;
    }
  }
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; chunk += 2) {
#pragma unroll
    for (int block = 0; block < N; ++block) {
      u32 x[4], a[4], b[4];
      load_matrices(x, keys.at(first + block, chunk));
      if (IS_BYTE) {
        Widen<KV_TYPE>::pairs(x[0], a[0], a[2]);
        Widen<KV_TYPE>::pairs(x[1], a[1], a[3]);
        Widen<KV_TYPE>::pairs(x[2], b[0], b[2]);
        Widen<KV_TYPE>::pairs(x[3], b[1], b[3]);
      }
#pragma unroll
      for (int n = 0; n < C; ++n) {
        float(&d)[4] = logits[n][block];
        u32 first, second;
        queries.load(n, IS_BYTE ? chunk : chunk / 2, first, second);
        if (IS_BYTE) {
          Multiply<Inner>::add(d, a[0], a[1], a[2], a[3], first, second);
          queries.load(n, chunk + 1, first, second);
          Multiply<Inner>::add(d, b[0], b[1], b[2], b[3], first, second);
        } else {
          Multiply<Inner>::add(d, x[0], x[1], x[2], x[3], first, second);
        }
      }
    }
  }
}

// sums[dimensions, columns] += values of a tile times weights, pairs of keys of each block of 16; N
// blocks of 16 dimensions from the first one on.
template <int N, int C = COLUMN_BLOCKS>
using SumsOf = float[C][N][4];
constexpr int CHUNKS_PER_STEP = CHUNKS / STEPS;  // 16 dimensions of bytes are a chunk

template <int N, int C, class Keys>
DEVICE void multiply_block(SumsOf<N, C>& sums, const u32 (&weights)[C][BLOCKS][2], const Keys& keys,
                           int block, int first = 0) {
#pragma unroll
  for (int chunk = 0; chunk < N * CHUNKS_PER_STEP; chunk += 2) {
    u32 x[4];
    if (N * CHUNKS_PER_STEP == 1) {
      load_one_transposed(x, keys.at(block, first));
    } else {
      load_transposed(x, keys.at(block, first * CHUNKS_PER_STEP + chunk));
    }
#pragma unroll
    for (int half = 0; half < (IS_BYTE && N > 1 ? 2 : 1); ++half) {
      u32 a[4];
      if (IS_BYTE) {  // a lane has two dimensions of two keys: pair the keys
        Widen<KV_TYPE>::pairs(__byte_perm(x[2 * half], 0, 0x3120), a[0], a[1]);
        Widen<KV_TYPE>::pairs(__byte_perm(x[2 * half + 1], 0, 0x3120), a[2], a[3]);
      } else {
        a[0] = x[0], a[1] = x[2], a[2] = x[1], a[3] = x[3];
      }
#pragma unroll
      for (int n = 0; n < C; ++n) {
        const auto& w = weights[n][block];
        Multiply<Inner>::add(sums[n][IS_BYTE ? chunk + half : chunk / 2], a[0], a[1], a[2], a[3],
                             w[0], w[1]);
      }
    }
  }
}

template <int N, int C, class Keys>
DEVICE void multiply_values(SumsOf<N, C>& sums, const u32 (&weights)[C][BLOCKS][2],
                            const Keys& keys, int first = 0) {
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) multiply_block(sums, weights, keys, block, first);
}
