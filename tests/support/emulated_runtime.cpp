// What all kernels on a CPU share: fibers, barriers, copies and products (emulated_warps.h says what each is).
#include "emulated_sums.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

namespace emu {
void fail(const char* what, long long at) {
  std::fprintf(stderr, "%s (%lld)\n", what, at);
  std::abort();
}

namespace {
void* scheduler[5];
constexpr int STACK_BYTES = 128 << 10;
std::vector<std::unique_ptr<char[]>> stacks;  // kept
bool copies_late;  // when they are waited for, and not at once
void (*kernel)(void**);
void** arguments;

// ---- threads ----

[[noreturn]] __attribute__((noinline)) void jump(void** place) { __builtin_longjmp(place, 1); }
__attribute__((noinline)) void go_on(OwnFiber& its) {  // jumps, as contexts are changed by system calls
  now = &its;
  if (__builtin_setjmp(scheduler)) return;
  if (its.has_started) jump(its.place);
  its.has_started = true;
  setcontext(&its.context);
}
void start() {
  kernel(arguments);
  own_fiber().is_done = true;
  leave();
}
void run_together(int first, int y, int z, int count, int threads, int bytes, std::mt19937& random) {
  Cluster cluster;
  cluster.threads = count * threads;
  std::vector<std::unique_ptr<OwnBlock>> blocks;
  for (int b = 0; b < count; ++b) {
    blocks.push_back(std::make_unique<OwnBlock>(threads, bytes, &cluster));
    cluster.blocks.push_back(blocks.back().get());
  }
  std::vector<OwnFiber> fibers(cluster.threads);
  std::vector<std::vector<OwnFiber*>> warps(cluster.threads / 32);
  for (int i = 0; i < cluster.threads; ++i) {
    OwnFiber& each = fibers[i];
    const int thread = i % threads;
    each.thread = {thread, 0, 0}, each.block = {first + i / threads, y, z};
    each.own = cluster.blocks[i / threads], each.warp = each.own->warps + thread / 32;
    each.lane = thread % 32, each.turn = 0;
    while (int(stacks.size()) <= i) stacks.emplace_back(new char[STACK_BYTES]);
    getcontext(&each.context);
    each.context.uc_stack.ss_sp = stacks[i].get(), each.context.uc_stack.ss_size = STACK_BYTES;
    each.context.uc_link = nullptr;
    makecontext(&each.context, start, 0);
    warps[i / 32].push_back(&each);
  }
  for (auto& lanes : warps) std::shuffle(lanes.begin(), lanes.end(), random);
  for (int left = cluster.threads; left > 0;) {
    bool went_on = false;
    std::shuffle(warps.begin(), warps.end(), random);
    for (auto& lanes : warps) {  // each as far as it comes alone: its threads' stacks stay in the CPU's cache
      for (OwnFiber* each : lanes) each->has_left = false;
      for (bool again = true; again;) {
        again = false;
        for (OwnFiber* each : lanes) {
          if (each->is_done || each->has_left || each->waits_for && *each->waits_for == each->seen) continue;
          each->waits_for = nullptr, went_on = true;
          go_on(*each);
          each->has_left = !each->waits_for;  // for others, until their turn has come
          again |= !each->has_left;
          if (each->is_done) {
            --left;
            if (!each->open.empty()) fail("copies that are not committed");
          }
        }
      }
    }
    if (!went_on) fail("all threads wait", left);
  }
}
}  // namespace

Fiber* now;
Index grid;
bool is_e4m3;

__attribute__((noinline)) void leave() {
  if (!__builtin_setjmp(own_fiber().place)) jump(scheduler);
}
void wait_while(const int* value, int seen) {
  while (*value == seen) {
    own_fiber().waits_for = value, own_fiber().seen = seen;
    leave();
  }
}
void cluster_arrive() {
  Cluster& all = *own_block().cluster;
  own_fiber().cluster_turn = all.all.turn;
  all.all.arrive(all.threads);
}
void cluster_wait() { wait_while(&own_block().cluster->all.turn, own_fiber().cluster_turn); }
void run_grid(int x, int y, int z, int together, int threads, int bytes, int seed, bool late, void (*own)(void**),
              void** values) {
  grid = {x, y, z}, copies_late = late, kernel = own, arguments = values;
  std::mt19937 random(seed);
  for (int k = 0; k < z; ++k)
    for (int j = 0; j < y; ++j)
      for (int i = 0; i < x; i += together) run_together(i, j, k, together, threads, bytes, random);
}

// ---- shared memory, its barriers and copies ----

Block& block_of(u32 at) { return *own_block().cluster->blocks[(at >> 20) - 1]; }
void barrier_init(u32 at, u32 count) {
  Transactions& its = own_block().barrier(at);
  its = {}, its.count = its.arrivals = count;
}
void barrier_expect(u32 at, u32 bytes) {
  Transactions& its = own_block().barrier(at);
  --its.arrivals, its.bytes += bytes;
  its.advance();
}
void barrier_arrive(u32 at) {
  Transactions& its = own_block().barrier(at);
  --its.arrivals;
  its.advance();
}
static void arrived(OwnBlock& block, u32 at, u32 bytes) {
  Transactions& barrier = block.barrier(at);
  barrier.bytes -= bytes;
  barrier.advance();
}
static void do_bulk(OwnBlock& block, u32 barrier, std::function<void()> copy) {
  copies_late && !block.barrier(barrier).waiting ? block.bulk.push_back({barrier, copy}) : copy();
}
void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  if ((size_t)from % 16 || bytes % 16 || to % 16) fail("a bulk copy is not aligned", to);
  if (to + bytes > now->own->size) fail("a bulk copy outside of shared memory", to);
  OwnBlock& block = own_block();
  do_bulk(block, barrier, [=, &block] {
    std::memcpy(block.memory + to, from, bytes);
    arrived(block, barrier, bytes);
  });
}
void copy_box(u32 to, const void* map, int column, int row, u32 barrier) {
  const u64* words = (const u64*)map;
  const u64 rows = words[1], width = words[2], count = words[3];
  if (to % 1024 || to + count * 128 > now->own->size) fail("a box is not aligned, or outside of shared memory", to);
  OwnBlock& block = own_block();
  do_bulk(block, barrier, [=, &block] {
    for (u64 at = 0; at < count * 128; at += 16) {
      const u64 y = row + at / 128, x = column * words[4] + at % 128;
      const u64 inside = y < rows && x < width ? std::min<u64>(width - x, 16) : 0;
      u8* own = block.memory + to + (at ^ at / 128 % 8 << 4);
      std::memcpy(own, (const u8*)words[0] + y * width + x, inside);
      std::memset(own + inside, 0, 16 - inside);
    }
    arrived(block, barrier, count * 128);
  });
}
void barrier_wait(u32 at, u32 parity) {
  auto& bulk = own_block().bulk;
  for (size_t i = 0; i < bulk.size();) {
    if (bulk[i].first != at) { ++i; continue; }
    const auto copy = bulk[i].second;
    bulk.erase(bulk.begin() + i);
    copy();
  }
  Transactions& its = own_block().barrier(at);
  ++its.waiting;
  while (u32(its.phase & 1) == parity) wait_while(&its.phase, its.phase);
  --its.waiting;
}
u32 barrier_is_over(u32 at, u32 parity) {
  leave();
  return u32(own_block().barrier(at).phase & 1) != parity;
}
void store_remote(u32 at, std::initializer_list<float> x, u32 barrier) {
  store(at, x);
  OwnBlock& block = barrier >> 20 ? static_cast<OwnBlock&>(block_of(barrier)) : own_block();
  arrived(block, barrier & 0xFFFFF, 4 * x.size());
}
static void finish(const Copy& its) {
  if (its.bytes) std::memcpy(its.to, its.from, its.bytes);
  if (its.bytes < 16) std::memset(its.to + its.bytes, 0, 16 - its.bytes);
}
void copy(u32 to, const void* from, u32 bytes) {
  if ((size_t)from % 16) fail("a copy's source is not aligned");
  const Copy its = {place(to, 16), (const u8*)from, bytes};
  copies_late ? own_fiber().open.push_back(its) : finish(its);
}
void barrier_wait_for_copies(u32 at) {
  const std::vector<Copy> copies = std::move(own_fiber().open);
  own_fiber().open.clear();
  if (copies.empty()) return;
  OwnBlock& block = own_block();
  ++block.barrier(at).bytes;
  do_bulk(block, at, [=, &block] {
    for (const Copy& its : copies) finish(its);
    arrived(block, at, 1);
  });
}
void commit() {
  own_fiber().groups.push_back(std::move(own_fiber().open));
  own_fiber().open.clear();
}
void wait_for_groups(int pending) {
  auto& groups = own_fiber().groups;
  for (; int(groups.size()) > pending; groups.pop_front())
    for (const Copy& its : groups.front()) finish(its);
}

void store_block(void* to, u32 from, u32 bytes) {
  if ((size_t)to % 16 || bytes % 16) fail("a store's target is not aligned");
  own_fiber().open_stores.push_back([=, source = place(from, 16), last = place(from + bytes - 16, 16)] {
    std::memcpy(to, source, last + 16 - source);
  });
}
void commit_stores() {
  auto& its = own_fiber();
  its.stores.insert(its.stores.end(), its.open_stores.begin(), its.open_stores.end());
  its.open_stores.clear();
  if (!copies_late) wait_for_stores();
}
void wait_for_stores() {
  for (const auto& store : own_fiber().stores) store();
  own_fiber().stores.clear();
}

// ---- matrices of a warp ----

u32 transposed(u32 x) {
  const auto all = show(&x, 4);
  u16 found[2];
  for (int k = 0; k < 2; ++k) {
    const int row = lane() % 4 * 2 + k, column = lane() / 4;
    found[k] = ((const u16*)all[4 * row + column / 2])[column % 2];
  }
  return found[0] | u32(found[1]) << 16;
}
void load_matrices(u32** x, int count, u32 at, bool is_transposed) {
  u16 row[8] = {};
  if (lane() < 8 * count) std::memcpy(row, place(at, 16), 16);
  const auto all = show(row, 16);
  for (int i = 0; i < count; ++i) {
    u16 found[2];
    for (int k = 0; k < 2; ++k) {
      const int r = is_transposed ? lane() % 4 * 2 + k : lane() / 4;
      const int c = is_transposed ? lane() / 4 : lane() % 4 * 2 + k;
      found[k] = ((const u16*)all[8 * i + r])[c];
    }
    *x[i] = found[0] | u32(found[1]) << 16;
  }
}
void store_matrices(u32 at, std::initializer_list<u32> x) {
  const auto all = show(x.begin(), int(4 * x.size()));
  if (lane() / 8 >= int(x.size())) return;
  u16 row[8];
  for (int c = 0; c < 8; ++c) {
    row[c] = u16(((const u32*)all[c * 4 + lane() % 8 / 2])[lane() / 8] >> lane() % 2 * 16);
  }
  std::memcpy(place(at, 16), row, 16);
}
u32 pair_operation(const char* name, u32 a, u32 b) {
  u32 y = 0;
  const bool is_bf16 = std::strstr(name, ".bf16x2");
  for (int i = 0; i < 32; i += 16) {
    const float left = is_bf16 ? number(u32(u16(a >> i)) << 16) : from_half(u16(a >> i));
    const float right = is_bf16 ? number(u32(u16(b >> i)) << 16) : from_half(u16(b >> i));
    const float x = name[0] == 'm' ? left * right : name[0] == 'a' ? left + right : left - right;
    y |= u32(is_bf16 ? bf16(x) : u16(halves(0.0f, x))) << i;
  }
  return y;
}
u32 bounded(bool is_least, const char* name, u32 a, u32 bound) {
  u32 y = 0;
  for (int i = 0; i < 32; i += 16) {
    const u16 own = u16(a >> i), its = u16(bound >> i);
    const auto wide = [&](u16 x) { return name[0] == 'b' ? number(u32(x) << 16) : from_half(x); };
    const bool is_inside = is_least ? wide(own) <= wide(its) : wide(own) >= wide(its);
    y |= u32(is_inside || wide(own) != wide(own) ? own : its) << i;
  }
  return y;
}
}  // namespace emu
