// What kernels whose warps work together use of CUDA and of PTX, on a CPU. emulated_warps.py translates PTX to what is
// here.
#include "emulated_fibers.h"
#include "emulated_numbers.h"
#include "emulated_products.h"

namespace emu {
// ---- shared memory: addresses are offsets, with the block of the cluster above them ----

inline u32 address(const void* p) { return u32((const u8*)p - now->own->memory); }
inline u32 remote(u32 at, u32 rank) { return at | (rank + 1) << 20; }
inline Block& block_of(u32 at) { return at >> 20 ? *now->own->cluster->blocks[(at >> 20) - 1] : *now->own; }
inline u8* place(u32 at, u32 bytes) {
  Block& block = block_of(at);
  const u32 inside = at & 0xFFFFF;
  if (inside + bytes > block.size || inside % bytes) fail("outside of shared memory, or not aligned", at);
  return block.memory + inside;
}
template <class T>
void store(u32 at, std::initializer_list<T> x) {
  std::memcpy(place(at, sizeof(T) * x.size()), x.begin(), sizeof(T) * x.size());
}
template <class... T>
void load(u32 at, T&... x) {
  const u8* p = place(at, (sizeof(T) + ...));
  ((std::memcpy(&x, p, sizeof(T)), p += sizeof(T)), ...);
}
inline void barrier_init(u32 at, u32 count) {
  Transactions& its = now->own->barrier(at);
  its = {}, its.count = its.arrivals = count;
}
inline void barrier_expect(u32 at, u32 bytes) {
  Transactions& its = now->own->barrier(at);
  --its.arrivals, its.bytes += bytes;
  its.advance();
}
inline void barrier_arrive(u32 at) {
  Transactions& its = now->own->barrier(at);
  --its.arrivals;
  its.advance();
}
inline void arrived(Block& block, u32 at, u32 bytes) {
  Transactions& barrier = block.barrier(at);
  barrier.bytes -= bytes;
  barrier.advance();
}
inline void do_bulk(Block& block, u32 barrier, std::function<void()> copy) {
  copies_late && !block.barrier(barrier).waiting ? block.bulk.push_back({barrier, copy}) : copy();
}
inline void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  if ((size_t)from % 16 || bytes % 16 || to % 16) fail("a bulk copy is not aligned", to);
  if (to + bytes > now->own->size) fail("a bulk copy outside of shared memory", to);
  Block& block = *now->own;
  do_bulk(block, barrier, [=, &block] {
    std::memcpy(block.memory + to, from, bytes);
    arrived(block, barrier, bytes);
  });
}
// A box of 128 bytes a row, with the 128-byte swizzle. words: where the tensor begins, its rows, the bytes of one, rows of
// a box, bytes of an element (emulated_warps.py).
inline void copy_box(u32 to, const void* map, int column, int row, u32 barrier) {
  const u64* words = (const u64*)map;
  const u64 rows = words[1], width = words[2], count = words[3];
  if (to % 1024 || to + count * 128 > now->own->size) fail("a box is not aligned, or outside of shared memory", to);
  Block& block = *now->own;
  do_bulk(block, barrier, [=, &block] {
    for (u64 at = 0; at < count * 128; ++at) {
      const u64 y = row + at / 128, x = column * words[4] + at % 128;
      const bool is_inside = y < rows && x < width;
      block.memory[to + (at ^ at / 128 % 8 << 4)] = is_inside ? ((const u8*)words[0])[y * width + x] : 0;
    }
    arrived(block, barrier, count * 128);
  });
}
inline void barrier_wait(u32 at, u32 parity) {
  auto& bulk = now->own->bulk;
  for (size_t i = 0; i < bulk.size();) {
    if (bulk[i].first != at) { ++i; continue; }
    const auto copy = bulk[i].second;
    bulk.erase(bulk.begin() + i);
    copy();
  }
  Transactions& its = now->own->barrier(at);
  ++its.waiting;
  while (u32(its.phase & 1) == parity) wait_while(&its.phase, its.phase);
  --its.waiting;
}
inline void store_remote(u32 at, std::initializer_list<float> x, u32 barrier) {
  store(at, x);
  Transactions& its = block_of(barrier).barrier(barrier & 0xFFFFF);
  its.bytes -= 4 * x.size();
  its.advance();
}

// ---- copies into shared memory ----

inline void finish(const Copy& its) {
  if (its.bytes) std::memcpy(its.to, its.from, its.bytes);
  if (its.bytes < 16) std::memset(its.to + its.bytes, 0, 16 - its.bytes);
}
inline void copy(u32 to, const void* from, u32 bytes = 16) {
  if ((size_t)from % 16) fail("a copy's source is not aligned");
  const Copy its = {place(to, 16), (const u8*)from, bytes};
  copies_late ? now->open.push_back(its) : finish(its);
}
inline void commit() {
  now->groups.push_back(std::move(now->open));
  now->open.clear();
}
inline void wait_for_groups(int pending) {
  for (; int(now->groups.size()) > pending; now->groups.pop_front())
    for (const Copy& its : now->groups.front()) finish(its);
}

template <int N>
void load_matrices(u32* (&x)[N], u32 at, bool is_transposed) {  // N of 8 rows of 16 bytes, 8 lanes' addresses each
  u16 row[8] = {};
  if (lane() < 8 * N) std::memcpy(row, place(at, 16), 16);
  std::memcpy(warp().shown[lane()], row, 16);
  sync_warp();
  for (int i = 0; i < N; ++i) {
    u16 found[2];
    for (int k = 0; k < 2; ++k) {
      const int r = is_transposed ? lane() % 4 * 2 + k : lane() / 4;
      const int c = is_transposed ? lane() / 4 : lane() % 4 * 2 + k;
      found[k] = ((const u16*)warp().shown[8 * i + r])[c];
    }
    *x[i] = found[0] | u32(found[1]) << 16;
  }
  sync_warp();
}
inline void store_matrices(u32 at, std::initializer_list<u32> x) {  // four, transposed: 8 lanes' addresses each
  std::memcpy(warp().shown[lane()], x.begin(), 16);
  sync_warp();
  u16 row[8];
  for (int c = 0; c < 8; ++c) {
    row[c] = u16(((const u32*)warp().shown[c * 4 + lane() % 8 / 2])[lane() / 8] >> lane() % 2 * 16);
  }
  std::memcpy(place(at, 16), row, 16);
  sync_warp();
}
inline u32 pair_operation(const char* name, u32 a, u32 b) {
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
inline u32 bounded(bool is_least, const char* name, u32 a, u32 bound) {  // NaN stays
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

#define __grid_constant__
#define threadIdx (emu::now->thread)
#define blockIdx (emu::now->block)
#define gridDim (emu::grid)
#define blockDim (Index{32 * int(emu::now->own->warps.size()), 1, 1})
#define __noinline__
#define __shared__ static  // blocks run one after the other
#define __cvta_generic_to_shared emu::address
inline void __syncwarp(unsigned = ~0u) { emu::sync_warp(); }
inline void sync_all() { emu::sync_block(0, 32 * int(emu::now->own->warps.size())); }
#define __syncthreads sync_all
inline int __syncthreads_or(int x) {
  if (x) emu::now->own->any[0] = 1;
  sync_all();
  const int found = emu::now->own->any[0];
  sync_all();
  emu::now->own->any[0] = 0;
  sync_all();
  return found;
}
template <class T> T __shfl_xor_sync(unsigned, T x, int step) { return emu::from_lane(x, emu::lane() ^ step); }
template <class T> T __shfl_sync(unsigned, T x, int source, int = 32) { return emu::from_lane(x, source % 32); }
template <class T> T __shfl_up_sync(unsigned, T x, int step, int width = 32) {
  return emu::from_lane(x, emu::lane() % width >= step ? emu::lane() - step : emu::lane());
}
inline int __reduce_max_sync(unsigned, int x) { return emu::of_all(x, [](int a, int b) { return max(a, b); }); }
inline int __reduce_min_sync(unsigned, int x) { return emu::of_all(x, [](int a, int b) { return min(a, b); }); }
template <class T> T __ldcg(const T* at) { return *at; }
template <class T> T __ldg(const T* at) { return *at; }
template <class T> void __stcg(T* at, T x) { *at = x; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned which) {
  const unsigned long long both = x | (unsigned long long)y << 32;
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) found |= unsigned(both >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
  return found;
}
inline int min(const volatile int& a, int b) { const int x = a; return x < b ? x : b; }
inline unsigned __ballot_sync(unsigned, bool x) {
  return emu::of_all(int(unsigned(x) << emu::lane()), [](int a, int b) { return a | b; });
}
inline bool __any_sync(unsigned, bool x) { return __ballot_sync(~0u, x) != 0; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline int atomicAdd(int* at, int x) { return (*at += x) - x; }
template <class T> T atomicMax(T* at, T x) {
  const T before = *at;
  *at = before < x ? x : before;
  return before;
}
inline unsigned __float_as_uint(float x) { return emu::bits(x); }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline float __int_as_float(int x) { return emu::number(x); }
inline float __uint_as_float(unsigned x) { return emu::number(x); }
inline int __float2int_rn(float x) { return int(std::nearbyint(x)); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
