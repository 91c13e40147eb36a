// Loads keys and values from the cache for the tensor cores: from global memory into registers, then as operands into
// shared memory. The first THREADS threads of a block load a tile together.
#pragma once

#include "ops/paged_attention/shared/units.cuh"

constexpr int THREADS = 128;
constexpr int HALVES = SIZE / 64;                    // operands of 64 dimensions: 128 bytes a key
constexpr int HALF_BYTES = KEYS * 128;
constexpr int OPERAND_BYTES = HALVES * HALF_BYTES;
constexpr int PIECES = SIZE * KV_TYPE::bytes / 16;   // per key, 16 bytes each
constexpr int KEY_STEP = THREADS / PIECES;           // keys that the threads load at once
constexpr int LOADS = KEYS / KEY_STEP;
constexpr int STEPS = SIZE / 16;                     // of a product along the head dimension
constexpr bool IS_FP8 = KV_TYPE::bytes == 1;
#ifndef FP8_PRODUCTS
#define FP8_PRODUCTS 0  // 1: keys and values are operands as they are
#endif
constexpr int IMAGE_BYTES = FP8_PRODUCTS ? KEYS * SIZE : OPERAND_BYTES;  // of a tile's keys, or values
static_assert(KEY_STEP <= KEYS && THREADS % PIECES == 0, "a key is loaded by one pass");
static_assert(KEY_STEP % 8 == 0, "all keys of a thread are swizzled alike");

// The thread's piece of a key, and its key among those loaded at once. If a key is eight pieces, which become
// sixteen of an operand, eight adjacent threads have four pieces of each of two keys, so that
// their stores fall on different banks.
DEVICE int own_piece(u32 thread = threadIdx.x) {
  return IS_FP8 && PIECES == 8 ? thread % 4 + thread / 8 % 2 * 4 : thread % PIECES;
}
DEVICE int own_key(u32 thread = threadIdx.x) {
  return IS_FP8 && PIECES == 8 ? thread / 16 * 2 + thread / 4 % 2 : thread / PIECES;
}

// Values derived from x are computed here and not before a loop, where they would take registers.
DEVICE void hold_back(int& x) { asm volatile("" : "+r"(x)); }

DEVICE void load_piece(uint4& x, const void* from) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
}

// A thread loads keys `key` + i KEY_STEP of a tile. Keys in the same page share its number.
constexpr int NUMBERS = SPAN < KEY_STEP ? LOADS : TILE_PAGES;

struct Loader {
  const KV_TYPE::Storage* cache;
  const int* tables;
  int offset;  // in a page, of the thread's piece of the first key that it loads
  int table;   // the request's first entry
  int pages[NUMBERS];

  static DEVICE int nth_page(int i, u32 thread = threadIdx.x) {  // of a tile
    return u32(own_key(thread)) / SPAN + (SPAN < KEY_STEP ? i * (KEY_STEP / SPAN) : i);
  }
  // Directs it to a KV head and a request's entries of the block tables.
  DEVICE void aim(int head, int entry) {
    const u32 thread = thread_from_here();
    offset = head * (TOKENS_PER_BLOCK * SIZE) + u32(own_key(thread)) % SPAN * SIZE +
             own_piece(thread) * (16 / KV_TYPE::bytes);
    table = entry;
  }
  DEVICE void take_pages(const int* shared) {
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) pages[i] = shared[nth_page(i)];
  }
  DEVICE void load_pages(int tile, int end) {  // `end`: table entries
    const int first = tile / TILES_PER_PAGE * TILE_PAGES, thread = thread_from_here();
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) {
      const int entry = first + nth_page(i, thread);
      pages[i] = 0;
      if (entry < end) pages[i] = load_int(tables + table + entry);
    }
  }
  // Loads all keys of a tile, including those after the last written one.
  DEVICE void load(int tile, uint4 (&k)[LOADS], uint4 (&v)[LOADS]) const {
    const KV_TYPE::Storage* from = nullptr;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      if (i % (LOADS / NUMBERS) == 0) {
        from = at(tile, i);
        asm("" : "+l"(from));  // one address a page; the rest are constant distances
      }
      const KV_TYPE::Storage* its = from + i % (LOADS / NUMBERS) * (KEY_STEP * SIZE);
      load_piece(k[i], its);
      load_piece(v[i], its + PAGE);
    }
  }
  // Loads its keys or its values.
  DEVICE void load(int tile, int is_value, uint4 (&x)[LOADS]) const {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) load_piece(x[i], at(tile, i) + is_value * PAGE);
  }
  // Copies them to an operand (16-bit types); zeros from key `left` on.
  DEVICE void copy(int tile, int is_value, u32 target, int left) const {
    const int thread = thread_from_here(), piece = own_piece(thread), key = own_key(thread);
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int row = key + i * KEY_STEP;
      const u32 to = target + piece / 8 * HALF_BYTES + row * 128 + ((piece % 8 ^ (row & 7)) << 4);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
                   "l"(at(tile, i) + is_value * PAGE), "r"(row < left ? 16 : 0)
                   : "memory");
    }
  }
  // Prefetches a tile to L2. Data that other blocks may still write does no harm there.
  DEVICE void prefetch(int tile) const {
    constexpr int SHARERS = PIECES < 8 ? PIECES : 8;  // pieces of one line
    if (own_piece() % SHARERS != 0) return;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const KV_TYPE::Storage* from = at(tile, i);
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from + PAGE));
    }
  }

 private:
  DEVICE const KV_TYPE::Storage* at(int tile, int i) const {
    const int number = SPAN < KEY_STEP ? i : i * KEY_STEP / SPAN;
    int inside = offset;
    if (TILES_PER_PAGE > 1) inside += tile % TILES_PER_PAGE * (KEYS * SIZE);
    if (SPAN >= KEY_STEP) inside += i * KEY_STEP % SPAN * SIZE;
    return cache + pages[number] * (2 * PAGE) + inside;
  }
};

// Page numbers of a request, one a lane: those of 32 entries of its table, and of the 32 behind.
struct Pages {
  const int* table;
  int count, first;  // entries; the first that a lane has
  int own, next;

  DEVICE int load(int entry) const { return entry < count ? load_int(table + entry) : 0; }
  static DEVICE int entry_of(int tile) { return tile / TILES_PER_PAGE * TILE_PAGES; }
  DEVICE void start(int tile) {
    first = entry_of(tile) / 32 * 32;
    own = load(first + lane_id()), next = load(first + 32 + lane_id());
  }
  // Goes on to a tile; tiles are asked for in order.
  DEVICE void reach(int tile) {
    if (entry_of(tile) < first + 32) return;
    first += 32;
    own = next, next = load(first + 32 + lane_id());
  }
  // The page of a tile that has been reached.
  DEVICE int page(int tile, int nth) const { return __shfl_sync(~0u, own, (entry_of(tile) + nth) % 32); }
  DEVICE void aim(Loader& loader, int tile) {
    reach(tile);
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) loader.pages[i] = page(tile, Loader::nth_page(i));
  }
};

// Zeros for the keys of a tile from `left` on: a NaN times a weight of zero would still be a NaN.
DEVICE void clear_from(uint4 (&x)[LOADS], int left) {
  if (left >= KEYS) return;
  const int key = own_key(thread_from_here());
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    if (key + i * KEY_STEP >= left) x[i] = {0, 0, 0, 0};
  }
}

// Converts four bytes to four float16.
DEVICE void widen(u32 x, u32& low, u32& high) {
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\n"
      "cvt.rn.f16x2.e4m3x2 %1, b;\n}"
      : "=r"(low), "=r"(high)
      : "r"(x));
}

DEVICE void store_shared(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

DEVICE void shared_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Where a thread's piece of its first key lies in an operand: 128 bytes a key, 16-byte parts swizzled. Of FP8 that is
// the first of two parts; the other lies at `place` ^ 16.
DEVICE u32 own_place() {
  const int thread = thread_from_here(), piece = own_piece(thread), key = own_key(thread);
  const int part = IS_FP8 ? 2 * piece : piece;
  return part / 8 * HALF_BYTES + key * 128 + ((part % 8 ^ (key & 7)) << 4);
}

// Stores pieces of a tile as an operand; `step`: bytes from one to the next.
template <int COUNT = LOADS>
DEVICE void stage(u32 target, const uint4 (&x)[COUNT], u32 place = own_place(), u32 step = KEY_STEP * 128) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const u32 to = target + place + i * step;
    if (IS_FP8) {
      u32 w[8];
      widen(x[i].x, w[0], w[1]), widen(x[i].y, w[2], w[3]);
      widen(x[i].z, w[4], w[5]), widen(x[i].w, w[6], w[7]);
      const u32 other = target + (place ^ 16) + i * step;
      store_shared(to, w[0], w[1], w[2], w[3]);
      store_shared(other, w[4], w[5], w[6], w[7]);
    } else {
      store_shared(to, x[i].x, x[i].y, x[i].z, x[i].w);
    }
  }
}

// How many of a chunk's `count` tokens from `start` on have FP8 products: those before its request's `context_ends`, with
// EVERY_TOKEN all.
DEVICE int fp8_tokens(const int* context_ends, const int* position_ids, int request, int start, int count) {
#if EVERY_TOKEN
  return count;
#else
  return min(count, max(0, load_int(context_ends + request) - load_int(position_ids + start)));
#endif
}
