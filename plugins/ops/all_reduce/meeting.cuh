// How ranks with a GPU each hand numbers to each other: the numbers themselves say that they have come.
//
// Every rank has a buffer that all others map, with a slot for each sender. A rank stores 32-bit words into its
// slot of every other rank's buffer and polls its own, in local memory, until no word is absent; so there are no
// flags, no fences, and a word is on its way once. Zero is absent: words are stored inverted, and the word that
// would become zero, a NaN, is stored as another NaN. Whoever took a word clears its place.
//
// Launches on all ranks follow each other alike and use the two halves of the buffer in turn. A peer stores into
// a half again two launches later, which is safe: it has then taken words of mine of the launch between, and that
// launch began after this one, with its clearing, had ended.
//
// No block waits before it has stored all that is its own, and all blocks of a launch are on the device at once,
// so ranks cannot wait for each other in a circle. Where a peer does not come, the waiting ends after `limit_ns`,
// or when the host says so, and `lost` tells which rank it was; what follows is not used.
//
// Macros: RANKS, LEAVES (parts of a rank's own sum).
#pragma once

#include "backends/cuda/sm90/hopper.cuh"

constexpr u32 TURN = 1024;           // more than the blocks of any launch; as in peers.py
constexpr u32 LOOK_AT_HOST = 1024;   // polls; the host's memory is far

struct State {
  u32 begun;  // TURN for every launch of this rank, whose blocks add up to it
};

DEVICE u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

DEVICE int read_host(const int* lost) {
  int x;
  asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(x) : "l"(lost) : "memory");
  return x;
}

DEVICE void write_host(int* lost, int x) {
  asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(lost), "r"(x) : "memory");
}

DEVICE u32 read_begun(const State* state) {
  u32 x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(&state->begun) : "memory");
  return x;
}

DEVICE void add_begun(State* state, u32 x) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(&state->begun), "r"(x) : "memory");
}

DEVICE void put(u32* to, u32 x) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

DEVICE void put(uint4* to, uint4 x) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x),
               "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

DEVICE void put(uint2* to, uint2 x) {
  asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(x.x), "r"(x.y)
               : "memory");
}

DEVICE uint4 look(const uint4* at) {
  uint4 x;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(at)
               : "memory");
  return x;
}

DEVICE uint2 look(const uint2* at) {
  uint2 x;
  asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(x.x), "=r"(x.y)
               : "l"(at)
               : "memory");
  return x;
}

// A NaN of all ones, or several in a word, becomes other NaNs.
DEVICE u32 inverted(u32 x) { return ~x ? ~x : 0x80000000u; }
DEVICE uint4 inverted(uint4 x) {
  return {inverted(x.x), inverted(x.y), inverted(x.z), inverted(x.w)};
}
DEVICE uint2 inverted(uint2 x) { return {inverted(x.x), inverted(x.y)}; }
DEVICE uint2 upright(uint2 x) { return {~x.x, ~x.y}; }
DEVICE uint4 upright(uint4 x) { return {~x.x, ~x.y, ~x.z, ~x.w}; }
DEVICE uint4 words_of(float4 x) {
  return {__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w)};
}
DEVICE float4 floats_of(uint4 x) {
  return {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)};
}

DEVICE bool has_gap(uint2 x) { return !x.x || !x.y; }
DEVICE bool has_gap(uint4 x) { return !x.x || !x.y || !x.z || !x.w; }

// The half of this launch. Every thread reads it before its block calls `count_launch`.
DEVICE u32 half_of(u32 begun) { return begun / TURN & 1; }

// By one thread of each block, once.
DEVICE void count_launch(State* state) {
  add_begun(state, blockIdx.x ? 1 : TURN - (gridDim.x - 1));
}

struct Bases {  // every rank's buffer, as this one has it mapped
  u64 of[RANKS];
  DEVICE Bases(const long long* table) {
#pragma unroll
    for (int r = 0; r < RANKS; ++r) of[r] = (u64)__ldg(table + r);
  }
};

// This rank's end of one launch.
struct Meeting {
  Bases bases;
  u64 own;  // this rank's buffer
  long long slot_bytes, limit_ns;
  int* lost;
  int rank;
  u32 half;
  u32 polls;
  u64 began;

  DEVICE Meeting(const long long* table, int* lost_, int rank_, long long slot_bytes_,
                 long long limit_ns_)
      : bases(table), own((u64)__ldg(table + rank_)), slot_bytes(slot_bytes_), limit_ns(limit_ns_), lost(lost_),
        rank(rank_), half(0), polls(0), began(0) {}

  // Hands words to every other rank, in place `at` of its slot, in such words; or to one of them. Stores of a warp
  // should be of whole sectors, for those are what NVLink moves.
  template <class Words>
  DEVICE void give(long long at, const Words& x) const {
    const Words words = inverted(x);
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      if (r != rank) put((Words*)slot(bases.of[r], rank) + at, words);
    }
  }
  template <class Words>
  DEVICE void give_one(int to, long long at, const Words& x) const {
    const Words words = inverted(x);
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      if (r == to) put((Words*)slot(bases.of[r], rank) + at, words);
    }
  }

  // To every rank, this one, too.
  template <class Words>
  DEVICE void give_all(long long at, const Words& x) const {
    give(at, x);
    put((Words*)slot(own, rank) + at, inverted(x));
  }

  // What the others gave in COUNT places, `stride` apart: all ranks' numbers but this one's, which stay as
  // they are. False where one has not come.
  template <int COUNT>
  DEVICE bool take(long long at, int stride, float4 (&part)[RANKS][COUNT]) {
    uint4 words[RANKS][COUNT];
    int missing;
    do {
      missing = -1;
#pragma unroll
      for (int r = 0; r < RANKS; ++r) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
          if (r != rank) words[r][i] = look(slot(own, r) + at + i * stride);
        }
      }
#pragma unroll
      for (int r = 0; r < RANKS; ++r) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
          if (r != rank && has_gap(words[r][i])) missing = r;
        }
      }
      if (missing >= 0 && !waits_on(missing)) return false;
    } while (missing >= 0);
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        if (r == rank) continue;
        part[r][i] = floats_of(upright(words[r][i]));
        put(slot(own, r) + at + i * stride, uint4{0, 0, 0, 0});
      }
    }
    return true;
  }

  // What one of the others gave.
  template <class Words>
  DEVICE bool take_one(int sender, long long at, Words& x) {
    Words* const from = (Words*)slot(own, sender) + at;
    while (has_gap(x = look(from))) {
      if (!waits_on(sender)) return false;
    }
    x = upright(x);
    put(from, Words{});
    return true;
  }

  // What COUNT ranks gave, each in a place of its own; of a sender below 0 nothing.
  template <int COUNT, class Words>
  DEVICE bool take_from(const int (&senders)[COUNT], const long long (&at)[COUNT],
                        Words (&x)[COUNT]) {
    int missing;
    do {
      missing = -1;
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        if (senders[i] >= 0) x[i] = look((Words*)slot(own, senders[i]) + at[i]);
      }
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        if (senders[i] >= 0 && has_gap(x[i])) missing = senders[i];
      }
      if (missing >= 0 && !waits_on(missing)) return false;
    } while (missing >= 0);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      if (senders[i] < 0) continue;
      x[i] = upright(x[i]);
      put((Words*)slot(own, senders[i]) + at[i], Words{});
    }
    return true;
  }

 private:
  DEVICE uint4* slot(u64 base, int sender) const {
    return (uint4*)(base + (half * RANKS + sender) * slot_bytes);
  }
  DEVICE bool waits_on(int missing) {
    if (++polls % LOOK_AT_HOST) return true;
    if (read_host(lost)) return false;
    const u64 now = now_ns();
    if (!began) began = now;
    if (now - began <= u64(limit_ns)) return true;
    write_host(lost, missing + 1);
    return false;
  }
};

DEVICE float4 add(float4 a, float4 b) {
  return {__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w)};
}

// The sum over COUNT vectors as a balanced tree, (0 + 1) + (2 + 3), with the expression of reference.py; all ranks
// compute it, so all go on with the same bits. get(i): the i-th.
template <int FIRST, int COUNT, class Get>
DEVICE float4 tree(const Get& get) {
  if constexpr (COUNT == 1) return get(FIRST);
  else return add(tree<FIRST, COUNT / 2>(get), tree<FIRST + COUNT / 2, COUNT / 2>(get));
}

// A rank's own numbers of a row of `width` columns: its parts, which lie side by side, added.
DEVICE float4 own_vector(const float4* x, long long row, int vector, int width) {
  const float4* first = x + row * (LEAVES * width / 4) + vector;
  return tree<0, LEAVES>([&](int leaf) { return first[leaf * (width / 4)]; });
}
