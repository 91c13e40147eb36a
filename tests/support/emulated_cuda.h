// What kernels of ranks use of CUDA and of plugins/backends/cuda/sm90/, with threads of the system.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <mutex>
#include <pthread.h>
#include <thread>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEVICE inline
#define __global__
#define __launch_bounds__(n)
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct Index { int x; };
using std::min;

// ---- threads, blocks, clusters ----

struct Barrier {
  pthread_barrier_t own;
  explicit Barrier(int count) { pthread_barrier_init(&own, nullptr, count); }
  ~Barrier() { pthread_barrier_destroy(&own); }
  void wait() { pthread_barrier_wait(&own); }
};

struct TransactionBarrier {  // an mbarrier
  std::mutex lock;
  int count, arrivals, phase = 0;
  long long bytes = 0;
  void advance() {
    if (arrivals || bytes) return;
    arrivals = count;
    ++phase;
  }
};

struct Block {
  Barrier all;
  std::vector<Barrier*> warps;
  std::vector<u64> lanes;  // what threads of a warp show each other
  u8 memory[1024] = {};
  TransactionBarrier transactions[1024 / 8];
  struct Cluster* cluster;
  explicit Block(int threads) : all(threads), lanes(threads) {
    for (int i = 0; i < threads; i += 32) warps.push_back(new Barrier(std::min(32, threads - i)));
  }
  ~Block() {
    for (Barrier* warp : warps) delete warp;
  }
};

struct Cluster {
  Barrier all;
  std::vector<Block*> blocks;
};

static thread_local Index threadIdx, blockIdx, gridDim;
static thread_local Block* own_block;
static void __syncthreads() { own_block->all.wait(); }
static void __syncwarp() { own_block->warps[threadIdx.x / 32]->wait(); }
static void cluster_arrive() {}
static void cluster_wait() { own_block->cluster->all.wait(); }
static void launch_dependents() {}
static void wait_for_dependencies() {}
template <class T>
static T __shfl_xor_sync(u32, T x, int step) {
  std::memcpy(&own_block->lanes[threadIdx.x], &x, sizeof(T));
  __syncwarp();
  T y;
  std::memcpy(&y, &own_block->lanes[threadIdx.x ^ step], sizeof(T));
  __syncwarp();
  return y;
}

static u32 __reduce_max_sync(u32, u32 x) {
  for (int step = std::min<int>(32, own_block->lanes.size()) / 2; step > 0; step /= 2) {
    x = std::max(x, __shfl_xor_sync(0, x, step));
  }
  return x;
}

static void run_blocks(int grid, int cluster, int threads, const std::function<void()>& kernel) {
  std::vector<Cluster*> clusters;
  std::vector<Block*> blocks;
  for (int i = 0; i < grid; ++i) {
    if (i % cluster == 0) clusters.push_back(new Cluster{Barrier(cluster * threads), {}});
    blocks.push_back(new Block(threads));
    blocks.back()->cluster = clusters.back();
    clusters.back()->blocks.push_back(blocks.back());
  }
  std::vector<std::thread> running;
  for (int i = 0; i < grid * threads; ++i) {
    running.emplace_back([&, i] {
      threadIdx.x = i % threads, blockIdx.x = i / threads, gridDim.x = grid;
      own_block = blocks[i / threads];
      kernel();
    });
  }
  for (std::thread& thread : running) thread.join();
  for (Block* block : blocks) delete block;
  for (Cluster* each : clusters) delete each;
}

// ---- shared memory: addresses are offsets, with the block of the cluster in the upper half ----

DEVICE u32 shared_address(const u8* p) { return u32(p - own_block->memory); }
DEVICE u32 remote_address(u32 address, u32 block) { return address | (block + 1) << 16; }
DEVICE TransactionBarrier& transactions_at(Block* block, u32 at) {
  return block->transactions[(at & 0xFFFF) / 8];
}
DEVICE void barrier_init(u32 at, u32 count) {
  TransactionBarrier& barrier = transactions_at(own_block, at);
  barrier.count = barrier.arrivals = count;
}
DEVICE void barrier_init_fence() {}
DEVICE void barrier_expect(u32 at, u32 bytes) {
  TransactionBarrier& barrier = transactions_at(own_block, at);
  std::lock_guard<std::mutex> held(barrier.lock);
  --barrier.arrivals, barrier.bytes += bytes;
  barrier.advance();
}
DEVICE void barrier_wait_cluster(u32 at, u32 parity) {
  TransactionBarrier& barrier = transactions_at(own_block, at);
  while (true) {
    {
      std::lock_guard<std::mutex> held(barrier.lock);
      if (u32(barrier.phase & 1) != parity) return;
    }
    std::this_thread::yield();
  }
}
DEVICE void send_to_block(u32 address, u32 barrier_at, float x) {
  Block* to = own_block->cluster->blocks[(address >> 16) - 1];
  TransactionBarrier& barrier = transactions_at(to, barrier_at);
  std::lock_guard<std::mutex> held(barrier.lock);
  std::memcpy(to->memory + (address & 0xFFFF), &x, 4);
  barrier.bytes -= 4;
  barrier.advance();
}

// ---- global memory ----

template <class T>
DEVICE T __ldg(const T* at) { return *at; }
template <class T>
DEVICE T __ldcg(const T* at) { return *at; }
template <class Words>  // word by word, in any order
DEVICE void store_words(Words* to, const Words& x) {
  u32 words[sizeof(Words) / 4];
  std::memcpy(words, &x, sizeof(Words));
  for (u32 i = 0; i < sizeof(Words) / 4; ++i) __atomic_store_n((u32*)to + i, words[i], __ATOMIC_RELAXED);
}
template <class Words>
DEVICE Words load_words(const Words* at) {
  u32 words[sizeof(Words) / 4];
  for (u32 i = 0; i < sizeof(Words) / 4; ++i) words[i] = __atomic_load_n((u32*)at + i, __ATOMIC_RELAXED);
  Words x;
  std::memcpy(&x, words, sizeof(Words));
  return x;
}

// ---- numbers ----

DEVICE u32 __float_as_uint(float x) {
  u32 bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
DEVICE float __uint_as_float(u32 bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
DEVICE float __fadd_rn(float a, float b) { return a + b; }
DEVICE float __fmul_rn(float a, float b) { return a * b; }
struct FP32 {
  typedef float Storage;
  static constexpr int bytes = 4;
  static Storage pack(float x) { return x; }
};
struct BF16 {
  typedef u16 Storage;
  static constexpr int bytes = 2;
  static Storage pack(float x) {
    const u32 bits = __float_as_uint(x);
    return u16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
  static u32 pack_pair(float low, float high) { return pack(low) | u32(pack(high)) << 16; }
  static float unpack(Storage x) { return __uint_as_float(u32(x) << 16); }
};
