// What tree_shares.cuh and tree_tail.cuh use beside emulated_cuda.h, before them.
#include <cmath>
#include <initializer_list>

constexpr int THREADS = 0, MOST_UNIT = 8, TAIL_WARPS = 8, STEPS = SIZE / 16, ROW_FLOATS = SIZE + 8;
constexpr float NOTHING = -INFINITY;
struct alignas(8) float2 { float x, y; };
DEVICE float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
DEVICE float __fsub_rn(float a, float b) { return a - b; }
DEVICE int __clz(int x) { return __builtin_clz(x); }
DEVICE float minus_infinity() { return NOTHING; }
DEVICE float finite(float x) { return x == NOTHING ? 0.0f : x; }
DEVICE float power(float x) { return std::exp2(x); }
#define exp2 power
DEVICE int lane_id() { return threadIdx.x % 32; }
DEVICE int thread_from_here() { return threadIdx.x; }
DEVICE int row_of(int r) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r; }

// An address of this block, or one that remote_address has made.
DEVICE float* floats_at(u32 address) {
  Block* block = address >> 16 ? own_block->cluster->blocks[(address >> 16) - 1] : own_block;
  return (float*)(block->memory + (address & 0xFFFF));
}
DEVICE void send_floats(u32 address, u32 barrier_at, std::initializer_list<float> x) {
  TransactionBarrier& barrier =
      transactions_at(own_block->cluster->blocks[(barrier_at >> 16) - 1], barrier_at);
  std::copy(x.begin(), x.end(), floats_at(address));
  std::lock_guard<std::mutex> held(barrier.lock);
  barrier.bytes -= 4 * (long long)x.size();
  barrier.advance();
}
// Copies later than the copying thread goes on, so that a source written over too early shows.
static std::vector<std::thread> copies;
static std::mutex copies_lock;
DEVICE void copy_to_block(u32 target, u32 source, u32 bytes, u32 barrier_at) {
  Block *const from = own_block, *const to = own_block->cluster->blocks[(target >> 16) - 1];
  std::lock_guard<std::mutex> held(copies_lock);
  copies.emplace_back([=] {
    std::this_thread::sleep_for(std::chrono::microseconds(500));
    std::memcpy(to->memory + (target & 0xFFFF), from->memory + source, bytes);
    TransactionBarrier& barrier = transactions_at(to, barrier_at);
    std::lock_guard<std::mutex> held(barrier.lock);
    barrier.bytes -= bytes;
    barrier.advance();
  });
}
DEVICE void end_copies() {
  std::lock_guard<std::mutex> held(copies_lock);
  for (std::thread& copy : copies) copy.join();
  copies.clear();
}
DEVICE void barrier_arrive_remote(u32 at) {
  TransactionBarrier& barrier = transactions_at(own_block->cluster->blocks[(at >> 16) - 1], at);
  std::lock_guard<std::mutex> held(barrier.lock);
  --barrier.arrivals;
  barrier.advance();
}
DEVICE void barrier_wait(u32 at, u32 parity) { barrier_wait_cluster(at, parity); }
DEVICE void shared_fence() {}
DEVICE void store_remote_pair(u32 address, u32 barrier, float a, float b) {
  send_floats(address, barrier, {a, b});
}

template <int COUNT, int LENGTH>
struct RowsOf;
typedef RowsOf<64, SIZE / SPLITS + 8> Handed;
struct TailShared {
  Handed& handed;
  u32 is_handed;
};
DEVICE void tell_all(u32) {}
namespace columns {
constexpr int BLOCK_TOKENS = GROUP < 8 ? 8 / GROUP : 1;
struct ColumnState { float largest[1][2], total[1], sums[1][STEPS][4]; };
DEVICE int value_dimension(int i, int half) { return 16 * i + 2 * (lane_id() / 4) + half; }
}  // namespace columns
