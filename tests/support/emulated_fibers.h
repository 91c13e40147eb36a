// Threads of a GPU on a CPU: every one is a fiber, which runs until it waits for others; and what threads of a warp show
// each other.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <tuple>
#include <utility>
#include <vector>
#include <setjmp.h>
#include <ucontext.h>

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

[[noreturn]] inline void fail(const char* what, long long at = 0) {
  std::fprintf(stderr, "%s (%lld)\n", what, at);
  std::abort();
}

// ---- threads, blocks, clusters ----

struct Meeting {  // of `arrived` threads
  int arrived = 0, turn = 0;
  bool arrive(int wanted) {
    if (++arrived < wanted) return false;
    arrived = 0, ++turn;
    return true;
  }
};
struct Transactions {  // an mbarrier
  int count = 0, arrivals = 0, phase = 0, waiting = 0;
  long long bytes = 0;
  void advance() {
    if (arrivals < 0) fail("more arrive at a barrier than it counts");
    if (arrivals || bytes) return;
    arrivals = count, ++phase;
  }
};
struct Warp {
  Meeting all;
  u64 shown[32][8];  // what threads show each other
};
struct Copy { u8* to; const u8* from; u32 bytes; };
struct Block {
  std::vector<u8> room;
  u8* memory;
  u32 size;
  Meeting named[16];
  int any[2] = {0, 0};
  std::vector<Warp> warps;
  std::vector<std::pair<u32, Transactions>> barriers;
  std::vector<std::pair<u32, std::function<void()>>> bulk;  // copies that an mbarrier waits for
  struct Cluster* cluster;
  Block(int threads, int bytes) : room(bytes + 1024), size(bytes), warps(threads / 32) {
    memory = room.data() + 1024 - (size_t)room.data() % 1024;
    std::memset(memory, 0xA5, bytes);
  }
  Transactions& barrier(u32 at) {
    for (auto& known : barriers) if (known.first == at) return known.second;
    barriers.push_back({at, {}});
    return barriers.back().second;
  }
};
struct Cluster {
  Meeting all;
  int threads = 0;
  std::vector<Block*> blocks;
};
struct Product { float* d; u32 a[4]; u64 b; int columns, add; u64 left = 0; bool is_e4m3 = false; };  // of a warpgroup: emulated_products.h
struct Fiber {
  ucontext_t context;  // of its start
  jmp_buf place;       // where it waits
  Index thread, block;
  Block* own;
  bool has_started = false, is_done = false;
  const int* waits_for = nullptr;  // goes on when it is not `seen` any more
  int seen = 0, cluster_turn = 0;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
  std::vector<Product> open_products;
  std::deque<std::vector<Product>> products;
};
inline Fiber* now;
inline jmp_buf scheduler;
constexpr int STACK_BYTES = 128 << 10;
inline std::vector<std::unique_ptr<char[]>> stacks;  // kept
inline Index grid;
inline bool copies_late;  // when they are waited for, and not at once
inline const std::function<void()>* kernel;

__attribute__((noinline)) void go_on(Fiber& its) {  // jumps, as contexts are changed by system calls
  now = &its;
  if (_setjmp(scheduler)) return;
  if (its.has_started) _longjmp(its.place, 1);
  its.has_started = true;
  setcontext(&its.context);
}
__attribute__((noinline)) void leave() {
  if (!_setjmp(now->place)) _longjmp(scheduler, 1);
}
inline void wait_while(const int* value, int seen) {
  while (*value == seen) {
    now->waits_for = value, now->seen = seen;
    leave();
  }
}
inline void meet(Meeting& meeting, int wanted) {
  const int turn = meeting.turn;
  if (!meeting.arrive(wanted)) wait_while(&meeting.turn, turn);
}
inline Warp& warp() { return now->own->warps[now->thread.x / 32]; }
inline int lane() { return now->thread.x % 32; }
inline void sync_warp() { meet(warp().all, 32); }
inline void sync_block(int id, int threads) { meet(now->own->named[id], threads); }
inline void arrive_block(int id, int threads) { now->own->named[id].arrive(threads); }
inline void cluster_arrive() {
  Cluster& all = *now->own->cluster;
  now->cluster_turn = all.all.turn;
  all.all.arrive(all.threads);
}
inline void cluster_wait() { wait_while(&now->own->cluster->all.turn, now->cluster_turn); }

inline void start() {
  (*kernel)();
  now->is_done = true;
  leave();
}
inline void run_cluster(int first, int y, int z, int splits, int threads, int bytes, std::mt19937& random) {
  Cluster cluster;
  cluster.threads = splits * threads;
  std::vector<Fiber> fibers(cluster.threads);
  for (int b = 0; b < splits; ++b) {
    cluster.blocks.push_back(new Block(threads, bytes));
    cluster.blocks.back()->cluster = &cluster;
    cluster.blocks.back()->barriers.reserve(64);
  }
  std::vector<int> order;
  for (int i = 0; i < cluster.threads; ++i) {
    Fiber& each = fibers[i];
    each.thread = {i % threads, 0, 0}, each.block = {first + i / threads, y, z};
    each.own = cluster.blocks[i / threads];
    while (int(stacks.size()) <= i) stacks.emplace_back(new char[STACK_BYTES]);
    getcontext(&each.context);
    each.context.uc_stack.ss_sp = stacks[i].get(), each.context.uc_stack.ss_size = STACK_BYTES;
    each.context.uc_link = nullptr;
    makecontext(&each.context, start, 0);
    order.push_back(i);
  }
  std::shuffle(order.begin(), order.end(), random);
  for (int left = cluster.threads; left > 0;) {
    bool went_on = false;
    for (int i : order) {
      Fiber& each = fibers[i];
      if (each.is_done || each.waits_for && *each.waits_for == each.seen) continue;
      each.waits_for = nullptr, went_on = true;
      go_on(each);
      if (each.is_done) {
        --left;
        if (!each.open.empty()) fail("copies that are not committed");
      }
    }
    if (!went_on) fail("all threads wait", left);
  }
  for (Block* block : cluster.blocks) delete block;
}
inline void run_grid(int x, int y, int z, int splits, int threads, int bytes, int seed, bool late,
                     const std::function<void()>& own) {
  grid = {x, y, z}, copies_late = late, kernel = &own;
  std::mt19937 random(seed);
  for (int k = 0; k < z; ++k)
    for (int j = 0; j < y; ++j)
      for (int i = 0; i < x; i += splits) run_cluster(i, j, k, splits, threads, bytes, random);
}
template <class... Types, size_t... I>
void call_with(void (*f)(Types...), void** values, std::index_sequence<I...>) {
  f(*(Types*)values[I]...);
}
template <class... Types>
void call(void (*f)(Types...), void** values) {
  call_with(f, values, std::index_sequence_for<Types...>());
}

// ---- what threads of a warp show each other ----

template <class T>
T from_lane(T x, int source) {
  std::memcpy(warp().shown[lane()], &x, sizeof(T));
  sync_warp();
  T y;
  std::memcpy(&y, warp().shown[source], sizeof(T));
  sync_warp();
  return y;
}
template <class T, class Use>
T of_all(T x, const Use& use) {
  for (int step = 16; step > 0; step /= 2) x = use(x, from_lane(x, lane() ^ step));
  return x;
}
}  // namespace emu
