// What kernels whose warps work together use of CUDA and of PTX, on a CPU. emulated_warps.py translates PTX to what is
// here.
#pragma once
#include "emulated_products.h"

namespace emu {
// ---- shared memory: addresses are offsets, with the block of the cluster above them ----

inline u32 address(const void* p) { return u32((const u8*)p - now->own->memory); }
inline u32 remote(u32 at, u32 rank) { return at | (rank + 1) << 20; }
Block& block_of(u32 at);
inline u8* place(u32 at, u32 bytes) {
  Block& block = at >> 20 ? block_of(at) : *now->own;
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
void barrier_init(u32 at, u32 count);
void barrier_expect(u32 at, u32 bytes);
void barrier_arrive(u32 at);
void barrier_wait(u32 at, u32 parity);
u32 barrier_is_over(u32 at, u32 parity);
void barrier_wait_for_copies(u32 at);  // that the thread has not committed
void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier);
// A box of 128 bytes a row, with the 128-byte swizzle. map: where the tensor begins, its rows, the bytes of one, rows of
// a box, bytes of an element (emulated_warps.py).
void copy_box(u32 to, const void* map, int column, int row, u32 barrier);
void store_remote(u32 at, std::initializer_list<float> x, u32 barrier);

// ---- copies into shared memory ----

void copy(u32 to, const void* from, u32 bytes = 16);
void commit();
void wait_for_groups(int pending);
void store_block(void* to, u32 from, u32 bytes);  // out of shared memory
void commit_stores();
void wait_for_stores();

void load_matrices(u32** x, int count, u32 at, bool is_transposed);
template <int N>
void load_matrices(u32* (&x)[N], u32 at, bool is_transposed) {  // N of 8 rows of 16 bytes, 8 lanes' addresses each
  load_matrices(x, N, at, is_transposed);
}
void store_matrices(u32 at, std::initializer_list<u32> x);  // transposed: 8 lanes' addresses each
u32 pair_operation(const char* name, u32 a, u32 b);
u32 bounded(bool is_least, const char* name, u32 a, u32 bound);  // NaN stays
}  // namespace emu

#define __grid_constant__
#define threadIdx (emu::now->thread)
#define blockIdx (emu::now->block)
#define gridDim (emu::grid)
#define blockDim (Index{32 * emu::now->own->num_warps, 1, 1})
#define __noinline__
#define __shared__ static  // blocks run one after the other
#define __cvta_generic_to_shared emu::address
inline void __syncwarp(unsigned = ~0u) { emu::sync_warp(); }
inline void sync_all() { emu::sync_block(0, 32 * emu::now->own->num_warps); }
#define __syncthreads sync_all
namespace emu {
inline u32 meet_any(int id, int threads, u32 is_so) {
  if (is_so) now->own->any = 1;
  sync_block(id, threads);
  const int found = now->own->any;
  sync_block(id, threads);
  now->own->any = 0;
  sync_block(id, threads);
  return found;
}
}  // namespace emu
inline int __syncthreads_or(int x) {
  if (x) emu::now->own->any = 1;
  sync_all();
  const int found = emu::now->own->any;
  sync_all();
  emu::now->own->any = 0;
  sync_all();
  return found;
}
template <class T> T __shfl_xor_sync(unsigned, T x, int step) { return emu::from_lane(x, emu::lane() ^ step); }
template <class T> T __shfl_sync(unsigned, T x, int source, int width = 32) {
  return emu::from_lane(x, emu::lane() / width * width + source % width);
}
template <class T> T __shfl_up_sync(unsigned, T x, int step, int width = 32) {
  return emu::from_lane(x, emu::lane() % width >= step ? emu::lane() - step : emu::lane());
}
inline int __reduce_max_sync(unsigned, int x) { return emu::of_all(x, [](int a, int b) { return max(a, b); }); }
inline int __reduce_add_sync(unsigned, int x) { return emu::of_all(x, [](int a, int b) { return a + b; }); }
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
inline bool __all_sync(unsigned, bool x) { return !__any_sync(~0u, !x); }
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
