// Threads of a GPU on a CPU: every one is a fiber, which runs until it waits for others, warp after warp; and what threads of
// a warp show each other. What is no template is in emulated_runtime.cpp, compiled once for all kernels.
#pragma once
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <utility>

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
using std::max;
using std::min;
struct Index { int x, y, z; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

namespace emu {
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

[[noreturn]] void fail(const char* what, long long at = 0);

// ---- threads, blocks, clusters ----

struct Meeting {  // of `arrived` threads
  int arrived = 0, turn = 0;
  bool arrive(int wanted) {
    if (++arrived < wanted) return false;
    arrived = 0, ++turn;
    return true;
  }
};
struct Warp {
  Meeting all;
  u64 shown[2][32][8];  // what threads show each other, in turns: who shows the next has read the last but one
  const void* given[32];  // what they give to who computes for all
};
struct Block {
  u8* memory;
  u32 size;
  int num_warps;
  Warp* warps;
  Meeting named[16];
  int any = 0;
};
struct Fiber {
  Index thread, block;
  Block* own;
  Warp* warp;
  int lane, turn;
};
extern Fiber* now;
extern Index grid;
extern bool is_e4m3;  // products of warpgroups without a type of their own

void leave();
void wait_while(const int* value, int seen);
inline void meet(Meeting& meeting, int wanted) {
  const int turn = meeting.turn;
  if (!meeting.arrive(wanted)) wait_while(&meeting.turn, turn);
}
inline Warp& warp() { return *now->warp; }
inline int lane() { return now->lane; }
inline void sync_warp() { meet(warp().all, 32); }
inline void sync_block(int id, int threads) { meet(now->own->named[id], threads); }
inline void arrive_block(int id, int threads) { now->own->named[id].arrive(threads); }
void cluster_arrive();
void cluster_wait();
// together: thread blocks along x that run at once, each of a cluster's with its own shared memory.
void run_grid(int x, int y, int z, int together, int threads, int bytes, int seed, bool late, void (*kernel)(void**),
              void** values);

template <class... Types, size_t... I>
void call_with(void (*f)(Types...), void** values, std::index_sequence<I...>) {
  f(*(Types*)values[I]...);
}
template <class... Types>
void call(void (*f)(Types...), void** values) {
  call_with(f, values, std::index_sequence_for<Types...>());
}

// ---- what threads of a warp show each other ----

inline const u64 (*show(const void* x, size_t bytes))[8] {  // all lanes' of this turn
  auto& shown = warp().shown[now->turn ^= 1];
  std::memcpy(shown[lane()], x, bytes);
  sync_warp();
  return shown;
}
template <class T>
T from_lane(T x, int source) {
  T y;
  std::memcpy(&y, show(&x, sizeof(T))[source], sizeof(T));
  return y;
}
template <class T, class Use>
T of_all(T x, const Use& use) {  // in any order
  const auto all = show(&x, sizeof(T));
  for (int i = 0; i < 32; ++i) {
    T y;
    std::memcpy(&y, all[i], sizeof(T));
    x = i ? use(x, y) : y;
  }
  return x;
}
}  // namespace emu
